"""Write the run folder of a network that `esper.AnytimeGrowth` widens, which `esper watch`, `report` and `serve` read."""

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from esper.leyline.config.parsing import LARGEST_YAML, parse_yaml
from esper.leyline.config.tree import Config
from esper.leyline.messages import InputError, RunWarning, warn
from esper.nissa.hub import Hub, JsonLines
from esper.nissa.recovery import resume_events
from esper.nissa.rows import RunRow
from esper.runs.folder.environment import describe_environment, environment_row
from esper.runs.folder.run_folder import check_folder, create_folder, make_folder
from esper.store.disk import read_kept, write_atomic
from esper.store.files import CONFIG, ENVIRONMENT, EVENTS, MARK, SUMMARY, is_run, to_json
from esper.store.lock import Lock

_note = partial(warn, category=RunWarning)


class SizeLog:
    """Writes the config, the events and the summary of a run; the folder is opened by `begin`.

    A run that is resumed, by what `state` returned, keeps the rows up to there, and writes the others again.
    """

    def __init__(self, folder: Path, *, overwrite: bool) -> None:
        """Raise InputError if the folder cannot be that of a run."""
        self.folder, self.overwrite = folder, overwrite
        self.resumed: dict[str, Any] | None = None  # what `state` returned then
        self.begun = False
        self._began = time.time()  # by which two runs are told apart
        self.noted = 0.0  # compute of the network at the last row of sizes
        self._place: dict[str, Any] | None = None  # in the events, before the last row
        if not is_run(folder):  # a run there may be the one that is resumed
            check_folder(folder)
        self._lock = Lock(folder, _note)
        self.hub = Hub([JsonLines(folder / EVENTS, note=_note)], "run")

    def begin(self, device: torch.device, settings: Mapping[str, Any], **head: Any) -> None:
        """Open the folder, and write its first files and rows; of a run that is resumed, keep them.

        settings: what growth was made with. head: task, seed and host_param_counts of the first row.
        """
        folder, resumed = self.folder, self.resumed if is_run(self.folder) else None
        if resumed is None:
            check_folder(folder, self.overwrite)
            make_folder(folder)
        else:  # of this run, or of another one
            path, mend = folder / CONFIG, "give run= the folder of the run that is resumed, or a new one"
            known = parse_yaml(read_kept(path, LARGEST_YAML, mend), str(path), mend)
            own = known.get("anytime") if isinstance(known, dict) else None
            if not isinstance(own, dict) or own.get("began") != resumed["began"]:
                raise InputError(f"{folder} holds another run than the one that is resumed; {mend}")
        self._lock.take()
        if resumed is not None:
            try:
                resume_events(folder, resumed["seq"], resumed["events"], _note)
            except InputError:  # nothing is written to what is refused
                self._lock.release()
                raise
        self.begun = True
        self._head = {"controller": "anytime", "envs": 1, "steps": 0, "device": str(device), **head}
        if resumed is not None:
            (folder / SUMMARY).unlink(missing_ok=True)
            self.hub.seq, self.noted, self._began = resumed["seq"], resumed["noted"], resumed["began"]
            return
        create_folder(folder, self.overwrite, _note)
        config = {
            "task": head["task"],
            "controller": "anytime",
            "seed": head["seed"],
            "anytime": {**settings, "began": self._began},
        }
        write_atomic(folder / CONFIG, MARK + yaml.safe_dump(config, sort_keys=False, allow_unicode=True))
        found = describe_environment(device, Config())
        write_atomic(folder / ENVIRONMENT, to_json(found))
        self._write_head("running")
        self.hub.emit(environment_row(found))

    def state(self) -> dict[str, Any] | None:
        """Return the place in the events, for a checkpoint; None before there are any."""
        if not self.begun:
            return self.resumed
        return self._place or {**self.hub.state(), "noted": self.noted, "began": self._began}

    def end(self, summary: Mapping[str, Any]) -> None:
        """Write the last row and the summary, and release the folder."""
        self._place = self.state()
        self._write_head("finished")
        self.hub.flush()
        self.hub.close()
        write_atomic(self.folder / SUMMARY, to_json({"status": "finished", **summary}))
        self._lock.release()

    def _write_head(self, status: Any) -> None:
        self.hub.emit(RunRow(status=status, slots=(), blueprints=(), **self._head))
