"""Checks of the models and the options that score given texts."""

from flaxformer_lite.field_rules import CHOICES
from flaxformer_lite.fields import ModelConfig
from flaxformer_lite.system import given
from flaxformer_lite.system.errors import InputError

Languages = tuple[str | None, str | None]  # source and target; None: unknown


def check_model(model: ModelConfig, *, where: str) -> None:
    """Raises InputError if the model assigns no probability to texts; `where`: its run."""
    if model.architecture == "encoder_classifier":
        raise InputError(
            "rescore needs a run with model.architecture='encoder_decoder' or 'decoder_lm', this "
            "one is 'encoder_classifier'.",
            where=where,
        )
    if model.decoder == "masked":
        raise InputError(
            "rescore needs a run with model.decoder='causal', this one is 'masked': it predicts "
            "all tokens at once, and has no probability of a whole text.",
            where=where,
        )


def check_translates(model: ModelConfig, *, where: str) -> None:
    """Raises InputError if the model, of the run `where`, has no other direction."""
    if model.architecture != "encoder_decoder":
        raise InputError(
            f"reverse: {where} has model.architecture={model.architecture!r}, and only "
            "translations have another direction; leave it out."
        )


def check_directions(forward: Languages, backward: Languages, *, where: str) -> None:
    """Raises InputError if known languages of 2 runs are not opposite; `where`: the second run."""
    for side, wanted, got in zip(("source", "target"), forward[::-1], backward, strict=True):
        if None not in (wanted, got) and wanted != got:
            raise InputError(
                f"reverse: {where} has the {side} language {got!r}, expected {wanted!r}, the other "
                "direction of the first run."
            )


def check_penalty(penalty: str | None, alpha: float) -> None:
    """Raises InputError if the kind of the length penalty does not exist, or has no effect."""
    kinds = CHOICES["decode.penalty"]
    if penalty is not None and penalty not in kinds:
        raise InputError(f"penalty: expected {' or '.join(kinds)}, got {penalty!r}.")
    if penalty is not None and not alpha:
        raise InputError("penalty: has no effect with alpha=0; set alpha too, or leave it out.")


def checked_stride(stride: int | None, windows: int | None) -> int | None:
    """Returns the stride, by default the whole window; None without windows.

    Raises:
      InputError: there are no windows, or the stride is not between 1 and `windows`.
    """
    if stride is None:
        return windows
    if windows is None:
        raise InputError(
            "stride: applies only to a language model with data.windows; leave it out."
        )
    if given.whole_number(stride, name="stride") > windows:
        raise InputError(f"stride: expected at most data.windows = {windows}, got {stride}.")
    return stride
