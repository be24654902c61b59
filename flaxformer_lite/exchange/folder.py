"""What every exported folder is made of."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from flaxformer_lite.config import DecodeConfig
from flaxformer_lite.trained import Trained

LENGTH = 20  # tokens of a text about which one length penalty stands for another


def on_host(run: Trained) -> dict[str, Any]:
    """The parameters as NumPy arrays, float32, that may be written to: CTranslate2 quantizes in place."""
    return jax.tree.map(lambda x: np.array(x, np.float32), jax.device_get(run.params))


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Writes `content` for people to read, too."""
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_arrays(file: Path, arrays: Mapping[str, np.ndarray], metadata: dict[str, str] | None = None) -> None:
    """Writes `arrays` as safetensors; raises OSError if they cannot be written."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    try:
        save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, file, metadata)
    except SafetensorError as error:
        raise OSError(str(error)) from error


def write_models(run: Trained, folder: Path) -> None:
    """Writes the SentencePiece models of the run."""
    for name, content in run.tokenizer.models.items():
        (folder / name).write_bytes(content)


def power_of_length(decode: DecodeConfig) -> float:
    """The power of the length itself that scores are divided by; of Wu's penalty, what is nearest about 20 tokens."""
    return decode.alpha if decode.penalty == "power" else round(decode.alpha * LENGTH / (5 + LENGTH), 4)


def about_decoding(run: Trained, engine: str) -> str:
    """What a user of `engine` has to know of how its texts may differ from those of the run."""
    decode = run.config.decode
    text = (
        f"\n\nA text has at most {run.longest} tokens. In the run one ends {decode.max_extra_length} tokens after its "
    )
    text += f"source or prompt at the latest; {engine} knows one limit for all."
    if decode.method == "beam" and decode.penalty != "power" and decode.alpha:
        text += (
            f" The run divides scores by ((5 + length) / 6)^{decode.alpha:g}; {engine} has a power of the length, of "
            f"which the one given here is nearest for texts of about {LENGTH} tokens."
        )
    return text
