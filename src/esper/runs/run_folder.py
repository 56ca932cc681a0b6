"""A run folder from its opening to its closing: the files that are read first, and those that are written."""

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Self

from esper.leyline.config import Config
from esper.leyline.config_text import dump_config
from esper.leyline.errors import describe_error
from esper.leyline.resuming import is_reference
from esper.leyline.task import AnyTask
from esper.nissa.hub import Hub
from esper.nissa.outputs import Guarded, JsonLines, Output
from esper.nissa.recovery import Mark
from esper.nissa.rows import CheckpointRow, EnvironmentRow, RunRow
from esper.runs.contents import check_folder, create_folder, make_folder, sweep
from esper.runs.environment import environment_row
from esper.runs.exporting import Exporter, check_exporters
from esper.runs.interrupt import Interrupt
from esper.runs.origin import CODE, DATA, Difference, compare_origin, origin_of
from esper.runs.resume import NEW, Opening, change_config, fitting, reopen_run, take_up
from esper.store.changes import read_trail, record_origin
from esper.store.checkpoint import Checkpoint, Checkpoints
from esper.store.disk import Retry, write_atomic, write_once
from esper.store.files import CHANGES, CONFIG, ENVIRONMENT, EVENTS, SUMMARY, is_run, to_json
from esper.store.full_disk import DiskRetry
from esper.store.lock import Lock


