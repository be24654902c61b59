"""The best learning rate of each optimizer, with 2 more seeds.

The rates are the best of the sweep `optimizers`, which is seed 0 of the same runs.

Data      the task of `default`: CLDR phrases, English to German
Size      7 points of 2 runs, 400 steps each
Hardware  2 CPU cores, 21 minutes with --jobs=2 while other work used half of them
Command   flaxformer-lite sweep --sweep=optimizers_seeds --workdir=sweeps/optimizers_seeds
"""

from flaxformer_lite.config import default_config

SWEEP = {"objective": "loss", "seeds": (1, 2), "columns": ("exact_match", "bleu")}
BEST = {
    "muon": {"optim.learning_rate": 8e-3, "optim.weight_decay": 0.1},
    "adamw": {"optim.learning_rate": 4e-3, "optim.weight_decay": 0.1},
    "adam": {"optim.learning_rate": 4e-3},
    "adafactor": {"optim.learning_rate": 2e-3},
    "lion": {"optim.learning_rate": 8e-4},
    "schedule_free": {"optim.learning_rate": 4e-3, "optim.schedule": "constant"},
    "sgd": {"optim.learning_rate": 0.1},
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
        num_steps=400, log_every=10, eval_every=400, checkpoint_every=100, decode_examples=200
    )
    return config


def points(config):
    return [{"optim.optimizer": name, **changes} for name, changes in BEST.items()]
