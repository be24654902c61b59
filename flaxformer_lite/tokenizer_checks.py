"""Refuses fields that contradict the kind of the tokenizer; the sizes that follow from it."""

from collections.abc import Set

from flaxformer_lite.field_rules import BYTE_VOCABULARY, COUNTED, FROM_FILE
from flaxformer_lite.fields import Config
from flaxformer_lite.system.errors import InputError

# Kinds that ignore the fields about training subwords, and the reason.
WHY = {
    **dict.fromkeys(COUNTED, "which has the symbols of all training texts"),
    "byte": "which has the 256 bytes",
    **dict.fromkeys(FROM_FILE, "which is read from a file"),
}
OF_SUBWORDS = ("vocab_limit", "vocabulary_sample", "character_coverage", "subword_sampling")


def check_tokenizer(config: Config, given: Set[str]) -> None:
    """Raises InputError if a field contradicts the kind of the tokenizer, or is ignored by it.

    Args:
      given: 'section.field' of each field that differs from its default, or was given.
    """
    data = config.data
    kind, why = data.tokenizer, WHY.get(data.tokenizer)
    for name in OF_SUBWORDS:
        if why is not None and f"data.{name}" in given:
            raise InputError(
                f"config.data.{name}: has no effect with data.tokenizer={kind!r}, {why}; leave it "
                "unset, or set data.tokenizer to 'unigram' or 'bpe'."
            )
    if kind in FROM_FILE and data.tokenizer_file is None and config.init.run is None:
        file = "a SentencePiece model" if kind == "sentencepiece" else "a tokenizer.json"
        raise InputError(
            f"config.data.tokenizer_file: required by data.tokenizer={kind!r}; set it to the path "
            f"of {file}."
        )
    if why is not None and config.init.vocabulary == "extend":
        raise InputError(
            "config.init.vocabulary: 'extend' requires data.tokenizer='unigram' or 'bpe', got "
            f"{kind!r}; leave it unset."
        )
    _check_size(config)
    _check_mask(config)


def _check_size(config: Config) -> None:
    """Raises InputError if the kind needs a size, has its own, or the model has another one."""
    data, of_model = config.data, config.model.vocab_size
    if data.vocab_size is None and data.tokenizer not in WHY:
        raise InputError(
            "config.data.vocab_size: expected a number of pieces for data.tokenizer="
            f"{data.tokenizer!r}, got None; set it, for example to 8000."
        )
    if data.tokenizer == "byte" and data.vocab_size is not None:
        raise InputError(
            f"config.data.vocab_size: data.tokenizer='byte' has its own size, {BYTE_VOCABULARY}, "
            f"got {data.vocab_size}; set --config.data.vocab_size=None."
        )
    most = BYTE_VOCABULARY if data.tokenizer == "byte" else data.vocab_size
    if of_model is None or most is None:
        return
    has_one_size = data.tokenizer == "byte" or not follows_tokenizer(config)
    if of_model > most or (of_model < most and has_one_size):
        field = "" if data.vocab_size is None else "data.vocab_size = "
        raise InputError(
            f"config.model.vocab_size: {of_model} contradicts {field}{most}, the size of the "
            "tokenizer; leave model.vocab_size unset."
        )


def _check_mask(config: Config) -> None:
    """Raises InputError if a target may contain the unknown token, and that is the mask symbol."""
    data = config.data
    is_copied = data.tokenizer_file is not None or config.init.run is not None
    is_bounded = data.tokenizer in COUNTED and (is_copied or data.vocab_size is not None)
    if config.model.decoder != "masked" or not (is_bounded or data.tokenizer in FROM_FILE):
        return
    counts_all = (
        " all symbols of the training texts (data.vocab_size=None, no copied tokenizer), or"
    )
    raise InputError(
        "config.model.decoder: 'masked' uses the unknown token as its mask symbol, and targets of "
        f"data.tokenizer={data.tokenizer!r} may contain it; use"
        f"{counts_all if is_bounded else ''} data.tokenizer='unigram', 'bpe' or 'byte'."
    )


def follows_tokenizer(config: Config) -> bool:
    """Whether the model has the size of the tokenizer, which `data.vocab_size` may only bound."""
    return config.data.tokenizer in WHY or config.data.vocab_limit == "soft"


def vocabulary_size(config: Config, of_tokenizer: int) -> int:
    """Returns the size of the model's vocabulary, for a tokenizer of this size."""
    size = config.data.vocab_size
    return of_tokenizer if size is None or follows_tokenizer(config) else size


def expected_vocabulary(config: Config) -> int | None:
    """Returns the size of the vocabulary by the config, or its limit; None: the data has it."""
    if config.data.tokenizer == "byte":
        return BYTE_VOCABULARY
    return config.model.vocab_size or config.data.vocab_size
