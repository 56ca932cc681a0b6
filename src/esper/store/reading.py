"""Reading files of bounded size. Links and pipes are refused, unless the user named the file."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from esper.leyline.errors import InputError


def read_kept(path: Path, largest: int, mend: str) -> bytes:
    """The content of a file that Esper wrote: a regular file, no link, of at most `largest` bytes. InputError otherwise."""
    return _read(path, largest, mend, os.O_NOFOLLOW | os.O_NONBLOCK)


def read_named(path: Path, largest: int, mend: str) -> bytes:
    """The content of a file that the user named, maybe a link or a pipe, of at most `largest` bytes. InputError otherwise."""
    return _read(path, largest, mend, 0)


def open_regular(path: Path, mend: str) -> BinaryIO:
    """A file that Esper wrote, open for reading: a regular file, no link. InputError otherwise; never waits for a pipe."""
    return _opened(path, mend, os.O_NOFOLLOW | os.O_NONBLOCK)


def _opened(path: Path, mend: str, flags: int) -> BinaryIO:
    try:
        descriptor = os.open(path, os.O_RDONLY | flags)
    except OSError as error:
        reason = " is a link, which is not followed" if error.errno == errno.ELOOP else f": {error.strerror}"
        raise InputError(f"{path}{reason}; {mend}") from None
    found = os.fstat(descriptor).st_mode
    if stat.S_ISDIR(found) or (flags and not stat.S_ISREG(found)):
        os.close(descriptor)
        raise InputError(f"{path} is not a regular file; {mend}")
    return os.fdopen(descriptor, "rb")


def _read(path: Path, largest: int, mend: str, flags: int) -> bytes:
    with _opened(path, mend, flags) as file:
        found = os.fstat(file.fileno())
        try:
            data = file.read(min(found.st_size, largest) + 1 if stat.S_ISREG(found.st_mode) else largest + 1)
        except OSError as error:
            raise InputError(f"{path}: {error.strerror}; {mend}") from None
    if len(data) > largest:
        raise InputError(f"{path} has more than {largest:,} bytes, more than any of its kind; {mend}")
    return data
