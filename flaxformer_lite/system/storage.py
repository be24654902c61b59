"""Files and folders, on disk or in a bucket of Google Cloud Storage, by the same functions."""

import contextlib
import errno
import fcntl
import importlib.util
import os
import re
import shutil
import urllib.parse
import uuid
from collections.abc import Iterator
from pathlib import Path

from etils import epath

from flaxformer_lite.system.errors import InputError, NotWritten

NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # error codes of a disk without locks
BUCKETS = "gs://"


def place(name: str | os.PathLike[str]) -> Path:
    """Returns `name` as a `pathlib.Path`, or gs://bucket/folder as a path with the same methods.

    Raises:
      InputError: it is no path; or another kind of address, or one that pathlib has shortened as a
        folder; or the extra for buckets is not installed.
    """
    try:
        name = os.fsdecode(name)
    except TypeError as error:
        raise InputError(f"expected a path, got {name!r} ({type(name).__name__}).") from error
    address = re.match(r"([a-z][a-z0-9+.-]*):/", name)
    if address is None:
        return expanded(name)
    if not name.startswith(BUCKETS):
        raise InputError(
            f"{name}: expected a folder, or {BUCKETS}BUCKET/FOLDER, got an address of "
            f"{address[1]!r}."
        )
    bucket, *folders = name.removeprefix(BUCKETS).split("/")
    # The client of buckets would expand these characters.
    if not bucket or {".", ".."} & {bucket, *folders} or re.search(r"[][*?]", name):
        raise InputError(
            f"{name}: expected {BUCKETS}BUCKET/FOLDER, without [ ] * ?, and no folder '.' or '..'."
        )
    _set_up_buckets(name)
    return epath.Path(name)


def expanded(name: str) -> Path:
    """Returns `name` as a path on disk; '~' at its start is the home folder.

    A shell leaves '~' as it is in --workdir=~/runs.
    """
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise InputError(f"{name}: there is no such user; check the name after '~'.") from error


def in_bucket(path: str | Path) -> bool:
    """Whether `path` is in a bucket."""
    return os.fspath(path).startswith(BUCKETS)


def absolute(path: Path) -> Path:
    """Returns the absolute path; unchanged in a bucket."""
    path = place(path)
    return path if in_bucket(path) else path.absolute()


def on_disk(path: Path, kind: str) -> Path:
    """Returns `path`, or for a path in a bucket a local folder of its own for files of `kind`."""
    if not in_bucket(path):
        return path
    name = urllib.parse.quote(os.fspath(path).removeprefix(BUCKETS).rstrip("/"), safe="")
    return Path.home() / ".cache/flaxformer_lite" / kind / name


def fetch(source: Path, target: Path) -> None:
    """Copies the files below `source`, in a bucket, to `target`, on disk; skips complete copies.

    If several processes of a machine call this, 1 copies and the others wait.

    Raises:
      InputError: the bucket cannot be read, or the disk cannot be written.
    """
    advice = "check the free space of the disk, and that this machine may read there"
    with _as_input_error(source, f"cannot be copied to {target}", advice):
        target.mkdir(parents=True, exist_ok=True)
        with locked(target / ".lock"):
            _copy_tree(source, target)


@contextlib.contextmanager
def locked(file: Path) -> Iterator[None]:
    """Locks `file`, on disk, for the block; the system unlocks it if the process is killed.

    On a disk without locks this does nothing.
    """
    with file.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        yield


def is_copied(file: Path, copy: Path) -> bool:
    """Whether a bucket has the file `copy`, of the size of `file` on disk."""
    return copy.exists() and epath.Path(copy).stat().length == file.stat().st_size


def _copy_tree(source: epath.Path, target: Path) -> None:
    for entry in source.iterdir():
        copy = target / entry.name
        if entry.is_dir():
            _copy_tree(entry, copy)
        elif entry.exists() and not (copy.exists() and copy.stat().st_size == entry.stat().length):
            # `entry.exists()` skips names without a file, which mark folders in some tools.
            target.mkdir(parents=True, exist_ok=True)
            partial = copy.with_name(f"{copy.name}.partial")
            with entry.open("rb") as reader, partial.open("wb") as writer:
                shutil.copyfileobj(reader, writer, 2**24)
            partial.replace(copy)


def check_utf8(path: Path) -> None:
    """Raises InputError about a path that the library of the checkpoints cannot open."""
    try:
        os.fspath(absolute(path)).encode()
    except UnicodeEncodeError as error:
        raise InputError(
            "expected a path in UTF-8, as checkpoints need; rename the folder, or use another.",
            where=f"--workdir={path}",
        ) from error


def make_folder(folder: Path) -> None:
    """Creates `folder` and its parents if they do not exist; a bucket needs no folders."""
    if not in_bucket(folder):
        folder.mkdir(parents=True, exist_ok=True)


def why_unwritable(folder: Path) -> str | None:
    """Returns why nothing can be written into `folder`; None if it can, or if it is in a bucket.

    The folder need not exist.
    """
    if in_bucket(folder):
        return None
    existing = nearest_existing(folder)
    if not existing.is_dir():
        return os.strerror(errno.ENOTDIR)
    # The permissions of a folder do not show that its file system is read-only.
    if os.statvfs(existing).f_flag & os.ST_RDONLY:
        return os.strerror(errno.EROFS)
    return None if os.access(existing, os.W_OK | os.X_OK) else os.strerror(errno.EACCES)


