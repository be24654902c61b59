"""Refuses fields that contradict `train.guided_alignment`, or have no effect without it."""

from collections.abc import Set

from flaxformer_lite.fields import Config
from flaxformer_lite.system.errors import InputError

OF_THE_LOSS = ("train.alignment_layer", "train.alignment_head", "data.train_alignments")


def guided_layer(config: Config) -> int:
    """Returns the layer of the head that `train.guided_alignment` acts on."""
    before_last = max(0, config.model.num_decoder_layers - 2)
    layer = config.train.alignment_layer
    return before_last if layer is None else layer


def check_alignments(config: Config, given: Set[str]) -> None:
    """Raises InputError if no head can be guided, or a field about it has no effect.

    Args:
      given: 'section.field' of each field that differs from its default, or was given.
    """
    if not config.train.guided_alignment:
        for name in OF_THE_LOSS:
            if name in given:
                raise InputError(
                    f"config.{name}: applies only with train.guided_alignment; set that, or leave "
                    "this unset."
                )
        return
    model, data = config.model, config.data
    for name, value, expected, reason in (
        ("model.architecture", model.architecture, "encoder_decoder", "needs cross-attention"),
        ("model.decoder", model.decoder, "causal", "aligns the token that a step predicts"),
        ("model.attention", model.attention, "dot_product", "computes the head's scores so"),
        ("data.packing", data.packing, False, "needs one pair a row"),
        ("data.subword_sampling", data.subword_sampling, 0.0, "needs fixed tokens"),
    ):
        if value != expected:
            raise InputError(
                f"config.train.guided_alignment: {reason}, {name}={expected!r}, got {value!r}; "
                "change that, or leave this unset."
            )
    for name, number, count, what in (
        ("layer", guided_layer(config), model.num_decoder_layers, "layers"),
        ("head", config.train.alignment_head, model.num_heads, "heads"),
    ):
        if number >= count:
            raise InputError(
                f"config.train.alignment_{name}: expected 0 to {count - 1}, as the decoder has "
                f"{count} {what}, got {number}."
            )
    if data.train_alignments and data.dataset != "parallel_text":
        raise InputError(
            "config.data.train_alignments: belongs to the data.train_files of "
            f"data.dataset='parallel_text', got {data.dataset!r}; leave it unset."
        )
    if data.train_alignments and len(data.train_files) != 2:
        raise InputError(
            "config.data.train_alignments: aligns a pair of files with a sentence per line, got "
            f"data.train_files={data.train_files}; write the two sides to two files."
        )
