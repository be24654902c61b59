"""Every position scheme on one task, with 3 seeds each.

Data      the small task of `default`: CLDR phrases, English to German
Size      7 points of 3 runs, 400 steps each; 2 CPU cores suffice
Command   flaxformer-lite sweep --sweep=positions --workdir=sweeps/positions
"""

from flaxformer_lite.config import CHOICES, default_config

SWEEP = {"objective": "loss", "seeds": (0, 1, 2), "columns": ("bleu",)}


def get_config():
    config = default_config()
    config.model.update(
        d_model=64,
        num_heads=4,
        d_ff=256,
        num_encoder_layers=2,
        num_decoder_layers=2,
        max_length=128,
    )
    config.data.update(tokenizer="bpe", vocab_size=2000, tokens_per_batch=2048, buckets=(16, 40))
    config.data.update(validation_split="validation[:500]", test_split="test[:100]")
    config.optim.update(schedule="linear", learning_rate=4e-3, warmup_steps=100)
    config.train.update(
        num_steps=400, log_every=10, eval_every=100, checkpoint_every=50, decode_examples=200
    )
    return config


def points(config):
    return [{"model.position": scheme} for scheme in CHOICES["model.position"]]
