"""Export to MLflow: a local SQLite store, with a folder of artifacts beside it."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from esper.karn.exporters.store import KEPT, wait_for
from esper.karn.exporters.targets import FinalTable, as_markdown
from esper.store.lock import Lock

EXPERIMENT = "esper"
STORE = "mlflow.db"
MOST = 900  # metrics that wait to be written; a batch of MLflow's holds at most 1000


class MLflow:
    """Writes to `mlflow.db` and `artifacts`. Metrics are written in batches, because each call is a transaction."""

    def __init__(self, folder: Path) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # else it reports its use to its makers
        import mlflow
        from mlflow.entities import Metric

        self.folder, self._metric = folder.absolute(), Metric
        self._connect: Callable[[Path], Any] = lambda path: mlflow.MlflowClient(f"sqlite:///{path}")
        self._waiting: list[Any] = []

    def open(self, name: str, known: str | None, facts: Mapping[str, str | int]) -> str:
        """The id of the run is drawn by MLflow. Facts are tags, because parameters could not change when a run is resumed."""
        client, experiment = self._opened()
        if known is None:
            known = str(client.create_run(experiment, run_name=name).info.run_id)
        for key, value in facts.items():
            client.set_tag(known, key, value)
        client.update_run(known, status="RUNNING")
        self._client, self._id = client, known
        return known

    def _opened(self) -> tuple[Any, str]:
        """A client of the store, and the id of the experiment.

        MLflow makes a store in many steps, and one that was killed on the way, or that two processes make at once, cannot be
        used. So one process makes it under another name, and it gets its own when it is whole.
        """
        store = self.folder / STORE
        part = store.with_suffix(".part")
        lock = Lock(self.folder / KEPT, lambda line: None)
        wait_for(lock)
        try:
            if not store.exists():
                part.unlink(missing_ok=True)
                self._connect(part).search_experiments()
                part.replace(store)
            client = self._connect(store)
            found = client.get_experiment_by_name(EXPERIMENT)
            place = (self.folder / "artifacts").as_uri()
            return client, found.experiment_id if found else client.create_experiment(EXPERIMENT, place)
        finally:
            lock.release()

    def scalars(self, x: int, time: float, values: Mapping[str, float]) -> None:
        if len(self._waiting) + len(values) > MOST:
            self.flush()
        self._waiting += [self._metric(name, value, round(1000 * time), x) for name, value in values.items()]

    def image(self, name: str, pixels: NDArray[np.uint8], x: int) -> None:
        self._client.log_image(self._id, pixels, f"{name}.png")

    def table(self, name: str, table: FinalTable, x: int) -> None:
        # log_table would append to the table that an earlier end of the run has written
        self._client.log_dict(self._id, {"columns": table.columns, "data": table.rows}, f"{name}.json")
        self._client.log_text(self._id, as_markdown(table) + "\n", f"{name}.md")

    def flush(self) -> None:
        if self._waiting:
            self._client.log_batch(self._id, metrics=self._waiting)
            self._waiting = []

    def close(self) -> None:
        self.flush()
        self._client.set_terminated(self._id)


make = MLflow
