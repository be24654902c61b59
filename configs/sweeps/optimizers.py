"""Optimizers against learning rates: 4 rates for each optimizer, with one seed.

Data      the task of `default`: CLDR phrases, English to German
Size      28 points, 600 steps each
Hardware  2 CPU cores, 39 minutes with --jobs=2 while other work used half of them
Command   flaxformer-lite sweep --sweep=optimizers --workdir=sweeps/optimizers
Next      the sweep `optimizers_seeds` has the best rate of each optimizer with more seeds
"""

from flaxformer_lite.config import default_config

SWEEP = {"objective": "loss", "columns": ("exact_match", "bleu")}
RATES = {
    "adam": (1e-3, 2e-3, 4e-3, 8e-3),
    "adamw": (1e-3, 2e-3, 4e-3, 8e-3),
    "lion": (2e-4, 4e-4, 8e-4, 1.6e-3),
    "adafactor": (1e-3, 2e-3, 4e-3, 8e-3),
    "muon": (4e-3, 8e-3, 1.6e-2, 3.2e-2),
    "sgd": (0.025, 0.05, 0.1, 0.2),
    "schedule_free": (2e-3, 4e-3, 8e-3, 1.6e-2),
}
# Other changes. Schedule-free averaging replaces a decaying rate.
CHANGES = {
    "adamw": {"optim.weight_decay": 0.1},
    "muon": {"optim.weight_decay": 0.1},
    "schedule_free": {"optim.schedule": "constant"},
}


def get_config():
    config = default_config()
    config.model.update(
        d_model=128,
        num_heads=4,
        d_ff=256,
        num_encoder_layers=2,
        num_decoder_layers=2,
        max_length=128,
    )
    config.data.update(tokenizer="bpe", vocab_size=2000, tokens_per_batch=2048, buckets=(16, 40))
    config.data.update(validation_split="validation[:500]", test_split="test[:100]")
    config.optim.update(schedule="linear", warmup_steps=50)
    config.train.update(
        num_steps=600, log_every=10, eval_every=600, checkpoint_every=100, decode_examples=200
    )
    return config


def points(config):
    return [
        {"optim.optimizer": name, "optim.learning_rate": rate, **CHANGES.get(name, {})}
        for name, rates in RATES.items()
        for rate in rates
    ]
