"""Position of the normalisation against depth: after each sublayer, or before it (Xiong 2020).

Data      the small task of `default`: CLDR phrases, English to German
Size      12 points of 1 to 12 layers, 300 steps each; 2 CPU cores suffice
Command   flaxformer-lite sweep --sweep=norms --workdir=sweeps/norms
"""

from flaxformer_lite.config import default_config

SWEEP = {"objective": "loss", "columns": ("bleu",)}


def get_config():
    config = default_config()
    config.model.update(d_model=64, num_heads=8, d_ff=256, max_length=128)
    config.data.update(tokenizer="bpe", vocab_size=2000, tokens_per_batch=2048, buckets=(16, 40))
    config.data.update(validation_split="validation[:500]", test_split="test[:100]")
    config.optim.update(schedule="linear", learning_rate=3e-3, warmup_steps=100)
    config.train.update(
        num_steps=300, log_every=10, eval_every=100, checkpoint_every=50, decode_examples=200
    )
    return config


def suggest(trial, config):
    config.model.norm_placement = trial.suggest_categorical("norm_placement", ["post", "pre"])
    layers = trial.suggest_categorical("layers", [1, 2, 4, 6, 8, 12])
    config.model.num_encoder_layers = config.model.num_decoder_layers = layers
