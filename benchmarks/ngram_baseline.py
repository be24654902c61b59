"""Bits per byte of the best n-gram language model: what a decoder-only Transformer has to beat.

Interpolated n-grams over bytes and over SentencePiece pieces, of all orders up to a limit, by four smoothings:

  Witten-Bell         Bell, Cleary and Witten, 1990
  Kneser-Ney          interpolated modified Kneser-Ney, Chen and Goodman, 1998, equations 21 to 26
  tuned Kneser-Ney    the same; three discounts and the concentration of a Pitman-Yor process (Teh, 2006), for each
                      length of context, are those that give the validation split the fewest bits
  tuned raw counts    the same again, with plain counts in place of Kneser-Ney's numbers of left neighbours

Training text, also of the pieces, is the train split alone. Unit, vocabulary, smoothing and order are chosen on the
validation split, and the test split is scored once, by that choice. A phrase is one sequence: it begins in a start
context, ends in an end symbol, and nothing is carried over to the next.

Bits per byte = the bits of all phrases, end symbols included, divided by the UTF-8 bytes of the phrases. An end symbol
costs bits and adds no byte.

Every distribution ends in the uniform one over all symbols, so that nothing has probability 0, and sums to 1: each run
checks that in a few contexts.

    python benchmarks/ngram_baseline.py --text=de
"""

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.optimize import minimize

from flaxformer_lite.data import builders, tokenizer

SPLITS = TRAIN, VALIDATION, TEST, PROBE = range(4)
CLASSES = 3  # n-grams seen once, twice and more often have discounts of their own


class Corpus(NamedTuple):
    """All phrases in a row, each with its start and end symbol."""

    tokens: np.ndarray  # int64 (N,)
    depth: np.ndarray  # int64 (N,): how many tokens of its phrase come before each; 0 is the start symbol
    split: np.ndarray  # int8 (N,)
    size: int  # symbols that can follow a context; the start symbol is not among them


class Level(NamedTuple):
    """What the contexts of one length saw in training, for each held-out token."""

    count: np.ndarray  # float64 (M,): of the context with the token
    total: np.ndarray  # float64 (M,): of the context; 0 where it was never seen, or would begin before the start
    types: np.ndarray  # float64 (CLASSES, M): different tokens that the context saw once, twice and more often
    discounts: np.ndarray  # float64 (CLASSES,): Chen and Goodman's estimate


