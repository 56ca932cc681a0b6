"""The lock of a run folder, so that only one process at a time writes there.

The kernel holds the lock (flock), so that it ends with the process; the lock file names the process. On a file system without
flock, the lock holds as long as the process that the file names exists.
"""

import errno
import fcntl
import io
import json
import os
import socket
import stat
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from esper.leyline.errors import InputError
from esper.store.disk import WITHOUT_FLOCK, Retry

LOCK = "lock"
_LARGEST = 64 * 2**10  # bytes of it that are read
_COMMAND = 12  # words of a command line that are recorded

_held: "weakref.WeakSet[io.FileIO]" = weakref.WeakSet()  # files that hold a lock


def _forget() -> None:
    """Close the lock files in a forked child, which may outlive the process that holds the lock."""
    for file in list(_held):
        file.close()
    _held.clear()


os.register_at_fork(after_in_child=_forget)


class Lock:
    """The lock of one folder.

    `release` works after a KeyboardInterrupt at any line, and may be called again.
    """

    def __init__(self, folder: Path, note: Callable[[str], None]) -> None:
        self.path, self.note = folder / LOCK, note
        self._owner: dict[str, Any] | None = None  # content of the lock file while the lock is held
        self._file: io.FileIO | None = None  # None without flock

    @property
    def held(self) -> bool:
        """Whether this object holds the lock."""
        return self._owner is not None

    def take(self) -> None:
        """Take the lock of an existing folder. InputError, with nothing changed, if another process holds it.

        The lock file of a killed process is replaced, and `note` is told.
        """
        try:
            left = self._taken()
        except BaseException:
            self.release()
            raise
        if left:
            self.note(f"{_who(left)} was killed and left its lock behind; the lock is taken over")

    def release(self) -> None:
        """Remove the lock if this process holds it."""
        if self._owner is not None and self._owner["pid"] != os.getpid():
            return
        if self._owner is not None and owner_of(self.path) == self._owner:
            self.path.unlink(missing_ok=True)  # before closing: afterwards it could be the lock of another process
        if self._file is not None:
            _held.discard(self._file)
            self._file.close()
        self._owner = self._file = None

    def _taken(self) -> dict[str, Any] | None:
        """Take the lock. Returns the killed process that left its lock file behind; None if there was none."""
        try:
            self._file = file = self._locked()
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            if error.errno not in WITHOUT_FLOCK:
                raise InputError(
                    f"the run folder cannot be locked at {self.path}: {error.strerror}; repair that, or name another folder"
                ) from None
            return self._claimed()
        _held.add(file)
        left, self._owner = owner_of(self.path), describe_process()
        try:
            os.ftruncate(file.fileno(), 0)
            _write(file.fileno(), self._owner)
        except BaseException:
            self.path.unlink(missing_ok=True)
            raise
        return left

    def _locked(self) -> io.FileIO:
        """The open lock file, locked by flock. OSError if the file system has no flock."""
        while True:
            file = io.FileIO(self.path, "r+", opener=_open)
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise InputError(f"{self.path} is not a regular file; remove it, or name another run folder")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
                raise self._refusal(owner_of(self.path)) from None
            except BaseException:
                file.close()
                raise
            if _named(self.path, file.fileno()):
                return file
            file.close()  # another process removed this file in between; try again

    def _claimed(self) -> dict[str, Any] | None:
        """Take the lock without flock, by a hard link, which fails if the name exists. Returns what `_taken` returns."""
        mine, left = describe_process(), None
        new, old = (self.path.with_name(f".{LOCK}-{os.getpid()}.{part}") for part in ("new", "old"))
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            _write(descriptor, mine)
            while True:
                found = owner_of(self.path)
                if found is not None and lives(found):
                    raise self._refusal(found)
                left = found or left
                with suppress(FileNotFoundError):
                    os.rename(self.path, old)
                    if owner_of(old) != found:  # another process took the lock in between: restore its file
                        with suppress(FileExistsError):
                            os.link(old, self.path)
                    os.unlink(old)
                with suppress(FileExistsError):
                    self._owner = mine  # set before the link exists, so that an interrupt cannot leave the lock behind
                    os.link(new, self.path)
                    return left
                self._owner = None
        finally:
            os.close(descriptor)
            os.unlink(new)

    def _refusal(self, owner: dict[str, Any] | None) -> InputError:
        who = _who(owner) if owner else "another process, which has not written its name yet,"
        return InputError(f"{who} writes to {self.path.parent}; wait for its end, or end it first")


@contextmanager
def locked_folder(folder: Path, note: Callable[[str], None], retry: Retry) -> Iterator[None]:
    """Make a folder, and hold its lock in the body. Folders that were made for it and are empty in the end are removed.

    Raises InputError if the folder cannot be made or another process holds the lock.
    """
    made = [each for each in (folder, *folder.parents) if not each.exists()]  # innermost first
    lock = Lock(folder, note)

    def take() -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise InputError(
                f"cannot write to {error.filename}: {error.strerror}; name another folder (--out, out=)"
            ) from None
        lock.take()

    try:
        retry(lock.path, take)
        yield
    finally:
        lock.release()
        for each in made:
            with suppress(OSError):  # the folder is not empty
                each.rmdir()


def owner_of(path: Path) -> dict[str, Any] | None:
    """The process that a lock file names; None if the file is empty, as just after its creation, or not of Esper."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            owner = json.loads(file.read(_LARGEST))
    except (OSError, ValueError, RecursionError):
        return None
    known = isinstance(owner, dict) and {"pid", "host", "started", "since", "command"} <= set(owner)
    return owner if known and isinstance(owner["pid"], int) else None


def is_lock(path: Path) -> bool:
    """Whether a file is a lock file of Esper, or an empty file of that name."""
    return path.name == LOCK and (owner_of(path) is not None or (path.is_file() and path.stat().st_size == 0))


def describe_process() -> dict[str, Any]:
    """This process, as written into a lock file."""
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "started": process_start(os.getpid()),
        "since": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "command": sys.argv[:_COMMAND],
    }


def process_start(pid: int) -> int | None:
    """When a process of this machine started [clock ticks since boot]; None if it does not run, or if that is unknown."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # fields 3 and 22 of proc_pid_stat(5); field 2, a name in brackets, may hold any character
            fields = file.read().rpartition(b")")[2].split()
            return None if fields[0] in (b"Z", b"X") else int(fields[19])  # Z and X: ended
    except OSError:
        return None


def lives(owner: dict[str, Any]) -> bool:
    """Whether the process of a lock still runs, or may run on another machine; its pid may be another process by now."""
    if owner["host"] != socket.gethostname():
        return True
    if owner["started"] is not None:
        return bool(process_start(owner["pid"]) == owner["started"])
    try:
        os.kill(owner["pid"], 0)  # signal 0 only checks
    except OSError as error:
        return error.errno != errno.ESRCH
    return True


def _open(path: str, flags: int) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)


def _named(path: Path, descriptor: int) -> bool:
    """Whether a path still names the file of a descriptor."""
    try:
        found = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    mine = os.fstat(descriptor)
    return (found.st_dev, found.st_ino) == (mine.st_dev, mine.st_ino)


def _write(descriptor: int, owner: dict[str, Any]) -> None:
    os.write(descriptor, json.dumps(owner).encode() + b"\n")


def _who(owner: dict[str, Any]) -> str:
    command = " ".join(map(str, owner["command"])) if isinstance(owner["command"], list) else "?"
    return f"process {owner['pid']} on {owner['host']}, since {owner['since']} ({command[:200]}),"
