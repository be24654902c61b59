"""The weights of a `MarianMTModel` of Hugging Face, and the parameters of our encoder-decoder.

Both are the post-LN model of "Attention Is All You Need". They differ in three ways, and a
permutation of the weights accounts for each:

    width   Marian's sinusoids are all sines, then all cosines; ours alternate. So entry 2i of our
            vectors of size D is Marian's entry i, and entry 2i + 1 is its entry D / 2 + i, in all
            weights that read or write such vectors.
    ids     Our ids start with PAD, BOS, EOS and UNK. `MarianTokenizer.theirs` has Marian's ids.
    start   Marian's decoder usually starts with the padding token. Our BOS is then a copy of that
            row, and is never generated.
"""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from flaxformer_lite.exchange.marian_config import shares_embeddings, ties_output, vocab_sizes
from flaxformer_lite.fields import BOS, ModelConfig
from flaxformer_lite.system.errors import InputError

Arrays = Mapping[str, np.ndarray]
Ids = Mapping[str, Sequence[int]]  # side 'source' or 'target' -> Marian's id for each of our ids

NEVER = -30.0  # output bias of a token that Marian lacks: its probability is about e^-30
SHARED = "model.shared.weight"  # stored instead of the next three if they are one matrix
SOURCE, TARGET, OUTPUT = (
    "model.encoder.embed_tokens.weight",
    "model.decoder.embed_tokens.weight",
    "lm_head.weight",
)
BIAS = "final_logits_bias"
POSITIONS = ("model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight")


class Module(NamedTuple):
    """The names and shapes of a projection or norm in both models."""

    ours: tuple[str, ...]
    theirs: str
    kernel: tuple[int, ...] | None  # shape of ours; None: a norm
    bias: tuple[int, ...]  # shape of ours
    reads_width: bool
    writes_width: bool


class Table(NamedTuple):
    """The names of a matrix with one row for each token, and the side of these tokens."""

    ours: tuple[str, str]
    theirs: str
    side: str


TABLES = (
    Table(("source_embedding", "embedding"), SOURCE, "source"),
    Table(("target_embedding", "embedding"), TARGET, "target"),
    Table(("output", "kernel"), OUTPUT, "target"),
)


def modules(model: ModelConfig) -> Iterator[Module]:
    """Yields all projections and norms."""
    stacks = {"encoder": model.num_encoder_layers, "decoder": model.num_decoder_layers}
    for stack, layers in stacks.items():
        for n in range(layers):
            yield from _modules_of_layer(model, stack, n)


def _modules_of_layer(model: ModelConfig, stack: str, n: int) -> Iterator[Module]:
    D, F, H = model.d_model, model.d_ff, model.num_heads
    K = D // H

    def module(path: Any, name: str, kernel: Any, bias: Any, **widths: bool) -> Module:
        ours, theirs = (stack, f"layers_{n}", *path), f"model.{stack}.layers.{n}.{name}"
        return Module(ours, theirs, kernel, bias, **widths)

    reads = functools.partial(module, reads_width=True, writes_width=False)
    writes = functools.partial(module, reads_width=False, writes_width=True)
    attentions = [("self_attention", "self_attn"), ("cross_attention", "encoder_attn")]
    for name, their_name in attentions if stack == "decoder" else attentions[:1]:
        for part in ("query", "key", "value"):
            yield reads((name, part), f"{their_name}.{part[0]}_proj", (D, H, K), (H, K))
        yield writes((name, "out"), f"{their_name}.out_proj", (H, K, D), (D,))
        yield writes((f"{name}_residual", "norm"), f"{their_name}_layer_norm", None, (D,))
    yield reads(("feed_forward", "inner"), "fc1", (D, F), (F,))
    yield writes(("feed_forward", "outer"), "fc2", (F, D), (D,))
    yield writes(("feed_forward_residual", "norm"), "final_layer_norm", None, (D,))


def width_order(d_model: int) -> np.ndarray:
    """Returns (D,): the entry of Marian's vectors for each entry of ours."""
    return np.arange(d_model).reshape(2, -1).T.reshape(-1)


