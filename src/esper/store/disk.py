"""Write atomically: after a crash at any moment, a file or folder is either complete or absent."""

import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

from esper.leyline.messages import InputError, system_in_words
from esper.store.files import is_run

Content = bytes | Sequence[bytes | memoryview]
"""The content of a file, as a whole or in parts."""

Retry = Callable[[Path, Callable[[], None]], None]
"""Calls a function that writes a path: once, or again as long as the disk is full."""

FULL = (errno.ENOSPC, errno.EDQUOT)
EVERY = 1.0
"""Pause between two attempts to write to a full disk [seconds]."""
PATIENCE = 300.0
"""How long a command without a config waits for room [seconds]."""
SUMS = "SHA256SUMS"
"""The sha256 of every file of a folder, in the format that the command `sha256sum -c` reads."""
_TEMPORARY = re.compile(r"\.(?P<name>.+?)(\.[0-9a-f]{16})?\.tmp")


def write_once(path: Path, write: Callable[[], None]) -> None:
    """Call `write` once; a `Retry` that does not retry."""
    write()


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write `path` so that a reader, also after a crash, finds either the old content or all of the new.

    The content is written to a temporary file in the same folder, flushed to the disk, and renamed. Every call has its own
    temporary name; if two processes write one path, the last rename wins.
    """
    with replacing(path) as temporary:
        write_synced(temporary, content.encode() if isinstance(content, str) else content)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the temporary file that the body writes, and that then replaces `path`; it is removed if the body fails."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def unfinished(path: Path) -> str | None:
    """Return the name of the file for which `write_atomic` made this temporary file; None if the path is no such file."""
    temporary = _TEMPORARY.fullmatch(path.name)
    return None if temporary is None else temporary["name"]


def write_folder(folder: Path, files: Mapping[str, Content]) -> None:
    """Replace a folder by one with these files, so that a crash leaves either all of the old folder or all of the new.

    No portable system call exchanges two folders. The old folder therefore has another name for a moment: `find_folder` finds
    it there, and the next `write_folder` first restores its name. Processes that write into one parent folder take turns.
    """
    new, old = _aside(folder, "new"), _aside(folder, "old")
    parent = os.open(folder.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(parent, fcntl.LOCK_EX)
        except OSError as error:  # a file system without flock is written to without it
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
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
            remove(new)  # frees room on a full disk
            raise
        if os.path.lexists(folder):
            os.rename(folder, old)
        os.rename(new, folder)
        os.fsync(parent)
        remove(old)
        with suppress(OSError):  # explicitly, because a forked child keeps the descriptor open
            fcntl.flock(parent, fcntl.LOCK_UN)
    finally:
        os.close(parent)


def find_folder(folder: Path) -> Path:
    """Return the folder that `write_folder` wrote, under its name or, after a crash between two renames, under the old name."""
    if os.path.lexists(folder):
        return folder
    old = _aside(folder, "old")
    return old if old.is_dir() and not old.is_symlink() else folder


def remove_unfinished(folder: Path, names: Collection[str] | None = None) -> None:
    """Remove the temporary files that a killed `write_atomic` left in a folder: of these files, or of all of them."""
    for path in folder.iterdir() if folder.is_dir() else ():
        name = unfinished(path)
        if name is not None and (names is None or name in names):
            path.unlink(missing_ok=True)


def remove(path: Path) -> None:
    """Remove a file, a link (not its target) or a folder with its content, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_synced(path: Path, content: Content) -> None:
    """Write a file and flush it to the disk. An OSError names the file."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o666)
        try:
            for part in (content,) if isinstance(content, bytes) else content:
                rest = memoryview(part)
                while rest:  # a nearly full disk writes only a part
                    rest = rest[os.write(descriptor, rest) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _aside(folder: Path, part: str) -> Path:
    """Return the temporary name of the new or the old folder in `write_folder`."""
    return folder.with_name(f".{folder.name}.{part}")


def file_name(text: str) -> str:
    """Return a text as part of a file name: letters, digits, dots and dashes, of which the last 60 are kept."""
    return re.sub(r"[^A-Za-z0-9._]+", "-", text)[-60:].strip("-.") or "unnamed"


def read_named(path: Path, largest: int, mend: str) -> bytes:
    """Read a file that the user named, maybe a link or a pipe, of at most `largest` bytes. InputError otherwise."""
    return read_kept(path, largest, mend, named=True)


def read_kept(path: Path, largest: int, mend: str, named: bool = False) -> bytes:
    """Read a file as `open_regular` opens it, of at most `largest` bytes. InputError otherwise."""
    with open_regular(path, mend, named) as file:
        found = os.fstat(file.fileno())
        with system_in_words(str(path), mend):
            data = file.read(min(found.st_size, largest) + 1 if stat.S_ISREG(found.st_mode) else largest + 1)
    if len(data) > largest:
        raise InputError(f"{path} has more than {largest:,} bytes, more than any of its kind; {mend}")
    return data


def open_regular(path: Path, mend: str, named: bool = False) -> BufferedReader:
    """Return a file that Esper wrote, open for reading: a regular file, no link. InputError otherwise; never waits for a pipe.

    named: whether the user named it instead, so that it may be a link or a pipe.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | (0 if named else os.O_NOFOLLOW | os.O_NONBLOCK))
    except OSError as error:
        reason = " is a link, which is not followed" if error.errno == errno.ELOOP else f": {error.strerror}"
        raise InputError(f"{path}{reason}; {mend}") from None
    found = os.fstat(descriptor).st_mode
    if stat.S_ISDIR(found) or not (named or stat.S_ISREG(found)):
        os.close(descriptor)
        raise InputError(f"{path} is not a regular file; {mend}")
    return os.fdopen(descriptor, "rb")


