"""Open and close a run folder: what is read first, what is written, and what `--overwrite` removes.

A folder is a run of Esper if its config.yaml begins with `MARK`. Within it, the files of Esper are recognised by their names and
places. Other files are never removed.
"""

import errno
import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Self

from esper.leyline.config.tree import Config, dump_config
from esper.leyline.data.task import AnyTask
from esper.leyline.distribution import check_installed
from esper.leyline.lifecycle.view import Space
from esper.leyline.messages import (
    DataFault,
    InputError,
    OutOfMemory,
    UserCodeError,
    describe_error,
    listed,
    system_in_words,
)
from esper.leyline.plugins import OUTPUTS, load_plugin, plugins
from esper.leyline.reference import is_reference, resume_call, resume_command
from esper.nissa.hub import Guarded, Hub, JsonLines, Output
from esper.nissa.recovery import Mark, resume_events
from esper.nissa.rows import CheckpointRow, EnvironmentRow, RunRow
from esper.runs.folder.environment import CODE, DATA, compare_origin, environment_row, origin_of
from esper.runs.folder.interrupt import Interrupt
from esper.runs.folder.resume import NEW, PAID, Opening, change_config, finished, fitting, read_config
from esper.store import files
from esper.store.changes import read_trail, record_origin
from esper.store.checkpoint import Checkpoint, Checkpoints
from esper.store.disk import DiskRetry, Retry, unfinished, write_atomic, write_once
from esper.store.lock import LOCK, Lock, is_lock
from esper.store.tensors import StateCopy
from esper.tolaria.runtime import resolve_device

_OWN = re.compile(
    "|".join(
        (
            "|".join(map(re.escape, (files.CONFIG, files.CHANGES, files.ENVIRONMENT, files.SUMMARY, files.REPORT))),
            r"events(-(cut|damaged)-\d+)?\.jsonl",
            rf"{files.MODELS}/(env-\d+|{files.BEST})/((model|topology)\.[\w.]+|SHA256SUMS)",
            rf"{files.CONTROLLER}/controller\.\w+",
            rf"{files.CHECKPOINTS}/(latest|best|step-\d+/state\.\w+)",
        )
    )
)
"""The files that Esper writes into a run folder, without the lock. Esper writes no links."""
_ASIDE = re.compile(r"\.(.+)\.(new|old)")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_MEND = "name another folder (--run, run=)"
_LEFT_OUT = "interrupted again: the last whole step is saved; another Ctrl-C leaves that out"


class Contents(NamedTuple):
    """Lists the contents of a run folder."""

    own: list[Path]  # files that Esper wrote
    folders: list[Path]  # folders that Esper made, inner folders first
    others: list[Path]  # other files and folders beside them, which a run does not touch
    # other files and links that have the name of a file or folder of Esper, or are in such a folder
    in_the_way: list[Path]


def list_contents(folder: Path) -> Contents:
    """Classify the contents of a run folder by their names. Other folders are not searched, and links are not followed."""
    found = Contents([], [], [], [])

    def intended(name: str) -> str:
        aside = _ASIDE.fullmatch(name)
        return unfinished(Path(name)) or (aside[1] if aside else name)

    for top in sorted(folder.iterdir()):
        name = intended(top.name)
        if is_lock(top):
            continue
        if name not in (*files.NAMES, LOCK) and not _OWN.fullmatch(name):
            found.others.append(top)
            continue
        inside = sorted(top.rglob("*"), reverse=True) if top.is_dir() and not top.is_symlink() else []
        for path in (*inside, top):
            if path.is_dir() and not path.is_symlink():
                found.folders.append(path)
            elif _OWN.fullmatch("/".join(map(intended, path.relative_to(folder).parts))) and not path.is_symlink():
                found.own.append(path)
            else:
                found.in_the_way.append(path)
    return found


