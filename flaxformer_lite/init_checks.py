"""Refuses settings of `init` that contradict each other or have no effect; names the field."""

import dataclasses
import re
from collections.abc import Sequence, Set

from flaxformer_lite.fields import Config, InitConfig
from flaxformer_lite.system.errors import InputError


def check_init(config: Config, given: Set[str]) -> None:
    """Raises InputError if two fields of `init`, or one of them and the tokenizer, contradict.

    Args:
      given: 'section.field' of each field that differs from its default, or was given.
    """
    init = config.init
    for field in dataclasses.fields(InitConfig):
        if field.name != "run" and f"init.{field.name}" in given and init.run is None:
            raise InputError(
                f"config.init.{field.name}: requires init.run, the run to start from; set that, "
                "or leave this unset."
            )
    for name, path in (("init.run", init.run), ("data.tokenizer_file", config.data.tokenizer_file)):
        if path is not None and not path.strip():
            raise InputError(f"config.{name}: expected a path, got {path!r}; leave it unset.")
    _check_tokenizer(config, given)
    if config.data.tokenizer == "marian" and init.vocabulary == "extend":
        raise InputError(
            "config.init.vocabulary: an imported tokenizer has two models and cannot be extended; "
            "leave it unset."
        )
    if init.new_bias and not config.model.output_bias:
        raise InputError(
            "config.init.new_bias: requires model.output_bias=True, whose biases it sets; set "
            "that, or leave this unset."
        )
    if init.average is not None and init.average != "none":
        _check_average(init.average)
    rules(init.map)


def _check_tokenizer(config: Config, given: Set[str]) -> None:
    """Raises InputError if the tokenizer has two sources, or is copied and yet to be trained."""
    init, data = config.init, config.data
    if init.run is not None and data.tokenizer_file is not None:
        raise InputError(
            "config.data.tokenizer_file: the tokenizer is that of init.run, to whose pieces its "
            "embeddings belong; leave this unset."
        )
    source = "data.tokenizer_file" if init.run is None else "init.run"
    is_copied = init.vocabulary == "same" and (init.run, data.tokenizer_file) != (None, None)
    for name in ("vocabulary_sample", "character_coverage"):
        if is_copied and f"data.{name}" in given:
            raise InputError(
                f"config.data.{name}: is for training a tokenizer, and that of {source} is copied; "
                "leave this unset."
            )


def _check_average(text: str) -> None:
    if not re.fullmatch(r"(last|best):[1-9][0-9]{0,8}", text):
        raise InputError(
            f"config.init.average: expected last:N, best:N or none, such as last:5, got {text!r}."
        )


def rules(given: Sequence[str]) -> list[tuple[re.Pattern[str], str]]:
    """Returns the rules of `init.map`: a pattern of new names, and the template of the old start.

    Raises:
      InputError: a rule has no '=', or its pattern or template is not valid.
    """
    parsed = []
    for rule in given:
        new, equals, old = rule.rpartition("=")
        try:
            pattern = re.compile(rf"(?:{new})(?=/|$)")
            if not (equals and new.strip()):
                raise re.error("expected NEW=OLD")
            re.compile(rf"(?:{new})|").sub(old, "")  # a wrong reference to a group is found here
        except (re.error, IndexError) as error:
            raise InputError(
                f"config.init.map: {rule!r} is no rule: {error}; write NEW=OLD, such as "
                "'encoder/layers_(2|3)=encoder/layers_1'."
            ) from error
        parsed.append((pattern, old))
    return parsed
