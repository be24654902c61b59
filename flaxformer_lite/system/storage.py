"""Where a run lies: a folder on disk, or a folder in a bucket of Google Cloud Storage, read and written alike."""

import contextlib
import errno
import fcntl
import gzip
import importlib.util
import io
import os
import re
import shutil
import urllib.parse
import uuid
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from etils import epath

from flaxformer_lite.system.errors import InputError

UNREADABLE = (OSError, EOFError, zlib.error)  # what reading a file may raise: gzip raises all three
CHUNK = 1 << 20  # bytes that are read at a time
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # what a disk says that has none
BUCKETS = "gs://"


def place(name: str | os.PathLike) -> Path:
    """`name` as a path: on disk a `pathlib.Path`, and for gs://bucket/folder one with the same methods.

    Raises:
      InputError: another kind of address, or one that pathlib has taken for a folder and shortened; or what reads
        buckets is not installed.
    """
    name = os.fspath(name)
    address = re.match(r"([a-z][a-z0-9+.-]*):/", name)
    if address is None:
        return Path(name)
    if not name.startswith(BUCKETS):
        raise InputError(f"{name}: expected a folder, or {BUCKETS}BUCKET/FOLDER, got an address of {address[1]!r}.")
    bucket, *folders = name.removeprefix(BUCKETS).split("/")
    if not bucket or {".", ".."} & {bucket, *folders} or re.search(r"[][*?]", name):  # its client would expand these
        raise InputError(f"{name}: expected {BUCKETS}BUCKET/FOLDER, without [ ] * ?, and no folder '.' or '..'.")
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
    """`path` itself, or of one in a bucket the folder on this disk for what of this `kind` belongs to it alone."""
    if not in_bucket(path):
        return path
    name = urllib.parse.quote(os.fspath(path).removeprefix(BUCKETS).rstrip("/"), safe="")
    return Path.home() / ".cache/flaxformer_lite" / kind / name


def fetch(source: Path, target: Path) -> None:
    """Copies what is below `source`, in a bucket, and not yet as large below `target`, on disk; each file whole.

    Of several processes on a machine one copies, and the others wait for it.

    Raises:
      InputError: the bucket cannot be read, or the disk not written.
    """
    with _told(source, f"cannot be copied to {target}", "check the disk's room, and that this machine may read there"):
        target.mkdir(parents=True, exist_ok=True)
        with locked(target / ".lock"):
            _copy_tree(source, target)


@contextlib.contextmanager
def locked(file: Path) -> Iterator[None]:
    """Holds the lock `file`, on disk; the system lets go of it when the process dies, however it dies.

    On a disk without locks nothing is held.
    """
    with file.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        yield


def _copy_tree(source: Path, target: Path) -> None:
    for entry in source.iterdir():
        copy = target / entry.name
        if entry.is_dir():
            _copy_tree(entry, copy)
        elif entry.exists() and not (copy.exists() and copy.stat().st_size == entry.stat().length):
            # A name alone, without a file, is how some tools mark a folder.
            target.mkdir(parents=True, exist_ok=True)
            partial = copy.with_name(f"{copy.name}.partial")
            with entry.open("rb") as reader, partial.open("wb") as writer:
                shutil.copyfileobj(reader, writer, 2**24)
            partial.replace(copy)


def make_folder(folder: Path) -> None:
    """Makes `folder` and those around it, where they are not there; a bucket has files alone."""
    if not in_bucket(folder):
        folder.mkdir(parents=True, exist_ok=True)


def why_unwritable(folder: Path) -> str | None:
    """Why nothing could be written into `folder`, made where it is not there; None if it could, as far as is known.

    Of a bucket that is known only when it is written to.
    """
    if in_bucket(folder):
        return None
    there = what_exists(folder)
    if not there.is_dir():
        return os.strerror(errno.ENOTDIR)
    if not os.access(there, os.W_OK | os.X_OK):
        return os.strerror(errno.EACCES)
    # A file system that refuses new entries, which the permissions of a folder do not tell.
    return os.strerror(errno.EROFS) if os.statvfs(there).f_flag & os.ST_RDONLY else None


