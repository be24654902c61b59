"""The error for input that cannot be used. The command line prints only its message, and exits with 2."""

import errno

# What the system says of a path that a user named, which is no bug either.
OF_A_PATH = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP)


class InputError(ValueError):
    """A config, flag, file or argument that cannot be used: which one, what was expected, and what to do.

    Every other exception is a bug, and keeps its traceback.

    Attributes:
      where: the field, flag, file or line; may be empty.
      what: the rest of the message.
    """

    def __init__(self, what: str, *, where: str = ""):
        super().__init__(f"{where}: {what}" if where else what)
        self.where, self.what = where, what


def is_of_a_path(error: OSError) -> bool:
    """Whether a path that a user named cannot be reached, which is no bug."""
    return error.errno in OF_A_PATH and error.filename is not None
