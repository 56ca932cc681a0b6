"""Number the rows of the events, and hand each of them to every output, in order."""

import time
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from esper.nissa.outputs import Guarded, JsonLines, Output
from esper.nissa.rows import GateRow, GradientsRow, MeasurementRow, PhasesRow, RewardRow, Row, SensorsRow, StepRow

Level = Literal["off", "run", "step", "debug"]

_OF_STEPS = (StepRow, GateRow, MeasurementRow, SensorsRow, RewardRow, PhasesRow, GradientsRow)
_HIGHER: dict[Level, Level] = {"run": "step", "step": "debug"}


class Hub:
    """Takes the rows that the engine and the run write.

    When `emit` returns, every output has the row, so a run that is killed loses none in its file, and `emit` raises the error
    of an output. Only a `Guarded` output, one of the user's, has the row in its queue instead; `emit` waits while that is
    full. `seconds` is the time that all this took, for which the training waited. `seq` is the number of the next row. `level`
    says which rows are kept. After a restoration the level 'run' counts as 'step', and 'step' as 'debug', for `raise_steps`
    steps, of which `raised` are left.
    """

    def __init__(
        self, outputs: Sequence[Output | JsonLines | Guarded] = (), level: Level = "step", raise_steps: int = 0
    ) -> None:
        self.outputs = tuple(outputs)
        self._file = next((output for output in self.outputs if isinstance(output, JsonLines)), None)
        self._queued = [output for output in self.outputs if isinstance(output, Guarded)]
        self.asked: Level = level if outputs else "off"  # as nobody would have the rows
        self.seq = 0
        self.raise_steps, self.raised = raise_steps, 0
        self.seconds = 0.0

    @property
    def level(self) -> Level:
        return _HIGHER.get(self.asked, self.asked) if self.raised else self.asked

    def wants(self, kind: type[Row]) -> bool:
        """Return whether rows of this kind are kept: none at level 'off', all but those of every step at 'run', all above."""
        return self.level != "off" and (self.level != "run" or not issubclass(kind, _OF_STEPS))

    def begin_step(self, *, restored: bool) -> None:
        """Begin the rows of a step. restored: whether a network was restored in the step, which raises the level."""
        if restored:
            self.raised = self.raise_steps

    def end_step(self) -> None:
        self.raised = max(self.raised - 1, 0)

    def emit(self, row: Row) -> None:
        """Set number and time of a row and hand it to every output, if the level keeps it."""
        self.extend((row,))

    def extend(self, rows: Iterable[Row]) -> None:
        """Emit several rows, which an output that has a file writes at once: a call of the system costs more than a row."""
        self.take([row for row in rows if self.wants(type(row))])

    def take(self, kept: Sequence[Row]) -> None:
        """Set number and time of rows that a hub of this level kept, and hand them to every output."""
        if not kept:
            return
        now = round(time.time(), 3)
        for place, row in enumerate(kept):
            row.seq, row.time = self.seq + place, now
        begin = time.perf_counter()
        for output in self.outputs:
            if isinstance(output, JsonLines | Guarded):
                output.write_all(kept)
            else:
                for row in kept:
                    output.write(row)
        self.seq += len(kept)  # before the wait, which an interrupt may end
        for queued in self._queued:
            queued.wait_for_room()
        self.seconds += time.perf_counter() - begin

    def waits(self) -> dict[str, Any] | None:
        """Return how often and how long the run has waited for full queues, as in its summary; None if no output has a queue."""
        if not self._queued:
            return None
        backlogs = [output.backlog for output in self._queued]
        seconds = sum(backlog.waited for backlog in backlogs)
        return {"waits": sum(backlog.waits for backlog in backlogs), "waiting_seconds": round(seconds, 3)}

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def state(self) -> dict[str, Any]:
        """Return for a checkpoint the number of rows, the mark of the file, and steps of a raised level."""
        return {"seq": self.seq, "events": self._file and self._file.mark(), "raised": self.raised}

    def close(self) -> None:
        for output in self.outputs:
            output.close()
