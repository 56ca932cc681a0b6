"""The hub: numbers rows and hands them to every output, in order, without dropping any."""

import time
from collections.abc import Iterable, Sequence
from typing import Any, Literal, Self

from esper.nissa.events import Row, StepRow
from esper.nissa.outputs import Output

Level = Literal["off", "run", "step"]


class Hub:
    """What the engine and the run write to.

    There is no queue: a row has reached every output when `emit` returns, and an output that fails raises there.
    `seq` is the number of the next row, and the first one where a run is taken up again.
    """

    def __init__(self, outputs: Sequence[Output] = (), level: Level = "step", seq: int = 0) -> None:
        self.outputs = tuple(outputs)
        self.level = level
        self.seq = seq

    def wants(self, kind: type[Row]) -> bool:
        """Whether rows of this kind are kept at this level: 'off' none, 'run' all but step rows, 'step' all."""
        return self.level == "step" or (self.level == "run" and not issubclass(kind, StepRow))

    def emit(self, row: Row) -> None:
        """Number a row, date it and hand it on, where the level asks for it."""
        if not self.wants(type(row)):
            return
        row.seq, row.time = self.seq, time.time()
        for output in self.outputs:
            output.write(row)
        self.seq += 1

    def extend(self, rows: Iterable[Row]) -> None:
        """`emit` each."""
        for row in rows:
            self.emit(row)

    def flush(self) -> None:
        """See that every row survives a crash of the machine."""
        for output in self.outputs:
            output.flush()

    def state(self) -> dict[str, Any]:
        """For a checkpoint: how many rows there are, and by what those of the first output that has a file are known."""
        marks = [mark for output in self.outputs if (mark := output.mark()) is not None]
        return {"seq": self.seq, "events": marks[0] if marks else None}

    def close(self) -> None:
        """Close every output."""
        for output in self.outputs:
            output.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