def check_folder(folder: Path, overwrite: bool = False) -> None:
    """Check, without changing anything, that a run can be written to `folder`. Raises InputError if it cannot."""
    try:
        # A process that was killed before it wrote the config leaves a lock or the beginning of the config.
        content = [path for path in folder.iterdir() if not is_lock(path) and unfinished(path) != files.CONFIG]
    except FileNotFoundError:
        content = []
    except NotADirectoryError:
        raise InputError(f"the run folder {folder} is a file, or lies under one; name a folder") from None
    except OSError as error:
        raise InputError(f"the run folder {folder} cannot be read: {error.strerror}; name another") from None
    if files.is_run(folder) and not overwrite:
        raise InputError(
            f"{folder} already holds a run; name another (--run, run=), or replace it (--overwrite, overwrite=True)"
        )
    if content and not files.is_run(folder):
        raise InputError(f"{folder} holds other files and no run; name a new or an empty folder (--run, run=)")
    if content:
        stays = f"--overwrite (overwrite=True) leaves {folder} as it is"
        if not files.is_marked(folder):
            raise InputError(
                f"{folder / files.CONFIG} does not begin as the config of an Esper run, so {stays}; {_MEND}"
            )
        if in_the_way := list_contents(folder).in_the_way:
            raise InputError(
                f"a run would overwrite {listed(in_the_way)}, which Esper did not write, so {stays}; move those files "
                f"elsewhere, or {_MEND}"
            )
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    if not os.access(place, os.W_OK | os.X_OK):
        raise InputError(f"no permission to write to {place}, the folder for the run; {_MEND}")


def create_folder(folder: Path, overwrite: bool = False, note: Callable[[str], None] | None = None) -> None:
    """Create the folder, and with `overwrite` remove the files of an earlier run; `note` is told of other files."""
    check_folder(folder, overwrite)
    make_folder(folder)
    found = list_contents(folder)
    with system_in_words(None, _MEND):
        for path in found.own:
            if path != folder / files.CONFIG:
                path.unlink()
        for path in found.folders:
            if not any(path.iterdir()):
                path.rmdir()
        (folder / files.CONFIG).unlink(missing_ok=True)  # last, because it makes the folder recognisable as a run
    if found.others and note is not None:
        were = "were" if len(found.others) > 1 else "was"
        note(f"{listed(found.others)} in {folder} {were} not written by Esper and not removed")


def make_folder(folder: Path) -> None:
    """Create the folder if it does not exist. Raises InputError if that fails."""
    with system_in_words(None, _MEND):
        folder.mkdir(parents=True, exist_ok=True)


def exporters(config: Config, folder: Path | None, note: Callable[[str], None]) -> list[Guarded]:
    """Make the exporters and the outputs of other packages that a config names, each with a queue and a thread."""
    names = config.telemetry.exporters
    if not names:
        return []
    if folder is None:
        raise InputError(
            f"telemetry.exporters is {', '.join(names)}, and exporters read the run folder; name one (--run, run=)"
        )
    if config.telemetry.level == "off":
        raise InputError("telemetry.exporters needs events, and telemetry.level is off; set it to step or run")
    of_packages = plugins(OUTPUTS)
    for name in names:
        if name not in of_packages:
            check_installed(name)
    exporter = import_module("esper.commands.exporting").exporter
    return [
        Guarded(load_plugin(OUTPUTS, name)(folder) if name in of_packages else exporter(folder, name), note)
        for name in names
    ]


