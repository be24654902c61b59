"""A toy corpus whose sides have different symbols: words, and their phones between spaces."""

import re
from pathlib import Path

import numpy as np

LETTERS = "abdefghiklmnoprstuv"
# Some letters have the same phone; a pair of letters has its own.
PHONES = {letter: f"P{n % 8}" for n, letter in enumerate(LETTERS)} | {"sh": "SH"}


def phones_of(word: str) -> str:
    """Returns the phones of a word with one space between 2 of them."""
    return " ".join(PHONES[symbol] for symbol in re.findall("sh|.", word))


def words(count: int, seed: int = 5) -> list[str]:
    """Returns random words; each third one ends with 'sh'."""
    rng = np.random.default_rng(seed)
    random = ["".join(rng.choice(list(LETTERS), rng.integers(2, 7))) for _ in range(count)]
    return [word + "sh" if n % 3 == 0 else word for n, word in enumerate(random)]


def write(folder: Path) -> dict[str, object]:
    """Writes the files of a small corpus; returns the settings of a run that reads them."""
    files: dict[str, object] = {}
    for seed, (split, count) in enumerate({"train": 400, "validation": 16, "test": 16}.items()):
        texts, names = words(count, seed), (folder / f"{split}.word", folder / f"{split}.phones")
        names[0].write_text("".join(f"{word}\n" for word in texts))
        names[1].write_text("".join(f"{phones_of(word)}\n" for word in texts))
        files[f"data.{split}_files"] = tuple(map(str, names))
    return {
        **files,
        "data.dataset": "parallel_text",
        "data.train_split": "train",
        "data.validation_split": "validation",
        "data.test_split": "test",
        "data.tokenizer": "char",
        "data.target_tokenizer": "spaces",
        "data.vocab_size": None,
        "data.buckets": "(16,)",
    }