class DiskFull(OSError):
    """Says that the disk stayed full. The run can be resumed."""


class Unwritable(OSError):
    """Says that a file could not be written for a reason other than a full disk. The run can be resumed."""


@dataclass
class DiskRetry:
    """Calls a function that writes a file until the disk has room, for at most `seconds`. One object serves a whole run.

    It does not wait if `asked` returns True, because the user wants the run to end, nor after it waited in vain once (`spent`).
    """

    seconds: float
    note: Callable[[str], None]  # shows a line to the user
    run: Path
    asked: Callable[[], bool]
    further: str = "start the run again"  # how the work is done again
    resumed: str = ""  # how it is continued instead, once its folder is that of a run
    spent: bool = False

    def __call__(self, path: Path, write: Callable[[], None]) -> None:
        """Call `write`, which writes `path`, as long as the disk is full. Raises DiskFull, or Unwritable for another reason."""
        end = time.monotonic() + (0.0 if self.spent else self.seconds)
        full: OSError | None = None  # the first error of a full disk
        while True:
            try:
                write()
            except (DiskFull, Unwritable):
                raise
            except OSError as error:
                if error.errno == errno.ENOENT and not self.run.is_dir():
                    raise Unwritable(
                        f"cannot write {path}: the folder {self.run} was renamed or removed; give it its name back, or its new "
                        "name to `esper resume`, which continues after the last checkpoint"
                    ) from error
                if error.errno not in FULL:
                    large = error.errno == errno.EFBIG
                    mend = "raise the limit on the size of files (ulimit -f)" if large else "repair that"
                    raise Unwritable(
                        f"cannot write {path}: {error.strerror or error}; {mend}, and {self._mend()}"
                    ) from error
                if full is None and time.monotonic() < end and not self.asked():
                    self.note(
                        f"cannot write {path}: {error.strerror}. The run waits up to {self.seconds:g} s for room: remove files "
                        f"from the file system of {self.run.absolute()}, or raise its quota"
                    )
                full = full or error
            else:
                if full is not None:
                    self.note(f"{path} is written; the run goes on")
                return
            left = end - time.monotonic()
            if left <= 0 or self.asked():
                self.spent = True
                raise DiskFull(f"cannot write {path}: {full.strerror}; make room there, and {self._mend()}") from full
            time.sleep(min(EVERY, left))

    def _mend(self) -> str:
        return self.resumed if self.resumed and is_run(self.run) else self.further


def sha256_of(*parts: bytes | memoryview) -> str:
    """Return the sha256 of parts of a content, one after the other."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def checksum_of(facts: Mapping[str, Any]) -> str:
    """Return the sha256 of what a file holds beside its `checksum`, as JSON with sorted keys."""
    rest = {name: value for name, value in facts.items() if name != "checksum"}
    return sha256_of(json.dumps(rest, sort_keys=True).encode())


def sums_of(files: Mapping[str, Content]) -> bytes:
    """Return the content of SHA256SUMS for files by name."""
    contents = {name: [content] if isinstance(content, bytes) else content for name, content in files.items()}
    return "".join(f"{sha256_of(*parts)}  {name}\n" for name, parts in contents.items()).encode()


def check_sum(path: Path, mend: str = "export the network again") -> None:
    """Raise InputError if the sha256 of a file differs from that in SHA256SUMS beside it; without SHA256SUMS, do nothing.

    The check finds damage, not attacks: whoever can alter the file can alter SHA256SUMS too.
    """
    listed = path.parent / SUMS
    if not listed.exists() and not listed.is_symlink():
        return
    text = read_kept(listed, 2**16, mend).decode("utf-8", "replace")
    lines = [re.fullmatch(r"([0-9a-f]{64})  ([\w.-]+)", line) for line in text.splitlines()]
    known = {line[2]: line[1] for line in lines if line is not None}
    if len(known) < len(lines) or path.name not in known:
        raise InputError(f"{listed} does not list {path.name}, or is damaged; {mend}")
    with open_regular(path, mend) as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != known[path.name]:
            raise InputError(f"{path} is damaged: its sha256 is not the one in {SUMS}; {mend}")
