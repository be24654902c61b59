"""CTranslate2's specification of a model, filled with our parameters.

A model that CTranslate2 does not support raises InputError with the name of the field.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from flaxformer_lite.fields import ModelConfig
from flaxformer_lite.model.layers import GATES
from flaxformer_lite.model.positions import T5_MAX_DISTANCE, sinusoidal
from flaxformer_lite.system.errors import InputError

Params = Mapping[str, Any]

# our name -> CTranslate2's name
ACTIVATIONS = {"relu": "RELU", "gelu": "GELU", "gelu_tanh": "GELUTanh", "silu": "SWISH"}


# The position schemes that CTranslate2 computes, by architecture. A scheme that is not listed, such
# as a new one, is refused: it would be exported without positions.
POSITIONS: dict[str, tuple[str, ...]] = {
    "encoder_decoder": ("sinusoidal", "learned", "rotary", "relative", "t5_bias", "none")
}
POSITIONS["decoder_lm"] = (*POSITIONS["encoder_decoder"], "alibi")
POSITIONS["encoder_classifier"] = ()


def check(model: ModelConfig) -> None:
    """Raises InputError about a field if CTranslate2 cannot run the model."""
    unsupported = {
        "architecture": (
            model.architecture == "encoder_classifier",
            "it has no classification layer",
            ("encoder_decoder", "decoder_lm"),
        ),
        "decoder": (model.decoder == "masked", "it decodes token by token", ("causal",)),
        "attention": (
            model.attention == "additive",
            "it has dot-product attention only",
            ("dot_product",),
        ),
        "attention_window": (
            model.attention_window is not None,
            "its attention has no window",
            (None,),
        ),
        "position": (
            model.position not in POSITIONS[model.architecture],
            "its encoder has no ALiBi" if model.position == "alibi" else "it has no such positions",
            POSITIONS[model.architecture],
        ),
    }
    for field, (is_unsupported, why, possible) in unsupported.items():
        if is_unsupported:
            values = " or ".join(f"model.{field}={value}" for value in possible)
            raise InputError(
                f"config.model.{field}: CTranslate2 cannot run {getattr(model, field)!r}: {why}; "
                f"use `export safetensors`, which takes every model, or train one with {values}."
            )


def build(model: ModelConfig, params: Params) -> Any:
    """Returns a `TransformerSpec`, or a `TransformerDecoderModelSpec` for a language model.

    Args:
      params: of the model, NumPy arrays in float32.

    Raises:
      InputError: CTranslate2 cannot run the model.
    """
    from ctranslate2.specs import transformer_spec

    check(model)
    decoder = _decoder(model, params)
    if model.architecture == "decoder_lm":
        spec = transformer_spec.TransformerDecoderModelSpec(decoder)
    else:
        spec = transformer_spec.TransformerSpec(_encoder(model, params), decoder)
    spec.config.layer_norm_epsilon = model.norm_epsilon
    return spec


def _options(model: ModelConfig) -> dict[str, Any]:
    """Returns the options that the specifications of encoder and decoder share."""
    from ctranslate2.specs import common_spec

    options = {
        "num_heads": model.num_heads,
        "pre_norm": model.norm_placement == "pre",
        "activation": common_spec.Activation[
            ACTIVATIONS[GATES.get(model.activation, model.activation)]
        ],
        "ffn_glu": model.activation in GATES,
        "rms_norm": model.norm == "rms_norm",
        "num_heads_kv": model.num_kv_heads,
        "head_dim": model.d_head,
        "relative_position": model.position == "relative",
        "relative_attention_bias": model.position == "t5_bias",
    }
    # rotary_dim 0: all dimensions of a head; interleaved: neighbouring dimensions form a pair
    if model.position == "rotary":
        options |= {"rotary_dim": 0, "rotary_interleave": True, "rotary_base": model.rope_base}
    return options


def _encoder(model: ModelConfig, params: Params) -> Any:
    from ctranslate2.specs import transformer_spec

    spec = transformer_spec.TransformerEncoderSpec(model.num_encoder_layers, **_options(model))
    table = params["target_embedding"] if model.ties_source else params["source_embedding"]
    spec.embeddings[0].weight = table["embedding"]
    _stack(spec, model, params["encoder"], params.get("source_inputs", {}))
    return spec


def _decoder(model: ModelConfig, params: Params) -> Any:
    from ctranslate2.specs import transformer_spec

    with_encoder = model.architecture == "encoder_decoder"
    spec = transformer_spec.TransformerDecoderSpec(
        model.num_decoder_layers,
        with_encoder_attention=with_encoder,
        alibi=model.position == "alibi",
        **_options(model),
    )
    table, output = params["target_embedding"]["embedding"], params.get("output", {})
    spec.embeddings.weight, spec.projection.weight = table, output.get("kernel", table)
    if "bias" in output:
        spec.projection.bias = output["bias"]
    _stack(spec, model, params["decoder"], params.get("target_inputs", {}))
    return spec


def _stack(spec: Any, model: ModelConfig, params: Params, inputs: Params) -> None:
    """Fills an encoder or decoder except its embeddings; `inputs`: parameters of its `Inputs`."""
    if hasattr(spec, "position_encodings"):
        spec.position_encodings.encodings = _position_vectors(model, inputs)
    if model.norm_placement == "pre":
        _norm(spec.layer_norm, params["final_norm"])
    for number, layer in enumerate(spec.layer):
        own = params[f"layers_{number}"]
        _attention(layer.self_attention, own["self_attention"], is_self_attention=True)
        _norm(layer.self_attention.layer_norm, own["self_attention_residual"]["norm"])
        _positions(layer.self_attention, model, params, own["self_attention"])
        if hasattr(layer, "attention"):
            _attention(layer.attention, own["cross_attention"], is_self_attention=False)
            _norm(layer.attention.layer_norm, own["cross_attention_residual"]["norm"])
        feed_forward = own["feed_forward"]
        if "gate" in feed_forward:  # CTranslate2: act(linear_0 x) * linear_0_noact x
            _linear(layer.ffn.linear_0, feed_forward["gate"])
            _linear(layer.ffn.linear_0_noact, feed_forward["inner"])
        else:
            _linear(layer.ffn.linear_0, feed_forward["inner"])
        _linear(layer.ffn.linear_1, feed_forward["outer"])
        _norm(layer.ffn.layer_norm, own["feed_forward_residual"]["norm"])


def _position_vectors(model: ModelConfig, inputs: Params) -> np.ndarray:
    """Returns (max_length, D) to add to embeddings: zeros if positions act elsewhere."""
    if model.position == "learned":
        return inputs["position_vectors"]["learned"]["embedding"]
    if model.position == "sinusoidal":
        return np.asarray(sinusoidal(jnp.arange(model.max_length), model.d_model))
    return np.zeros((model.max_length, model.d_model), np.float32)


def _positions(spec: Any, model: ModelConfig, stack: Params, attention: Params) -> None:
    """Fills the position parameters of a self-attention layer."""
    if model.position == "relative":
        keys = attention["relative"]["key"]
        spec.relative_position_keys = keys
        spec.relative_position_values = attention["relative"].get("value", np.zeros_like(keys))
    if model.position == "t5_bias":
        spec.relative_attention_bias = stack["position_bias"]["embedding"]
        spec.relative_attention_max_distance = np.int32(T5_MAX_DISTANCE)


def _attention(spec: Any, params: Params, *, is_self_attention: bool) -> None:
    """Fills an attention layer.

    CTranslate2 concatenates query, key and value in self-attention, and key and value in
    cross-attention.
    """
    rows = [_matrix(params[name], outputs=2) for name in ("query", "key", "value")]
    groups = [rows] if is_self_attention else [rows[:1], rows[1:]]
    for linear, group in zip(
        spec.linear, [*groups, [_matrix(params["out"], outputs=1)]], strict=True
    ):
        linear.weight = np.concatenate([weight for weight, _ in group])
        if group[0][1] is not None:
            linear.bias = np.concatenate([bias for _, bias in group])


def _linear(spec: Any, params: Params) -> None:
    spec.weight, bias = _matrix(params, outputs=1)
    if bias is not None:
        spec.bias = bias


def _matrix(params: Params, *, outputs: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns a projection's matrix, outputs first, and its bias.

    Args:
      outputs: the number of the kernel's last axes that are outputs.
    """
    kernel, bias = params["kernel"], params.get("bias")
    matrix = kernel.reshape(-1, int(np.prod(kernel.shape[-outputs:]))).T
    return np.ascontiguousarray(matrix), None if bias is None else bias.reshape(-1)


def _norm(spec: Any, params: Params) -> None:
    spec.gamma = params["scale"]
    if hasattr(spec, "beta"):
        spec.beta = params.get("bias", np.zeros_like(params["scale"]))
