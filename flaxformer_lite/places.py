"""Where a run lies: a folder on disk, or a folder in a bucket of Google Cloud Storage, read and written alike."""

import importlib.util
import os
import shutil
from pathlib import Path

from etils import epath

BUCKETS = "gs://"


def place(name: str | os.PathLike) -> Path:
    """`name` as a path: on disk a `pathlib.Path`, and for gs://bucket/folder one with the same methods.

    Raises:
      ValueError: another kind of address, or what reads buckets is not installed.
    """
    name = os.fspath(name)
    scheme, separator, _ = name.partition("://")
    if separator and scheme + separator != BUCKETS:
        raise ValueError(f"{name}: expected a folder, or {BUCKETS}BUCKET/FOLDER, got an address of {scheme!r}.")
    if not separator:
        return Path(name)
    _read_buckets(name)
    return epath.Path(name)


def in_bucket(path: Path) -> bool:
    """Whether `path` lies in a bucket."""
    return os.fspath(path).startswith(BUCKETS)


def absolute(path: Path) -> Path:
    """`path` from the root of the disk, or as it is in a bucket."""
    path = place(path)
    return path if in_bucket(path) else path.absolute()


def on_disk(path: Path, kind: str) -> Path:
    """`path` itself, or of one in a bucket the folder on this disk for what of this `kind` belongs to it."""
    if not in_bucket(path):
        return path
    return Path.home() / ".cache/flaxformer_lite" / kind / os.fspath(path).removeprefix(BUCKETS)


def fetch(source: Path, target: Path) -> None:
    """Copies what is below `source`, in a bucket, and not yet as large below `target`, on disk; each file whole."""
    for entry in source.iterdir() if source.is_dir() else ():
        if entry.is_dir():
            fetch(entry, target / entry.name)
            continue
        copy = target / entry.name
        if copy.exists() and copy.stat().st_size == entry.stat().length:
            continue
        target.mkdir(parents=True, exist_ok=True)
        partial = copy.with_name(f"{copy.name}.{os.getpid()}.partial")
        try:
            with entry.open("rb") as reader, partial.open("wb") as writer:
                shutil.copyfileobj(reader, writer, 2**24)
            partial.replace(copy)
        finally:
            partial.unlink(missing_ok=True)


def make_folder(folder: Path) -> None:
    """Makes `folder` and those around it, where they are not there; a bucket has files alone."""
    if not in_bucket(folder):
        folder.mkdir(parents=True, exist_ok=True)


def remove_tree(folder: Path) -> None:
    """Removes `folder` and what is in it, if it is there."""
    if in_bucket(folder):
        folder.rmtree(missing_ok=True)
    else:
        shutil.rmtree(folder, ignore_errors=True)


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes text, as UTF-8, or bytes at `path` so that no reader sees a part: on disk by a rename.

    In a bucket a file appears when all of it is there.
    """
    content = content.encode() if isinstance(content, str) else content
    if in_bucket(path):
        path.write_bytes(content)
        return
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def check_bucket(path: Path) -> None:
    """Raises ValueError if the bucket that `path` names cannot be listed."""
    bucket = os.fspath(path)[len(BUCKETS) :].split("/")[0]
    try:
        next(iter(place(f"{BUCKETS}{bucket}").iterdir()), None)
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no bucket {bucket!r}; make it first, or check its name.") from None
    except Exception as error:  # of the network, of credentials, of the server
        reason = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise ValueError(
            f"{path}: the bucket {bucket!r} cannot be read: {reason[0]:.200}; check that this machine may use it "
            "(gcloud auth application-default login)."
        ) from error


def _read_buckets(name: str) -> None:
    """Makes ready for buckets: what another process has written there is seen at once."""
    if importlib.util.find_spec("gcsfs") is None:
        raise ValueError(f"{name}: needs the extra for buckets: pip install 'flaxformer_lite[gcs]'.")
    import fsspec

    for protocol in ("gs", "gcs"):
        fsspec.config.conf.setdefault(protocol, {}).setdefault("use_listings_cache", False)
