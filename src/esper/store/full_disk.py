"""A full disk: a run waits for room for a limited time, and then stops in a state from which it can be resumed."""

import errno
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from esper.leyline.resuming import resume_command
from esper.store.files import is_run

FULL = (errno.ENOSPC, errno.EDQUOT)
EVERY = 1.0
"""Pause between two attempts [seconds]."""
PATIENCE = 300.0
"""How long a command without a config waits for room [seconds]."""


class DiskFull(OSError):
    """The disk stayed full. The run can be resumed."""


class Unwritable(OSError):
    """A file could not be written for a reason other than a full disk. The run can be resumed."""


class DiskRetry:
    """Calls a function that writes a file until the disk has room, for at most `seconds`. One object serves a whole run.

    It does not wait if `asked` returns True, because the user wants the run to end, nor after it waited in vain once.
    `note` shows a line to the user. The command that resumes the run may need `tasks`, the names of its tasks, and `controller`,
    that of its config. `further` says how work that is no run is done again.
    """

    def __init__(
        self,
        seconds: float,
        note: Callable[[str], None],
        run: Path,
        asked: Callable[[], bool],
        tasks: Sequence[str] = (),
        controller: str = "",
        further: str = "start the run again",
    ) -> None:
        self.seconds, self.note, self.run, self.asked = seconds, note, run, asked
        self.tasks, self.controller, self.further = tasks, controller, further
        self.spent = False

    def __call__(self, path: Path, write: Callable[[], None]) -> None:
        """Call `write`, which writes `path`, again as long as the disk is full.

        Raises DiskFull if the disk stays full, and Unwritable if `write` fails for another reason.
        """
        try:
            write()
        except OSError as error:
            if error.errno not in FULL:
                raise self._unwritable(path, error) from error
            self._wait(path, write, error)

    def _wait(self, path: Path, write: Callable[[], None], error: OSError) -> None:
        end = time.monotonic() + (0.0 if self.spent else self.seconds)
        if end > time.monotonic() and not self.asked():
            self.note(
                f"cannot write {path}: {error.strerror}. The run waits up to {self.seconds:g} s for room: remove files from the "
                f"file system of {self.run.absolute()}, or raise its quota"
            )
        while (left := end - time.monotonic()) > 0 and not self.asked():
            time.sleep(min(EVERY, left))
            try:
                write()
            except OSError as again:
                if again.errno not in FULL:
                    raise self._unwritable(path, again) from again
            else:
                self.note(f"{path} is written; the run goes on")
                return
        self.spent = True
        raise DiskFull(f"cannot write {path}: {error.strerror}; make room there, and {self._further()}") from error

    def _unwritable(self, path: Path, error: OSError) -> OSError:
        if isinstance(error, DiskFull | Unwritable):
            return error
        if error.errno == errno.ENOENT and not self.run.is_dir():
            return Unwritable(
                f"cannot write {path}: the folder {self.run} was renamed or removed; give it its name back, or its new name to "
                "`esper resume`, which continues after the last checkpoint"
            )
        mend = "raise the limit on the size of files (ulimit -f)" if error.errno == errno.EFBIG else "repair that"
        return Unwritable(f"cannot write {path}: {error.strerror or error}; {mend}, and {self._further()}")

    def _further(self) -> str:
        if not is_run(self.run):
            return self.further
        return f"continue with `{resume_command(self.run, self.tasks, self.controller)}`"
