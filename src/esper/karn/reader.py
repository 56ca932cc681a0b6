"""Reads run folders: finished runs, runs in progress, and killed ones. T rows of one kind, E environments, S slots."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import msgspec
import numpy as np

from esper.karn.run_model import BlueprintAnalytics, RunModel, Tally
from esper.karn.schema import MEND, check_config, check_environment, check_summary
from esper.leyline.config.arguments import to_path
from esper.leyline.config.parsing import LARGEST_YAML, parse_json, parse_yaml
from esper.leyline.distribution import pip_install
from esper.leyline.errors import InputError, typed_line
from esper.nissa.events import RunShape, decode_lines, read_events, record
from esper.nissa.rows import ROWS, Row, RunRow
from esper.store.disk import open_regular, read_kept
from esper.store.files import CHANGES, CONFIG, ENVIRONMENT, EVENTS, SUMMARY, is_run
from esper.store.lock import LOCK, lives, owner_of

if TYPE_CHECKING:
    import pandas  # type: ignore[import-untyped]

Status = Literal["running", "finished", "interrupted", "failed", "killed"]
KINDS: Mapping[str, type[Row]] = {str(row.__struct_config__.tag): row for row in ROWS}
"""The kinds of rows by their names in the file."""

_LARGEST_JSON = 64 * 2**20  # bytes of summary.json, environment.json and changes.json that are read


class Tail:
    """The rows of a growing events.jsonl, as they are added.

    A resumed run may cut rows off the end and write them again. `read` then begins anew with the first row, and `restarts`
    counts how often that happened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.restarts = 0
        self._seen = 0  # complete rows
        self._last = b""  # the last of them, to recognise a file that was cut and written again
        self._place = 0  # bytes up to its end
        self._shape = RunShape()

    def read(self, most: int | None = None) -> list[Row]:
        """The complete rows since the last call, in order; all of them after a restart. InputError if a line is not a row.

        With `most`, the rows of that many bytes and of the rest of a line; further calls give the others, and the last none.
        """
        if not self.path.exists():
            return []
        with open_regular(self.path, MEND) as file:
            file.seek(max(self._place - len(self._last), 0))
            if file.read(len(self._last)) != self._last:
                self._seen, self._last, self._place, self._shape = 0, b"", 0, RunShape()
                self.restarts += 1
                file.seek(0)
            data = file.read() if most is None else file.read(most) + file.readline()
        lines = data.splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            lines.pop()
        if not lines:
            return []
        rows = list(decode_lines(self.path, lines, self._seen, self._shape))
        self._seen, self._last = self._seen + len(lines), lines[-1]
        self._place += sum(map(len, lines))
        return rows


