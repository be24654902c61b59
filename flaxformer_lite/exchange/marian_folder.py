"""A folder with a Marian model of Hugging Face: config, weights, tokenizer, generation settings."""

import contextlib
import dataclasses
import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flaxformer_lite.data.tokens.marian_tokenizer import their_ids
from flaxformer_lite.data.tokens.sentencepiece_tokenizer import open_model
from flaxformer_lite.exchange import marian_config, marian_weights
from flaxformer_lite.fields import ModelConfig
from flaxformer_lite.model.parameters import Params
from flaxformer_lite.system.errors import InputError

WEIGHTS, INDEX, PICKLED = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"
MODELS = ("source.spm", "target.spm")
CONVERT = (
    "from transformers import MarianMTModel as M; M.from_pretrained({0!r}).save_pretrained({0!r})"
)
ROLES = {  # of special tokens -> field of config.json
    "pad": "pad_token_id",
    "start": "decoder_start_token_id",
    "eos": "eos_token_id",
}


@dataclasses.dataclass(frozen=True)
class MarianFolder:
    """The contents of a folder, checked and converted."""

    path: Path
    model: ModelConfig
    tokenizer: dict[str, bytes]  # files for `MarianTokenizer.pack`
    special: dict[str, str]  # role -> piece
    params: Params  # our parameters, float32
    decode: dict[str, Any]  # fields of DecodeConfig
    license: str | None

    @property
    def files(self) -> list[Path]:
        """The files of the config and the weights."""
        return [self.path / "config.json", *sorted(self.path.glob("*.safetensors"))]


def read_folder(folder: Path) -> MarianFolder:
    """Reads a folder; raises InputError about a file and field that is missing or invalid."""
    if not folder.is_dir():
        raise InputError(f"{folder}: expected a folder with a Marian model; it does not exist.")
    config = _read_json(folder / "config.json")
    with _prefixed(folder / "config.json"):
        marian_config.check_importable(config)
    tokenizer, special, ids = _read_tokenizer(folder, config)
    model = marian_config.model_config(config, max(map(len, ids.values())))
    arrays = _read_arrays(folder)
    with _prefixed(folder / WEIGHTS):
        arrays = marian_weights.complete(arrays, config, model)
    params = marian_weights.to_ours(arrays, model, ids)
    decode, license = _read_decode(folder, config), _read_license(folder)
    return MarianFolder(folder, model, tokenizer, special, params, decode, license)


