"""The best learning rate of each optimizer, with 2 more seeds.

The rates are the best of the sweep `optimizers`, which is seed 0 of the same runs.

Data      the task of `default`: CLDR phrases, English to German
Size      7 points of 2 runs, 600 steps each
Hardware  2 CPU cores, 25 minutes with --jobs=2 while other work used half of them
Command   flaxformer-lite sweep --sweep=optimizers_seeds --workdir=sweeps/optimizers_seeds
"""

from flaxformer_lite.config_files import find_config, load_config

SWEEP = {"objective": "loss", "seeds": (1, 2), "columns": ("exact_match", "bleu")}
BEST = {
    "muon": {"optim.learning_rate": 4e-3, "optim.weight_decay": 0.1},
    "adamw": {"optim.learning_rate": 4e-3, "optim.weight_decay": 0.1},
    "adam": {"optim.learning_rate": 4e-3},
    "adafactor": {"optim.learning_rate": 2e-3},
    "lion": {"optim.learning_rate": 4e-4},
    "schedule_free": {"optim.learning_rate": 4e-3, "optim.schedule": "constant"},
    "sgd": {"optim.learning_rate": 0.1},
}


def get_config():
    return load_config(find_config("optimizers", kind="sweeps"))


def points(config):
    return [{"optim.optimizer": name, **changes} for name, changes in BEST.items()]
