"""Tiny Shakespeare, one character a token: the small recipe of nanoGPT for a CPU.

The first 90 % of the characters are for training, the last 10 % for validation. The loss is over
contiguous windows of 64 characters. Download the file first:

    curl -O https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt

Data      input.txt in the current folder: 1,115,394 characters
Hardware  2 CPU cores
Command   python train.py --config=benchmarks/tiny_shakespeare
"""

from flaxformer_lite.config import default_config


def get_config():
    config = default_config()
    config.model.update(architecture="decoder_lm", num_decoder_layers=4, num_heads=4, d_model=128)
    config.model.update(d_ff=512, max_length=64, activation="gelu", use_bias=False, dropout=0.0)
    config.model.update(position="learned", norm_placement="pre")
    config.data.update(dataset="plain_text", train_files=("input.txt",), whole_files=True)
    config.data.update(train_split="train[:90%]")
    config.data.update(validation_split="train[90%:]", test_split="train[90%:]")
    config.data.update(tokenizer="char", vocab_size=None)
    config.data.update(windows=64, tokens_per_batch=12 * 64, rows_multiple=12)
    config.optim.update(optimizer="adamw", b2=0.99, eps=1e-8, weight_decay=0.1, clip_norm=1.0)
    config.optim.update(schedule="cosine", learning_rate=1e-3, warmup_steps=100)
    config.train.update(num_steps=2000, label_smoothing=0.0)
    config.train.update(log_every=50, eval_every=500, checkpoint_every=500)
    config.decode.update(method="sample", temperature=0.8, max_extra_length=63)
    return config
