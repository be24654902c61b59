"""Copy, reverse, sort and addition of up to 20 digits, tested on longer ones.

benchmarks/algorithms.py trains each task with each position scheme and scores each length.

Data      algorithms/copy: 86,110 pairs of 1 to 20 digits, test splits of one length each, generated
          locally; no download. Other tasks: algorithms/reverse, /sort and /addition
Hardware  CPU
Command   python train.py --config=benchmarks/algorithms; all tasks: python -m benchmarks.algorithms
"""

from flaxformer_lite.config import default_config


def get_config():
    config = default_config()
    # 128: sources and targets of 40 digits, and both with a separator in a language model
    config.model.update(d_model=64, num_heads=4, d_ff=256, max_length=128, dropout=0.0)
    config.model.update(num_encoder_layers=2, num_decoder_layers=2, norm_placement="pre")
    config.data.update(dataset="algorithms/copy", test_split="test_20")
    config.data.update(tokenizer="spaces", vocab_size=None)
    config.data.update(tokens_per_batch=4096, buckets=(64,), num_buckets=4)
    config.optim.update(schedule="linear", learning_rate=3e-3, warmup_steps=200)
    config.train.update(num_steps=1500, label_smoothing=0.0, log_every=50, eval_every=500)
    # The last parameters, not the best ones: validation has no text beyond the trained length.
    config.train.update(average="last:1")
    return config