@contextlib.contextmanager
def _prefixed(file: Path, what: str = "") -> Iterator[None]:
    """Adds the file, and `what`, to the start of an InputError of the block."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{what}{error}", where=str(file)) from error


def _read_bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise InputError(f"{file}: expected a file of a Marian model: {error.strerror}.") from error


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(_read_bytes(file))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: expected JSON, got {error}.") from error
    if not isinstance(content, dict):
        raise InputError(f"{file}: expected a JSON object, got {type(content).__name__}.")
    return content


def _read_arrays(folder: Path) -> dict[str, np.ndarray]:
    """Returns the arrays of the folder's safetensors files."""
    from safetensors import SafetensorError, safe_open

    arrays: dict[str, np.ndarray] = {}
    for name in _weight_files(folder):
        file = folder / name
        if not file.is_file():
            raise InputError(f"{file}: expected the weights of a Marian model; no such file.")
        try:
            with safe_open(file, "flax") as opened:  # "numpy" cannot read bfloat16
                arrays |= {key: np.asarray(opened.get_tensor(key)) for key in opened.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise InputError(f"{file}: not a safetensors file, or damaged: {error}.") from error
    return arrays


def _weight_files(folder: Path) -> list[str]:
    """Returns the names of the safetensors files: one, or those of the index."""
    if (folder / INDEX).exists():
        file_of = _read_json(folder / INDEX).get("weight_map")
        if not isinstance(file_of, dict) or not all(
            isinstance(name, str) for name in file_of.values()
        ):
            raise InputError(
                f"{folder / INDEX}: weight_map: expected the file of each array, "
                f"got {file_of!r:.80}."
            )
        return sorted(set(file_of.values()))
    if not (folder / WEIGHTS).exists() and (folder / PICKLED).exists():
        command = shlex.join(["python", "-c", CONVERT.format(os.fspath(folder))])
        raise InputError(
            f"{folder / PICKLED}: pickled weights can run any code and are not read; convert them "
            f"to {WEIGHTS} first: {command}"
        )
    return [WEIGHTS]


def _read_tokenizer(
    folder: Path, config: Mapping[str, Any]
) -> tuple[dict[str, bytes], dict[str, str], dict[str, list[int]]]:
    """Returns the tokenizer's files, special pieces, and by side Marian's id for each of ours."""
    files = {name: _read_bytes(folder / name) for name in MODELS}
    for name, content in files.items():
        with _prefixed(folder / name, "expected a SentencePiece model, got "):
            open_model(content)
    file = folder / "tokenizer_config.json"
    settings = _read_json(file) if file.exists() else {}
    names = {"source": "vocab.json", "target": "vocab.json"}
    if settings.get("separate_vocabs"):
        names["target"] = "target_vocab.json"
    rows = marian_config.vocab_sizes(config)
    vocabularies = {
        side: _read_vocabulary(folder / name, rows[side]) for side, name in names.items()
    }
    special = _special_pieces(folder, config, settings, vocabularies["target"])
    for side, name in names.items():
        for role in ("pad", "eos", "unk"):
            if special[role] not in vocabularies[side]:
                raise InputError(f"{folder / name}: expected the {role} token {special[role]!r}.")
        files[name] = json.dumps(vocabularies[side], ensure_ascii=False).encode()
    ids = {side: their_ids(vocabulary, special) for side, vocabulary in vocabularies.items()}
    return files, special, ids


def _read_vocabulary(file: Path, rows: int) -> dict[str, int]:
    """Returns piece -> id, for each row of the embeddings.

    A row without a piece gets a name that occurs in no text.
    """
    vocabulary = _read_json(file)
    invalid = [f"{piece!r}: {id!r}" for piece, id in vocabulary.items() if type(id) is not int]
    invalid += [f"{piece!r}: {id}" for piece, id in vocabulary.items() if id not in range(rows)]
    if invalid or len(set(vocabulary.values())) < len(vocabulary):
        raise InputError(
            f"{file}: expected a different id from 0 to {rows - 1} for each piece, as config.json "
            f"has {rows} rows of embeddings; got {invalid[0] if invalid else 'a repeated id'}."
        )
    unnamed = sorted(set(range(rows)) - set(vocabulary.values()))
    return vocabulary | {f"<unused {id}>": id for id in unnamed}


def _special_pieces(
    folder: Path,
    config: Mapping[str, Any],
    settings: Mapping[str, Any],
    vocabulary: Mapping[str, int],
) -> dict[str, str]:
    """Returns the pieces of the roles 'pad', 'start', 'eos' and 'unk'."""
    piece_of, special = {id: piece for piece, id in vocabulary.items()}, dict[str, str]()
    for role, field in ROLES.items():
        id = config.get(field)
        if type(id) is not int or id not in piece_of:
            raise InputError(
                f"{folder / 'config.json'}: {field}: expected the id of a token, "
                f"0 to {len(vocabulary) - 1}, got {id!r}."
            )
        special[role] = piece_of[id]
    unknown = settings.get("unk_token", "<unk>")
    piece = unknown.get("content") if isinstance(unknown, dict) else unknown
    if not isinstance(piece, str):
        raise InputError(
            f"{folder / 'tokenizer_config.json'}: unk_token: expected a piece, got {unknown!r}."
        )
    special["unk"] = piece
    if len({special[role] for role in ("pad", "eos", "unk")}) < 3:
        raise InputError(
            f"{folder / 'config.json'}: expected three different tokens for pad, eos and unk, "
            f"got {special}."
        )
    return special


def _read_decode(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the model's generation settings, as fields of `DecodeConfig`."""
    file = folder / "generation_config.json"
    generation = _read_json(file) if file.exists() else {}  # older models use config.json only
    settings = {**config, **generation}

    def number(name: str, kind: type, default: float) -> Any:
        value = default if settings.get(name) is None else settings[name]
        if type(value) not in (int, kind) or value < 0:
            where = file if name in generation else folder / "config.json"
            raise InputError(
                f"{where}: {name}: expected a number of type {kind.__name__}, 0 or more, "
                f"got {value!r}."
            )
        return kind(value)

    decode: dict[str, Any] = {"method": "greedy"}
    if (beams := number("num_beams", int, 1)) > 1:
        alpha = number("length_penalty", float, 1.0)
        decode = {"method": "beam", "beam_size": beams, "penalty": "power", "alpha": alpha}
    if size := number("no_repeat_ngram_size", int, 0):
        decode["no_repeat_ngram"] = size
    return decode


def _read_license(folder: Path) -> str | None:
    """Returns the licence in the metadata of the model's card, README.md."""
    file = folder / "README.md"
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    metadata = re.match(r"---\n(.*?)\n---", text, re.DOTALL)
    if metadata is None:
        return None
    pattern = r"^license:\s*(?:-\s*)?[\"']?([^\s\"']+)"
    line = re.search(pattern, metadata[1], re.MULTILINE)
    return line[1] if line else None
