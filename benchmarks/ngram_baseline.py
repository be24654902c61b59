"""Bits per byte of the best n-gram language model: a baseline for decoder-only models.

Interpolated n-grams over bytes and over SentencePiece pieces, of every order up to a limit, with 3
smoothings:

  Witten-Bell        Witten and Bell, 1991, method C
  Kneser-Ney         interpolated and modified: Chen and Goodman, 1998
  tuned Kneser-Ney   the same counts; the discounts, and the concentration of a Pitman-Yor process
                     (Teh, 2006), minimise the bits of the validation split, for each length of
                     context and each group of similar contexts

Counts and pieces are from the train split only. The validation split selects the unit, the
vocabulary, the smoothing and the order. The test figure is that of the selected model.

A phrase is one sequence: a start symbol, its bytes or pieces, one end symbol. Nothing is carried
over to the next phrase. Bits per byte are the bits of all phrases, end symbols included, divided by
the UTF-8 bytes of the phrases, without end symbols. The text 'en-de' is the English phrase, a tab
and the German phrase, all of which counts.

Every distribution is interpolated with the uniform one over all symbols, so that no probability is
0. Each run checks that the distributions sum to 1.

    python -m benchmarks.ngram_baseline --text=de
"""

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.optimize import minimize

from benchmarks import figures
from flaxformer_lite.data.sources import builders, preparation
from flaxformer_lite.data.tokens import tokenizer

SPLITS = "train", "validation", "test"
TRAIN, VALIDATION, TEST, PROBE = range(4)
PROBES = 4  # contexts for which the sum of all probabilities is checked
CLASSES = 3  # separate discounts for n-grams with counts of 1, 2, and more
# A group has contexts with a similar number of different next symbols, and a similar share of those
# seen once: a context that always precedes the same letter needs less smoothing than one that
# precedes any digit.
SYMBOL_EDGES, ONCE_EDGES = (1.5, 4.5, 10.5, 60.5), (0.01, 0.5)
GROUPS = (len(SYMBOL_EDGES) + 1) * (len(ONCE_EDGES) + 1)


class Corpus(NamedTuple):
    """All phrases concatenated, each with its start and end symbol."""

    tokens: np.ndarray  # int64 (N,)
    depth: np.ndarray  # int64 (N,): tokens of the phrase before this one
    split: np.ndarray  # int64 (N,)
    last: np.ndarray  # bool (N,)
    size: int  # symbols that may follow a context; also the id of the start symbol, which may not

    @property
    def held_out(self) -> np.ndarray:
        """Which M tokens are predicted: bool (N,)."""
        return (self.split != TRAIN) & (self.depth > 0)


class Level(NamedTuple):
    """Training counts for the contexts of one length, at each predicted token; 0 if not seen."""

    count: np.ndarray  # float64 (M,): the token after this context
    total: np.ndarray  # float64 (M,): any token after this context
    kinds: np.ndarray  # float64 (CLASSES, M): different tokens with a count of 1, 2, more
    group: np.ndarray  # int64 (M,)
    discounts: np.ndarray  # float64 (CLASSES,): as Chen and Goodman estimate them

    def where(self, mask: np.ndarray) -> "Level":
        """Returns the level of some of the tokens."""
        return Level(
            self.count[mask],
            self.total[mask],
            self.kinds[:, mask],
            self.group[mask],
            self.discounts,
        )


