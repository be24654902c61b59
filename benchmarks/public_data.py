"""Public data sets that benchmarks read: their files are found, checked by SHA-256 and rewritten.

The project has no copy of them. `--data` names a folder with the files, or a checkout of their
repository: files may be in any folder below, and compressed by gzip.
"""

import argparse
import gzip
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from flaxformer_lite.system.errors import InputError
from flaxformer_lite.system.storage import write_whole

Pair = tuple[str, str]  # a source and its target
Pairs = Sequence[Pair]


def add_flag(parser: argparse.ArgumentParser, name: str) -> None:
    """Adds `--data` to the flags of a benchmark, with the folder `data/NAME` as the default."""
    text = f"folder of the public files; default: data/{name}"
    parser.add_argument("--data", type=Path, default=Path("data") / name, help=text)


def read(folder: Path, digests: Mapping[str, str], *, source: str) -> dict[str, str]:
    """Returns the text of each file by its name, see `find`."""
    paths = find(folder, digests, source=source)
    return {name: _content(path).decode() for name, path in paths.items()}


def find(folder: Path, digests: Mapping[str, str], *, source: str) -> dict[str, Path]:
    """Returns the path of each file by its name.

    Args:
      digests: the SHA-256 of each file, not compressed.
      source: where the files are from, for errors.

    Raises:
      InputError: a file is missing, or has other contents.
    """
    found = {}
    for name, digest in digests.items():
        paths = sorted([*folder.rglob(name), *folder.rglob(f"{name}.gz")])
        if not paths:
            raise InputError(
                f"{name}: expected it, or {name}.gz, below {folder}; get it from {source}, and "
                "name its folder with --data=FOLDER."
            )
        got = hashlib.sha256(_content(paths[0])).hexdigest()
        if got != digest:
            raise InputError(
                f"{paths[0]}: expected the SHA-256 {digest}, got {got}; get the file again from "
                f"{source}."
            )
        found[name] = paths[0]
    return found


def _content(path: Path) -> bytes:
    """Returns the bytes of a file, not compressed."""
    content = path.read_bytes()
    return gzip.decompress(content) if path.suffix == ".gz" else content


def write_parts(folder: Path, parts: Mapping[str, Pairs]) -> list[str]:
    """Writes a file of tab-separated pairs for each part, and returns the flags that name them.

    Args:
      parts: 'train', 'validation' and 'test'.
    """
    folder.mkdir(parents=True, exist_ok=True)
    flags = []
    for part, pairs in parts.items():
        path = folder.absolute() / f"{part}.tsv"
        write_whole(path, lines(f"{source}\t{target}" for source, target in pairs))
        flags.append(f"--config.data.{part}_files={path}")
    return flags


def lines(texts: Iterable[str]) -> str:
    """Returns texts, each with a line end."""
    return "".join(f"{text}\n" for text in texts)
