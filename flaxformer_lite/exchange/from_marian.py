"""A folder with a Marian model of Hugging Face becomes the workdir of a run that has trained nothing yet."""

import contextlib
import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import config_dict

from flaxformer_lite import config as config_lib
from flaxformer_lite import config_files
from flaxformer_lite.config import Config, DecodeConfig, ModelConfig
from flaxformer_lite.data.tokens.tokenizer import MarianTokenizer, open_model, their_ids
from flaxformer_lite.exchange import marian
from flaxformer_lite.fields import FIXED_BY_WEIGHTS, NOT_IN_WEIGHTS, READ_IF
from flaxformer_lite.runs import workdir as workdir_lib
from flaxformer_lite.runs.workdir import Workdir
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.system.storage import new_folder, write_whole
from flaxformer_lite.training.checkpoint import Checkpoints

WEIGHTS, INDEX, PICKLED = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"
MODELS = ("source.spm", "target.spm")
CONVERT = "python -c \"from transformers import MarianMTModel as M; M.from_pretrained('{0}').save_pretrained('{0}')\""


@dataclasses.dataclass(frozen=True)
class MarianFolder:
    """What a folder holds, read and checked."""

    path: Path
    model: ModelConfig
    tokenizer: dict[str, bytes]  # files, as `MarianTokenizer.pack` takes them
    special: dict[str, str]
    params: dict[str, Any]  # ours, float32
    decode: dict[str, Any]  # fields of DecodeConfig
    license: str | None

    @property
    def files(self) -> list[Path]:
        """Those that its weights and its config were read from."""
        return [self.path / "config.json", *sorted(self.path.glob("*.safetensors"))]


def read(folder: Path) -> MarianFolder:
    """Raises InputError for what is missing, damaged, or no Marian model; it names the file, and in it the field."""
    if not folder.is_dir():
        raise InputError(f"{folder}: expected a folder with a Marian model, and there is none.")
    config = _json(folder / "config.json")
    with _about(folder / "config.json"):
        marian.check_theirs(config)
    tokenizer, special, ids = _tokenizer(folder, config)
    model = marian.model_config(config, max(map(len, ids.values())))
    stored = _stored(folder)
    with _about(folder / WEIGHTS):
        params = marian.to_ours(marian.completed(stored, config, model), model, ids)
    return MarianFolder(folder, model, tokenizer, special, params, _decode(folder, config), _license(folder))


