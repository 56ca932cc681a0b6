"""Read run folders: finished runs, runs in progress, and killed ones. T rows of one kind, E environments, S slots."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NotRequired, TypedDict, cast

import msgspec
import numpy as np
from msgspec import Meta
from pydantic import BaseModel

from esper.karn.run_model import BlueprintAnalytics, RunModel, Tally
from esper.leyline.config.arguments import to_path
from esper.leyline.config.parsing import LARGEST_YAML, parse_json, parse_yaml
from esper.leyline.config.tree import BASELINES, Config, build_config
from esper.leyline.distribution import of_extra
from esper.leyline.messages import InputError, amended, typed_line
from esper.nissa.events import RunShape, decode_lines, read_events, record
from esper.nissa.rows import KINDS, Count, Row, Value
from esper.store.disk import open_regular, read_kept
from esper.store.files import CHANGES, CONFIG, ENVIRONMENT, EVENTS, SUMMARY, check_is_run
from esper.store.lock import LOCK, lives, owner_of

if TYPE_CHECKING:
    import pandas  # type: ignore[import-untyped]

Status = Literal["running", "finished", "interrupted", "failed", "killed"]
_LARGEST_JSON = 64 * 2**20  # bytes of summary.json, environment.json and changes.json that are read
MEND = "put back what the run wrote"  # what to do if a file of a run folder is damaged


class Tail:
    """Reads the rows of a growing events.jsonl as they are added.

    A resumed run may cut rows off the end and write them again. `read` then calls `again`, and begins anew with the first row.
    """

    def __init__(self, path: Path, again: Callable[[], None] = lambda: None) -> None:
        self.path, self._again = path, again
        self._seen = 0  # complete rows
        self._last = b""  # the last of them, to recognise a file that was cut and written again
        self._place = 0  # bytes up to its end
        self._shape = RunShape()

    def read(self, most: int | None = None) -> list[Row]:
        """Return the complete rows since the last call, in order; all of them after a restart. InputError if a line is not a row.

        With `most`, the rows of that many bytes and of the rest of a line; further calls give the others, and the last none.
        """
        if not self.path.exists():
            return []
        with open_regular(self.path, MEND) as file:
            file.seek(max(self._place - len(self._last), 0))
            if file.read(len(self._last)) != self._last:
                self._again()
                self._seen, self._last, self._place, self._shape = 0, b"", 0, RunShape()
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

    def parts(self, most: int) -> Iterator[list[Row]]:
        """Yield the rows that the file has now, as `read`; those that are added meanwhile are left to the next call.

        A run may write rows faster than they are taken in, so that reading to the end of the file would not end.
        """
        end = self.path.stat().st_size if self.path.exists() else 0
        while rows := self.read(most):
            yield rows
            if self._place >= end:
                return


class OpenRun:
    """Reads a run folder. Nothing is cached: every access reads what the folder holds at that time.

    folder (Path): the run folder
    """

    def __init__(self, folder: Path) -> None:
        check_is_run(folder)
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
        """As `config`. InputError if a key of this version has a value that it cannot have; keys of others are left out."""
        content = self.config
        with amended(f"{self.folder / CONFIG}: ", f", or {MEND}"):
            build_config(_known(content, Config))
        return content

    @property
    def environment(self) -> Any:
        """The machine, the versions and the command line; None if environment.json is missing. InputError if it is damaged."""
        check = partial(msgspec.convert, type=_ENVIRONMENT)
        return self._json(ENVIRONMENT, check, "does not describe the machine of a run")

    @property
    def summary(self) -> Any:
        """The final figures; None until the run has ended. InputError if summary.json is damaged."""
        return self._json(SUMMARY, check_summary, "is not the summary of a run")

    @property
    def changes(self) -> Any:
        """The settings that were changed when the run was resumed; None if there were none."""
        return self._json(CHANGES)

    @property
    def status(self) -> Status:
        """'finished', 'interrupted' or 'failed', as summary.json says; without it 'running' while the process that writes the
        folder lives, and 'killed' otherwise. The summary is written after the last row, and removed before further ones.
        """
        summary = self.summary
        if summary is None:
            return "running" if self.is_written else "killed"
        said = summary.get("status")
        return cast(Status, said) if said in ("interrupted", "failed") else "finished"

    @property
    def is_written(self) -> bool:
        """Whether the process that writes the folder lives."""
        owner = owner_of(self.folder / LOCK)
        return owner is not None and lives(owner)

    def rows(self, kind: str | None = None) -> Iterator[Row]:
        """Yield the rows of events.jsonl in order, or those of one kind. InputError if the kind is unknown or a line is no row.

        A run with `telemetry.level: off` has none.
        """
        wanted = kind_of(kind)
        path = self.folder / EVENTS
        return (row for row in (read_events(path) if path.exists() else ()) if isinstance(row, wanted))

    def columns(self, kind: str) -> dict[str, Any]:
        """Return the rows of one kind as arrays, by field.

        Numbers become arrays of shape (T,), lists (T, E), and lists of lists (T, E, S). What was not measured is nan, as is a
        field that only trainings write. Fields of text, and lists whose length changes from row to row, become lists of T values.
        """
        rows = [record(row) for row in self.rows(kind)]
        names = kind_of(kind).__struct_encode_fields__
        return {name: _column([row.get(name) for row in rows]) for name in names} if rows else {}

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
        """Return the rows of one kind as a pandas data frame; lists stay lists. InputError if pandas is not installed."""
        with of_extra("frames", "frames need pandas, which is"):
            import pandas
        return pandas.DataFrame(
            [record(row) for row in self.rows(kind)], columns=kind_of(kind).__struct_encode_fields__
        )

    def follow(self, every: float = 0.5) -> Iterator[Row]:
        """Yield the rows so far and then each new one, until the run ends; `every` is the pause between two looks [seconds].

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
        """Return what a notebook shows: the heading of the run's report, what came out, and the tables of figures."""
        from esper.karn.report import frame, page  # imported here because they take rich along

        model, name = read_model(self), self.folder.resolve().name
        verdicts, others, tables, _ = page.results(model)
        lines = [page.heading(model), *verdicts, *others]
        return frame.TEMPLATES.get_template("head.html").render(name=name, lines=lines, tables=tables)

    def _json(self, name: str, check: Callable[[Any], object] | None = None, wrong: str = "") -> Any:
        path = self.folder / name
        content = parse_json(read_kept(path, _LARGEST_JSON, MEND), path, MEND) if path.exists() else None
        try:
            if content is not None and check is not None:
                check(content)
        except (msgspec.ValidationError, TypeError) as error:
            raise InputError(f"{path} {wrong}: {error}; {MEND}") from None
        return content