class OpenRun:
    """A run folder, open for reading. Nothing is cached: every access reads what the folder holds at that time.

    folder (Path): the run folder
    """

    def __init__(self, folder: Path) -> None:
        """InputError if `folder` is not a run folder."""
        if not is_run(folder):
            raise InputError(
                f"{folder} is not a run folder: it has no {CONFIG}; name one that esper grow or train wrote"
            )
        self.folder = folder

    @property
    def config(self) -> dict[str, Any]:
        """Everything that was asked for, after defaults, as plain values."""
        path = self.folder / CONFIG
        content = parse_yaml(read_kept(path, LARGEST_YAML, MEND), str(path), MEND)
        if not isinstance(content, dict):
            raise InputError(f"{path} holds no mapping of keys; {MEND}")
        return content

    @property
    def checked_config(self) -> dict[str, Any]:
        """As `config`. InputError if a key of this version has a value that it cannot have."""
        content = self.config
        check_config(content, self.folder / CONFIG)
        return content

    @property
    def environment(self) -> Any:
        """The machine, the versions and the command line; None if environment.json is missing. InputError if it is damaged."""
        return self._json(ENVIRONMENT, check_environment)

    @property
    def summary(self) -> Any:
        """The final figures; None until the run has ended. InputError if summary.json is damaged."""
        return self._json(SUMMARY, check_summary)

    @property
    def changes(self) -> Any:
        """The settings that were changed when the run was resumed; None if there were none."""
        return self._json(CHANGES)

    @property
    def status(self) -> Status:
        """'running', 'finished', 'interrupted' or 'failed', as the last `run` row says; 'killed' if that row says 'running'
        but the process that wrote it has gone.
        """
        last = None
        for row in self.rows("run"):
            assert isinstance(row, RunRow)
            last = row.status
        return self.status_after(last)

    def status_after(self, last: str | None) -> Status:
        """As `status`, without reading the rows: `last` is the status in the last `run` row, None if there is no such row."""
        summary = self.summary if last is None else None
        if summary is not None:  # telemetry.level is off
            said = str(summary.get("status", "finished"))
            return "interrupted" if said == "interrupted" else "failed" if said == "failed" else "finished"
        if last in ("finished", "interrupted", "failed"):
            return cast(Status, last)
        return "running" if self.is_written else "killed"

    @property
    def is_written(self) -> bool:
        """Whether the process that writes the folder lives."""
        owner = owner_of(self.folder / LOCK)
        return owner is not None and lives(owner)

    def rows(self, kind: str | None = None) -> Iterator[Row]:
        """The rows of events.jsonl in order, or those of one kind. InputError if the kind is unknown or a line is not a row.

        A run with `telemetry.level: off` has none.
        """
        wanted = kind_of(kind)
        path = self.folder / EVENTS
        return (row for row in (read_events(path) if path.exists() else ()) if isinstance(row, wanted))

    def columns(self, kind: str) -> dict[str, Any]:
        """The rows of one kind as arrays, by field.

        Numbers become arrays of shape (T,), lists (T, E), and lists of lists (T, E, S). What was not measured is nan, as is a
        field that only trainings write. Fields of text, and lists whose length changes from row to row, become lists of T values.
        """
        rows = [record(row) for row in self.rows(kind)]
        return {name: _column([row.get(name) for row in rows]) for name in fields_of(kind_of(kind))} if rows else {}

    @property
    def steps(self) -> dict[str, Any]:
        """`columns("step")`: metrics (T, E), stages (T, E, S), alphas (T, E, S) and so on."""
        return self.columns("step")

    @property
    def lifecycle(self) -> dict[str, Any]:
        """`columns("lifecycle")`: one value for each change of stage."""
        return self.columns("lifecycle")

    @property
    def episodes(self) -> dict[str, Any]:
        """`columns("episode")`: one value for each environment at the end of each episode."""
        return self.columns("episode")

    @property
    def rounds(self) -> dict[str, Any]:
        """`columns("round")`: one value for each round of a training."""
        return self.columns("round")

    @property
    def blueprints(self) -> list[Tally]:
        """What became of each blueprint at each slot: tried, kept, pruned, contribution, parameters; the most tried first."""
        return BlueprintAnalytics.of(self.rows()).tallies()

    def frame(self, kind: str) -> "pandas.DataFrame":
        """The rows of one kind as a pandas data frame; lists stay lists. InputError if pandas is not installed."""
        try:
            import pandas
        except ImportError:
            raise InputError(f"frames need pandas, which is not installed; run {pip_install('frames')}") from None
        return pandas.DataFrame([record(row) for row in self.rows(kind)], columns=fields_of(kind_of(kind)))

    def follow(self, every: float = 0.5) -> Iterator[Row]:
        """The rows so far and then each new one, until the run ends; `every` is the pause between two looks [seconds].

        After a resume that cut rows off, all rows come again from the first.
        """
        tail = Tail(self.folder / EVENTS)
        while True:
            ended = self.status != "running"
            yield from tail.read()
            if ended:
                return
            time.sleep(every)

    def __repr__(self) -> str:
        return f"<run {str(self.folder)!r}, {self.status}>"

    def _repr_html_(self) -> str:
        """The head of the run's report, which a notebook shows."""
        from esper.karn.result import head_of  # imported here because it takes rich along

        return head_of(read_model(self), self.folder.resolve().name)

    def _json(self, name: str, check: Callable[[Any, Path], None] | None = None) -> Any:
        path = self.folder / name
        if not path.exists():
            return None
        content = parse_json(read_kept(path, _LARGEST_JSON, MEND), path, MEND)
        if check is not None:
            check(content, path)
        return content


def read_model(run: OpenRun) -> RunModel:
    """The model of a run folder. InputError if a file of it is damaged."""
    with fitting_files(run.folder):
        return complete(RunModel().update(run.rows()), run)


def complete(model: RunModel, run: OpenRun) -> RunModel:
    """Complete a model that has the rows of a run by its other files. InputError if one of these is damaged."""
    status = run.status_after(None if model.last is None else model.last.status)
    return model.complete(status, run.checked_config, run.summary, run.environment)


@contextmanager
def fitting_files(folder: Path) -> Iterator[None]:
    """Raise InputError if the body fails on what the files of a run folder hold, each of which is of its schema."""
    try:
        yield
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"the files of {folder} do not fit together ({typed_line(error)}); {MEND}") from error


def open_run(folder: str | PathLike[str]) -> OpenRun:
    """Open a run folder for reading, whether its run goes on, has ended, or was killed.

        run = esper.open_run("runs/demo")
        run.summary, run.status, run.steps["metrics"]

    Raises InputError if the folder is not a run folder.
    """
    return OpenRun(to_path(folder, "folder"))


def fields_of(kind: type[Row]) -> list[str]:
    """The names of a kind's fields as the file has them, `seq` and `time` first."""
    names = [field.encode_name for field in msgspec.structs.fields(kind)]
    first = [field.encode_name for field in msgspec.structs.fields(Row)]
    return [*first, *(name for name in names if name not in first)]


def kind_of(name: str | None) -> type[Row]:
    """The class of rows of a kind; every row for None. InputError if the kind is unknown."""
    if name is None:
        return Row
    if name not in KINDS:
        raise InputError(f"unknown kind of rows {name!r}; choose one of {', '.join(KINDS)}")
    return KINDS[name]


def _column(values: list[Any]) -> Any:
    """An array of numbers, None as nan, or the list itself if it holds anything else.

    Where a row has no lists, which other rows have, its part of the array is nan.
    """
    first = next((value for value in values if value is not None), None)
    try:
        if isinstance(first, list) and None in values:
            blank = np.full(np.shape(first), np.nan).tolist()
            values = [blank if value is None else value for value in values]
        array = np.array(values, dtype=object if first is None else None)
        if array.dtype == object:
            array = array.astype(np.float64)
    except (TypeError, ValueError):
        return values
    return array if array.dtype.kind in "biuf" else values
