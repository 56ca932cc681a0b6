"""What a run that fails leaves: the error in its events and its summary, and where it goes on."""

import errno
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

from esper.leyline.errors import DataFault, InputError, OutOfMemory
from esper.leyline.resuming import resume_call, resume_command
from esper.nissa.events import RunRow
from esper.runs.run_folder import RunFolder

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class RolledBack(RuntimeError):
    """Every environment was rolled back in every step, so that nothing was trained."""

    def __init__(self, rollbacks: Mapping[str, int]) -> None:
        """`rollbacks` counts them by reason."""
        reasons = ", ".join(f"{count} for {name}" for name, count in rollbacks.items())
        mend = (
            "look at the metric of the task"
            if set(rollbacks) == {"metric"}
            else "lower optimizer.lr, or look at the loss"
        )
        super().__init__(f"every environment was rolled back in every step ({reasons}), so nothing was trained: {mend}")


class Failure(NamedTuple):
    """Records the end of a run that comes by an exception."""

    run: RunFolder
    row: Callable[[Literal["failed"]], RunRow]  # the last row of the events
    asked: Callable[[], dict[str, Any]]  # the summary of what was asked for and done so far

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Write the last row and the summary behind a failure; the error is raised on, with how the run goes on.

        A full disk leaves neither, as it has no room for them.
        """
        try:
            yield
        except (OutOfMemory, DataFault) as error:
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
                    f"The run in {self.run.path} has the status failed. Mend this; then `{self._command(self.run.path)}` "
                    f"{self._place()}. If the task or the controller was an object made in Python, call "
                    f"{resume_call(self.run.path, (), ('task', 'controller'))} instead."
                )
            raise

    def _command(self, path: Path) -> str:
        return resume_command(path, self.run.config.tasks or (self.run.config.task,))

    def _place(self) -> str:
        """From which step a resumed run goes on."""
        number = None if self.run.store is None else self.run.store.latest()
        if number is None:
            return "starts again with the first step, as there is no checkpoint yet"
        return f"goes on after step {number:,}, that of the last checkpoint"


def failed_row(row: RunRow, summary: Mapping[str, Any]) -> RunRow:
    """The last row of a run, with the error of its summary where that holds one."""
    if "error" in summary:
        row.error = f"{summary['error']['type']}: {summary['error']['message']}"
    return row
