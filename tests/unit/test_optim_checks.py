"""Settings of the optimizer that contradict each other or have no effect are refused by name."""

import pytest

from flaxformer_lite.config import CHOICES, default_config, resolve
from flaxformer_lite.system.errors import InputError


def resolved(**fields: object):
    steps = fields.pop("num_steps", 1009)
    return resolve({"optim": fields, "train": {"num_steps": steps}}).optim


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"weight_decay": 0.1}, "weight_decay: optim.optimizer='adam' has no weight decay; use "
         "optim.optimizer='adamw', or leave this unset"),
        ({"optimizer": "adafactor", "b1": 0.5}, "b1: requires optim.optimizer='adam' or "),
        ({"optimizer": "lion", "eps": 0.5}, "eps: requires optim.optimizer='adam' or "),
        ({"optimizer": "adamw", "momentum": 0.5}, "momentum: requires optim.optimizer='sgd' or "
         "optim.optimizer='muon'; set that, or this to None"),
        ({"schedule": "linear", "final_rate": 0.5}, "final_rate: requires optim.schedule='cosine'"),
        ({"schedule": "cosine", "decay_steps": 5}, "decay_steps: requires optim.schedule='wsd'"),
        ({"schedule": "wsd", "warmup_steps": 1000, "decay_steps": 10}, "decay_steps: 1,000 steps "
         "of optim.warmup_steps and 10 of decay are more than train.num_steps = 1,009"),
    ],
)  # fmt: skip
def test_a_setting_without_effect_or_that_does_not_fit_is_refused_by_name(fields, message):
    with pytest.raises(InputError) as refused:
        resolved(**fields)
    assert str(refused.value).startswith(f"config.optim.{message}")


def test_a_weight_decay_of_0_that_was_given_is_refused_with_adam():
    config = default_config()
    config.optim.weight_decay = 0.0
    with pytest.raises(InputError, match=r"^config\.optim\.weight_decay: .*'adam' has no weight"):
        resolve(config)
    config.optim.optimizer = "adamw"
    assert resolve(config).optim.weight_decay == 0.0


def test_a_decay_that_ends_the_training_exactly_is_accepted():
    optim = resolved(schedule="wsd", warmup_steps=1000, decay_steps=9)
    assert optim.last_phase(1009) == 9


@pytest.mark.parametrize("schedule", CHOICES["optim.schedule"])
def test_schedule_free_learning_accepts_only_a_constant_rate(schedule):
    fields = {"optimizer": "schedule_free", "schedule": schedule}
    if schedule == "constant":
        assert resolved(**fields).optimizer == "schedule_free"
        return
    with pytest.raises(
        InputError, match=rf"^config\.optim\.schedule: '{schedule}' decays, .* set "
    ):
        resolved(**fields)
    assert resolved(schedule=schedule).optimizer == "adam"


def test_a_config_of_an_earlier_version_has_adam_and_no_rules():
    old = {"schedule": "linear", "learning_rate": 0.1, "warmup_steps": 5, "b1": 0.9, "b2": 0.98}
    optim = resolve({"optim": {**old, "eps": 1e-9, "clip_norm": None, "accumulate_steps": 1}}).optim
    assert (optim.optimizer, optim.weight_decay) == ("adam", 0.0)
    assert (optim.freeze, optim.groups) == ((), ())
