"""What a run does where the disk is full: it waits for room, for so long, and else stops so that it can be resumed."""

import errno
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from esper.leyline.resuming import resume_command
from esper.store.files import is_run

FULL = (errno.ENOSPC, errno.EDQUOT)
EVERY = 1.0
"""Pause between two tries [seconds]."""


class DiskFull(OSError):
    """There was no room in time. The run is left as it is, to be resumed."""


class Unwritable(OSError):
    """A file could not be written for another reason, which no waiting mends. The run is left as it is, to be resumed."""


class Patience:
    """That of one run, for all that it writes: calls what writes a file until there is room, or for `seconds`.

    `asked` says whether someone wants an end; then nothing is waited for. Where it waited in vain once, it does not wait again.
    `tasks` are the names of the run's tasks, some of which the command that resumes it has to name.
    """

    def __init__(
        self,
        seconds: float,
        note: Callable[[str], None],
        run: Path,
        asked: Callable[[], bool],
        tasks: Sequence[str] = (),
    ) -> None:
        self.seconds, self.note, self.run, self.asked, self.tasks = seconds, note, run, asked, tasks
        self.spent = False

    def __call__(self, path: Path, write: Callable[[], None]) -> None:
        """`write`, which writes `path` and may be called again where it failed. DiskFull where there was no room in time.

        Unwritable, with the name of the file, where it failed for another reason.
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
                self.note(f"{path} is written: the run goes on")
                return
        self.spent = True
        raise DiskFull(f"cannot write {path}: {error.strerror}; make room there, and {self._further()}") from error

    def _unwritable(self, path: Path, error: OSError) -> OSError:
        if isinstance(error, DiskFull | Unwritable):
            return error
        mend = "raise the limit on the size of files (ulimit -f)" if error.errno == errno.EFBIG else "mend that"
        return Unwritable(f"cannot write {path}: {error.strerror or error}; {mend}, and {self._further()}")

    def _further(self) -> str:
        return f"`{resume_command(self.run, self.tasks)}` goes on" if is_run(self.run) else "start the run again"
