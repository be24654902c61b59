"""The errors that are not bugs: bad input, and a disk that fails; the command prints one message.

It exits with code 2 for bad input, and with 1 for a disk.
"""

import difflib
import errno
import os
from collections.abc import Iterable

# Error codes of the system for bad paths of a user; not bugs.
OF_A_PATH = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP)
# Error codes of a disk that is full or fails.
OF_A_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ESTALE)


class InputError(ValueError):
    """A config, flag, file or argument that cannot be used.

    The message contains its name, the expectation and advice. Every other exception is a bug, and
    keeps its traceback.

    Attributes:
      where: the field, flag, file or line; may be empty.
      what: the rest of the message.
    """

    def __init__(self, what: str, *, where: str = ""):
        super().__init__(f"{where}: {what}" if where else what)
        self.where, self.what = where, what


class NotWritten(OSError):
    """A file or folder could not be written; the message says why and what to do."""


def is_of_a_disk(error: OSError) -> bool:
    """Whether the error is of a disk, and not a bug."""
    return error.errno in OF_A_DISK


def is_of_a_path(error: OSError) -> bool:
    """Whether the error is of a bad path of a user, and not a bug."""
    return error.errno in OF_A_PATH and error.filename is not None


def raise_unreachable(path: os.PathLike[str], cause: BaseException) -> None:
    """Raises OSError if a disk or a permission made the read fail: the files may be intact.

    TensorStore has the system's code of the error in its text.
    """
    for code in (*OF_A_DISK, *OF_A_PATH):
        is_it = isinstance(cause, OSError) and cause.errno == code
        if is_it or f"os_error_code='{code}'" in str(cause):
            raise OSError(code, os.strerror(code), os.fspath(path)) from cause


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """Returns the end of a message about a wrong `name`: "; did you mean 'x'?".

    If no valid name is similar, it lists all valid names.
    """
    valid = sorted(valid)
    near = difflib.get_close_matches(str(name), valid, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else f"; valid are {', '.join(valid)}."
