"""The config.json of a `MarianMTModel`, and the `ModelConfig` of the same model."""

from collections.abc import Mapping
from typing import Any

from flaxformer_lite.exchange import ctranslate2_spec
from flaxformer_lite.fields import ModelConfig
from flaxformer_lite.system.errors import InputError

# Marian's name -> our name
ACTIVATIONS = {
    "swish": "silu",
    "silu": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
DEFAULT_ACTIVATION = "gelu"
NORM_EPSILON = 1e-5  # of every LayerNorm of a Marian model
# Fields that our encoder-decoder fixes: field -> (required value, default if it is missing)
EXPECTED = {
    "model_type": ("marian", None),
    "is_encoder_decoder": (True, True),
    "scale_embedding": (True, False),
    "normalize_before": (False, False),
    "normalize_embedding": (False, False),
    "add_final_layer_norm": (False, False),
    "static_position_embeddings": (True, True),
}
# Marian has one value each for encoder and decoder; our model has one for both.
PAIRS = ("attention_heads", "ffn_dim")
SIZES = (
    *("d_model", "encoder_layers", "decoder_layers", "vocab_size", "max_position_embeddings"),
    *(f"{stack}_{name}" for name in PAIRS for stack in ("encoder", "decoder")),
)


def model_config(config: Mapping[str, Any], vocab_size: int) -> ModelConfig:
    """Returns our config of the model with this config.json.

    Args:
      vocab_size: of the imported tokenizer.

    Raises:
      InputError: as `check_importable`.
    """
    check_importable(config)
    return ModelConfig(
        vocab_size=vocab_size,
        d_model=config["d_model"],
        num_heads=config["encoder_attention_heads"],
        d_ff=config["encoder_ffn_dim"],
        num_encoder_layers=config["encoder_layers"],
        num_decoder_layers=config["decoder_layers"],
        max_length=config["max_position_embeddings"],
        activation=ACTIVATIONS[config.get("activation_function", DEFAULT_ACTIVATION)],
        norm_epsilon=NORM_EPSILON,
        output_bias=True,
        tie_embeddings=shares_embeddings(config) and ties_output(config),
        dropout=float(config.get("dropout", 0.1)),
        attention_dropout=float(config.get("attention_dropout", 0.0)),
        feed_forward_dropout=float(config.get("activation_dropout", 0.0)),
    )


def check_importable(config: Mapping[str, Any]) -> None:
    """Raises InputError about a field of config.json if the model cannot be imported."""
    for field, (expected, default) in EXPECTED.items():
        if (value := config.get(field, default)) != expected:
            raise InputError(
                f"{field}: expected {expected!r}, the only value that can be imported, "
                f"got {value!r}."
            )
    architectures = config.get("architectures") or ["MarianMTModel"]
    if "MarianMTModel" not in architectures:
        raise InputError(f"architectures: expected ['MarianMTModel'], got {architectures}.")
    _check_numbers(config)
    _check_pairs(config)
    _check_width(config)
    activation = config.get("activation_function", DEFAULT_ACTIVATION)
    if str(activation) not in ACTIVATIONS:
        raise InputError(
            f"activation_function: expected one of {', '.join(ACTIVATIONS)}, got {activation!r}."
        )


def _check_numbers(config: Mapping[str, Any]) -> None:
    for field in SIZES:
        if type(config.get(field)) is not int or config[field] < 1:
            raise InputError(f"{field}: expected a positive integer, got {config.get(field)!r}.")
    if not shares_embeddings(config) and type(config.get("decoder_vocab_size", 1)) is not int:
        raise InputError(
            f"decoder_vocab_size: expected an integer, got {config['decoder_vocab_size']!r}."
        )
    for field in ("dropout", "attention_dropout", "activation_dropout"):
        rate = config.get(field, 0.0)
        if type(rate) not in (int, float) or not 0 <= rate < 1:
            raise InputError(f"{field}: expected at least 0 and less than 1, got {rate!r}.")


def _check_pairs(config: Mapping[str, Any]) -> None:
    for name in PAIRS:
        encoder, decoder = config[f"encoder_{name}"], config[f"decoder_{name}"]
        if decoder != encoder:
            raise InputError(
                f"decoder_{name}: expected {encoder}, as encoder_{name}, got {decoder}."
            )


def _check_width(config: Mapping[str, Any]) -> None:
    width, heads = config["d_model"], config["encoder_attention_heads"]
    if width % 2:
        raise InputError(
            f"d_model: expected an even number, half sines and half cosines, got {width}."
        )
    if width % heads:
        raise InputError(
            f"encoder_attention_heads: expected a divisor of d_model = {width}, got {heads}."
        )


def check_exportable(model: ModelConfig) -> None:
    """Raises InputError about a field if no `MarianMTModel` can hold the model."""
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
                f"config.model.{field}: a MarianMTModel has {expected}, and this model {value!r}; "
                f"use {_other_exports(model)}, or train one with model.{field}={values[0]}."
            )


def _other_exports(model: ModelConfig) -> str:
    """Returns the commands that export a model that no `MarianMTModel` can hold."""
    try:
        ctranslate2_spec.check(model)
    except InputError:
        return "`export safetensors`, which takes every model"
    return "`export ctranslate2` or `export safetensors`"


def shares_embeddings(config: Mapping[str, Any]) -> bool:
    """Whether encoder and decoder share one embedding matrix."""
    return bool(config.get("share_encoder_decoder_embeddings", True))


def ties_output(config: Mapping[str, Any]) -> bool:
    """Whether the output projection is the decoder's embedding matrix."""
    return bool(config.get("tie_word_embeddings", True))


def vocab_sizes(config: Mapping[str, Any]) -> dict[str, int]:
    """Returns the vocabulary sizes of the sides 'source' and 'target'."""
    source = config["vocab_size"]
    target = source if shares_embeddings(config) else config.get("decoder_vocab_size") or source
    return {"source": source, "target": target}