@contextlib.contextmanager
def _about(file: Path, what: str = "") -> Iterator[None]:
    """Puts the name of the file, and `what`, before what an InputError of the block says."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{what}{error}", where=str(file)) from error


def _bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise InputError(f"{file}: expected a file of a Marian model: {error.strerror}.") from error


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(_bytes(file))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: expected JSON, got {error}.") from error
    if not isinstance(content, dict):
        raise InputError(f"{file}: expected names and values, got {type(content).__name__}.")
    return content


def _stored(folder: Path) -> dict[str, np.ndarray]:
    """The arrays of the folder's safetensors, one file or several."""
    from safetensors import SafetensorError, safe_open

    files = [WEIGHTS]
    if (folder / INDEX).exists():
        held = _json(folder / INDEX).get("weight_map")
        if not isinstance(held, dict) or not all(isinstance(name, str) for name in held.values()):
            raise InputError(f"{folder / INDEX}: weight_map: expected the file of each array, got {held!r:.80}.")
        files = sorted(set(held.values()))
    elif not (folder / WEIGHTS).exists() and (folder / PICKLED).exists():
        raise InputError(
            f"{folder / PICKLED}: pickled weights can run any code, and are not read; write {WEIGHTS} first: "
            f"{CONVERT.format(folder)}"
        )
    arrays = {}
    for name in files:
        file = folder / name
        if not file.is_file():
            raise InputError(f"{file}: expected the weights of a Marian model, and there is no such file.")
        try:
            with safe_open(file, "flax") as opened:  # NumPy has no bfloat16
                arrays |= {key: np.asarray(opened.get_tensor(key)) for key in opened.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise InputError(f"{file}: damaged, or no safetensors: {error}.") from error
    return arrays


def _tokenizer(
    folder: Path, config: Mapping[str, Any]
) -> tuple[dict[str, bytes], dict[str, str], dict[str, list[int]]]:
    """The files of the tokenizer, its special pieces, and for each side and id of ours the id that it has here."""
    files = {name: _bytes(folder / name) for name in MODELS}
    for name, content in files.items():
        with _about(folder / name, "expected a SentencePiece model, got "):
            open_model(content)
    settings = _json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").exists() else {}
    names = {"source": "vocab.json", "target": "vocab.json"}
    if settings.get("separate_vocabs"):
        names["target"] = "target_vocab.json"
    rows = marian.sizes(config)
    vocabularies = {side: _vocabulary(folder / name, rows[side]) for side, name in names.items()}
    special = _special(folder, config, settings, vocabularies["target"])
    for side, name in names.items():
        for role in ("pad", "eos", "unk"):
            if special[role] not in vocabularies[side]:
                raise InputError(f"{folder / name}: expected {special[role]!r}, the {role}, and it has none.")
        files[name] = json.dumps(vocabularies[side], ensure_ascii=False).encode()
    return files, special, {side: their_ids(vocabulary, special) for side, vocabulary in vocabularies.items()}


def _vocabulary(file: Path, rows: int) -> dict[str, int]:
    """A piece to its number, for each row of embeddings: one that has none gets a name that no text holds."""
    vocabulary = _json(file)
    wrong = [f"{piece!r}: {number!r}" for piece, number in vocabulary.items() if type(number) is not int]
    wrong += [f"{piece!r}: {number}" for piece, number in vocabulary.items() if number not in range(rows)]
    if wrong or len(set(vocabulary.values())) < len(vocabulary):
        raise InputError(
            f"{file}: expected a number from 0 to {rows - 1}, its own, for each piece, as config.json has {rows} "
            f"rows of embeddings; got {wrong[0] if wrong else 'the same number twice'}."
        )
    unnamed = sorted(set(range(rows)) - set(vocabulary.values()))
    return vocabulary | {f"<unused {number}>": number for number in unnamed}


def _special(
    folder: Path, config: Mapping[str, Any], settings: Mapping[str, Any], vocabulary: Mapping[str, int]
) -> dict[str, str]:
    """The pieces that pad, start and end a text, and stand for what is no piece."""
    of_number, special = {number: piece for piece, number in vocabulary.items()}, {}
    for role, field in (("pad", "pad_token_id"), ("start", "decoder_start_token_id"), ("eos", "eos_token_id")):
        if type(config.get(field)) is not int or config[field] not in of_number:
            expected = f"the number of a token, 0 to {len(vocabulary) - 1}"
            raise InputError(f"{folder / 'config.json'}: {field}: expected {expected}, got {config.get(field)!r}.")
        special[role] = of_number[config[field]]
    unknown = settings.get("unk_token", "<unk>")
    special["unk"] = unknown.get("content") if isinstance(unknown, dict) else unknown
    if not isinstance(special["unk"], str):
        raise InputError(f"{folder / 'tokenizer_config.json'}: unk_token: expected a piece, got {unknown!r}.")
    if len({special[role] for role in ("pad", "eos", "unk")}) < 3:
        raise InputError(f"{folder / 'config.json'}: expected three tokens as pad, end and unknown, got {special}.")
    return special


def _decode(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """How its texts are written, as fields of `DecodeConfig`."""
    file = folder / "generation_config.json"
    newer = _json(file) if file.exists() else {}  # older models have all in config.json
    settings = {**config, **newer}

    def number(name: str, kind: type, default: float) -> Any:
        value = default if settings.get(name) is None else settings[name]
        if type(value) not in (int, kind) or value < 0:
            where = file if name in newer else folder / "config.json"
            raise InputError(f"{where}: {name}: expected a number of type {kind.__name__}, 0 or more, got {value!r}.")
        return kind(value)

    decode: dict[str, Any] = {"method": "greedy"}
    if (beams := number("num_beams", int, 1)) > 1:
        alpha = number("length_penalty", float, 1.0)
        decode = {"method": "beam", "beam_size": beams, "penalty": "power", "alpha": alpha}
    if size := number("no_repeat_ngram_size", int, 0):
        decode["no_repeat_ngram"] = size
    return decode


def _license(folder: Path) -> str | None:
    """As the model's card says it, in the lines between --- at the top of README.md."""
    file = folder / "README.md"
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    head = re.match(r"---\n(.*?)\n---", text, re.DOTALL)
    line = re.search(r"^license:\s*(?:-\s*)?[\"']?([^\s\"']+)", head[1], re.MULTILINE) if head else None
    return line[1] if line else None


def import_run(
    folder: Path, workdir: Path, user_config: config_dict.ConfigDict, overrides: Sequence[str]
) -> ModelConfig:
    """Makes a workdir of a folder with a Marian model, and returns the config of the model.

    Args:
      user_config: how it is to be trained.
      overrides: `--config.section.field=value` arguments.

    Raises:
      InputError: as `read`, `check` and `write`.
    """
    source = read(folder)
    if any(override.lstrip("-").startswith("config.decode.method=") for override in overrides):
        source = dataclasses.replace(source, decode=of_any_method(source.decode))
    config = config_lib.resolve(config_files.override(with_weights(user_config, source), overrides))
    check(config, source)
    write(source, workdir, config)
    return source.model


def with_weights(config: config_dict.ConfigDict, source: MarianFolder) -> config_dict.ConfigDict:
    """`config` with all that the weights and the tokenizer have fixed, and the method by which the model writes.

    What the config says about the rest stays.
    """
    free = _changed(ModelConfig(), config.model, NOT_IN_WEIGHTS)
    model = dataclasses.replace(source.model, vocab_size=None, **free)
    config.model = config_lib.to_config_dict(Config(model=model)).model
    config.data.update(tokenizer="marian", vocab_size=source.model.vocab_size)
    longest = source.model.max_length
    config.data.buckets = tuple(length for length in config.data.buckets if length <= longest) or (longest,)
    own = of_any_method(
        _changed(DecodeConfig(), config.decode, [each.name for each in dataclasses.fields(DecodeConfig)])
    )
    config.decode = config_lib.to_config_dict(Config(decode=DecodeConfig(**{**source.decode, **own}))).decode
    return config


def of_any_method(decode: Mapping[str, Any]) -> dict[str, Any]:
    """What of some fields of `DecodeConfig` is not about one method."""
    return {name: value for name, value in decode.items() if name != "method" and f"decode.{name}" not in READ_IF}


def _changed(default: Any, section: config_dict.ConfigDict, names: Iterable[str]) -> dict[str, Any]:
    """The fields of a section that are not as the default has them."""
    return {name: getattr(section, name) for name in names if getattr(section, name) != getattr(default, name)}


def check(config: Config, source: MarianFolder) -> None:
    """Raises InputError if `config` is not of the model in the folder."""
    own = {f"model.{name}": value for name, value in dataclasses.asdict(source.model).items()}
    own |= {"model.vocab_size": None, "data.tokenizer": "marian", "data.vocab_size": source.model.vocab_size}
    for name in FIXED_BY_WEIGHTS:
        section, field = name.split(".")
        if (value := getattr(getattr(config, section), field)) != own[name]:
            raise InputError(
                f"config.{name}: {source.path} has {own[name]!r}, and this asks for {value!r}; leave it out."
            )


def write(source: MarianFolder, workdir: Path, config: Config) -> None:
    """Makes the workdir of a run that is at step 0 with these weights, whole or not at all.

    Raises:
      InputError: there is something already, or the folder cannot be written.
    """
    if workdir_lib.has_run(workdir):
        raise InputError(f"--workdir={workdir}: holds a run already; choose another folder.")
    with new_folder(workdir) as folder:
        paths = Workdir(folder)
        MarianTokenizer.pack(paths.tokenizer, source.tokenizer, source.special)
        tokenizer = MarianTokenizer(paths.tokenizer)
        record = {"step": 0, "tokenizer": tokenizer.fingerprint, "scores": {}}
        try:
            checkpoints = Checkpoints(paths.checkpoints)
            checkpoints.save(0, {"params": source.params}, record)
            checkpoints.close()
        except Exception as error:  # whatever a full disk makes a writer raise
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise InputError(f"--workdir={workdir}: the weights cannot be written: {reason:.200}.") from error
        files = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in source.files}
        facts = {"format": "Marian", "folder": source.path.absolute().name, "files": files, "license": source.license}
        write_whole(paths.imported, json.dumps(facts, indent=2) + "\n")
        workdir_lib.create(folder, config)
