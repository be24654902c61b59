"""Refuses fields that contradict `data.windows` or `data.whole_files`, or have no effect there."""

from collections.abc import Set

from flaxformer_lite.fields import Config
from flaxformer_lite.system.errors import InputError

WHOLE = "plain_text"  # the dataset whose files may be whole texts
# Fields about single lines, which whole files do not have.
OF_LINES = ("longest_line", "faults", "header", "quoted")


def check_windows(config: Config, given: Set[str]) -> None:
    """Raises InputError if windows are longer than the model, or another field sets the rows."""
    data = config.data
    if data.windows is None:
        return
    if data.windows > config.model.max_length:
        raise InputError(
            f"config.data.windows: {data.windows} tokens are over model.max_length = "
            f"{config.model.max_length}; shorten the windows or raise model.max_length."
        )
    if data.packing:
        raise InputError(
            "config.data.packing: a row of data.windows is filled with consecutive tokens already; "
            "unset one of the two."
        )
    for name, none in (("buckets", ()), ("num_buckets", None)):
        if f"data.{name}" in given and getattr(data, name) != none:
            raise InputError(
                f"config.data.{name}: every row has data.windows = {data.windows} tokens, so this "
                f"has no effect; leave it unset, or set it to {none}."
            )
    if data.subword_sampling:
        raise InputError(
            "config.data.subword_sampling: changes the number of tokens in each epoch, and "
            "data.windows cuts one stream of tokens; unset one of the two."
        )


def check_whole_files(config: Config, given: Set[str]) -> None:
    """Raises InputError if no dataset has whole files, or a field about lines is set."""
    data = config.data
    datasets = (data.dataset, data.validation_dataset, data.test_dataset)
    if "data.whole_files" in given and WHOLE not in datasets:
        raise InputError(
            f"config.data.whole_files: applies only to data.dataset={WHOLE!r}; leave it unset."
        )
    if not data.whole_files:
        return
    for name in OF_LINES:
        if f"data.{name}" in given:
            raise InputError(
                f"config.data.{name}: is about single lines, and data.whole_files=True reads a "
                "file as one text; leave it unset."
            )
    if data.subword_sampling:
        raise InputError(
            "config.data.subword_sampling: samples the ids of whole texts, and "
            "data.whole_files=True reads texts of any length in pieces; unset one of the two."
        )
