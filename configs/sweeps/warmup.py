"""Learning rate against warmup: the highest rate that trains, for each number of warmup steps.

Data      the small task of `default`: CLDR phrases, English to German
Hardware  2 CPU cores, 12 minutes for 12 points of 400 steps with --jobs=2
Expected  the lowest loss, 1.115, at a rate of 3e-3 with 200 steps of warmup; 2.70 at that rate
          with 1 step of warmup
Command   flaxformer-lite sweep --sweep=warmup --workdir=sweeps/warmup
"""

from flaxformer_lite.config import default_config

SWEEP = {"objective": "loss", "columns": ("bleu",)}


def get_config():
    config = default_config()
    config.model.update(
        d_model=64,
        num_heads=8,
        d_ff=256,
        num_encoder_layers=3,
        num_decoder_layers=3,
        max_length=128,
    )
    config.data.update(tokenizer="bpe", vocab_size=2000, tokens_per_batch=2048, buckets=(16, 40))
    config.data.update(validation_split="validation[:500]", test_split="test[:100]")
    config.optim.update(schedule="inverse_sqrt")
    config.train.update(
        num_steps=400, log_every=10, eval_every=100, checkpoint_every=50, decode_examples=200
    )
    return config


def suggest(trial, config):
    config.optim.learning_rate = trial.suggest_categorical(
        "learning_rate", [1e-3, 3e-3, 1e-2, 3e-2]
    )
    config.optim.warmup_steps = trial.suggest_categorical("warmup_steps", [1, 50, 200])
