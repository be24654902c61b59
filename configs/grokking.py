"""Grokking: addition modulo 97 is learnt long after its examples are (Power 2022).

After 300 steps the model knows the training split by heart, and of other sums fewer than by chance.
Between steps 2,600 and 3,500 it learns to add: it computes every sum of the validation split.

Data      modular_addition/97: all 9,409 sums of 2 numbers, half of them to train on, generated
          locally; no download
Hardware  2 CPU cores
Time      4 minutes
Expected  training accuracy 100 % at step 300; validation accuracy below 3 % until step 2,600, and
          100 % from step 3,500 on (seed 0). See docs/results/grokking.md for more seeds
Command   python train.py --config=grokking
Differs   an encoder and a classifier; the paper has a decoder with the same width, depth and heads
"""

from flaxformer_lite.config import default_config

MODULUS = 97


def get_config():
    config = default_config()
    config.model.update(
        architecture="encoder_classifier", d_model=128, num_heads=4, d_ff=512, max_length=8
    )
    config.model.update(num_encoder_layers=2, norm_placement="pre", pooling="first", dropout=0.0)
    config.model.position = "learned"
    config.data.update(dataset=f"modular_addition/{MODULUS}", train_split="pairs[:50%]")
    config.data.update(validation_split="pairs[50%:]", test_split="pairs[50%:]")
    # Pieces: each number, the plus sign and the start of a text; 4 special tokens and 256 bytes.
    config.data.update(tokenizer="bpe", vocab_size=MODULUS + 2 + 4 + 256)
    # 512 texts a step, of 6 tokens: the start symbol, 4 pieces and the end symbol.
    config.data.update(tokens_per_batch=512 * 6, buckets=(6,))
    # Appendix A.1.2. Every parameter decays, the embeddings too.
    config.optim.update(optimizer="adamw", weight_decay=1.0, groups=(".*: decay=True",))
    # The rate decays in the last tenth, because the loss has spikes at a constant rate.
    config.optim.update(schedule="wsd", learning_rate=1e-3, warmup_steps=10)
    config.train.update(num_steps=4000, label_smoothing=0.0)
    config.train.update(log_every=20, eval_every=100)
    return config
