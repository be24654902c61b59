"""A tokenizer that a run does not train: a copy of another one, or its extension."""

from typing import NamedTuple

from flaxformer_lite.checks.vocabularies import SIDES, named_for, of_side
from flaxformer_lite.data.tokens import tokenizer as tokenizer_lib
from flaxformer_lite.data.tokens import two_vocabularies
from flaxformer_lite.data.tokens.tokenizer import AnyTokenizer
from flaxformer_lite.data.tokens.two_vocabularies import TwoVocabularies
from flaxformer_lite.field_rules import COUNTED, SUBWORDS
from flaxformer_lite.fields import Config
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.system.storage import place

FILE = "tokenizer.model"  # in a workdir


class Given(NamedTuple):
    """The tokenizers of the sides that a run does not train; both the same if it has one."""

    source: AnyTokenizer | None
    target: AnyTokenizer | None


def of_files(config: Config) -> Given | None:
    """Returns the tokenizers of `data.tokenizer_file` and `data.target_tokenizer_file`, checked.

    None if no file is set.

    Raises:
      InputError: there is no such file, or its tokenizer does not fit the config.
    """
    if config.data.target_tokenizer is None:
        tokenizer = of_file(config)
        return None if tokenizer is None else Given(tokenizer, tokenizer)
    found = []
    for side in SIDES:
        with named_for(side):
            found.append(of_file(of_side(config, side), side))
    return None if found == [None, None] else Given(*found)


def of_parent(tokenizer: AnyTokenizer, config: Config) -> Given:
    """Returns the tokenizers that a run takes from `init.run`, which has `tokenizer`."""
    if config.data.target_tokenizer is None:
        return Given(tokenizer, tokenizer)
    return Given(*(two_vocabularies.tokenizer_of(tokenizer, side) for side in SIDES))


def of_file(config: Config, side: str | None = None) -> AnyTokenizer | None:
    """Returns the tokenizer of `data.tokenizer_file`, checked; None if the field is not set.

    Args:
      config: of one vocabulary.
      side: of a file with two vocabularies, that of this side; None: such a file does not fit.

    Raises:
      InputError: there is no such file, or its tokenizer does not fit the config.
    """
    name = config.data.tokenizer_file
    if name is None:
        return None
    path = place(name)
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise InputError(
            f"config.data.tokenizer_file: expected a {FILE}, or a workdir with one, and {file} "
            "does not exist; check the path."
        )
    try:
        tokenizer = tokenizer_lib.load(file)
    except InputError as error:
        if error.where:
            raise
        raise InputError(str(error), where="config.data.tokenizer_file") from error
    if side is not None:
        tokenizer = two_vocabularies.tokenizer_of(tokenizer, side)
    check(tokenizer, config, source=str(file))
    return tokenizer


def check(tokenizer: AnyTokenizer, config: Config, *, source: str) -> None:
    """Raises InputError if the kind or the size of a tokenizer is not that of the config.

    Args:
      source: where it is from.
    """
    if config.data.target_tokenizer is not None:
        for side in SIDES:
            with named_for(side):
                own = two_vocabularies.tokenizer_of(tokenizer, side)
                check(own, of_side(config, side), source=source)
        return
    if isinstance(tokenizer, TwoVocabularies):
        raise InputError(
            f"config.data.target_tokenizer: {source} has a tokenizer of the targets, "
            f"{tokenizer.target.kind!r}, got None; set data.target_tokenizer="
            f"{tokenizer.target.kind}."
        )
    kind, data = tokenizer.kind, config.data
    # A SentencePiece model with our special ids is used like one that was trained here.
    is_ours = data.tokenizer == "sentencepiece" and kind in SUBWORDS
    if kind != data.tokenizer and not is_ours:
        raise InputError(
            f"config.data.tokenizer: the tokenizer of {source} is {kind!r}, got "
            f"{data.tokenizer!r}; set data.tokenizer={kind}."
        )
    size, most = tokenizer.vocab_size, data.vocab_size
    if most is None:
        return
    is_limit = data.vocab_limit == "soft" or data.tokenizer in COUNTED
    if config.init.vocabulary == "extend":
        if size >= most:
            raise InputError(
                f"config.data.vocab_size: the tokenizer of {source} has {size:,} pieces already, "
                f"got {most:,}; raise it, or set init.vocabulary='same'."
            )
    elif size > most or (size < most and not is_limit):
        extends = config.init.run and size < most and data.tokenizer in SUBWORDS
        raise InputError(
            f"config.data.vocab_size: the tokenizer of {source} has {size:,} pieces, got "
            f"{most:,}; set data.vocab_size={size}"
            + (", or init.vocabulary='extend'." if extends else ".")
        )
