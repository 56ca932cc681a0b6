"""Lock a run folder, so that only one process at a time writes there.

The kernel holds the lock (flock, by the package filelock), so that it ends with the process; the lock file names the process.
"""

import errno
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from esper.leyline.messages import InputError
from esper.store.disk import FULL, Retry, read_kept

LOCK = "lock"
_LARGEST = 64 * 2**10  # bytes of it that are read
_COMMAND = 12  # words of a command line that are recorded
_TRIES = 0.1  # time for further tries, because an owner may remove its lock file while it is opened here [seconds]


class Lock:
    """Locks one folder; `release` works after a KeyboardInterrupt at any line, from every thread, and again."""

    def __init__(self, folder: Path, note: Callable[[str], None]) -> None:
        self.path, self.note = folder / LOCK, note
        self._descriptors: list[int] = []  # of the lock file; the last one is open while the lock is held
        self._lock = FileLock(self.path, thread_local=False, on_acquired=self._descriptors.append)

    @property
    def held(self) -> bool:
        return self._lock.is_locked

    def take(self, patience: float = _TRIES) -> None:
        """Take the lock of an existing folder. InputError, with nothing changed, if another process holds it.

        patience: how long to wait until that process releases it [seconds]. The lock file of a killed process is taken over, and
        `note` is told.
        """
        if self.path.exists() and not self.path.is_file():
            raise InputError(f"{self.path} is not a regular file; remove it, or name another run folder")
        try:
            self._lock.acquire(timeout=max(patience, _TRIES), poll_interval=_TRIES / 4)
            left = owner_of(self.path)
            os.ftruncate(self._descriptors[-1], 0)
            os.write(self._descriptors[-1], json.dumps(describe_process()).encode() + b"\n")
        except Timeout:
            owner = owner_of(self.path)
            who = _who(owner) if owner else "another process, which has not written its name yet,"
            raise InputError(f"{who} writes to {self.path.parent}; wait for its end, or end it first") from None
        except OSError as error:
            self.release()
            if error.errno in FULL:
                raise
            raise InputError(
                f"the run folder cannot be locked at {self.path}: {error.strerror}; repair that, or name another folder"
            ) from None
        if left is not None:
            self.note(f"{_who(left)} was killed and left its lock behind; the lock is taken over")

    def release(self) -> None:
        if self._lock.is_locked:
            with suppress(FileNotFoundError):
                if os.path.samestat(os.lstat(self.path), os.fstat(self._descriptors[-1])):
                    self.path.unlink()  # before the release: afterwards it could be the lock of another process
            self._lock.release(force=True)


@contextmanager
def locked_folder(
    folder: Path, note: Callable[[str], None], retry: Retry, patience: float = _TRIES, mend: str = "(--out, out=)"
) -> Iterator[None]:
    """Make a folder, and hold its lock in the body. Folders that were made for it and are empty in the end are removed.

    Raises InputError if the folder cannot be made, or if another process holds the lock for more than `patience` seconds.
    mend: the option that names another folder.
    """
    made = [each for each in (folder, *folder.parents) if not each.exists()]  # innermost first
    lock = Lock(folder, note)

    def take() -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if error.errno in FULL:
                raise
            raise InputError(
                f"cannot write to {error.filename}: {error.strerror}; name another folder {mend}"
            ) from None
        lock.take(patience)

    try:
        retry(lock.path, take)
        yield
    finally:
        lock.release()
        for each in made:
            with suppress(OSError):  # the folder is not empty
                each.rmdir()


def owner_of(path: Path) -> dict[str, Any] | None:
    """Return the process that a lock file names; None if the file is empty, as just after its creation, or not of Esper."""
    try:
        owner = json.loads(read_kept(path, _LARGEST, ""))
    except (InputError, ValueError, RecursionError):
        return None
    known = isinstance(owner, dict) and {"pid", "host", "started", "since", "command"} <= set(owner)
    return owner if known and isinstance(owner["pid"], int) else None


def is_lock(path: Path) -> bool:
    """Return whether a file is a lock file of Esper, or an empty file of that name."""
    return path.name == LOCK and (owner_of(path) is not None or (path.is_file() and path.stat().st_size == 0))


def describe_process() -> dict[str, Any]:
    """Describe this process, as written into a lock file."""
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "started": process_start(os.getpid()),
        "since": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "command": sys.argv[:_COMMAND],
    }


def process_start(pid: int) -> int | None:
    """Return when a process of this machine started [clock ticks since boot]; None if it does not run, or if unknown."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # fields 3 and 22 of proc_pid_stat(5); field 2, a name in brackets, may hold any character
            fields = file.read().rpartition(b")")[2].split()
            return None if fields[0] in (b"Z", b"X") else int(fields[19])  # Z and X: ended
    except OSError:
        return None


def lives(owner: dict[str, Any]) -> bool:
    """Return whether the process of a lock still runs, or may run on another machine; its pid may be another process by now."""
    if owner["host"] != socket.gethostname():
        return True
    if owner["started"] is not None:
        return bool(process_start(owner["pid"]) == owner["started"])
    try:
        os.kill(owner["pid"], 0)  # signal 0 only checks
    except OSError as error:
        return error.errno != errno.ESRCH
    return True


def _who(owner: dict[str, Any]) -> str:
    command = " ".join(map(str, owner["command"])) if isinstance(owner["command"], list) else "?"
    return f"process {owner['pid']} on {owner['host']}, since {owner['since']} ({command[:200]}),"
