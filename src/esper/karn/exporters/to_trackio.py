"""Export to trackio: its local store."""

import os
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from esper.karn.exporters.targets import FinalTable
from esper.leyline.errors import InputError

PROJECT = "esper"
FOLDER = "TRACKIO_DIR"
REMOTE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")
"""Variables with which trackio would write elsewhere than into its folder."""


class Trackio:
    """Writes the project `esper` of the store in a folder."""

    def __init__(self, folder: Path) -> None:
        place = str(folder.absolute())
        if "trackio" in sys.modules and os.environ.get(FOLDER) != place:
            raise InputError(
                f"trackio is imported already, and it takes its folder when it is imported; set {FOLDER} to {place} before that, "
                "or export in a process of its own"
            )
        os.environ[FOLDER] = place
        os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
        for name in REMOTE:
            os.environ.pop(name, None)
        import trackio

        self._trackio = trackio

    def open(self, name: str, known: str | None, facts: Mapping[str, str | int]) -> str:
        """Runs are continued by their names."""
        resume = "never" if known is None else "must"
        with redirect_stdout(sys.stderr):
            self._run = self._trackio.init(
                PROJECT, name, config=dict(facts), resume=resume, embed=False, auto_log_gpu=False, auto_log_cpu=False
            )
        self._logged = self._stored()
        return name

    def scalars(self, x: int, time: float, values: Mapping[str, float]) -> None:
        self._log(dict(values), x)

    def image(self, name: str, pixels: NDArray[np.uint8], x: int) -> None:
        self._log({name: self._trackio.Image(pixels)}, x)

    def table(self, name: str, table: FinalTable, x: int) -> None:
        cells = self._trackio.Table(columns=list(table.columns), data=[list(row) for row in table.rows])
        self._log({name: cells}, x)

    def flush(self) -> None:
        """A thread of its own writes the store."""

    def close(self) -> None:
        with redirect_stdout(sys.stderr):
            self._trackio.finish()
        if self._stored() != self._logged:  # trackio only warns where it cannot write
            raise OSError(f"trackio stored {self._stored()} of {self._logged} entries in {os.environ[FOLDER]}")

    def _stored(self) -> int:
        from trackio.sqlite_storage import SQLiteStorage

        return int(SQLiteStorage.get_log_count(PROJECT, self._run.name, run_id=self._run.id))

    def _log(self, values: Mapping[str, object], x: int) -> None:
        self._run.log(values, step=x)
        self._logged += 1


make = Trackio
