"""Writing token by token: a model, its cache and the method that picks the tokens, in one jitted loop.

A masked decoder writes all tokens at once: `fill_in`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from flaxformer_lite.config import DecodeConfig
from flaxformer_lite.data.tokenizer import BOS, EOS, PAD, UNK
from flaxformer_lite.decoding import beam, mask_predict, sampling

NextLogits = Callable[..., tuple[jax.Array, Any]]
Pick = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # (logits_BV, ids_BT, index) -> token_B

FEW_PLACES = 16  # mask-predict halves the places of a batch, where its texts need no more, until they are so few
IN_NO_TEXT = PAD, BOS, UNK  # what no method writes


class Task(NamedTuple):
    """What a model is to write for a batch, whatever the method."""

    next_logits: NextLogits  # (tokens (B,) or (B, W), cache, index, ancestor_BWT=) -> (logits (..., V), cache)
    start_cache: Callable[..., Any]  # (max_length), for one text a row, or (max_length, W)
    prompt_BP: jax.Array  # ids that a row begins with, then padding
    limit_B: jax.Array  # tokens at which a row ends without an end symbol; 0: an unused row
    row_B: jax.Array  # a number for each row, which its random draws depend on


def translation(
    model: nn.Module,
    config: DecodeConfig,
    params: dict,
    source_BS: jax.Array,
    row_B: jax.Array,
    prefix_BP: jax.Array | None = None,
) -> Task:
    """What an encoder-decoder is to write for each source.

    Args:
      params: the model's parameters.
      source_BS: ids that end with the end symbol and then padding. A row of padding alone gives an empty row.
      prefix_BP: ids that a translation begins with, then padding.

    A row stops at the latest `config.max_extra_length` tokens after its source, or prefix if that is longer; 6.1.
    """
    apply = functools.partial(model.apply, {"params": params})
    prompt_BP = jnp.zeros((source_BS.shape[0], 0), jnp.int32) if prefix_BP is None else prefix_BP
    source_B, prompt_B = ((ids != PAD).sum(axis=1) for ids in (source_BS, prompt_BP))
    limit_B = jnp.maximum(source_B, prompt_B) + config.max_extra_length
    return Task(
        lambda token, cache, index, **beams: apply(token, cache, index, source_BS, method="decode_step", **beams),
        lambda *size: apply(source_BS, *size, method="start_cache"),
        prompt_BP,
        jnp.where(source_B > 0, limit_B, 0),
        row_B,
    )


def continuation(model: nn.Module, config: DecodeConfig, params: dict, prompt_BP: jax.Array, row_B: jax.Array) -> Task:
    """What a language model is to write after each prompt, the prompt included.

    Args:
      params: as of `translation`.
      prompt_BP: ids and then padding; a row of padding alone begins from nothing.
      row_B: -1 leaves the row empty.

    A row stops at the latest `config.max_extra_length` tokens after its prompt.
    """
    apply = functools.partial(model.apply, {"params": params})
    limit_B = (prompt_BP != PAD).sum(axis=1) + config.max_extra_length
    return Task(
        lambda token, cache, index, **beams: apply(token, cache, index, method="decode_step", **beams),
        lambda *size: apply(prompt_BP.shape[0], *size, method="start_cache"),
        prompt_BP,
        jnp.where(row_B >= 0, limit_B, 0),
        row_B,
    )


def place_logits(task: Task, *, config: DecodeConfig, sharding: jax.sharding.Sharding | None) -> Task:
    """`task` with its logits laid out as `sharding` says, if it is given: all of a row on one device.

    Where devices split the vocabulary, each has a part of all rows. Greedy and beam search find the k largest of a row
    in place; to sample, a row may have to be sorted, for which it must be on one device.
    """
    if sharding is None or config.method != "sample":
        return task

    def next_logits(*arguments: Any) -> tuple[jax.Array, Any]:
        logits, cache = task.next_logits(*arguments)
        return jax.lax.with_sharding_constraint(logits, sharding), cache

    return task._replace(next_logits=next_logits)


def constrain(config: DecodeConfig, logits: jax.Array, ids: jax.Array, index: jax.Array) -> jax.Array:
    """`logits` (..., V) with -inf for what may not follow the first `index` of `ids` (..., T), whatever the method."""
    logits = sampling.forbid(logits, IN_NO_TEXT)
    if config.no_repeat_ngram is not None:
        logits = sampling.no_repeated_ngram(logits, ids, index, n=config.no_repeat_ngram)
    if config.min_length:
        logits = sampling.no_early_end(logits, index, min_length=config.min_length, end=EOS)
    return logits


def make_pick(config: DecodeConfig, row_B: jax.Array) -> Pick:
    """The rule of 'greedy' or 'sample'; samples are a function of (config.seed, index of the token, row)."""
    options = {"temperature": config.temperature, "top_k": config.top_k, "top_p": config.top_p}
    key = jax.random.key(config.seed)

    def pick(logits_BV: jax.Array, ids_BT: jax.Array, index: jax.Array) -> jax.Array:
        logits_BV = constrain(config, logits_BV, ids_BT, index)
        if config.method == "greedy":
            return sampling.greedy(logits_BV)
        return sampling.sample(logits_BV, jax.random.fold_in(key, index), row_B, **options)

    return pick


def write(task: Task, pick: Pick, *, capacities: Sequence[int]) -> jax.Array:
    """Picks tokens one after another until every row has ended: (B, T) ids, then padding.

    `capacities`: the positions of the cache, in rising order; the last is T, the most tokens of a text. Each step reads
    the whole cache, so one that is enough for most texts comes first.
    """

    def one_token(state: tuple) -> tuple:
        index, token_B, ended_B, output_BT, cache = state
        logits_BV, cache = task.next_logits(token_B, cache, index)
        given_B = _given(task, index)
        token_B = jnp.where(given_B != PAD, given_B, pick(logits_BV, output_BT, index))
        token_B = jnp.where(ended_B, PAD, token_B)
        output_BT = jax.lax.dynamic_update_slice_in_dim(output_BT, token_B[:, None], index, axis=1)
        ended_B = ended_B | (token_B == EOS) | (index + 1 >= task.limit_B)
        return index + 1, token_B, ended_B, output_BT, cache

    start_B = jnp.full(task.limit_B.shape, BOS, jnp.int32)
    empty_BT = jnp.full((start_B.shape[0], capacities[-1]), PAD, jnp.int32)
    state = jnp.int32(0), start_B, task.limit_B <= 0, empty_BT, task.start_cache(capacities[0])
    for capacity in capacities:
        *rest, cache = state
        unfinished = functools.partial(_unfinished, capacity=capacity)
        state = jax.lax.while_loop(unfinished, one_token, (*rest, cache.extended(capacity)))
    return state[3]


def _unfinished(state: tuple, *, capacity: int) -> jax.Array:
    index, _, ended_B, _, _ = state
    return (index < capacity) & ~ended_B.all()


def search(task: Task, config: DecodeConfig, *, n_best: int, capacities: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    """The best texts of each row that beam search finds: ids (B, N, T), best first, and scores (B, N).

    A score is the log-probability of the whole text, of a prompt too, over its length penalty; -inf: there are fewer.
    The hypotheses of a row share the encoder's output. `capacities`: as of `write`.
    """

    def step(state: beam.Beams) -> tuple[jax.Array, Any]:
        ids_BWT, index = state.live_BWT, state.index
        last_BW = jax.lax.dynamic_index_in_dim(ids_BWT, jnp.maximum(index - 1, 0), axis=2, keepdims=False)
        token_BW = jnp.where(index == 0, BOS, last_BW)
        logits_BWV, cache = task.next_logits(token_BW, state.cache, index, ancestor_BWT=state.ancestor_BWT)
        log_prob_BWV = jax.nn.log_softmax(logits_BWV)
        allowed_BWV = constrain(config, log_prob_BWV, ids_BWT, index)
        if task.prompt_BP.shape[1]:
            given_B1 = _given(task, index)[:, None]
            forced_BWV = sampling.force(log_prob_BWV, given_B1)
            allowed_BWV = jnp.where((given_B1 != PAD)[..., None], forced_BWV, allowed_BWV)
        return allowed_BWV, cache

    penalty = {"alpha": config.alpha, "penalty": config.penalty}
    wanted = beam.Search(beam_size=config.beam_size, n_best=n_best, max_length=capacities[-1], end=EOS, **penalty)
    state = beam.start(task.start_cache(capacities[0], config.beam_size), task.limit_B, wanted)
    for capacity in capacities:
        state = state.replace(cache=state.cache.extended(capacity, config.beam_size))
        state = beam.run(step, state, task.limit_B, wanted, until=capacity)
    return state.done_BNT, state.score_BN


def best(task: Task, config: DecodeConfig, *, capacities: Sequence[int]) -> jax.Array:
    """What `config.method` writes: (B, T) ids, then padding; `capacities`: as of `write`."""
    if config.method == "beam":
        return search(task, config, n_best=1, capacities=capacities)[0][:, 0]
    return write(task, make_pick(config, task.row_B), capacities=capacities)


def _given(task: Task, index: jax.Array) -> jax.Array:
    """The token that each prompt has at `index`, (B,); padding where it has none."""
    prompt_BP, P = task.prompt_BP, task.prompt_BP.shape[1]
    if P == 0:
        return jnp.full(task.limit_B.shape, PAD, jnp.int32)
    token_B = jax.lax.dynamic_index_in_dim(prompt_BP, jnp.minimum(index, P - 1), axis=1, keepdims=False)
    return jnp.where(index < P, token_B, PAD)


def fill_in(
    model: nn.Module, config: DecodeConfig, params: dict, source_BS: jax.Array, *, max_length: int
) -> jax.Array:
    """What a masked decoder writes for each source by mask-predict: (B, max_length) ids, then padding.

    Arguments as of `translation`; a row of padding alone gives an empty row. The source is encoded once for all
    candidates of a row, texts of different lengths; to the decoder each candidate is a row of its own.
    """
    apply = functools.partial(model.apply, {"params": params})
    memory, logits_BL = apply(source_BS, method="start_filling")
    source_B = (source_BS != PAD).sum(axis=1)
    limit_B = jnp.minimum(source_B + config.max_extra_length, max_length) - 1  # the end symbol takes a place
    limit_B = jnp.where(source_B > 0, limit_B, 0)
    lengths = mask_predict.likeliest_lengths(logits_BL, config.min_length, limit_B, count=config.length_candidates)

    length_BC, _ = lengths
    B, C = length_BC.shape
    memory, source_RS = jax.tree.map(lambda x: jnp.repeat(x, C, axis=0), (memory, source_BS))

    def predict(ids_BCT: jax.Array) -> tuple[jax.Array, jax.Array]:
        x_RTD = apply(ids_BCT.reshape(B * C, -1), memory, source_RS, method="fill")
        x_CBTD = x_RTD.reshape(B, C, *x_RTD.shape[1:]).swapaxes(0, 1)
        # The logits of one candidate after another: those of all at once would be many.
        likeliest = jax.lax.map(lambda x_BTD: _likeliest(apply(x_BTD, method="logits")), x_CBTD)
        return jax.tree.map(lambda x_CBT: x_CBT.swapaxes(0, 1), likeliest)

    def write_within(length: int, *lengths: jax.Array) -> jax.Array:
        options = {"iterations": config.iterations, "max_length": length, "mask": UNK, "end": EOS}
        ids_BT, _ = mask_predict.mask_predict(predict, *lengths, **options)
        return jnp.pad(ids_BT, ((0, 0), (0, max_length - length)))

    # An iteration costs as much as there are places, and most texts need few of those that there may be: the smallest
    # of a few sizes that holds the longest candidate.
    sizes = [max_length]
    while sizes[0] > FEW_PLACES:
        sizes.insert(0, -(-sizes[0] // 2))
    number = (length_BC.max() >= jnp.array(sizes[:-1], jnp.int32)).sum()
    return jax.lax.switch(number, [functools.partial(write_within, size) for size in sizes], *lengths)


def _likeliest(logits_BTV: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The likeliest token of each place, of those that a text holds, and its log-probability among all."""
    log_prob_BTV = jax.nn.log_softmax(logits_BTV)
    allowed_BTV = sampling.forbid(log_prob_BTV, [PAD, BOS, EOS, UNK])  # the length says where a text ends
    return jnp.argmax(allowed_BTV, axis=-1).astype(jnp.int32), allowed_BTV.max(axis=-1)
