"""Export to TensorBoard: event files, a folder for each run."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from esper.karn.exporters.targets import FinalTable, as_markdown


class TensorBoard:
    """Writes event files. Numbers keep their double precision."""

    def __init__(self, folder: Path) -> None:
        import tensorboard  # noqa: F401  # torch names neither the package nor the extra when it is missing
        from torch.utils.tensorboard import SummaryWriter

        self.folder, self._make = folder, SummaryWriter

    def open(self, name: str, known: str | None, facts: Mapping[str, str | int]) -> str:
        """A further event file in the folder of a known run continues it."""
        self._writer = self._make(str(self.folder / name))
        if known is None:
            about = FinalTable(("run", name), [(key, str(value)) for key, value in facts.items()])
            self._writer.add_text("run", as_markdown(about), 0)
        return name

    def scalars(self, x: int, time: float, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, x, time, new_style=True, double_precision=True)

    def image(self, name: str, pixels: NDArray[np.uint8], x: int) -> None:
        self._writer.add_image(name, pixels, x, dataformats="HWC")

    def table(self, name: str, table: FinalTable, x: int) -> None:
        self._writer.add_text(name, as_markdown(table), x)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


make = TensorBoard
