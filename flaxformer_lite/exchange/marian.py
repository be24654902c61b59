"""A `MarianMTModel` of Hugging Face and our encoder-decoder: the same numbers by other names, in another order.

Theirs is the model of "Attention Is All You Need", post-LN. Three things lie differently, and the order of weights
alone puts them right:

    width   its sinusoids are all sines and then all cosines; ours take turns. So entry 2i of our vectors of size D is
            its entry i, and entry 2i + 1 its entry D / 2 + i, in all that reads or writes such vectors.
    ids     ours begin with PAD, BOS, EOS and UNK. `MarianTokenizer.theirs` says which id is which.
    start   its decoder mostly starts with its padding. Our BOS is then a copy of that row, and is never written.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from flaxformer_lite.config import ModelConfig
from flaxformer_lite.fields import BOS
from flaxformer_lite.system.errors import InputError

Arrays = Mapping[str, np.ndarray]

ACTIVATIONS = {"swish": "silu", "silu": "silu", "relu": "relu", "gelu": "gelu"}  # theirs, and ours
ACTIVATIONS |= {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
NORM_EPSILON = 1e-5  # of every LayerNorm there
NEVER = -30.0  # output bias of a token that theirs has not: e^-30 is no share of a softmax
# What our model has no choice of: a field of config.json, what it must be, and what it is where it is not there.
EXPECTED = {
    "model_type": ("marian", None),
    "is_encoder_decoder": (True, True),
    "scale_embedding": (True, False),
    "normalize_before": (False, False),
    "normalize_embedding": (False, False),
    "add_final_layer_norm": (False, False),
    "static_position_embeddings": (True, True),
}
PAIRS = ("attention_heads", "ffn_dim")  # of encoder and of decoder; one number here
SIZES = ("d_model", "encoder_layers", "decoder_layers", "vocab_size", "max_position_embeddings")
SIZES += tuple(f"{stack}_{name}" for name in PAIRS for stack in ("encoder", "decoder"))

SHARED = "model.shared.weight"  # what stands for the next three where they are one matrix
SOURCE, TARGET, OUTPUT = "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight"
BIAS = "final_logits_bias"
POSITIONS = ("model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight")


class Place(NamedTuple):
    """Where a projection, or a norm, lies in both models."""

    ours: tuple[str, ...]
    theirs: str
    kernel: tuple[int, ...] | None  # shape of ours; None: a norm
    bias: tuple[int, ...]  # shape of ours
    reads_width: bool
    writes_width: bool


class Table(NamedTuple):
    """Where a matrix with a row for each token lies in both models, and whose tokens they are."""

    ours: tuple[str, str]
    theirs: str
    side: str


TABLES = (
    Table(("source_embedding", "embedding"), SOURCE, "source"),
    Table(("target_embedding", "embedding"), TARGET, "target"),
    Table(("output", "kernel"), OUTPUT, "target"),
)


def model_config(theirs: Mapping[str, Any], vocab_size: int) -> ModelConfig:
    """Our config of a model whose config.json is `theirs`.

    Args:
      vocab_size: of the imported tokenizer.

    Raises:
      InputError: it is no Marian model, or one that ours cannot be; the message begins with the field.
    """
    check_theirs(theirs)
    return ModelConfig(
        vocab_size=vocab_size,
        d_model=theirs["d_model"],
        num_heads=theirs["encoder_attention_heads"],
        d_ff=theirs["encoder_ffn_dim"],
        num_encoder_layers=theirs["encoder_layers"],
        num_decoder_layers=theirs["decoder_layers"],
        max_length=theirs["max_position_embeddings"],
        activation=ACTIVATIONS[theirs.get("activation_function", "gelu")],
        norm_epsilon=NORM_EPSILON,
        output_bias=True,
        tie_embeddings=shares(theirs) and ties(theirs),
        dropout=float(theirs.get("dropout", 0.1)),
        attention_dropout=float(theirs.get("attention_dropout", 0.0)),
    )


def check_theirs(theirs: Mapping[str, Any]) -> None:
    """Raises InputError, about the field, if a config.json is not of a Marian model that ours can be."""
    for field, (expected, default) in EXPECTED.items():
        if (value := theirs.get(field, default)) != expected:
            raise InputError(f"{field}: expected {expected!r}, which alone can be imported, got {value!r}.")
    if "MarianMTModel" not in (architectures := theirs.get("architectures") or ["MarianMTModel"]):
        raise InputError(f"architectures: expected ['MarianMTModel'], got {architectures}.")
    for field in SIZES:
        if type(theirs.get(field)) is not int or theirs[field] < 1:
            raise InputError(f"{field}: expected a positive whole number, got {theirs.get(field)!r}.")
    if not shares(theirs) and type(theirs.get("decoder_vocab_size", 1)) is not int:
        raise InputError(f"decoder_vocab_size: expected a whole number, got {theirs['decoder_vocab_size']!r}.")
    for name in ("dropout", "attention_dropout"):
        if type(theirs.get(name, 0.0)) not in (int, float) or not 0 <= theirs.get(name, 0.0) < 1:
            raise InputError(f"{name}: expected at least 0 and less than 1, got {theirs[name]!r}.")
    for name in PAIRS:
        if theirs[f"decoder_{name}"] != theirs[f"encoder_{name}"]:
            expected = f"{theirs[f'encoder_{name}']}, as encoder_{name}"
            raise InputError(f"decoder_{name}: expected {expected}, got {theirs[f'decoder_{name}']}.")
    width, heads = theirs["d_model"], theirs["encoder_attention_heads"]
    if width % 2:
        raise InputError(f"d_model: expected an even number, half sines and half cosines, got {width}.")
    if width % heads:
        raise InputError(f"encoder_attention_heads: expected a divisor of d_model = {width}, got {heads}.")
    if str(activation := theirs.get("activation_function", "gelu")) not in ACTIVATIONS:
        raise InputError(f"activation_function: expected one of {', '.join(ACTIVATIONS)}, got {activation!r}.")


def shares(theirs: Mapping[str, Any]) -> bool:
    """Whether encoder and decoder have one matrix of embeddings."""
    return bool(theirs.get("share_encoder_decoder_embeddings", True))


def ties(theirs: Mapping[str, Any]) -> bool:
    """Whether the output has the decoder's matrix of embeddings."""
    return bool(theirs.get("tie_word_embeddings", True))


