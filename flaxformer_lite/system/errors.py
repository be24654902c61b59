"""The error for bad input. The command line prints only its message, and exits with code 2."""

import errno

# Error codes of the system for bad paths of a user; not bugs.
OF_A_PATH = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP)


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


def is_of_a_path(error: OSError) -> bool:
    """Whether the error is of a bad path of a user, and not a bug."""
    return error.errno in OF_A_PATH and error.filename is not None
