"""The token ids of words and phrases that no output may contain."""

from collections.abc import Sequence

from flaxformer_lite.data.tokens.any_tokenizer import AnyTokenizer

BEFORE = "x"  # a word before the text, so that its ids after a space are found


def forbidden_ids(tokenizer: AnyTokenizer, texts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Returns the sequences of ids of each text, without duplicates.

    They are those of the text at the start of a sentence, and after a space. A text that is split
    into other tokens is not found. Tokens of characters are found within words too.
    """
    found: dict[tuple[int, ...], None] = {}
    before = _encoded(tokenizer, BEFORE)
    for text in texts:
        after_space = _encoded(tokenizer, f"{BEFORE} {text}")
        sequences = [_encoded(tokenizer, text)]
        if after_space[: len(before)] == before:
            sequences.append(after_space[len(before) :])
        found |= dict.fromkeys(sequence for sequence in sequences if sequence)
    return tuple(found)


def _encoded(tokenizer: AnyTokenizer, text: str) -> tuple[int, ...]:
    return tuple(map(int, tokenizer.encode([text], side="target")[0]))