class RunFolder:
    """Writes the folder of a run that is open. Without a path, everything is accepted and nothing is stored.

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
        """`config` is the changed one if the `opening` has a change. `outputs` get every row after events.jsonl."""
        self.path, self.config, self.note = path, config, note
        self.opening = opening
        self.retry: Retry = write_once
        kept: list[JsonLines] = []
        others = [*(Guarded(output, note) for output in outputs), *exporters(config, path, note)]
        if path is not None:
            self._command = resume_command(path, config.tasks or (config.task,), config.controller)
            seconds, resumed = config.faults.disk_seconds, f"continue with `{self._command}`"
            self.retry = DiskRetry(seconds, note, path, lambda: interrupt.asked, resumed=resumed)
            kept.append(JsonLines(path / files.EVENTS, self.retry, note))
        self.hub = Hub([*kept, *others], config.telemetry.level, raise_steps=config.telemetry.raise_steps)
        self.lock = Lock(path, note) if path is not None else None
        self.store: Checkpoints | None = None  # without it no checkpoint is written
        self._copy, self._copied = StateCopy(), -1  # the state that `keep` copied, and the steps after which
        self.found: Checkpoint | None = None
        self.mark: Mark | None = None  # position in the events at the checkpoint that was found
        self.origin = {} if path is None else origin_of(tasks, config.controller)
        self.differs: tuple[str, ...] | None = None  # sentences, if the origin is not the recorded one

    def __enter__(self) -> Self:
        try:
            if self.path is not None and self.lock is not None:
                self._open(self.path, self.lock)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *rest: object) -> None:
        """Release the lock once all files are written. A KeyboardInterrupt does not wait for a checkpoint."""
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
        """Lock a folder, which `begin` does for one that does not exist yet, and read the checkpoint to go on from."""
        opening = self.opening
        if not opening.resume:
            check_folder(path, opening.overwrite)
        if files.is_run(path) if opening.resume else path.is_dir():
            self.retry(lock.path, lock.take)
        if opening.resume:
            if read_config(path) != (opening.before or self.config):
                mend = "resume the run with the config that the file holds"
                raise InputError(f"{path / files.CONFIG} differs from the config of this run; {mend}")
            self.store = Checkpoints(path, self.config.checkpoint, self.retry)
            self.found = found = self.store.read(self.note)
            if found is None and opening.before is not None and finished(path) is not None:
                lacks = "no checkpoint from which it could go on"
                raise InputError(f"{path} holds a finished run and {lacks}; start a new run")
            anew = "no complete checkpoint: starting again from config.yaml"
            self.note(f"going on after step {found.number}" if found else anew)
            if self.found is not None or (path / files.ENVIRONMENT).exists():
                self.differs = compare_origin(path, self.origin, opening.other_data)
        if self.found is not None:
            with fitting(self.found):
                self.hub.seq = operator.index(self.found.state["seq"])
                self.hub.raised = operator.index(self.found.state.get("raised", 0))
                mark = self.found.state.get("events")
                if mark is not None:
                    self.mark = {"bytes": operator.index(mark["bytes"]), "sha256": str(mark["sha256"])}

    def begin(
        self, environment: Callable[[], Mapping[str, Any]], space: Space | None = None, host_params: Any = ()
    ) -> None:
        """Write the first files and the first row; for a run that continues, write only what is missing or changed.

        space: None for networks that did not fit into memory. host_params: (E,) parameters of the hosts.
        """
        self._space, self._host_params, environment = space, host_params, cache(environment)
        row = self.row("running")
        if self.path is not None and self.lock is not None:
            path, lock = self.path, self.lock
            steps, differs, origin = 0 if self.found is None else self.found.number, self.differs, self.origin
            config, settings = self.config, self.opening.settings
            if self.opening.resume:  # first, as it refuses events of another version
                self.retry(path / files.EVENTS, lambda: resume_events(path, self.hub.seq, self.mark, self.note))
            if self.opening.before is not None:
                self.retry(path / files.CONFIG, lambda: change_config(path, config, settings, steps))
            if differs is not None:
                self.retry(path / files.CHANGES, lambda: record_origin(path, differs, origin, steps))
            if self.opening.resume:
                (path / files.SUMMARY).unlink(missing_ok=True)
                for each in list_contents(path).own:
                    if each.parent == path and unfinished(each) is not None:  # a killed process was writing it
                        each.unlink(missing_ok=True)
                if self.store is not None:
                    self.store.sweep()  # otherwise only the next checkpoint would sweep
            else:
                if not lock.held:
                    make_folder(path)
                    self.retry(lock.path, lock.take)
                # checked again, because another run may have used the folder before the lock was taken
                create_folder(path, self.opening.overwrite, self.note)
                self._write(path / files.CONFIG, files.MARK + dump_config(self.config))
                self.store = Checkpoints(path, self.config.checkpoint, self.retry)
            if not (path / files.ENVIRONMENT).exists():  # the process may have been killed before it was written
                code = {name: known for name, known in origin["versions"].items() if is_reference(name)}
                recorded = {**environment(), DATA: origin[DATA], **({CODE: code} if code else {})}
                self._write(path / files.ENVIRONMENT, files.to_json(recorded))
            # changes after the checkpoint: the rows that named them were cut from the events
            entries = [entry for entry in read_trail(path).entries if entry.steps >= steps]
            row.changed = [each for entry in entries for each in (*entry.settings, *entry.noted)]
        if self.found is None or row.changed:
            self.hub.emit(row)
        if self.found is None and self.hub.wants(EnvironmentRow):
            self.hub.emit(environment_row(environment()))

    def end(self, summary: Mapping[str, Any], *, at_once: bool = False) -> None:
        """Write the last row and the summary, with its error if any, after the last checkpoint unless `at_once`."""
        row = self.row(summary["status"])
        if self.store is not None and not at_once:
            self.store.join()
        self._emit_checkpoints()
        if "error" in summary:
            row.error = f"{summary['error']['type']}: {summary['error']['message']}"
        self.hub.emit(row)
        self.hub.flush()
        if self.path is not None:
            self._write(self.path / files.SUMMARY, files.to_json(summary))

    def save(self, steps: int, state: Callable[[], Mapping[str, Any]], best: bool = False) -> None:
        """Begin a checkpoint of a state and of the events, unless no step was taken since the last.

        best: whether its validation score is the best so far.
        """
        if self.store is None or steps == self.store.last:
            return
        self.store.join()
        self._emit_checkpoints()
        self.hub.flush()
        self.store.begin(steps, {**self.hub.state(), **state()}, best)

    def keep(self, steps: int, state: Mapping[str, Any]) -> None:
        """Copy the state before a step, in place of the copy before, for a run that reads by batch: the step may fail there."""
        self._copied = -1  # an interrupt may end the copying
        self._copy.take({**self.hub.state(), **state})
        self._copied = steps

    def save_kept(
        self,
        note: Callable[[str], None] | None = None,
        whole: Callable[[dict[str, Any]], None] = lambda state: None,
    ) -> None:
        """Write what was kept as a checkpoint, if it is newer than the last one.

        note: is told before, after a second signal. whole: completes the copy by what is kept elsewhere.
        """
        if self.store is None or self._copied <= self.store.last:
            return
        if note is not None:
            note(_LEFT_OUT)
        try:
            self.hub.flush()
            state = self._copy.tree()
            whole(state)
            self.store.write(self._copied, state)
        except Exception as error:  # the error that ended the step is raised again, and not this one
            (note or self.note)(f"no checkpoint could be written after a step failed: {error}")

    def _emit_checkpoints(self) -> None:
        """Emit a row for each checkpoint that was completed since the last call."""
        while self.store is not None and self.store.written:
            self.hub.emit(CheckpointRow(**self.store.written.popleft()))

    def row(self, status: Any) -> RunRow:
        """Return the row of kind `run` that says this status of the run. `begin` must have been called."""
        config, space = self.config, self._space
        return RunRow(
            status=status,
            task=config.task,
            controller=PAID if config.tasks else config.controller,
            envs=config.envs,
            steps=config.steps,
            seed=config.seed,
            device=str(resolve_device(config.device)),
            slots=() if space is None else space.slots,
            blueprints=() if space is None else [blueprint.name for blueprint in space.blueprints],
            host_param_counts=self._host_params,
        )

    @contextmanager
    def recorded(self, asked: Callable[[], Mapping[str, Any]]) -> Iterator[None]:
        """Write the last row and the summary if the body fails, and say in the error how the run is resumed.

        asked: returns the summary up to now. On a full disk nothing is written.
        """
        try:
            yield
        except Exception as error:
            if isinstance(error, OSError) and error.errno in _FULL:
                raise
            summary = {**asked(), "status": "failed", "error": describe_error(error)}
            self.end(summary, at_once=True)
            if self.path is None:
                raise
            number = None if self.store is None else self.store.latest()
            place = "starts again with the first step, because there is no checkpoint yet"
            if number is not None:
                place = f"continues after step {number:,}, that of the last checkpoint"
            if isinstance(error, OutOfMemory | DataFault | UserCodeError | InputError):
                raise type(error)(f"{error}; {self._command} {place}") from error.__cause__
            error.add_note(
                f"The run in {self.path} has the status failed. Correct the error; then `{self._command}` {place}. If the task "
                f"or the controller was an object made in Python, call {resume_call(self.path, (), ('task', 'controller'))} "
                "instead."
            )
            raise

    def _write(self, path: Path, content: str) -> None:
        self.retry(path, lambda: write_atomic(path, content))