def what_exists(path: Path) -> Path:
    """`path`, or the nearest of what it lies in that is there; on disk."""
    return next(each for each in (path, *path.absolute().parents) if each.exists())


def is_stream(path: Path) -> bool:
    """Whether `path` is a pipe or a device, in whose place nothing may be put."""
    return not in_bucket(path) and path.exists() and not path.is_file() and not path.is_dir()


def behind_links(path: Path) -> Path:
    """What a link leads to, which is written in place of the link; on disk."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def remove_tree(folder: Path) -> None:
    """Removes `folder` and what is in it, if it is there."""
    if in_bucket(folder):
        if folder.exists():
            folder.rmtree()
    else:
        shutil.rmtree(folder, ignore_errors=True)


def open_bytes(path: str | Path) -> BinaryIO:
    """The bytes of a file, unpacked if its name ends in .gz; opening and reading raise one of `UNREADABLE`."""
    return io.BufferedReader(gzip.open(path), CHUNK) if str(path).endswith(".gz") else open(path, "rb", CHUNK)


def why_unreadable(error: Exception) -> str:
    """What one of `UNREADABLE` says."""
    return getattr(error, "strerror", None) or str(error)


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes text, as UTF-8, or bytes at `path` so that no reader sees a part: on disk by a rename.

    In a bucket a file appears when all of it is there.

    Raises:
      OSError: it cannot be written, with the reason.
    """
    content = content.encode() if isinstance(content, str) else content
    if in_bucket(path):
        try:
            path.write_bytes(content)
        except Exception as error:  # of the network, of credentials, of the server
            raise OSError(errno.EIO, _reason(error), os.fspath(path)) from error
        return
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.partial")  # of machines that share it, each its own
    try:
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_new(path: Path, content: str) -> None:
    """As `write_whole`, on disk, unless there is something at `path`: of several at once the first is kept."""
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        partial.write_text(content, encoding="utf-8")
        with contextlib.suppress(FileExistsError):
            os.link(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder, on disk, to be filled by the block, that is at `path` once the block has ended, and else nowhere.

    Raises:
      InputError: there is something at `path`, or it cannot be written to.
    """
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise InputError(f"{path}: expected a name for a new folder, and there is something; choose another.")
    if path.absolute() == Path.cwd():
        raise InputError(f"{path}: expected a name for a new folder, and it is the one to work in; choose another.")
    partial = path.absolute().with_name(f"{path.absolute().name}.{uuid.uuid4().hex[:8]}.partial")
    made = [folder for folder in partial.parents if not folder.exists()]
    try:
        partial.mkdir(parents=True)
        yield partial
        partial.replace(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be written to: {error.strerror or error}; choose another folder.") from error
    finally:
        remove_tree(partial)
        for folder in made:  # those around it that hold nothing now
            with contextlib.suppress(OSError):
                folder.rmdir()


def check_bucket(path: Path) -> None:
    """Raises InputError if the bucket that `path` names cannot be listed."""
    bucket = os.fspath(path).removeprefix(BUCKETS).split("/")[0]
    advice = "check that this machine may use it (gcloud auth application-default login)"
    with _told(path, f"the bucket {bucket!r} cannot be read", advice):
        try:
            next(iter(place(f"{BUCKETS}{bucket}").iterdir()), None)
        except FileNotFoundError:
            raise InputError(f"{path}: there is no bucket {bucket!r}; make it first, or check its name.") from None


@contextlib.contextmanager
def _told(path: Path, what: str, advice: str) -> Iterator[None]:
    """Whatever the network, credentials, the server or the disk make the block raise, as an InputError about `path`."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{path}: {what}: {_reason(error)}; {advice}.") from error


def _reason(error: Exception) -> str:
    return f"{([*str(error).strip().splitlines(), type(error).__name__])[0]:.200}"


def _read_buckets(name: str) -> None:
    """Makes ready for buckets: what another process has written there is seen at once."""
    if importlib.util.find_spec("gcsfs") is None:
        raise InputError(f"{name}: needs the extra for buckets: pip install 'flaxformer_lite[gcs]'.")
    import fsspec

    for protocol in ("gs", "gcs"):
        fsspec.config.conf.setdefault(protocol, {}).setdefault("use_listings_cache", False)