def read_model(run: OpenRun) -> RunModel:
    """Return the model of a run folder. InputError if a file of it is damaged."""
    with fitting_files(run.folder):
        return RunModel().update(run.rows()).complete(run)


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


def kind_of(name: str | None) -> type[Row]:
    """Return the class of rows of a kind; every row for None. InputError if the kind is unknown."""
    if name is None:
        return Row
    if name not in KINDS:
        raise InputError(f"unknown kind of rows {name!r}; choose one of {', '.join(KINDS)}")
    return KINDS[name]


def _column(values: list[Any]) -> Any:
    """Return an array of numbers, None as nan, or the list itself if it holds anything else.

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


# What environment.json and summary.json hold.


def _entry(fields: Mapping[str, Any]) -> Any:
    """Return the type of a mapping by key, of which a key that ends in ? may be missing; others are left to who reads them."""
    by_key, optional = cast(Any, (TypedDict, NotRequired))  # mypy knows no types that are made as it runs
    kinds = {key.removesuffix("?"): optional[kind] if key.endswith("?") else kind for key, kind in fields.items()}
    return by_key("Entry", kinds)


_STATUS = Literal["running", "finished", "interrupted", "failed"]
_ENVIRONMENT = _entry({"command?": list[str]})
_ANY_RUN = {
    "error?": _entry({"type": str, "message": str}),
    "workers?": _entry({"number": Count, "lost": Count, "waiting_seconds": float}),
    "outputs?": _entry({"waits": Count, "waiting_seconds": float}),
    "explanations?": list[str],
}
_FAILED = _entry({**_ANY_RUN, "status?": _STATUS, "steps_done?": Count})  # before it had figures
_TRAINED = _entry(
    {
        **_ANY_RUN,
        "status": _STATUS,
        "rounds_done": Count,
        "best_round?": int | None,
        "best_validation_objective": Value,
        "last_rounds": dict[str, Value],
        "anomalies?": dict[str, dict[str, str | int]],
        "controller_share": Value,
        "rollbacks": dict[str, Count],
        "refused": dict[str, Count],
        "seconds?": float,
        "policy_inputs?": dict[str, float],
    }
)
_SIZED = _entry(  # a network that became wider as a whole (`esper.AnytimeGrowth`)
    {
        **_ANY_RUN,
        "status": _STATUS,
        **dict.fromkeys(("verdict", "why"), str),
        **dict.fromkeys(("steps_done", "seen"), Count),
        "sizes": list[Count],
        "seconds": float,
    }
)
_LABELS = list[str | int | float | bool]
_SEED = _entry({"env": Count, "slot": str, "blueprint": str, "step": Count, "reason": str})
_CLASS_FIGURES = _entry(
    {
        **dict.fromkeys(("balanced_accuracy", "f1_macro", "roc_auc"), list[Value]),
        "confusion": list[list[Count]] | None,
    }
)
_HEAD = _entry({"envs": Annotated[int, Meta(ge=1, le=2**31)], "metric": str})


@lru_cache
def _grown(envs: int, metric: str) -> Any:
    """Return the type of the summary of a growth that came to its end."""
    list_of, by_name = cast(Any, (list, dict))
    each = Meta(min_length=envs, max_length=envs)  # environment
    values, counts = Annotated[list[Value], each], Annotated[list[Count], each]
    one_or_each = Count | counts
    pair = _entry(
        {"host": values | None, "grown": values}
    )  # of the twins, None without twins, and of the grown networks
    static = {"absent?": str, "note?": str, "params?": counts, "seconds?": Value, f"test_{metric}?": values}
    comparison = {"test_objective": list[Value], "difference": Value, "low": Value, "high": Value}
    splits = {"train?": one_or_each, "probe": one_or_each, "validation?": one_or_each, "test": one_or_each}
    rare = {"classes": _LABELS, "rare": _LABELS, "examples": list[Count], "weighted": bool}
    widening = {"step": Count, "host_params_before": Count, "host_params": Count}
    return _entry(
        {
            **_ANY_RUN,
            "status": _STATUS,
            **dict.fromkeys(("verdict?", "task", "controller", "device", "metric", "objective_formula"), str),
            **dict.fromkeys(("envs", "steps", "steps_done", "seed", "rows"), Count),
            "epochs_done?": Value,
            "examples?": _entry(splits),
            "host_params": one_or_each,
            "grown_params": counts,
            **{f"{split}_{name}": pair for split in ("test", "validation") for name in (metric, "loss", "objective")},
            "best": _entry({"env": Annotated[int, Meta(ge=0, lt=envs)], "select": str, "validation": Value}),
            "baselines?": by_name[str, _entry(static)],
            "compared?": by_name[str, _entry(comparison)],
            "constant?": _entry({f"test_{metric}": values}),
            "rare_classes?": _entry({**rare, "grown": _CLASS_FIGURES, "host": _CLASS_FIGURES | None}),
            "seeds": _entry(dict.fromkeys(("germinated", "fossilized", "unfinished", "discarded", "pruned"), Count)),
            "grown": Annotated[list[dict[str, str]], each],
            "widened?": list_of[_entry(widening)],
            "widen_ahead?": list[Count],
            "best_step": _entry({"host": counts | None, "grown": counts}) | None,
            "stopped_early": bool,
            "stopped_because": str | None,
            "rollbacks": dict[str, Count],
            "refused": dict[str, Count],
            "skipped_updates?": _entry({"updates": Count, "grown": list[Count]}),
            **dict.fromkeys(("plantings?", "keeps?", "prunes?"), list_of[_SEED]),
            "seconds": float,
            "env_steps_per_second": Value,
            "phase_seconds?": dict[str, float],
            "reading_p95?": float,
        }
    )


def check_summary(summary: Any) -> None:
    """Raise `msgspec.ValidationError` or TypeError, which names the key, if the content is not that of a summary.json."""
    if "grown_params" not in summary:
        kinds = {"rounds_done": _TRAINED, "sizes": _SIZED}
        msgspec.convert(summary, next((kinds[key] for key in kinds if key in summary), _FAILED))
        return
    msgspec.convert(summary, _HEAD)
    msgspec.convert(summary, _grown(summary["envs"], summary["metric"]))
    for name, static in summary.get("baselines", {}).items():
        if name not in BASELINES:
            raise msgspec.ValidationError(f"Invalid enum value {name!r} - at `key in $.baselines`")
        for key in {"params", f"test_{summary['metric']}"} - static.keys() if "absent" not in static else ():
            raise msgspec.ValidationError(f"Object missing required field `{key}` - at `$.baselines.{name}`")


def is_whole(summary: Any, training: bool) -> bool:
    """Return whether a summary is that of a growth, or of a training, which came to its end."""
    with suppress(msgspec.ValidationError, TypeError):
        check_summary(summary)
        return ("rounds_done" if training else "grown_params") in summary
    return False


def _known(content: Mapping[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    """Return the keys of a mapping that a config, or a section of it, has."""
    known = {name: content[name] for name in model.model_fields if name in content}
    for name, value in known.items():
        inner = model.model_fields[name].annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel) and isinstance(value, Mapping):
            known[name] = _known(value, inner)
    return known
