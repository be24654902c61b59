"""Writing token by token: a model, its cache and the method that picks the tokens, in one jitted loop.

A masked decoder writes all tokens at once: `fill_in`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from flaxformer_lite.config import DecodeConfig
from flaxformer_lite.data.tokenizer import BOS, EOS, PAD, UNK
from flaxformer_lite.decoding import beam, mask_predict, sampling
from flaxformer_lite.decoding.highest import log_sum_exp

NextLogits = Callable[..., tuple[jax.Array, Any]]
Pick = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # (logits_BV, ids_BT, index) -> token_B

ROOM, GROWTH = 16, 4  # positions that a cache first has room for, and how often as many it has then, and then
FEW_PLACES = 16  # mask-predict halves the places of a batch, where its texts need no more, until they are so few
IN_NO_TEXT = PAD, BOS, UNK  # what no method writes


class Task(NamedTuple):
    """What a model is to write for a batch, whatever the method."""

    next_logits: NextLogits  # (tokens (B,) or (B, W), cache, index, part_BWL=) -> (logits (..., V), cache)
    start_cache: Callable[..., Any]  # (max_length), for one text a row, or (max_length, W)
    prompt_BP: jax.Array  # ids that a row begins with, then padding
    limit_B: jax.Array  # tokens at which a row ends without an end symbol; 0: an unused row
    row_B: jax.Array  # a number for each row, which its random draws depend on


def translation(
    model: nn.Module,
    config: DecodeConfig,
    variables: dict,
    source_BS: jax.Array,
    row_B: jax.Array,
    prefix_BP: jax.Array | None = None,
) -> Task:
    """What an encoder-decoder is to write for each source.

    Args:
      variables: the model's collections, "params" and what else it shall find.
      source_BS: ids that end with the end symbol and then padding. A row of padding alone gives an empty row.
      prefix_BP: ids that a translation begins with, then padding.

    A row stops at the latest `config.max_extra_length` tokens after its source, or prefix if that is longer; 6.1.
    """
    apply = functools.partial(model.apply, variables)
    prompt_BP = jnp.zeros((source_BS.shape[0], 0), jnp.int32) if prefix_BP is None else prefix_BP
    source_B, prompt_B = ((ids != PAD).sum(axis=1) for ids in (source_BS, prompt_BP))
    limit_B = jnp.maximum(source_B, prompt_B) + config.max_extra_length
    return Task(
        lambda token, cache, index, **beams: apply(token, cache, index, source_BS, method="decode_step", **beams),
        lambda *room: apply(source_BS, *room, method="start_cache"),
        prompt_BP,
        jnp.where(source_B > 0, limit_B, 0),
        row_B,
    )


def continuation(
    model: nn.Module, config: DecodeConfig, variables: dict, prompt_BP: jax.Array, row_B: jax.Array
) -> Task:
    """What a language model is to write after each prompt, the prompt included.

    Args:
      variables: as of `translation`.
      prompt_BP: ids and then padding; a row of padding alone begins from nothing.
      row_B: -1 leaves the row empty.

    A row stops at the latest `config.max_extra_length` tokens after its prompt.
    """
    apply = functools.partial(model.apply, variables)
    limit_B = (prompt_BP != PAD).sum(axis=1) + config.max_extra_length
    return Task(
        lambda token, cache, index, **beams: apply(token, cache, index, method="decode_step", **beams),
        lambda *room: apply(prompt_BP.shape[0], *room, method="start_cache"),
        prompt_BP,
        jnp.where(row_B >= 0, limit_B, 0),
        row_B,
    )


def place_logits(task: Task, *, config: DecodeConfig, sharding: jax.sharding.Sharding | None) -> Task:
    """`task`, whose logits lie as `sharding` says, if it is given: all of a row on one device.

    Where devices split the vocabulary, each has a part of all rows. The highest of a row are soon found so, and greedy
    and beam search leave them there; to draw from a row it may have to be sorted, for which it must be in one place.
    """
    if sharding is None or config.method != "sample":
        return task

    def next_logits(*arguments: Any, **beams: Any) -> tuple[jax.Array, Any]:
        logits, cache = task.next_logits(*arguments, **beams)
        return jax.lax.with_sharding_constraint(logits, sharding), cache

    return task._replace(next_logits=next_logits)


def constrain(
    config: DecodeConfig, logits: jax.Array, ids: jax.Array, index: jax.Array, *, axis: int = -1
) -> jax.Array:
    """`logits` (..., V) with -inf for what may not follow the first `index` of `ids` (..., T), whatever the method.

    `axis`: where V is, if not last. What it forbids to some texts and not to others, `forbids_alike` must know of.
    """
    logits = sampling.forbid(logits, IN_NO_TEXT, axis=axis)
    end_may_be_last = logits.shape[axis] <= len([*IN_NO_TEXT, EOS])
    if config.no_repeat_ngram is not None:
        end_may_be_last = True
        logits = sampling.no_repeated_ngram(logits, ids, index, n=config.no_repeat_ngram, axis=axis)
    if config.min_length:
        least = {"min_length": config.min_length, "may_be_last": end_may_be_last}
        logits = sampling.no_early_end(logits, index, end=EOS, **least, axis=axis)
    return logits


def forbids_alike(config: DecodeConfig) -> bool:
    """Whether `constrain` forbids nothing but what is in no text, and an end that is too early."""
    return config.no_repeat_ngram is None


def make_pick(config: DecodeConfig, row_B: jax.Array) -> Pick:
    """The rule of 'greedy' or 'sample'; draws are a function of (config.seed, index of the token, row)."""
    options = {"temperature": config.temperature, "top_k": config.top_k, "top_p": config.top_p}
    key = jax.random.key(config.seed)

    def likeliest(logits_BV: jax.Array, ids_BT: jax.Array, index: jax.Array) -> jax.Array:
        logit_VB = jnp.moveaxis(logits_BV, -1, 0)  # as `embeddings.project` makes them
        allowed_VB = constrain(config, logit_VB, ids_BT, index, axis=0)
        # Where the same is forbidden to all texts, it is left out of the few that are looked at, as in `search`.
        alike = forbids_alike(config)
        on_VB, never = (logit_VB, IN_NO_TEXT) if alike else (jax.lax.optimization_barrier(allowed_VB), ())
        return sampling.greedy(on_VB, allowed_VB[EOS], end=EOS, never=never)

    def drawn(logits_BV: jax.Array, ids_BT: jax.Array, index: jax.Array) -> jax.Array:
        logits_BV = constrain(config, logits_BV, ids_BT, index)
        return sampling.sample(logits_BV, jax.random.fold_in(key, index), row_B, **options)

    return likeliest if config.method == "greedy" else drawn


def rooms(max_length: int) -> list[int]:
    """The lengths that a cache has one after another: a step reads all of it, and most texts are short.

    None that is more than two thirds of the last: what steps save there is less than another program costs.
    """
    lengths = [ROOM]
    while 3 * lengths[-1] <= 2 * max_length:
        lengths.append(lengths[-1] * GROWTH)
    return [*lengths[:-1], max_length]


def in_growing_rooms(
    run: Callable[[Any, int], Any],
    state: Any,
    unfinished: Callable[[Any], jax.Array],
    result: Callable,
    max_length: int,
) -> Any:
    """`result` of the state after `run(state, room)` in one room after another, up to the first in which all has ended.

    `run` gives the state's cache the room. Each is a loop of its own, so that none reads more of the cache than it has.
    """

    def in_rooms(state: Any, room: int, *larger: int) -> Any:
        state = run(state, room)
        if not larger:
            return result(state)
        return jax.lax.cond(unfinished(state), lambda state: in_rooms(state, *larger), result, state)

    return in_rooms(state, *rooms(max_length))


def write(task: Task, pick: Pick, *, max_length: int) -> jax.Array:
    """Picks tokens one after another until every row has ended: (B, max_length) ids, then padding."""

    def unfinished(state: tuple) -> jax.Array:
        return ~state[2].all()

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
    empty_BT = jnp.full((start_B.shape[0], max_length), PAD, jnp.int32)
    state = jnp.int32(0), start_B, task.limit_B <= 0, empty_BT, task.start_cache(max_length)

    def run(state: tuple, room: int) -> tuple:
        *rest, cache = state
        within = lambda state: (state[0] < room) & unfinished(state)  # noqa: E731
        return jax.lax.while_loop(within, one_token, (*rest, cache.with_room(room)))

    return in_growing_rooms(run, state, unfinished, lambda state: state[3], max_length)


def search(task: Task, config: DecodeConfig, *, n_best: int, max_length: int) -> tuple[jax.Array, jax.Array]:
    """The best texts of each row that beam search finds: ids (B, N, max_length), best first, and scores (B, N).

    A score is the log-probability of the whole text, of a prompt too, over its length penalty; -inf: there are fewer.
    The hypotheses of a row share what the encoder gave for it.
    """
    # Where the same is forbidden to all texts, the search itself leaves it out: that spares a look at all logits.
    alike = task.prompt_BP.shape[1] == 0 and forbids_alike(config)

    def ways(logits: jax.Array, state: beam.Beams) -> beam.Ways:
        """What may follow by logits (B, V) for the first token, or (B, W, V)."""
        logits = jnp.moveaxis(logits, -1, 0)  # as `embeddings.project` makes them: (V, B), or (V, B, W)
        logit_VBX = logits.reshape(*logits.shape[:2], -1)
        ids_BXT, index = state.live_BWT[:, : logit_VBX.shape[2]], state.index
        allowed_VBX = constrain(config, logit_VBX, ids_BXT, index, axis=0)
        if task.prompt_BP.shape[1]:
            given_BX = jnp.broadcast_to(_given(task, index)[:, None], ids_BXT.shape[:2])
            allowed_VBX = jnp.where((given_BX != PAD)[None], sampling.force(logit_VBX, given_BX, axis=0), allowed_VBX)
        log_sum_BX = log_sum_exp(logits).reshape(logit_VBX.shape[1:])
        on_VBX = logit_VBX if alike else jax.lax.optimization_barrier(allowed_VBX)
        return beam.Ways(on_VBX, allowed_VBX[EOS], log_sum_BX)

    # The first token comes after the same, empty beginning for all hypotheses of a row: one of them is looked at. At
    # position 0 its entry of the cache is the first, as if there were no others.
    def first(state: beam.Beams) -> tuple[beam.Ways, Any]:
        start_B = jnp.full(task.limit_B.shape, BOS, jnp.int32)
        logits_BV, cache = task.next_logits(start_B, state.cache, state.index)

        def with_others(x: jax.Array) -> jax.Array:
            """With those of the other hypotheses: as these do not exist yet, any number will do."""
            return jnp.pad(x, [*[(0, 0)] * (x.ndim - 1), (0, W - 1)])

        return jax.tree.map(with_others, ways(logits_BV, state)), cache

    def step(state: beam.Beams) -> tuple[beam.Ways, Any]:
        token_BW = jax.lax.dynamic_index_in_dim(state.live_BWT, state.index - 1, axis=2, keepdims=False)
        logits_BWV, cache = task.next_logits(token_BW, state.cache, state.index, part_BWL=state.part_BWT)
        return ways(logits_BWV, state), cache

    W, never = config.beam_size, IN_NO_TEXT if alike else ()
    penalty = {"alpha": config.alpha, "penalty": config.penalty}
    wanted = beam.Search(beam_size=W, n_best=n_best, max_length=max_length, end=EOS, never=never, **penalty)

    def run(state: beam.Beams, room: int) -> beam.Beams:
        state = state.replace(cache=state.cache.with_room(room, W))
        return beam.run(step, state, task.limit_B, wanted, until=room)

    cache = task.start_cache(max_length, W).with_room(rooms(max_length)[0], W)
    state = beam.run(first, beam.start(cache, task.limit_B, wanted), task.limit_B, wanted, until=1)
    return in_growing_rooms(run, state, beam.unfinished, lambda state: (state.done_BNT, state.score_BN), max_length)


def best(task: Task, config: DecodeConfig, *, max_length: int) -> jax.Array:
    """What `config.method` writes: (B, max_length) ids, then padding."""
    if config.method == "beam":
        return search(task, config, n_best=1, max_length=max_length)[0][:, 0]
    return write(task, make_pick(config, task.row_B), max_length=max_length)


def _given(task: Task, index: jax.Array) -> jax.Array:
    """The token that each prompt has at `index`, (B,); padding where it has none."""
    prompt_BP, P = task.prompt_BP, task.prompt_BP.shape[1]
    if P == 0:
        return jnp.full(task.limit_B.shape, PAD, jnp.int32)
    token_B = jax.lax.dynamic_index_in_dim(prompt_BP, jnp.minimum(index, P - 1), axis=1, keepdims=False)
    return jnp.where(index < P, token_B, PAD)


def fill_in(
    model: nn.Module, config: DecodeConfig, variables: dict, source_BS: jax.Array, *, max_length: int
) -> jax.Array:
    """What a masked decoder writes for each source by mask-predict: (B, max_length) ids, then padding.

    Arguments as of `translation`; a row of padding alone gives an empty row. The source is encoded once for all
    candidates of a row, texts of different lengths; to the decoder each candidate is a row of its own.
    """
    apply = functools.partial(model.apply, variables)
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