def sinusoids(length: int, d_model: int) -> np.ndarray:
    """Returns Marian's position table, (length, D) float32: section 3.5, all sines first."""
    angle = np.arange(length)[:, None] / np.power(10000, 2 * np.arange(d_model // 2) / d_model)
    return np.concatenate([np.sin(angle), np.cos(angle)], axis=1).astype(np.float32)


def complete(
    arrays: Arrays, config: Mapping[str, Any], model: ModelConfig
) -> dict[str, np.ndarray]:
    """Returns all arrays of a Marian model in float32, from those that its file holds.

    A file may hold one array for several tied matrices, and may omit a bias of zeros.

    Args:
      config: the contents of config.json.

    Raises:
      InputError: about an array that is missing, unknown, of another shape or type, or not finite.
    """
    stored_as, shapes = _stored_names(config), _shapes(config, model)
    result = {}
    for name, shape in shapes.items():
        names = stored_as.get(name, (name,))
        stored = next((other for other in names if other in arrays), None)
        if stored is not None:
            result[name] = _checked(stored, arrays[stored], shape)
        elif name == BIAS:
            result[name] = np.zeros(shape, np.float32)
        else:
            raise InputError(f"expected the array {names[0]!r}, which is missing.")
    for name in POSITIONS:
        if name in arrays and not _is_sinusoidal(arrays[name]):
            raise InputError(
                f"{name}: expected the sinusoids of section 3.5, the only position vectors that "
                "can be imported."
            )
    if unknown := sorted(arrays.keys() - {*shapes, *POSITIONS, SHARED}):
        raise InputError(f"{unknown[0]}: a MarianMTModel has no such array.")
    return result


def _stored_names(config: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Returns for each matrix the names under which a file may hold it, the usual name first."""
    if ties_output(config) and shares_embeddings(config):
        return dict.fromkeys((SOURCE, TARGET, OUTPUT), (SHARED, TARGET, SOURCE, OUTPUT))
    output = (TARGET, OUTPUT) if ties_output(config) else (OUTPUT,)
    return {SOURCE: (SOURCE, SHARED), TARGET: (TARGET, SHARED), OUTPUT: output}


def _checked(name: str, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the array in float32; raises InputError for another shape, type, or NaN."""
    if array.shape != shape:
        raise InputError(f"{name}: expected the shape {list(shape)}, got {list(array.shape)}.")
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise InputError(
            f"{name}: expected floating point numbers, got {array.dtype}; quantized weights "
            "cannot be imported."
        )
    array = np.asarray(array, np.float32)
    if not np.isfinite(array).all():
        raise InputError(f"{name}: expected finite numbers only.")
    return array


def _is_sinusoidal(table: np.ndarray) -> bool:
    if table.ndim != 2 or table.shape[1] % 2:
        return False
    return np.allclose(table, sinusoids(len(table), table.shape[1]), atol=1e-3)


def _shapes(config: Mapping[str, Any], model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each of Marian's arrays."""
    shapes, rows = {}, vocab_sizes(config)
    for module in modules(model):
        outputs = math.prod(module.bias)
        inputs = () if module.kernel is None else (math.prod(module.kernel) // outputs,)
        shapes[f"{module.theirs}.weight"] = (outputs, *inputs)
        shapes[f"{module.theirs}.bias"] = (outputs,)
    for table in TABLES:
        shapes[table.theirs] = (rows[table.side], model.d_model)
    shapes[BIAS] = (1, rows["target"])
    return shapes


def to_ours(theirs: Arrays, model: ModelConfig, ids: Ids) -> dict[str, Any]:
    """Returns our parameters, float32, from all of Marian's arrays."""
    params: dict[str, Any] = {}
    order, vocab_size = width_order(model.d_model), model.vocab_size or 0
    for module in modules(model):
        matrix, bias = (theirs[f"{module.theirs}.{leaf}"] for leaf in ("weight", "bias"))
        if module.writes_width:
            matrix, bias = matrix[order], bias[order]
        if module.reads_width:
            matrix = matrix[:, order]
        _put(params, (*module.ours, "bias"), bias.reshape(module.bias))
        if module.kernel is None:
            _put(params, (*module.ours, "scale"), matrix)
        else:
            kernel = np.ascontiguousarray(matrix.T).reshape(module.kernel)
            _put(params, (*module.ours, "kernel"), kernel)
    for table in _our_tables(model):
        rows = theirs[table.theirs][list(ids[table.side])][:, order]
        _put(params, table.ours, np.pad(rows, ((0, vocab_size - len(rows)), (0, 0))))
    bias = theirs[BIAS][0, list(ids["target"])]
    bias = np.pad(bias, (0, vocab_size - len(bias)), constant_values=NEVER)
    if _copies_of_bos(ids["target"]):
        bias[BOS] = NEVER
    _put(params, ("output", "bias"), bias)
    return params


def to_theirs(
    params: Mapping[str, Any], model: ModelConfig, ids: Ids, rows: Mapping[str, int]
) -> dict[str, np.ndarray]:
    """Returns all of Marian's arrays, float32: the inverse of `to_ours`.

    Args:
      rows: Marian's vocabulary size by side.
    """
    theirs, order = {}, np.argsort(width_order(model.d_model))
    for module in modules(model):
        bias = _leaf(params, (*module.ours, "bias")).reshape(-1)
        if module.kernel is None:
            matrix = _leaf(params, (*module.ours, "scale"))
        else:
            matrix = _leaf(params, (*module.ours, "kernel")).reshape(-1, len(bias)).T
        if module.writes_width:
            matrix, bias = matrix[order], bias[order]
        if module.reads_width:
            matrix = matrix[:, order]
        theirs[f"{module.theirs}.weight"] = np.ascontiguousarray(matrix)
        theirs[f"{module.theirs}.bias"] = bias
    for table in TABLES:
        path = table.ours if table in _our_tables(model) else ("target_embedding", "embedding")
        theirs[table.theirs] = np.zeros((rows[table.side], model.d_model), np.float32)
        our_ids, their_ids = _exported_ids(ids[table.side])
        theirs[table.theirs][their_ids] = _leaf(params, path)[our_ids][:, order]
    theirs[BIAS] = np.zeros((1, rows["target"]), np.float32)
    if model.output_bias:
        our_ids, their_ids = _exported_ids(ids["target"])
        theirs[BIAS][0, their_ids] = params["output"]["bias"][our_ids]
    return theirs


def stored(theirs: Arrays) -> dict[str, np.ndarray]:
    """Returns the arrays that a file holds: equal matrices are stored once."""
    kept = dict(theirs)
    if np.array_equal(theirs[OUTPUT], theirs[TARGET]):
        del kept[OUTPUT]
        if np.array_equal(theirs[SOURCE], theirs[TARGET]):
            del kept[SOURCE], kept[TARGET]
            kept[SHARED] = theirs[TARGET]
    return kept


def start_is_copy(params: Mapping[str, Any], model: ModelConfig, ids: Ids) -> bool:
    """Whether BOS is still the copy of another token that an import made.

    Then an export can merge the two again.
    """
    same = bool(_copies_of_bos(ids["target"])) and params["output"]["bias"][BOS] == NEVER
    for table in _our_tables(model):
        rows = _leaf(params, table.ours)
        same = same and all(
            np.array_equal(rows[BOS], rows[copy]) for copy in _copies_of_bos(ids[table.side])
        )
    return same


def _our_tables(model: ModelConfig) -> Sequence[Table]:
    """Returns the matrices that our model has: tied ones are the target's."""
    if not model.tie_embeddings:
        return TABLES
    return TABLES[1:2] if model.ties_source else TABLES[:2]


def _copies_of_bos(ids: Sequence[int]) -> list[int]:
    """Returns our ids other than BOS of the token that is also Marian's start; may be empty."""
    return [number for number, theirs in enumerate(ids) if theirs == ids[BOS] and number != BOS]


def _exported_ids(ids: Sequence[int]) -> tuple[list[int], list[int]]:
    """Returns our ids to export and Marian's ids for them; BOS is left out if it is a copy."""
    ours = [number for number in range(len(ids)) if number != BOS or not _copies_of_bos(ids)]
    return ours, [ids[number] for number in ours]


def _put(tree: dict[str, Any], path: Sequence[str], leaf: np.ndarray) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = leaf


def _leaf(tree: Any, path: Sequence[str]) -> np.ndarray:
    for key in path:
        tree = tree[key]
    return tree
