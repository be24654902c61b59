"""The parts that all exported folders share: arrays, JSON files, notes on decoding."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from flaxformer_lite.data.tokens.tokenizer import AnyTokenizer
from flaxformer_lite.fields import DecodeConfig, ModelConfig
from flaxformer_lite.model.parameters import Params
from flaxformer_lite.system.errors import InputError

LENGTH = 20  # tokens; the two length penalties agree best at about this length


def on_host(params: Params) -> dict[str, Any]:
    """Returns the parameters as float32 NumPy arrays, writable: CTranslate2 quantizes in place."""
    return jax.tree.map(lambda x: np.array(x, np.float32), jax.device_get(params))


def with_separate_layers(params: Mapping[str, Any], model: ModelConfig) -> dict[str, Any]:
    """Returns the parameters of `model` with one set per layer: tied layers get a copy each.

    Other libraries have no tied layers.
    """
    if not model.tie_layers:
        return dict(params)
    counts = {"encoder": model.num_encoder_layers, "decoder": model.num_decoder_layers}
    return dict(params) | {
        stack: {
            **params[stack],
            **{
                f"layers_{n}": jax.tree.map(np.copy, params[stack]["layers_0"])
                for n in range(count)
            },
        }
        for stack, count in counts.items()
        if stack in params
    }


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Writes `content` as indented JSON."""
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_arrays(
    file: Path, arrays: Mapping[str, np.ndarray], metadata: dict[str, str] | None = None
) -> None:
    """Writes `arrays` as safetensors; raises OSError if that fails."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    try:
        save_file(
            {name: np.ascontiguousarray(array) for name, array in arrays.items()}, file, metadata
        )
    except SafetensorError as error:
        raise OSError(str(error)) from error


def write_models(tokenizer: AnyTokenizer, folder: Path) -> None:
    """Writes the files of `tokenizer` that other programs read."""
    for name, content in tokenizer.models.items():
        (folder / name).write_bytes(content)


def check_exported(decode: DecodeConfig) -> None:
    """Raises InputError if an export would lose the search, or a rule about the next token."""
    if decode.method in ("diverse_beam", "stochastic_beam"):
        raise InputError(
            f"config.decode.method: {decode.method!r} is not exported, as no engine has the same "
            "search; choose another one with --method=beam."
        )
    if decode.forbidden:
        raise InputError(
            "config.decode.forbidden: is not exported, got "
            f"{', '.join(map(repr, decode.forbidden[:3]))}; leave it out with --forbidden=."
        )


def power_of_length(decode: DecodeConfig) -> float:
    """Returns the exponent of a length penalty: scores are divided by length^exponent.

    Wu's penalty is ((5 + length) / 6)^alpha; the exponent gives it the same logarithmic slope at
    `LENGTH`.
    """
    if decode.penalty == "power":
        return decode.alpha
    return round(decode.alpha * LENGTH / (5 + LENGTH), 4)


def about_decoding(decode: DecodeConfig, *, longest: int, engine: str) -> str:
    """Returns notes for the card on how decoding with `engine` may differ from the run's.

    `longest`: the most tokens that a text of the run may have.
    """
    text = (
        f"\n\nA text has at most {longest} tokens. In the run one ends "
        f"{decode.max_extra_length} tokens after its source or prompt at the latest; {engine} "
        "knows one limit for all."
    )
    if decode.method == "beam" and decode.penalty != "power" and decode.alpha:
        text += (
            f" The run divides scores by ((5 + length) / 6)^{decode.alpha:g}; {engine} has a "
            "power of the length, and the one in this folder is nearest to it for texts of about "
            f"{LENGTH} tokens."
        )
    return text
