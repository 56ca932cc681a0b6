"""The hub, which numbers the rows of the events and hands each of them to every output, in order."""

import time
from collections.abc import Iterable, Sequence
from typing import Any, Literal, Self

from esper.nissa.events import Row, StepRow
from esper.nissa.outputs import Output

Level = Literal["off", "run", "step"]


class Hub:
    """The object to which the engine and the run write rows.

    There is no queue: when `emit` returns, every output has the row; `emit` raises the error of an output.
    `seq` is the number of the next row. `level` says which rows are kept.
    """

    def __init__(self, outputs: Sequence[Output] = (), level: Level = "step", seq: int = 0) -> None:
        self.outputs = tuple(outputs)
        self.level = level
        self.seq = seq

    def wants(self, kind: type[Row]) -> bool:
        """Whether rows of this kind are kept: none at level 'off', all but step rows at 'run', all at 'step'."""
        return self.level == "step" or (self.level == "run" and not issubclass(kind, StepRow))

    def emit(self, row: Row) -> None:
        """Set number and time of a row and hand it to every output, if the level keeps it."""
        if not self.wants(type(row)):
            return
        row.seq, row.time = self.seq, time.time()
        for output in self.outputs:
            output.write(row)
        self.seq += 1

    def extend(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self.emit(row)

    def flush(self) -> None:
        """Flush every output to the disk."""
        for output in self.outputs:
            output.flush()

    def state(self) -> dict[str, Any]:
        """For a checkpoint: the number of rows, and the mark of the first output that has a file."""
        marks = [mark for output in self.outputs if (mark := output.mark()) is not None]
        return {"seq": self.seq, "events": marks[0] if marks else None}

    def close(self) -> None:
        for output in self.outputs:
            output.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
