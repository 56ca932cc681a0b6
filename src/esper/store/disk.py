"""Files and folders that are whole or absent, whatever moment a crash comes at."""

import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

Content = bytes | Sequence[bytes | memoryview]
"""Of a file; in parts, to be written one after the other."""

Patient = Callable[[Path, Callable[[], None]], None]
"""Calls what writes a path, once or, where the disk is full, until there is room."""


WITHOUT_FLOCK = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What a file system answers that has no flock."""

_TEMPORARY = re.compile(r"\.(?P<name>.+?)(\.[0-9a-f]{16})?\.tmp")


def at_once(path: Path, write: Callable[[], None]) -> None:
    """A `Patient` that waits for nothing."""
    write()


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write `path` so that a reader, or a crash, finds either the old content or all of the new.

    The content goes to a temporary name beside it, is flushed to the disk, and takes the name in one rename. Every call has
    a temporary name of its own, so that two processes that write one path do not meet: the last rename decides.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        write_synced(temporary, content.encode() if isinstance(content, str) else content)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def unfinished(path: Path) -> str | None:
    """The name of the file that `write_atomic` was writing to this temporary name, where a kill left it; None for others."""
    temporary = _TEMPORARY.fullmatch(path.name)
    return None if temporary is None else temporary["name"]


def write_folder(folder: Path, files: Mapping[str, Content]) -> None:
    """Write a folder of files in place of the one of that name, so that a crash leaves all of the old one or of the new.

    No system call exchanges two folders everywhere, so the old one steps aside for a moment: `standing` finds it there, and
    the next `write_folder` puts it back first. Processes that write folders beside each other do so one after the other.
    """
    new, old = _aside(folder, "new"), _aside(folder, "old")
    with _alone_in(folder.parent) as parent:
        if os.path.lexists(old) and not os.path.lexists(folder):
            os.rename(old, folder)
        remove(new)
        remove(old)
        try:
            new.mkdir()
            for name, content in files.items():
                write_synced(new / name, content)
            sync_folder(new)
        except OSError:
            remove(new)  # a full disk has use for the room
            raise
        if os.path.lexists(folder):
            os.rename(folder, old)
        os.rename(new, folder)
        os.fsync(parent)
        remove(old)


@contextmanager
def _alone_in(folder: Path) -> Iterator[int]:
    """A descriptor of a folder, with the kernel's lock on it where the file system has one."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in WITHOUT_FLOCK:
                raise
        yield descriptor
        with suppress(OSError):  # a child that was forked in between would hold it on
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def standing(folder: Path) -> Path:
    """Where to read what `write_folder` wrote: under its name or, behind a crash between two renames, beside it."""
    if os.path.lexists(folder):
        return folder
    old = _aside(folder, "old")
    return old if old.is_dir() and not old.is_symlink() else folder


def remove(path: Path) -> None:
    """Remove a file, a link (not what it leads to) or a folder with all that it holds, where there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_synced(path: Path, content: Content) -> None:
    """Write a file and see that its content survives a crash of the machine. An OSError of it names the file."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o666)
        try:
            for part in (content,) if isinstance(content, bytes) else content:
                rest = memoryview(part)
                while rest:  # a nearly full disk takes a part of it first
                    rest = rest[os.write(descriptor, rest) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def sync_folder(folder: Path) -> None:
    """See that the names in a folder survive a crash of the machine."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _aside(folder: Path, part: str) -> Path:
    """The name beside a folder under which it is made (new), or steps aside (old)."""
    return folder.with_name(f".{folder.name}.{part}")


def file_name(text: str) -> str:
    """A text as a part of a file's name: letters, digits, dots and dashes, the last 60 of them."""
    return re.sub(r"[^A-Za-z0-9._]+", "-", text)[-60:].strip("-.") or "unnamed"