def row(phrases: Sequence[Sequence[np.ndarray]], size: int, end: int) -> Corpus:
    """Splits of phrases in one row, and probes: for 4 contexts of the validation split all symbols that can follow."""
    start = size
    probes = [
        np.append(phrase[: len(phrase) * part // 3], symbol)
        for part, phrase in enumerate(phrases[VALIDATION][:4])
        for symbol in range(size)
    ]
    closed = [[np.concatenate(([start], phrase, [end])) for phrase in split] for split in phrases]
    closed.append([np.concatenate(([start], probe)) for probe in probes])
    every = [phrase for split in closed for phrase in split]
    lengths = np.array([len(phrase) for phrase in every])
    depth = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    split = np.repeat(np.repeat(SPLITS, [len(split) for split in closed]), lengths).astype(np.int8)
    return Corpus(np.concatenate(every).astype(np.int64), depth, split, size)


def levels(corpus: Corpus, max_order: int) -> Iterator[tuple[Level, Level]]:
    """For contexts of 0, 1, ... max_order - 1 tokens: what plain counts and what Kneser-Ney's counts say."""
    trains, held_out = corpus.split == TRAIN, (corpus.split != TRAIN) & (corpus.depth > 0)
    grams, contexts = corpus.tokens, np.zeros_like(corpus.tokens)
    for length in range(max_order):
        longer = np.full_like(grams, -1)
        longer_contexts = np.roll(grams, 1)  # the n-gram that ends just before is the context one token longer
        fits = corpus.depth > length
        keys = longer_contexts[fits] * (corpus.size + 1) + corpus.tokens[fits]
        longer[fits] = np.unique(keys, return_inverse=True)[1]
        inside = (corpus.depth >= max(length, 1)) & trains
        number = grams.max() + 1
        plain = np.bincount(grams[inside], minlength=number)
        # Kneser-Ney: the different tokens to the left; nothing is left of the start, so its n-grams keep their counts.
        _, first = np.unique(longer[fits & trains], return_index=True)
        left = np.bincount(grams[fits & trains][first], minlength=number)
        if length:
            left += np.bincount(grams[inside & (corpus.depth == length)], minlength=number)
        seen = np.unique(np.stack([grams[inside], contexts[inside]]), axis=1) if False else None
        gram_context = np.zeros(number, np.int64)
        gram_context[grams[inside]] = contexts[inside]
        valid = held_out & (corpus.depth >= length)
        at = valid[held_out]
        yield tuple(_level(counts, gram_context, contexts.max() + 1, grams[valid], contexts[valid], at) for counts in (plain, left))
        grams, contexts = longer, longer_contexts


def _level(counts, gram_context, contexts_number, grams, contexts, at):
    """Level from the counts of n-grams."""
    total = np.bincount(gram_context, counts, contexts_number)
    occurs = np.array([(counts == n).sum() for n in range(1, CLASSES + 2)], float)
    classes = [np.bincount(gram_context, (counts == n) if n < CLASSES else (counts >= n), contexts_number) for n in range(1, CLASSES + 1)]
    with np.errstate(all="ignore"):
        y = occurs[0] / (occurs[0] + 2 * occurs[1])
        n = np.arange(1, CLASSES + 1)
        discounts = n - (n + 1) * y * occurs[1:] / occurs[:-1]
    discounts = np.where(np.isfinite(discounts) & (discounts > 0), np.minimum(discounts, n), n / 2)
    def spread(values):
        full = np.zeros(len(at))
        full[at] = values
        return full
    return Level(spread(counts[grams]), spread(total[contexts]), np.stack([spread(c[contexts]) for c in classes]), discounts)


def step(level, params, below):
    count, total, types = level.count, level.total, level.types
    seen = total > 0
    den = np.where(seen, total + params[3], 1.0)
    disc = np.concatenate(([0.0], params[:3]))[np.minimum(count, 3).astype(int)]
    m = (count - disc) / den
    g = np.where(seen, (params[3] + params[:3] @ types) / den, 1.0)
    return m + g * below, g, den


def kn(chain, size):
    p = np.full(len(chain[0].count), 1.0 / size)
    for level in chain:
        p = step(level, np.append(level.discounts, 0.0), p)[0]
    return p


def wb(chain, size):
    p = np.full(len(chain[0].count), 1.0 / size)
    for l in chain:
        t = l.types.sum(0)
        p = np.where(l.total > 0, (l.count + t * p) / np.maximum(l.total + t, 1), p)
    return p


def cut(level, mask):
    return Level(level.count[mask], level.total[mask], level.types[:, mask], level.discounts)


def run_params(chain, size, params):
    p = np.full(len(chain[0].count), 1.0 / size)
    for level, q in zip(chain, params):
        p = step(level, q, p)[0]
    return p


def tune(chain, size, start=None):
    L = len(chain)
    x0 = np.array([np.append(l.discounts, 0.1) for l in chain]) if start is None else start
    buckets = [[l.count == 1, l.count == 2, l.count >= 3] for l in chain]
    def f(x):
        x = x.reshape(L, 4)
        p = [np.full(len(chain[0].count), 1.0 / size)]
        gs, dens = [], []
        for l, q in zip(chain, x):
            out, g, den = step(l, q, p[-1])
            p.append(out); gs.append(g); dens.append(den)
        loss = -np.log2(p[-1]).mean()
        a = -1 / (p[-1] * np.log(2) * len(p[-1]))
        grad = np.zeros((L, 4))
        for i in reversed(range(L)):
            r = a / dens[i]
            rp = r * p[i]
            grad[i, :3] = chain[i].types @ rp - [r[b].sum() for b in buckets[i]]
            grad[i, 3] = rp.sum() - (r * p[i + 1]).sum() if (chain[i].total > 0).all() else (r * (p[i] - p[i + 1])).sum()
            a = a * gs[i]
        return loss, grad.ravel()
    res = minimize(f, x0.ravel(), jac=True, method="L-BFGS-B", bounds=[(1e-4, 1), (1e-4, 2), (1e-4, 3), (0, 1000)] * L, options={"maxiter": 300})
    return res.x.reshape(L, 4)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", default="de")
    parser.add_argument("--units", default="bytes,unigram-512,unigram-1000,unigram-2000,bpe-512,bpe-1000,bpe-2000")
    parser.add_argument("--order", type=int, default=10)
    flags = parser.parse_args()
    b = builders.cldr_translate("en-de"); builders.prepare(b)
    data = [d.__getitems__(range(len(d))) for d in b.as_data_source(split=["train", "validation", "test"])]
    texts = [[ "\t".join(e[k].decode() for k in flags.text.split("-")) for e in d] for d in data]
    nbytes = [sum(len(t.encode()) for t in d) for d in texts]
    for unit in flags.units.split(","):
        t0 = time.time()
        if unit == "bytes":
            rows = [[np.frombuffer(t.encode(), np.uint8) for t in d] for d in texts]; size, end = 257, 256
        else:
            kind, v = unit.split("-")
            with tempfile.TemporaryDirectory() as f:
                tokenizer.train(texts[0], Path(f) / "m", vocab_size=int(v), kind=kind)
                tok = tokenizer.Tokenizer(Path(f) / "m")
            rows = [tok.encode(d) for d in texts]; size, end = tok.vocab_size, tokenizer.EOS
        c = row(rows, size, end)
        t1 = time.time()
        lv = list(levels(c, flags.order))
        held = (c.split != TRAIN) & (c.depth > 0)
        s = c.split[held]
        # probes: last only
        nxt = np.append(c.depth[1:], 0)
        last = (nxt == 0)[held] & (s == PROBE)
        t2 = time.time()
        def bpb(p, k): return -np.log2(p[s == k]).sum() / nbytes[k]
        for order in range(1, flags.order + 1):
            raw = [lv[i][0] for i in range(order)]
            ad = [lv[i][1] for i in range(order - 1)] + [lv[order - 1][0]]
            res = {"wb": wb(raw, size), "kn": kn(ad, size)}
            for name, ch in (("tkn", ad), ("traw", raw)):
                q = tune([cut(l, s == VALIDATION) for l in ch], size)
                res[name] = run_params(ch, size, q)
                if order == 6: print(name, np.round(q, 2).tolist())
            line = " ".join(f"{n} {bpb(p, 1):.4f} (test {bpb(p, 2):.4f}, sum {[round(float(x),9) for x in p[last].reshape(4, size).sum(1)][-1]})" for n, p in res.items())
            print(unit, order, line, flush=True)
        print(f"   tokens {t1-t0:.1f} count {t2-t1:.1f} score {time.time()-t2:.1f}")
main()