def sizes(theirs: Mapping[str, Any]) -> dict[str, int]:
    """How many tokens each side has."""
    other = theirs["vocab_size"] if shares(theirs) else theirs.get("decoder_vocab_size") or theirs["vocab_size"]
    return {"source": theirs["vocab_size"], "target": other}


def check(model: ModelConfig) -> None:
    """Raises InputError, about the field, for a model that no `MarianMTModel` can be."""
    possible = {
        "architecture": ("encoder_decoder",),
        "decoder": ("causal",),
        "position": ("sinusoidal",),
        "attention": ("dot_product",),
        "attention_window": (None,),
        "norm": ("layer_norm",),
        "norm_placement": ("post",),
        "norm_epsilon": (NORM_EPSILON,),
        "activation": tuple(dict.fromkeys(ACTIVATIONS.values())),
        "use_bias": (True,),
        "num_kv_heads": (None, model.num_heads),
        "d_head": (None, model.d_model / model.num_heads),
    }
    for field, values in possible.items():
        if (value := getattr(model, field)) not in values:
            expected = " or ".join(repr(each) for each in values)
            raise InputError(
                f"config.model.{field}: a MarianMTModel has {expected}, and this model {value!r}; export it in another "
                "format, or train another model."
            )


def places(model: ModelConfig) -> Iterator[Place]:
    """All projections and norms."""
    D, F, H = model.d_model, model.d_ff, model.num_heads
    K = D // H
    reads, writes = {"reads_width": True, "writes_width": False}, {"reads_width": False, "writes_width": True}
    stacks = {"encoder": model.num_encoder_layers, "decoder": model.num_decoder_layers}
    for stack, n in ((stack, n) for stack, layers in stacks.items() for n in range(layers)):
        ours, theirs = (stack, f"layers_{n}"), f"model.{stack}.layers.{n}"
        attentions = [("self_attention", "self_attn"), ("cross_attention", "encoder_attn")]
        for name, its in attentions if stack == "decoder" else attentions[:1]:
            for part in ("query", "key", "value"):
                yield Place((*ours, name, part), f"{theirs}.{its}.{part[0]}_proj", (D, H, K), (H, K), **reads)
            yield Place((*ours, name, "out"), f"{theirs}.{its}.out_proj", (H, K, D), (D,), **writes)
            yield Place((*ours, f"{name}_residual", "norm"), f"{theirs}.{its}_layer_norm", None, (D,), **writes)
        yield Place((*ours, "feed_forward", "inner"), f"{theirs}.fc1", (D, F), (F,), **reads)
        yield Place((*ours, "feed_forward", "outer"), f"{theirs}.fc2", (F, D), (D,), **writes)
        yield Place((*ours, "feed_forward_residual", "norm"), f"{theirs}.final_layer_norm", None, (D,), **writes)


