"""Refuses regularisers that have no effect; names the field."""

from flaxformer_lite.field_rules import DROPOUTS
from flaxformer_lite.fields import Config, ModelConfig
from flaxformer_lite.system.errors import InputError


def check_regularization(config: Config) -> None:
    """Raises InputError if a regulariser has no effect with the other fields.

    R-Drop needs passes that differ, and tied layers at least 2 layers in a stack.
    """
    model = config.model
    is_random = any(_rate(model, name) for name in DROPOUTS)
    if config.train.r_drop and not is_random:
        raise InputError(
            "config.train.r_drop: compares two passes with dropout, but model.dropout is 0; set "
            "that, or leave this unset."
        )
    if model.tie_layers and max(_stacks(model).values()) < 2:
        names = " and ".join(_stacks(model))
        raise InputError(
            f"config.model.tie_layers: shares the parameters of 2 or more layers, but {names} "
            f"{'is' if len(_stacks(model)) == 1 else 'are'} 1; raise the number of layers, or "
            "leave this unset."
        )


def _rate(model: ModelConfig, name: str) -> float:
    """Returns the rate of a kind of dropout."""
    rate: float | None = getattr(model, name)
    return model.dropout if rate is None else rate


def _stacks(model: ModelConfig) -> dict[str, int]:
    """Returns the number of layers of each stack that the model has, by its field."""
    stacks = {
        "model.num_encoder_layers": model.num_encoder_layers,
        "model.num_decoder_layers": model.num_decoder_layers,
    }
    unused = {
        "encoder_classifier": "model.num_decoder_layers",
        "decoder_lm": "model.num_encoder_layers",
    }
    return {name: n for name, n in stacks.items() if name != unused.get(model.architecture)}
