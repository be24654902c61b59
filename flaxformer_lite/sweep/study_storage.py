"""The storage of a study: a database, or a journal file in the sweep's folder."""

import contextlib
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import optuna
import sqlalchemy
import sqlalchemy.exc
from optuna.storages.journal import JournalFileBackend

from flaxformer_lite.system.errors import InputError
from flaxformer_lite.system.storage import locked

JOURNAL = "journal.log"
ATTEMPTS, RETRY_SECONDS = 3, 1.0  # to open the storage
# errors while the storage is unavailable for a time
UNAVAILABLE = (optuna.exceptions.StorageInternalError, sqlalchemy.exc.SQLAlchemyError, OSError)


def open_study(
    folder: Path, url: str | None, create: Callable[[optuna.storages.BaseStorage], optuna.Study]
) -> tuple[optuna.storages.BaseStorage, optuna.Study]:
    """Opens the database at `url`, or the journal if it is None; returns it, and `create` of it.

    Workers that start at once may create a database's tables at the same time; one then fails, and
    tries again.

    Raises:
      InputError: the storage cannot be used.
    """
    attempt = 0
    while True:
        attempt += 1
        storage = None
        try:
            storage = _open_storage(folder, url)
            return storage, create(storage)
        except Exception as error:  # from the database's driver, or from the network
            close_storage(storage)
            if attempt == ATTEMPTS or not isinstance(error, UNAVAILABLE):
                message = ([*str(error).strip().splitlines(), type(error).__name__])[0].rstrip(".")
                advice = (
                    "use a --workdir on a disk that can be written to"
                    if url is None
                    else "expected the URL of a database that this machine can reach and whose "
                    "driver is installed, such as postgresql://USER@HOST/NAME"
                )
                raise InputError(
                    without_password(
                        f"--storage={url or folder / JOURNAL}: cannot be used: {message}; {advice}."
                    )
                ) from error
        time.sleep(RETRY_SECONDS)


def without_password(text: str) -> str:
    """Returns the text with *** in place of the passwords of URLs."""
    return re.sub(r"(://[^:/@\s]*):[^@\s]*@", r"\1:***@", text)


def close_storage(storage: optuna.storages.BaseStorage | None) -> None:
    """Closes the connections to a database."""
    if isinstance(storage, optuna.storages.RDBStorage):
        storage.remove_session()
        storage.engine.dispose()


def _open_storage(folder: Path, url: str | None) -> optuna.storages.BaseStorage:
    if url is not None:
        if _is_in_memory(sqlalchemy.make_url(url)):
            raise InputError("a database in memory ends with this process, and so would the sweep")
        return optuna.storages.RDBStorage(url, engine_kwargs={"pool_pre_ping": True})
    path = folder / JOURNAL
    # Optuna exports no base class of locks
    backend = JournalFileBackend(str(path), JournalLock(path))  # type: ignore[arg-type]
    return optuna.storages.JournalStorage(backend)


def _is_in_memory(url: sqlalchemy.URL) -> bool:
    """Whether a database has no file: SQLite's, if its name is empty or :memory:."""
    name = url.database or ""
    return url.get_backend_name() == "sqlite" and (not name or ":memory:" in name)


class JournalLock:
    """A lock on the journal, which the operating system releases if the process dies.

    A process that dies while it writes leaves part of a line, and Optuna cannot read such a
    journal. `acquire` removes that part.
    """

    def __init__(self, journal: Path):
        self._journal, self._lock = journal, journal.with_name(f"{journal.name}.lock")
        self._held = contextlib.ExitStack()

    def acquire(self) -> bool:
        """Waits for the lock, and removes an incomplete last line."""
        self._held.enter_context(locked(self._lock))
        try:
            with self._journal.open("rb+") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - 1))
                if size and file.read(1) != b"\n":
                    file.seek(0)
                    file.truncate(file.read().rfind(b"\n") + 1)
        except OSError:
            self.release()
            raise
        return True

    def release(self) -> None:
        """Releases the lock."""
        self._held.close()