def width_order(d_model: int) -> np.ndarray:
    """Which entry of their vectors each of ours is: a sine and a cosine in turns, of all sines and all cosines."""
    return np.arange(d_model).reshape(2, -1).T.reshape(-1)


def sinusoids(length: int, d_model: int) -> np.ndarray:
    """Their table of positions, (length, D) float32; section 3.5 with the sines first."""
    angle = np.arange(length)[:, None] / np.power(10000, 2 * np.arange(d_model // 2) / d_model)
    return np.concatenate([np.sin(angle), np.cos(angle)], axis=1).astype(np.float32)


def completed(arrays: Arrays, theirs: Mapping[str, Any], model: ModelConfig) -> dict[str, np.ndarray]:
    """All arrays of a model, in float32, where a file holds one for several that are tied, and may leave out zeros.

    Raises:
      InputError: an array is missing, has another shape, or is one that such a model has not; it is named.
    """
    # Where a matrix is looked for.
    stored_as = {SOURCE: (SOURCE, SHARED), TARGET: (TARGET, SHARED), OUTPUT: (OUTPUT,)}
    if ties(theirs):
        one_for_all = (SHARED, TARGET, SOURCE, OUTPUT)
        stored_as = dict.fromkeys(stored_as, one_for_all) if shares(theirs) else {**stored_as, OUTPUT: (TARGET, OUTPUT)}
    result, shapes = {}, _their_shapes(theirs, model)
    for name, shape in shapes.items():
        stored = next((other for other in stored_as.get(name, (name,)) if other in arrays), None)
        if stored is None and name != BIAS:
            raise InputError(f"expected the array {stored_as.get(name, (name,))[0]!r}, which is not there.")
        array = np.zeros(shape, np.float32) if stored is None else arrays[stored]
        if array.shape != shape:
            raise InputError(f"{stored}: expected the shape {list(shape)}, got {list(array.shape)}.")
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise InputError(
                f"{stored}: expected floating point numbers, got {array.dtype}; quantized ones are not read."
            )
        result[name] = np.asarray(array, np.float32)
        if not np.isfinite(result[name]).all():
            raise InputError(f"{stored}: expected finite numbers, and some are not.")
    for name in POSITIONS:
        table = arrays.get(name, sinusoids(1, model.d_model))
        if table.ndim != 2 or not np.allclose(table, sinusoids(len(table), table.shape[1]), atol=1e-3):
            raise InputError(f"{name}: expected the sinusoids of section 3.5, which alone can be imported.")
    if unknown := sorted(arrays.keys() - {*shapes, *POSITIONS, SHARED}):
        raise InputError(f"{unknown[0]}: a MarianMTModel has no such array.")
    return result


def _their_shapes(theirs: Mapping[str, Any], model: ModelConfig) -> dict[str, tuple[int, ...]]:
    shapes, rows = {}, sizes(theirs)
    for place in places(model):
        outputs = math.prod(place.bias)
        matrix = (outputs,) if place.kernel is None else (outputs, math.prod(place.kernel) // outputs)
        shapes |= {f"{place.theirs}.weight": matrix, f"{place.theirs}.bias": (outputs,)}
    return shapes | {table.theirs: (rows[table.side], model.d_model) for table in TABLES} | {BIAS: (1, rows["target"])}


def to_ours(theirs: Arrays, model: ModelConfig, ids: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Our parameters, float32, of all of their arrays.

    Args:
      ids: of the sides 'source' and 'target', for each of our ids theirs.
    """
    params, order = {}, width_order(model.d_model)
    for place in places(model):
        matrix, vector = (theirs[f"{place.theirs}.{leaf}"] for leaf in ("weight", "bias"))
        if place.writes_width:
            matrix, vector = matrix[order], vector[order]
        if place.reads_width:
            matrix = matrix[:, order]
        _put(params, (*place.ours, "bias"), vector.reshape(place.bias))
        if place.kernel is None:
            _put(params, (*place.ours, "scale"), matrix)
        else:
            _put(params, (*place.ours, "kernel"), np.ascontiguousarray(matrix.T).reshape(place.kernel))
    for table in TABLES[1:2] if model.tie_embeddings else TABLES:
        rows = theirs[table.theirs][list(ids[table.side])][:, order]
        _put(params, table.ours, np.pad(rows, ((0, model.vocab_size - len(rows)), (0, 0))))
    bias = theirs[BIAS][0, list(ids["target"])]
    bias = np.pad(bias, (0, model.vocab_size - len(bias)), constant_values=NEVER)
    if _twins(ids["target"]):
        bias[BOS] = NEVER
    _put(params, ("output", "bias"), bias)
    return params


def _put(tree: dict[str, Any], path: Sequence[str], leaf: np.ndarray) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = leaf


def _leaf(tree: Mapping[str, Any], path: Sequence[str]) -> np.ndarray:
    for key in path:
        tree = tree[key]
    return tree


def _twins(ids: Sequence[int]) -> list[int]:
    """Our ids, beside BOS, of the token that is BOS there as well; none if BOS is a token of its own."""
    return [number for number, their in enumerate(ids) if their == ids[BOS] and number != BOS]


def start_is_shared(params: Mapping[str, Any], model: ModelConfig, ids: Mapping[str, Sequence[int]]) -> bool:
    """Whether BOS is still what an import made of a start that is another token too, so that they can be one again."""
    same = bool(_twins(ids["target"])) and params["output"]["bias"][BOS] == NEVER
    for table in TABLES[1:2] if model.tie_embeddings else TABLES:
        rows = _leaf(params, table.ours)
        same = same and all(np.array_equal(rows[BOS], rows[twin]) for twin in _twins(ids[table.side]))
    return same


def to_theirs(
    params: Mapping[str, Any], model: ModelConfig, ids: Mapping[str, Sequence[int]], rows: Mapping[str, int]
) -> dict[str, np.ndarray]:
    """All of their arrays, float32: the inverse of `to_ours`.

    Args:
      ids: as there.
      rows: how many tokens each side has there.
    """
    theirs, order = {}, np.argsort(width_order(model.d_model))
    for place in places(model):
        vector = _leaf(params, (*place.ours, "bias")).reshape(-1)
        if place.kernel is None:
            matrix = _leaf(params, (*place.ours, "scale"))
        else:
            matrix = _leaf(params, (*place.ours, "kernel")).reshape(-1, len(vector)).T
        if place.writes_width:
            matrix, vector = matrix[order], vector[order]
        if place.reads_width:
            matrix = matrix[:, order]
        theirs |= {f"{place.theirs}.weight": np.ascontiguousarray(matrix), f"{place.theirs}.bias": vector}
    for table in TABLES:
        own = ("target_embedding", "embedding") if model.tie_embeddings else table.ours
        theirs[table.theirs] = np.zeros((rows[table.side], model.d_model), np.float32)
        ours, their = _one_each(ids[table.side])
        theirs[table.theirs][their] = _leaf(params, own)[ours][:, order]
    theirs[BIAS] = np.zeros((1, rows["target"]), np.float32)
    if model.output_bias:
        ours, their = _one_each(ids["target"])
        theirs[BIAS][0, their] = params["output"]["bias"][ours]
    return theirs


def _one_each(ids: Sequence[int]) -> tuple[list[int], list[int]]:
    """Our ids, one for each of theirs, and theirs; of BOS and its twin that one."""
    ours = [number for number in range(len(ids)) if number != BOS or not _twins(ids)]
    return ours, [ids[number] for number in ours]


def stored(theirs: Arrays) -> dict[str, np.ndarray]:
    """Of all arrays those that a file holds: matrices that are the same are one there."""
    left = dict(theirs)
    if np.array_equal(theirs[OUTPUT], theirs[TARGET]):
        del left[OUTPUT]
        if np.array_equal(theirs[SOURCE], theirs[TARGET]):
            del left[SOURCE], left[TARGET]
            left[SHARED] = theirs[TARGET]
    return left