def in_a_row(splits: Sequence[Sequence[np.ndarray]], size: int, end: int) -> Corpus:
    """Returns the phrases of all splits, then the probes: prefixes, each with every symbol."""
    starts = [
        phrase[: len(phrase) * i // (PROBES - 1)]
        for i, phrase in enumerate(splits[VALIDATION][:PROBES])
    ]
    rows = [[np.concatenate(([size], phrase, [end])) for phrase in phrases] for phrases in splits]
    rows.append(
        [np.concatenate(([size], start, [symbol])) for start in starts for symbol in range(size)]
    )
    lengths = np.array([len(row) for phrases in rows for row in phrases])
    ends = np.cumsum(lengths)
    last = np.zeros(ends[-1], bool)
    last[ends - 1] = True
    return Corpus(
        tokens=np.concatenate([row for phrases in rows for row in phrases]).astype(np.int64),
        depth=np.arange(ends[-1]) - np.repeat(ends - lengths, lengths),
        split=np.repeat(np.repeat(range(len(rows)), [len(phrases) for phrases in rows]), lengths),
        last=last,
        size=size,
    )


def count(corpus: Corpus, max_order: int) -> Iterator[tuple[Level, Level]]:
    """Yields plain counts and Kneser-Ney's lower-order counts, for contexts of 0, 1, ... tokens."""
    tokens, depth, train = corpus.tokens, corpus.depth, corpus.split == TRAIN
    # ids of the n-gram that ends at a token, and of its context
    grams, contexts = tokens, np.zeros_like(tokens)
    for length in range(max_order):
        fits, extends = depth >= max(length, 1), depth > length
        # The context of a token that is one token longer is the n-gram that ends at the previous
        # token.
        longer_contexts, longer = np.roll(grams, 1), np.full_like(grams, -1)
        keys = longer_contexts[extends] * (corpus.size + 1) + tokens[extends]
        longer[extends] = np.unique(keys, return_inverse=True)[1]

        number = grams.max() + 1
        plain = np.bincount(grams[fits & train], minlength=number)
        # Kneser-Ney counts the different tokens on the left. An n-gram at the start of a phrase has
        # none and keeps its plain count.
        _, one_of_each = np.unique(longer[extends & train], return_index=True)
        left = np.bincount(grams[extends & train][one_of_each], minlength=number)
        left += np.bincount(grams[fits & train & ~extends], minlength=number)

        context_of = np.zeros(number, np.int64)
        context_of[grams[fits]] = contexts[fits]
        at = corpus.held_out
        known = fits[at]
        ids = np.where(known, grams[at], -1), np.where(known, contexts[at], -1)
        yield _level(plain, context_of, *ids), _level(left, context_of, *ids)
        grams, contexts = longer, longer_contexts


def _level(
    counts: np.ndarray, context_of: np.ndarray, grams: np.ndarray, contexts: np.ndarray
) -> Level:
    """Returns the level, from the count and the context of each n-gram; an id of -1 has neither."""

    def at(values: np.ndarray, ids: np.ndarray) -> np.ndarray:
        return np.where(ids >= 0, values[ids], 0).astype(float)

    n = np.arange(1, CLASSES + 1)
    kinds = np.stack(
        [at(np.bincount(context_of, np.minimum(counts, CLASSES) == i), contexts) for i in n]
    )
    symbols = kinds.sum(0)
    once = kinds[0] / np.maximum(symbols, 1)
    group = np.searchsorted(SYMBOL_EDGES, symbols) * (len(ONCE_EDGES) + 1) + np.searchsorted(
        ONCE_EDGES, once
    )
    times = np.array([(counts == i).sum() for i in range(1, CLASSES + 2)], float)
    estimates = n - (n + 1) * times[0] / max(times[0] + 2 * times[1], 1) * times[1:] / np.maximum(
        times[:-1], 1
    )
    # With few rare n-grams, as with single bytes, the estimate is meaningless; it must be from 0 to
    # n.
    discounts = np.where((times[:-1] > 0) & (estimates >= 0), estimates, n / 2)
    return Level(
        at(counts, grams), at(np.bincount(context_of, counts), contexts), kinds, group, discounts
    )


def witten_bell(levels: Sequence[Level], size: int) -> np.ndarray:
    """Returns probabilities (M,); new symbols have the weight of the number of different ones."""
    p = np.full(len(levels[0].count), 1 / size)
    for level in levels:
        new = level.kinds.sum(0)
        p = np.where(level.total > 0, (level.count + new * p) / np.maximum(level.total + new, 1), p)
    return p


def estimated(levels: Sequence[Level]) -> np.ndarray:
    """Returns (levels, GROUPS, CLASSES + 1): Chen-Goodman discounts, and concentrations of 0."""
    return np.stack([np.tile(np.append(level.discounts, 0.0), (GROUPS, 1)) for level in levels])


def kneser_ney(levels: Sequence[Level], size: int, parameters: np.ndarray) -> np.ndarray:
    """Returns probabilities (M,), for parameters with the shape of `estimated`."""
    p = np.full(len(levels[0].count), 1 / size)
    for level, values in zip(levels, parameters, strict=True):
        kept, given, _ = _shares(level, values)
        p = kept + given * p
    return p


def _shares(level: Level, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the probability of this level, the weight of the shorter context, and the divisor."""
    seen, of_token = level.total > 0, values[level.group]
    concentration = of_token[:, CLASSES]
    divisor = np.where(seen, level.total + concentration, 1.0)
    own = np.take_along_axis(of_token, _class(level)[:, None], axis=1)[:, 0]
    taken = (of_token[:, :CLASSES].T * level.kinds).sum(0)
    kept = np.where(level.count > 0, (level.count - own) / divisor, 0.0)
    return kept, np.where(seen, (concentration + taken) / divisor, 1.0), divisor


def _class(level: Level) -> np.ndarray:
    """Returns the index of the token's discount; arbitrary if it has no count."""
    return np.clip(level.count, 1, CLASSES).astype(int) - 1


def tune(levels: Sequence[Level], size: int) -> np.ndarray:
    """Returns the parameters, with the shape of `estimated`, that minimise the bits of `levels`."""
    start = estimated(levels)
    start[..., CLASSES] = 0.1

    def bits(flat: np.ndarray) -> tuple[float, np.ndarray]:
        parameters = flat.reshape(start.shape)
        shares, p = [], [np.full(len(levels[0].count), 1 / size)]
        for level, values in zip(levels, parameters, strict=True):
            shares.append(_shares(level, values))
            p.append(shares[-1][0] + shares[-1][1] * p[-1])
        # Gradients of the mean nats: by the parameters, and by p of the level.
        slopes, back = np.zeros_like(start), -1 / p[-1] / len(p[-1])
        for i in reversed(range(len(levels))):
            level, (_, given, divisor) = levels[i], shares[i]
            scaled = np.where(level.total > 0, back / divisor, 0.0)
            for j in range(CLASSES):
                own = (level.count > 0) & (_class(level) == j)
                slopes[i, :, j] = np.bincount(
                    level.group, scaled * (level.kinds[j] * p[i] - own), GROUPS
                )
            slopes[i, :, CLASSES] = np.bincount(level.group, scaled * (p[i] - p[i + 1]), GROUPS)
            back = back * given
        return -np.log(p[-1]).mean(), slopes.ravel()

    # Discounts over 0 and concentrations of at least 0 give the shorter context some weight.
    bounds = [(1e-4, float(i)) for i in range(1, CLASSES + 1)] + [(0.0, 1e3)]
    options = {"maxiter": 150, "maxcor": 20}
    best = minimize(
        bits, start.ravel(), jac=True, bounds=bounds * (start.size // len(bounds)), options=options
    )
    return best.x.reshape(start.shape)


def scores(
    corpus: Corpus, sizes: Sequence[int], max_order: int
) -> dict[str, dict[int, tuple[float, float]]]:
    """Returns smoothing -> order -> bits per byte of validation and test.

    Args:
      sizes: bytes of the texts of each split.
    """
    split, last = corpus.split[corpus.held_out], corpus.last[corpus.held_out]

    def score(p: np.ndarray) -> tuple[float, float]:
        sums = p[(split == PROBE) & last].reshape(PROBES, corpus.size).sum(1)
        if not np.allclose(sums, 1, rtol=0, atol=1e-6):
            raise ArithmeticError(f"Expected probabilities that sum to 1, got sums of {sums}.")
        validation, test = (-np.log2(p[split == k]).sum() / sizes[k] for k in (VALIDATION, TEST))
        return validation, test

    counted = list(count(corpus, max_order))
    plain, lower = zip(*counted, strict=True)
    found = {"Witten-Bell": {}, "Kneser-Ney": {}, "tuned Kneser-Ney": {}}
    for order in range(1, max_order + 1):
        levels = (*lower[: order - 1], plain[order - 1])
        found["Witten-Bell"][order] = score(witten_bell(plain[:order], corpus.size))
        found["Kneser-Ney"][order] = score(kneser_ney(levels, corpus.size, estimated(levels)))
    # Tuned discounts favour longer contexts, so orders below the untuned optimum are skipped.
    for order in range(min(found["Kneser-Ney"], key=found["Kneser-Ney"].get), max_order + 1):
        levels = (*lower[: order - 1], plain[order - 1])
        parameters = tune([level.where(split == VALIDATION) for level in levels], corpus.size)
        found["tuned Kneser-Ney"][order] = score(kneser_ney(levels, corpus.size, parameters))
    return found


def in_pieces(texts: Sequence[Sequence[str]], kind: str, vocab_size: int) -> list[list[np.ndarray]]:
    """Returns the splits in pieces that are trained on the first split.

    Raises:
      ValueError: the text has too few pieces, or decoding does not restore it.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.model"
        tokenizer.train(texts[TRAIN], path, vocab_size=vocab_size, kind=kind)
        pieces = tokenizer.Tokenizer(path)
    splits = [pieces.encode(split) for split in texts]
    if pieces.decode(splits[TEST]) != list(texts[TEST]):
        raise ValueError(f"The {vocab_size} {kind} pieces lose text.")
    return splits


def read(pair: str, text: str, data_dir: str | None) -> list[list[str]]:
    """Returns the texts of all splits: one locale of `pair`, or both with a tab between."""
    builder = builders.cldr_translate(pair, data_dir=data_dir)
    preparation.prepare(builder)
    return [
        [
            "\t".join(example[name].decode() for name in text.split("-"))
            for example in data.__getitems__(range(len(data)))
        ]
        for data in builder.as_data_source(split=list(SPLITS))
    ]


def main() -> None:
    """Prints the validation figures of all models, and the selected model with its test figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--dataset", default="cldr_translate/en-de", help="cldr_translate/<source>-<target>"
    )
    parser.add_argument(
        "--text", default="de", help="<source>, <target>, or both in one text: <source>-<target>"
    )
    parser.add_argument("--data_dir", help="folder of all datasets; default: that of TFDS")
    parser.add_argument(
        "--vocab_sizes", type=int, nargs="*", default=[512, 1000, 2000], help="numbers of pieces"
    )
    parser.add_argument(
        "--byte_order", type=int, default=16, help="longest n-gram of bytes; 0: none"
    )
    parser.add_argument("--piece_order", type=int, default=10, help="longest n-gram of pieces")
    figures.add_flag(parser)
    flags = parser.parse_args()
    pair = flags.dataset.removeprefix("cldr_translate/")
    if flags.text not in (pair, *pair.split("-")):
        parser.error(
            f"--text: expected {' or '.join((pair, *pair.split('-')))}, got {flags.text!r}"
        )
    texts = read(pair, flags.text, flags.data_dir)
    sizes = [sum(len(text.encode()) for text in split) for split in texts]
    units = [("bytes", 256)] if flags.byte_order else []
    units += [(kind, size) for kind in ("unigram", "bpe") for size in flags.vocab_sizes]
    print(
        f"Validation bits per byte of {flags.text!r} by order\n{'unit':8}{'vocab':>6}  "
        f"{'smoothing':16}"
    )
    choices = {}
    for unit, vocab_size in units:
        if unit == "bytes":
            splits = [[np.frombuffer(text.encode(), np.uint8) for text in split] for split in texts]
            corpus, max_order = in_a_row(splits, vocab_size + 1, end=vocab_size), flags.byte_order
        else:
            try:
                splits = in_pieces(texts, unit, vocab_size)
            except ValueError as error:
                print(f"{unit:8}{vocab_size:6}  left out: {error}")
                continue
            corpus, max_order = in_a_row(splits, vocab_size, end=tokenizer.EOS), flags.piece_order
        for smoothing, by_order in scores(corpus, sizes, max_order).items():
            line = " ".join(
                f"{order}:{validation:.4f}" for order, (validation, _) in by_order.items()
            )
            print(f"{unit:8}{vocab_size:6}  {smoothing:16}  {line}", flush=True)
            for order, figure in by_order.items():
                choices[unit, f"{vocab_size}, {smoothing}, order {order}"] = figure
    for unit in dict.fromkeys(unit for unit, _ in choices):
        names = [name for name in choices if name[0] == unit]
        best = min(names, key=choices.get)
        print(
            f"Best of {' '.join(best)}: {choices[best][0]:.4f} on validation, "
            f"{choices[best][1]:.4f} on test"
        )
    choice = min(choices, key=choices.get)
    print(f"Choice: {' '.join(choice)}")
    plain = min((name for name in choices if ", Kneser-Ney" in name[1]), key=choices.get)
    found = {"best validation": choices[choice][0], "best": choices[choice][1]}
    figures.write(flags.json, found | {"plain Kneser-Ney": choices[plain][1]})


if __name__ == "__main__":
    main()
