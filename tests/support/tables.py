"""Tables of logits in place of a model: a decoding task whose distribution can be enumerated."""

import itertools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from flaxformer_lite.decoding.task import Task
from flaxformer_lite.fields import EOS

WORDS = (4, 5, 6)  # the ids that texts have, besides the end symbol
V, LONGEST = 7, 4  # the first 4 ids are the special tokens


@flax.struct.dataclass
class Cache:
    """The tokens that the step function was called with: W entries a position."""

    token_BLW: jax.Array

    def extended(self, max_length, beam_size=1):
        more = max_length - self.token_BLW.shape[1]
        return Cache(jnp.pad(self.token_BLW, ((0, 0), (0, more), (0, 0))))


def table(seed, scale=1.5):
    """Returns the logits (tokens so far, text so far, V) of the next token."""
    shape = LONGEST, len(WORDS) ** (LONGEST - 1), V
    return np.random.default_rng(seed).normal(scale=scale, size=shape).astype(np.float32)


def number(text):
    """Returns the index of a text among the texts of its length."""
    return sum((token - WORDS[0]) * len(WORDS) ** i for i, token in enumerate(text))


def log_probs(logits, text):
    """Returns the log-probability of each token after `text`, (V,) float64."""
    logits_V = logits[len(text), number(text)].astype(np.float64)
    return logits_V - np.log(np.exp(logits_V).sum())


def task_of(tables, limits, row_B, prompt=()):
    """Returns the task of rows with these tables and limits; all have the same prompt."""
    tables_BTXV = jnp.asarray(tables)

    def step(token_BW, cache, index, ancestor_BWT):
        token_BLW = jax.lax.dynamic_update_slice_in_dim(
            cache.token_BLW, token_BW[:, None], index, axis=1
        )
        past_BLW = jnp.take_along_axis(
            token_BLW, jnp.swapaxes(ancestor_BWT, 1, 2)[:, : token_BLW.shape[1]], axis=2
        )
        # The first entry is the start symbol.
        position_L = jnp.arange(past_BLW.shape[1])
        is_past_L = (position_L > 0) & (position_L <= index)
        value_L = len(WORDS) ** jnp.maximum(position_L - 1, 0) * is_past_L
        number_BW = jnp.einsum("BLW,L->BW", past_BLW - WORDS[0], value_L)
        row_B1 = jnp.arange(len(token_BW))[:, None]
        logits_BWV = tables_BTXV[row_B1, index, jnp.maximum(number_BW, 0)]
        return logits_BWV, Cache(token_BLW)

    return Task(
        step=step,
        start_cache=lambda length, beams: Cache(jnp.zeros((len(limits), length, beams), jnp.int32)),
        prompt_BP=jnp.tile(jnp.array(prompt, jnp.int32), (len(limits), 1)),
        limit_B=jnp.asarray(limits),
        row_B=jnp.asarray(row_B),
    )


def texts_of(found):
    """Returns the texts of each row of a search: a list of (ids, score)."""
    ids_BNT, score_BN = map(np.asarray, found)
    assert not np.isnan(score_BN).any()
    return [
        [
            (tuple(int(token) for token in ids if token), float(score))
            for ids, score in zip(*row, strict=True)
            if score > -np.inf
        ]
        for row in zip(ids_BNT, score_BN, strict=True)
    ]


def probabilities(logits, limit, *, forbidden=(), prompt=()):
    """Returns the probability of each text of up to `limit` tokens, with its end symbol or cut.

    The tokens in `forbidden` have none, and the texts are those that start with the prompt.
    """
    allowed = [token for token in (EOS, *WORDS) if token not in forbidden]
    found = {}
    for length in range(1, limit + 1):
        for text in itertools.product(WORDS, repeat=length - 1):
            for last in allowed:
                ids = *text, last
                if ids[: len(prompt)] != tuple(prompt)[: len(ids)] or len(ids) < len(prompt):
                    continue
                if {*ids} <= {*allowed} and (last == EOS or length == limit):
                    found[ids] = _probability(logits, ids, allowed, len(prompt))
    return found


def _probability(logits, ids, allowed, given):
    total = 1.0
    for i in range(given, len(ids)):
        p_V = np.exp(log_probs(logits, ids[:i]))
        total *= p_V[ids[i]] / p_V[allowed].sum()
    return total