def free_space(path: Path, needed: int | None = None) -> str:
    """Returns '1,024 bytes are free there, 4,096 are needed', and what to do about it."""
    words = "free some space, and start the same command again"
    if in_bucket(path):
        return words
    free = shutil.disk_usage(nearest_existing(path)).free
    wanted = "" if needed is None else f", {needed:,} are needed"
    return f"{free:,} bytes are free there{wanted}; {words}"


def nearest_existing(path: Path) -> Path:
    """Returns `path`, or the nearest of its parents that exists; on disk."""
    return next(each for each in (path, *path.absolute().parents) if each.exists())


def is_stream(path: Path) -> bool:
    """Whether `path` is a pipe or a device, which must not be replaced by a file."""
    return not in_bucket(path) and path.exists() and not path.is_file() and not path.is_dir()


def behind_links(path: Path) -> Path:
    """Returns the target of a symbolic link, so that the link is kept; other paths as they are."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def remove_tree(folder: Path) -> None:
    """Removes `folder` and its contents, if it exists."""
    if in_bucket(folder):
        if folder.exists():
            epath.Path(folder).rmtree()
    else:
        shutil.rmtree(folder, ignore_errors=True)


def read_whole(path: Path) -> bytes:
    """Returns the bytes of a file; an OSError names it, which one of a read does not."""
    try:
        return path.read_bytes()
    except OSError as error:
        error.filename = error.filename or os.fspath(path)
        raise


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes `path` atomically: on disk by a rename, in a bucket by a single upload.

    Args:
      content: bytes, or text to encode as UTF-8.

    Raises:
      OSError: it cannot be written, with the reason; NotWritten if a folder has this name.
    """
    if isinstance(content, str):
        content = content.encode(errors="surrogateescape")  # names of paths need not be UTF-8
    if in_bucket(path):
        try:
            path.write_bytes(content)
        except Exception as error:  # the network, credentials or the server fail
            raise OSError(errno.EIO, _reason(error), os.fspath(path)) from error
        return
    # A unique name, as several machines may share the disk.
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except IsADirectoryError as error:
        refused = NotWritten(
            f"{path}: cannot be written: a folder has this name; move it away, and start the same "
            "command again."
        )
        refused.strerror = error.strerror  # of the messages of callers
        raise refused from error
    finally:
        partial.unlink(missing_ok=True)


def write_new(path: Path, content: str) -> None:
    """Writes `path` atomically, on disk, unless it exists; of concurrent writers the first wins."""
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        partial.write_text(content, encoding="utf-8")
        with contextlib.suppress(FileExistsError):
            os.link(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yields a temporary folder, which becomes `path` at the end of the block; on disk.

    If the block fails, nothing is left.

    Raises:
      InputError: `path` exists and is not empty, or it cannot be written to.
    """
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise InputError(
            f"{path}: expected a name for a new folder, and there is something; choose another."
        )
    if path.absolute() == Path.cwd():
        raise InputError(
            f"{path}: expected a name for a new folder, and it is the one to work in; choose "
            "another."
        )
    partial = path.absolute().with_name(f"{path.absolute().name}.{uuid.uuid4().hex[:8]}.partial")
    made = [folder for folder in partial.parents if not folder.exists()]
    try:
        partial.mkdir(parents=True)
        yield partial
        partial.replace(path)
    except OSError as error:
        raise InputError(
            f"{path}: cannot be written to: {error.strerror or error}; choose another folder."
        ) from error
    finally:
        remove_tree(partial)
        for folder in made:  # its new parents, if they are empty
            with contextlib.suppress(OSError):
                folder.rmdir()


def check_bucket(path: Path) -> None:
    """Raises InputError if the bucket that `path` names cannot be listed."""
    bucket = os.fspath(path).removeprefix(BUCKETS).split("/")[0]
    advice = "check that this machine may use it (gcloud auth application-default login)"
    with _as_input_error(path, f"the bucket {bucket!r} cannot be read", advice):
        try:
            next(iter(place(f"{BUCKETS}{bucket}").iterdir()), None)
        except FileNotFoundError:
            raise InputError(
                f"{path}: there is no bucket {bucket!r}; make it first, or check its name."
            ) from None


@contextlib.contextmanager
def _as_input_error(path: Path, what: str, advice: str) -> Iterator[None]:
    """Raises any error of the block, such as of the network, as an InputError about `path`."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{path}: {what}: {_reason(error)}; {advice}.") from error


def _reason(error: Exception) -> str:
    return f"{([*str(error).strip().splitlines(), type(error).__name__])[0]:.200}"


def _set_up_buckets(name: str) -> None:
    """Turns off the cache of listings, so that files of other processes are seen at once."""
    if importlib.util.find_spec("gcsfs") is None:
        raise InputError(
            f"{name}: needs the extra for buckets: pip install 'flaxformer_lite[gcs]'."
        )
    import fsspec

    for protocol in ("gs", "gcs"):
        fsspec.config.conf.setdefault(protocol, {}).setdefault("use_listings_cache", False)
