"""Export to Weights & Biases: runs in its offline mode, which `wandb sync` uploads if the user wants that."""

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from esper.karn.exporters.targets import FinalTable

PROJECT = "esper"


class WeightsAndBiases:
    """Writes a folder `wandb/offline-run-...`; a run that continues has one more folder with the same id."""

    def __init__(self, folder: Path) -> None:
        os.environ.setdefault("WANDB_MODE", "offline")
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # else it may report errors to its makers
        import wandb

        self.folder, self._wandb = folder, wandb

    def open(self, name: str, known: str | None, facts: Mapping[str, str | int]) -> str:
        """The id of the run is drawn by wandb."""
        wandb = self._wandb
        self._run = wandb.init(
            project=PROJECT,
            name=name,
            id=known,
            dir=str(self.folder),
            config=dict(facts),
            resume="allow" if os.environ["WANDB_MODE"] == "online" else None,
            settings=wandb.Settings(
                console="off", silent=True, disable_git=True, save_code=False, x_disable_stats=True, x_disable_meta=True
            ),
        )
        return str(self._run.id)

    def scalars(self, x: int, time: float, values: Mapping[str, float]) -> None:
        self._run.log({**values, "_timestamp": time}, step=x)

    def image(self, name: str, pixels: NDArray[np.uint8], x: int) -> None:
        self._run.log({name: self._wandb.Image(pixels)}, step=x)

    def table(self, name: str, table: FinalTable, x: int) -> None:
        cells = self._wandb.Table(columns=list(table.columns), data=[list(row) for row in table.rows])
        self._run.log({name: cells}, step=x)

    def flush(self) -> None:
        """Its own process writes the file."""

    def close(self) -> None:
        self._run.finish()


make = WeightsAndBiases
