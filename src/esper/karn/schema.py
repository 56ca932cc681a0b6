"""The types of config.yaml, environment.json and summary.json, by which the reader of run folders checks them.

Keys that are not named here are left to who reads them.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import msgspec
from msgspec import Meta
from pydantic import BaseModel

from esper.leyline.config.tree import BASELINES, Config, build_config
from esper.leyline.errors import InputError
from esper.leyline.text import counted

MEND = "put back what the run wrote"  # what to do if a file of a run folder is damaged

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Value = float | None
Status = Literal["running", "finished", "interrupted", "failed"]


class Environment(TypedDict, total=False):
    """environment.json."""

    command: list[str]


class _Pair(TypedDict):
    """A quantity of the twins, None without twins, and of the grown networks; lists over environments."""

    host: list[Value] | None
    grown: list[Value]


class _Steps(TypedDict):
    host: list[Count] | None
    grown: list[Count]


class _Skipped(TypedDict):
    updates: Count
    grown: list[Count]


class _Examples(TypedDict):
    """Numbers of examples by split; lists over environments for a mixture."""

    probe: Count | list[Count]
    test: Count | list[Count]


class _Best(TypedDict):
    env: Count
    select: str
    validation: Value


class _Fates(TypedDict):
    germinated: Count
    fossilized: Count
    unfinished: Count
    discarded: Count
    pruned: Count


class _SeedFate(TypedDict):
    env: Count
    slot: str
    blueprint: str
    step: Count
    reason: str


class _Static(TypedDict, total=False):
    """A static network: why it is absent, or its parameters, seconds and `test_` values."""

    absent: str
    note: str
    params: list[Count]
    seconds: Value


class _Compared(TypedDict):
    """J of static networks, and the difference of the grown networks to it; without an interval, its ends are None."""

    test_objective: list[Value]
    difference: Value
    low: Value
    high: Value


class _ClassFigures(TypedDict):
    balanced_accuracy: list[Value]
    f1_macro: list[Value]
    roc_auc: list[Value]
    confusion: list[list[Count]] | None


class _RareClasses(TypedDict):
    classes: list[str | int | float | bool]
    rare: list[str | int | float | bool]
    examples: list[Count]
    weighted: bool
    grown: _ClassFigures
    host: _ClassFigures | None


class _Failure(TypedDict):
    type: str
    message: str


class _Actors(TypedDict):
    workers: Count
    lost: Count
    waiting_seconds: float


class Summary(TypedDict, total=False):
    """summary.json of any run."""

    error: _Failure
    actors: _Actors
    explanations: list[str]


class Failed(Summary, total=False):
    """summary.json of a run that failed before it had figures."""

    status: Status
    steps_done: Count


class Grown(Summary):
    """summary.json of a growth that came to its end."""

    status: Status
    verdict: NotRequired[str]
    task: str
    controller: str
    envs: Annotated[int, Meta(ge=1, le=2**31)]
    steps: Count
    steps_done: Count
    epochs_done: NotRequired[Value]
    seed: Count
    device: str
    rows: Count
    metric: str
    objective_formula: str
    examples: NotRequired[_Examples]
    host_params: Count | list[Count]
    grown_params: list[Count]
    best: _Best
    baselines: NotRequired[dict[str, _Static]]
    compared: NotRequired[dict[str, _Compared]]
    constant: NotRequired[dict[str, list[Value]]]
    rare_classes: NotRequired[_RareClasses]
    seeds: _Fates
    grown: list[dict[str, str]]
    best_step: _Steps | None
    stopped_early: bool
    stopped_because: str | None
    rollbacks: dict[str, Count]
    refused: dict[str, Count]
    skipped_updates: NotRequired[_Skipped]
    plantings: NotRequired[list[_SeedFate]]
    keeps: NotRequired[list[_SeedFate]]
    prunes: NotRequired[list[_SeedFate]]
    seconds: float
    env_steps_per_second: Value
    phase_seconds: NotRequired[dict[str, float]]


class FinishedTraining(Summary):
    """summary.json of a training that came to its end."""

    status: Status
    rounds_done: Count
    best_round: NotRequired[int | None]
    best_validation_objective: Value
    last_rounds: dict[str, Value]
    controller_share: Value
    rollbacks: dict[str, Count]
    refused: dict[str, Count]
    seconds: NotRequired[float]
    policy_inputs: NotRequired[dict[str, float]]


def check_summary(summary: Any, path: Path) -> None:
    """InputError, which names the key, if the content of a summary.json is none."""
    try:
        kind = Grown if "grown_params" in summary else FinishedTraining if "rounds_done" in summary else Failed
        msgspec.convert(summary, kind)
        if kind is Grown:
            for place, values in _of_environments(summary):
                if len(values) != summary["envs"]:
                    raise msgspec.ValidationError(
                        f"Expected {counted(summary['envs'], 'entry', 'entries')}, got {len(values)} - at `$.{place}`"
                    )
            if summary["best"]["env"] >= summary["envs"]:
                raise msgspec.ValidationError(f"Expected `int` < {summary['envs']} - at `$.best.env`")
    except (msgspec.ValidationError, TypeError) as error:
        raise InputError(f"{path} is not the summary of a run: {error}; {MEND}") from None


def _of_environments(summary: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the place and the content of every list over environments. ValidationError if one is of other values."""
    yield "grown_params", summary["grown_params"]
    yield "grown", summary["grown"]
    if isinstance(summary["host_params"], list):
        yield "host_params", summary["host_params"]
    for name, sizes in summary.get("examples", {}).items():
        if isinstance(sizes, list):
            yield f"examples.{name}", sizes
    names = [f"{split}_{name}" for split in ("test", "validation") for name in (summary["metric"], "loss", "objective")]
    pairs: dict[str, Any] = {name: summary.get(name) for name in names}
    msgspec.convert(pairs, dict[str, _Pair])
    if summary["best_step"] is not None:
        pairs["best_step"] = summary["best_step"]
    for name, pair in pairs.items():
        for part in ("host", "grown"):
            if pair[part] is not None:
                yield f"{name}.{part}", pair[part]
    if "constant" in summary:
        msgspec.convert(summary["constant"].get(names[0]), list[Value])
        yield f"constant.{names[0]}", summary["constant"][names[0]]
    for name, static in summary.get("baselines", {}).items():
        if name not in BASELINES:
            raise msgspec.ValidationError(f"Invalid enum value {name!r} - at `key in $.baselines`")
        for key in ("params", names[0]):
            if "absent" not in static:
                msgspec.convert(static.get(key), list[Value])
                yield f"baselines.{name}.{key}", static[key]


def check_environment(content: Any, path: Path) -> None:
    """InputError, which names the key, if the content of an environment.json is none."""
    try:
        msgspec.convert(content, Environment)
    except msgspec.ValidationError as error:
        raise InputError(f"{path} does not describe the machine of a run: {error}; {MEND}") from None


def check_config(content: Mapping[str, Any], path: Path) -> None:
    """InputError, which names the key, if a key of this version has another value than it may have.

    Keys of other versions are left out.
    """
    try:
        build_config(_known(content, Config))
    except InputError as error:
        raise InputError(f"{path}: {error}, or {MEND}") from None


def _known(content: Mapping[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    """The keys of a mapping that a config, or a section of it, has."""
    known = {}
    for name, field in model.model_fields.items():
        if name in content:
            value, inner = content[name], field.annotation
            if isinstance(inner, type) and issubclass(inner, BaseModel) and isinstance(value, Mapping):
                value = _known(value, inner)
            known[name] = value
    return known
