"""The record of a run that fails: the error in its events and its summary, and how to resume it."""

import errno
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

from esper.leyline.errors import DataFault, InputError, OutOfMemory, UserCodeError
from esper.leyline.resuming import resume_call, resume_command
from esper.nissa.rows import RunRow
from esper.runs.run_folder import RunFolder

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class RolledBack(RuntimeError):
    """Every environment was rolled back in every step, so nothing was trained."""

    def __init__(self, rollbacks: Mapping[str, int]) -> None:
        """rollbacks: numbers of rollbacks by reason."""
        reasons = ", ".join(f"{count} for {name}" for name, count in rollbacks.items())
        mend = (
            "check the metric of the task" if set(rollbacks) == {"metric"} else "lower optimizer.lr, or check the loss"
        )
        super().__init__(f"every environment was rolled back in every step ({reasons}), so nothing was trained: {mend}")


class Failure(NamedTuple):
    """Records the end of a run by an exception.

    Attributes:
        run (RunFolder): the folder of the run
        row (callable): returns the last row of the events
        asked (callable): returns the summary up to now
    """

    run: RunFolder
    row: Callable[[Literal["failed"]], RunRow]
    asked: Callable[[], dict[str, Any]]

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Write the last row and the summary if the body fails, and raise the error with the command that resumes the run.

        On a full disk nothing is written.
        """
        try:
            yield
        except (OutOfMemory, DataFault, UserCodeError) as error:
            self.run.fail(self.row("failed"), self.asked(), error)
            if self.run.path is None:
                raise
            raise type(error)(f"{error}; {self._command(self.run.path)} {self._place()}") from error.__cause__
        except Exception as error:
            if isinstance(error, OSError) and error.errno in _FULL:
                raise
            self.run.fail(self.row("failed"), self.asked(), error)
            if self.run.path is not None and not isinstance(error, InputError):
                error.add_note(
                    f"The run in {self.run.path} has the status failed. Correct the error; then `{self._command(self.run.path)}` "
                    f"{self._place()}. If the task or the controller was an object made in Python, call "
                    f"{resume_call(self.run.path, (), ('task', 'controller'))} instead."
                )
            raise

    def _command(self, path: Path) -> str:
        config = self.run.config
        return resume_command(path, config.tasks or (config.task,), config.controller)

    def _place(self) -> str:
        """Return the step from which a resumed run continues, as text."""
        number = None if self.run.store is None else self.run.store.latest()
        if number is None:
            return "starts again with the first step, because there is no checkpoint yet"
        return f"continues after step {number:,}, that of the last checkpoint"


def failed_row(row: RunRow, summary: Mapping[str, Any]) -> RunRow:
    """Return the last row of a run, with the error of its summary if there is one."""
    if "error" in summary:
        row.error = f"{summary['error']['type']}: {summary['error']['message']}"
    return row