class RunFolder:
    """The folder of a run that is open. Without a path, everything is accepted and nothing is stored.

    Entering the context checks the folder. If the run continues, it also reads the folder: `found` is the checkpoint,
    and `hub` continues its numbering. `begin` writes the first file, so bad input that is found before leaves the
    folder unchanged. `end` writes the last row and the summary.
    """

    def __init__(
        self,
        path: Path | None,
        config: Config,
        note: Callable[[str], None],
        interrupt: Interrupt,
        opening: Opening = NEW,
        tasks: Sequence[AnyTask] = (),
        outputs: Sequence[Output] = (),
    ) -> None:
        """`config` is that of the run, or the changed config if the `opening` has a change. `tasks` are those of the run.

        outputs: sinks of the user, which get every row after the writer of events.jsonl.
        """
        self.path, self.config, self.note = path, config, note
        self.opening = opening
        self.retry: Retry = write_once
        kept: list[Output] = []
        check_exporters(config, path)
        if path is not None:
            names = config.tasks or (config.task,)
            seconds = config.faults.disk_seconds
            self.retry = DiskRetry(seconds, note, path, lambda: interrupt.asked, names, config.controller)
            kept.append(JsonLines(path / EVENTS, self.retry, note))
            outputs = [*outputs, *(Exporter(path, name) for name in config.telemetry.exporters)]
        self.hub = Hub(
            [*kept, *map(Guarded, outputs)], config.telemetry.level, raise_steps=config.telemetry.raise_steps
        )
        self.lock = Lock(path, note) if path is not None else None
        self.store: Checkpoints | None = None
        self.found: Checkpoint | None = None
        self.mark: Mark | None = None  # position in the events at the checkpoint that was found
        self.origin = origin_of(tasks, config.controller) if path is not None else None
        self.differs: Difference | None = None  # differences from the versions and data that the run began with

    def __enter__(self) -> Self:
        try:
            if self.path is not None and self.lock is not None:
                self._open(self.path, self.lock)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *rest: object) -> None:
        """Release the lock once all files are written.

        A KeyboardInterrupt does not wait for a checkpoint.
        """
        try:
            try:
                self.hub.close()
            finally:
                self._leave(kind)
        except KeyboardInterrupt:
            self._leave(KeyboardInterrupt)  # the interrupt may have come before the lock was released
            raise

    def _leave(self, kind: type[BaseException] | None) -> None:
        """Release the lock once the checkpoint is written."""
        if self.lock is None:
            return
        if self.store is None:
            self.lock.release()
            return
        try:
            if kind is None or not issubclass(kind, KeyboardInterrupt):
                self.store.close()
        finally:
            self.store.leave(self.lock.release)

    def _open(self, path: Path, lock: Lock) -> None:
        """Lock an existing folder, and read the checkpoint from which the run continues.

        A folder that does not exist yet is locked in `begin`.
        """
        opening = self.opening
        if not opening.resume:
            check_folder(path, opening.overwrite)
        if is_run(path) if opening.resume else path.is_dir():
            self.retry(lock.path, lock.take)
        if opening.resume:
            self.store, self.found = take_up(path, self.config, opening.change, self.note, self.retry)
        if opening.resume and self.origin is not None and (self.found is not None or (path / ENVIRONMENT).exists()):
            self.differs = compare_origin(path, self.origin, opening.other_data)
        if self.found is not None:
            with fitting(self.found):
                self.hub.seq = operator.index(self.found.state["seq"])
                self.hub.raised = operator.index(self.found.state.get("raised", 0))
                mark = self.found.state.get("events")
                if mark is not None:
                    self.mark = {"bytes": operator.index(mark["bytes"]), "sha256": str(mark["sha256"])}

    def begin(self, environment: Callable[[], Mapping[str, Any]], row: RunRow) -> None:
        """Write the first files and the first row; for a run that continues, write only what is missing or changed."""
        environment = cache(environment)
        if self.path is not None and self.lock is not None:
            self._make(self.path, self.lock, environment)
            # changes after the checkpoint: the rows that named them were cut from the events
            since = 0 if self.found is None else self.found.number
            entries = [entry for entry in read_trail(self.path).entries if entry.steps >= since]
            row.changed = [each for entry in entries for each in (*entry.settings, *entry.noted)]
        if self.found is None or row.changed:
            self.hub.emit(row)
        if self.found is None and self.hub.wants(EnvironmentRow):
            self.hub.emit(environment_row(environment()))

    def end(self, row: RunRow, summary: Mapping[str, Any], *, at_once: bool = False) -> None:
        """Write the last row and the summary, after the last checkpoint is complete or, with `at_once`, without waiting
        for it.
        """
        if self.store is not None and not at_once:
            self.store.join()
        if self.store is not None:
            emit_checkpoints(self.hub, self.store)
        self.hub.emit(row)
        self.hub.flush()
        if self.path is not None:
            self._write(self.path / SUMMARY, to_json(summary))

    def fail(self, row: RunRow, summary: Mapping[str, Any], error: Exception) -> None:
        """Write the last row and the summary, both with the error, of a run that ends by an error."""
        found = describe_error(error)
        row.error = f"{found['type']}: {found['message']}"
        self.end(row, {**summary, "status": "failed", "error": found}, at_once=True)

    def _make(self, path: Path, lock: Lock, environment: Callable[[], Mapping[str, Any]]) -> None:
        steps, differs = 0 if self.found is None else self.found.number, self.differs
        config, change = self.config, self.opening.change
        if change is not None:
            self.retry(path / CONFIG, lambda: change_config(path, config, change, steps))
        if differs is not None:
            origin = differs.origin._asdict()
            self.retry(path / CHANGES, lambda: record_origin(path, differs.noted, origin, steps))
        if self.opening.resume:
            self.retry(path / EVENTS, lambda: reopen_run(path, self.hub.seq, self.mark, self.note))
            sweep(path)
            if self.store is not None:
                self.store.sweep()  # otherwise only the next checkpoint would sweep
        else:
            if not lock.held:
                make_folder(path)
                self.retry(lock.path, lock.take)
            # checked again, because another run may have used the folder before the lock was taken
            create_folder(path, self.opening.overwrite, self.note)
            self._write(path / CONFIG, dump_config(self.config))
            self.store = Checkpoints(path, self.config.checkpoint, self.retry)
        if not (path / ENVIRONMENT).exists():  # the process may have been killed before it was written
            versions, data = ({}, {}) if self.origin is None else self.origin
            code = {name: known for name, known in versions.items() if is_reference(name)}
            recorded = {**environment(), DATA: data, **({CODE: code} if code else {})}
            self._write(path / ENVIRONMENT, to_json(recorded))

    def _write(self, path: Path, content: str) -> None:
        self.retry(path, lambda: write_atomic(path, content))


def emit_checkpoints(hub: Hub, store: Checkpoints) -> None:
    """Emit a row for each checkpoint that was completed since the last call."""
    while store.written:
        hub.emit(CheckpointRow(**store.written.popleft()._asdict()))
