"""The rows of events.jsonl, one class per kind. E environments, S slots.

A value that was not measured is nan in an array and null in the file. Fields with one value per environment take arrays,
which the writer converts to lists. A field name has the same type in all kinds of rows, so that the file can be read as one
table; an array therefore has another name than the number of one environment.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from esper.leyline.actions import RELEVANT, Actions, Head, Op
from esper.leyline.errors import InputError
from esper.leyline.stages import IN_BUDGET, Stage, among
from esper.leyline.verdicts import Refusal, Vital
from esper.leyline.view import Bools, Outcome, Scores, Seeds, Space, Transitions, View
from esper.store.reading import open_regular

if TYPE_CHECKING:
    Numbers = Sequence[float | None] | NDArray[np.floating[Any]]
    Matrix = Sequence[Sequence[float | None]] | NDArray[np.floating[Any]]
    Integers = Sequence[int] | NDArray[np.integer[Any]]
    Table = Sequence[Sequence[int]] | NDArray[np.integer[Any]]
    Flags = Sequence[bool] | NDArray[np.bool_]
else:  # the types in the file
    Numbers = list[float | None]
    Matrix = list[list[float | None]]
    Integers = list[int]
    Table = list[list[int]]
    Flags = list[bool]


_DECIDED = (Stage.GERMINATED, Stage.PRUNED, Stage.FOSSILIZED)

SCHEMA = 2
"""Version of the rows, in every `run` row. Rows of version 1 have no such field; docs/events.md lists what changed."""


class Row(msgspec.Struct, kw_only=True, tag_field="kind"):
    """Fields of every row, beside `kind`."""

    seq: Annotated[int, Meta(description="place in the file, from 0, without a gap")] = -1
    time: Annotated[float, Meta(description="when the row was written [seconds since 1970]")] = 0.0


class RunRow(Row, tag="run", kw_only=True):
    """The first and the last row of a run. A run that is resumed with a changed config has one more at that place."""

    schema: Annotated[int, Meta(description="version of the rows")] = SCHEMA
    status: Annotated[Literal["running", "finished", "interrupted", "failed"], Meta(description="of the run")]
    task: Annotated[str, Meta(description="name of the task")]
    controller: Annotated[str, Meta(description="name of the controller; ppo in a training")]
    envs: Annotated[int, Meta(description="environments, twins not counted")]
    steps: Annotated[int, Meta(description="steps of an episode")]
    seed: Annotated[int, Meta(description="run seed")]
    device: Annotated[str, Meta(description="device of the networks")]
    slots: Annotated[Sequence[str], Meta(description="(S,) names of the slots")]
    blueprints: Annotated[Sequence[str], Meta(description="names of the menu")]
    host_param_counts: Annotated[
        Integers, Meta(description="(E,) parameters of the hosts; empty in a training, whose hosts change every round")
    ]
    changed: Annotated[
        Sequence[str], Meta(description="settings that `esper resume --set` changed at this row, as key=value")
    ] = ()
    error: Annotated[str | None, Meta(description="type and message of the error of a failed run; null otherwise")] = (
        None
    )


class PlayedRow(Row, kw_only=True):
    """Fields of every row of an episode in a training, whose rows come from several populations; other runs have none of them."""

    cohort: Annotated[
        str | msgspec.UnsetType, Meta(description="`training`, or `validation` for the greedy growth after a round")
    ] = msgspec.UNSET
    task: Annotated[str | msgspec.UnsetType, Meta(description="name of the population's task")] = msgspec.UNSET
    round: Annotated[
        int | msgspec.UnsetType, Meta(description="round of the training; rounds of imitation are below 0")
    ] = msgspec.UNSET


class StepRow(PlayedRow, tag="step", kw_only=True):
    """One step of every environment. All lists are over environments."""

    episode: Annotated[int, Meta(description="counted from 0")]
    step: Annotated[int, Meta(description="counted from 0")]
    metrics: Annotated[Numbers, Meta(description="(E,) task metric on the probe split, after the step")]
    losses: Annotated[Numbers, Meta(description="(E,) loss on the probe split, after the step")]
    train_losses: Annotated[Numbers, Meta(description="(E,) mean loss over the batches of the step")]
    ops: Annotated[Sequence[str], Meta(description="(E,) operation that the controller chose")]
    op_slots: Annotated[
        Sequence[str | None], Meta(description="(E,) slot of the operation; null where it acts on none")
    ]
    accepted: Annotated[Flags, Meta(description="(E,) whether the operation was carried out")]
    refused: Annotated[
        Sequence[str | None], Meta(description="(E,) why the operation was not carried out; null where it was")
    ]
    stages: Annotated[Table, Meta(description="(E, S) stage of every slot, 0 DORMANT to 7 EMBARGOED")]
    alphas: Annotated[Matrix, Meta(description="(E, S) dose of every slot")]
    added_param_counts: Annotated[
        Integers, Meta(description="(E,) parameters of the seeds in BLENDING, HOLDING or FOSSILIZED")
    ]
    twin_metrics: Annotated[
        Numbers | None, Meta(description="(E,) task metric of the never-grow twins; null without twins")
    ] = None


class LifecycleRow(PlayedRow, tag="lifecycle", kw_only=True, rename={"from_stage": "from", "to_stage": "to"}):
    """One change of stage of one slot of one environment."""

    episode: Annotated[int, Meta(description="counted from 0")]
    step: Annotated[int, Meta(description="counted from 0")]
    env: Annotated[int, Meta(description="environment")]
    slot: Annotated[str, Meta(description="name of the slot")]
    from_stage: Annotated[str, Meta(description="stage before")]
    to_stage: Annotated[str, Meta(description="stage after")]
    blueprint: Annotated[str | None, Meta(description="blueprint of the seed; null where the slot held none")]
    alpha: Annotated[float, Meta(description="dose after the change")]
    why: Annotated[
        str | None,
        Meta(description="why the seed was planted, pruned or fossilized; null at other changes and rollbacks"),
    ] = None
    contribution_mean: Annotated[
        float | None, Meta(description="contribution to the metric at that decision; null where not measured")
    ] = None
    contribution_se: Annotated[float | None, Meta(description="its standard error")] = None
    gain_mean: Annotated[
        float | None, Meta(description="incubation gain at that decision; null where not measured")
    ] = None
    gain_se: Annotated[float | None, Meta(description="its standard error")] = None
    gate_checks: Annotated[str | None, Meta(description="result of the gate of the seed at that decision")] = None


class RollbackRow(PlayedRow, tag="rollback", kw_only=True):
    """One environment, or its twin, failed in a step and was restored to its last healthy snapshot."""

    episode: Annotated[int, Meta(description="counted from 0")]
    step: Annotated[int, Meta(description="counted from 0")]
    env: Annotated[int, Meta(description="environment")]
    twin: Annotated[
        bool, Meta(description="true if the never-grow twin failed, false if the environment itself failed")
    ]
    reason: Annotated[str, Meta(description="the vital sign that failed")]
    metric: Annotated[float | None, Meta(description="task metric on the probe split, before the restoration")]
    loss: Annotated[float | None, Meta(description="loss on the probe split, before the restoration")]
    pruned: Annotated[Sequence[str], Meta(description="slots whose seed is not in the snapshot")]
    slot_stages: Annotated[Sequence[int], Meta(description="(S,) stage of every slot, after the restoration")]


class EpisodeRow(PlayedRow, tag="episode", kw_only=True):
    """One environment at the end of an episode. The figures are those of the network that is exported."""

    episode: Annotated[int, Meta(description="counted from 0")]
    step: Annotated[int, Meta(description="steps taken")]
    env: Annotated[int, Meta(description="environment")]
    metric: Annotated[float | None, Meta(description="task metric on the probe split")]
    loss: Annotated[float | None, Meta(description="loss on the probe split")]
    host_params: Annotated[int, Meta(description="parameters of the host")]
    added_params: Annotated[int, Meta(description="parameters of the seeds that were kept")]
    fossilized: Annotated[int, Meta(description="seeds that were kept")]
    grown: Annotated[dict[str, str], Meta(description="blueprint by slot, of the seeds that were kept")]
    unfinished: Annotated[Sequence[str], Meta(description="slots whose seed was not kept and is left out")]
    rollbacks: Annotated[int, Meta(description="restorations of the environment in the episode")]


class RoundRow(Row, tag="round", kw_only=True):
    """One round of a controller's training."""

    round: Annotated[int, Meta(description="counted from 0; rounds of imitation are below 0")]
    seconds: Annotated[float, Meta(description="duration of the round [seconds]")]
    figures: Annotated[
        Mapping[str, float | None], Meta(description="by name (docs/training.md); null where not measured")
    ]


ROWS: tuple[type[Row], ...] = (RunRow, StepRow, LifecycleRow, RollbackRow, EpisodeRow, RoundRow)
"""The kinds of rows."""


def step_row(view: View, outcome: Outcome, *, twin_metrics: Numbers | None = None) -> StepRow:
    """The row of the step that `outcome` describes and that led to `view`."""
    measured, seeds = view.measurements, view.seeds
    ops, slots = _decisions(outcome.actions, view.space)
    return StepRow(
        episode=outcome.episode,
        step=outcome.step,
        metrics=outcome.after.metric,
        losses=outcome.after.loss,
        train_losses=measured.train_loss,
        ops=ops,
        op_slots=slots,
        accepted=outcome.accepted,
        refused=[Refusal(why).name.lower() if why else None for why in outcome.refused.tolist()],
        stages=seeds.stage,
        alphas=seeds.alpha,
        added_param_counts=outcome.after.added_params,
        twin_metrics=twin_metrics,
    )


class Basis(NamedTuple):
    """The reason and the measurements of a decision to plant, keep or remove a seed; None for what was not measured.

    The fields are those of `LifecycleRow`.
    """

    why: str
    contribution_mean: float | None = None
    contribution_se: float | None = None
    gain_mean: float | None = None
    gain_se: float | None = None
    gate_checks: str | None = None


def lifecycle_rows(
    episode: int,
    step: int,
    space: Space,
    changes: Transitions,
    before: Seeds,
    after: Seeds,
    bases: Mapping[tuple[int, int], Basis],
) -> Iterator[LifecycleRow]:
    """One row per change of stage between two states of the seeds, in the order of `changes`.

    `bases` holds the reasons of plantings, removals and fossilizations, by environment and slot. The blueprint of a removed
    seed is taken from `before`.
    """
    planted = np.where(after.blueprint >= 0, after.blueprint, before.blueprint)
    for env, slot, source, target in np.stack(changes, axis=1).tolist():
        index = int(planted[env, slot])
        yield LifecycleRow(
            episode=episode,
            step=step,
            env=env,
            slot=space.slots[slot],
            from_stage=Stage(source).name,
            to_stage=Stage(target).name,
            blueprint=space.blueprints[index].name if index >= 0 else None,
            alpha=float(after.alpha[env, slot]),
            **(bases[env, slot]._asdict() if target in _DECIDED and (env, slot) in bases else {}),
        )


def rollback_rows(
    outcome: Outcome, space: Space, found: NDArray[np.int8], failed: Scores, before: Seeds, after: Seeds
) -> Iterator[RollbackRow]:
    """One row per rollback in a step. `found` (rows,) holds the environments and then their twins, `failed` the scores before
    the rollback, `before` and `after` the seeds before and after it.
    """
    envs = len(outcome.actions.op)
    for row in np.flatnonzero(found != Vital.GOOD).tolist():
        gone = among(before.stage[row], IN_BUDGET) & ~among(after.stage[row], IN_BUDGET)
        yield RollbackRow(
            episode=outcome.episode,
            step=outcome.step,
            env=row % envs,
            twin=row >= envs,
            reason=Vital(found[row]).name.lower(),
            metric=float(failed.metric[row]),
            loss=float(failed.loss[row]),
            pruned=[space.slots[slot] for slot in np.flatnonzero(gone)],
            slot_stages=after.stage[row].tolist(),
        )


def episode_rows(
    view: View, scores: Scores, steps: int, unfinished: Bools, rollbacks: NDArray[np.int64]
) -> Iterator[EpisodeRow]:
    """One row per environment at the end of an episode.

    `scores` are those of the networks that would be exported, which have the fossilized seeds of `view`. `unfinished` (E, S)
    marks the other seeds. `rollbacks` (E,) are counts. The arrays may be longer than E.
    """
    space, seeds = view.space, view.seeds
    for env, (stages, blueprints) in enumerate(zip(seeds.stage.tolist(), seeds.blueprint.tolist(), strict=True)):
        slots = zip(space.slots, stages, blueprints, strict=True)
        grown = {name: space.blueprints[index].name for name, stage, index in slots if stage == Stage.FOSSILIZED}
        yield EpisodeRow(
            episode=view.episode,
            step=steps,
            env=env,
            metric=float(scores.metric[env]),
            loss=float(scores.loss[env]),
            host_params=int(view.host_params[env]),
            added_params=int(scores.added_params[env]),
            fossilized=len(grown),
            grown=grown,
            unfinished=[name for name, left_out in zip(space.slots, unfinished[env].tolist(), strict=True) if left_out],
            rollbacks=int(rollbacks[env]),
        )


def encode(row: Row) -> bytes:
    """The row as one line of strict JSON with its newline."""
    return _encoder.encode(row) + b"\n"


def decode(line: bytes | str) -> Row:
    """The row of a line of events.jsonl. InputError if the line is no row of version `SCHEMA`."""
    try:
        row: Row = _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"not a row of version {SCHEMA} of the events ({error})") from None
    return row


def read_events(path: Path) -> Iterator[Row]:
    """The rows of an events.jsonl, in order. A last line without a newline, which is still being written, is left out.

    InputError if the file cannot be read, has another version, or has a line that is no row.
    """
    with open_regular(path, "name the events.jsonl of a run folder") as file:
        yield from decode_lines(path, file)


def decode_lines(path: Path, lines: Iterable[bytes], first: int = 0) -> Iterator[Row]:
    """The rows of lines of an events.jsonl, the first of which is line `first`, counted from 0. Raises as `read_events`."""
    for number, line in enumerate(lines, first):
        if number == 0 and (version := _version(line)) not in (None, SCHEMA):
            raise InputError(
                f"{path} holds rows of version {version}, this Esper reads version {SCHEMA}; docs/events.md says what changed"
            )
        if line.endswith(b"\n"):
            try:
                yield decode(line)
            except InputError as error:
                raise InputError(f"line {number + 1} of {path}: {error}") from None


def _version(line: bytes) -> int | None:
    """The version in a run row, 1 if it has none; None if the line is no run row."""
    try:
        first = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(first, dict) or first.get("kind") != "run":
        return None
    version = first.get("schema", 1)
    return version if isinstance(version, int) else None


def _decisions(actions: Actions, space: Space) -> tuple[list[str], list[str | None]]:
    """Names of the operations, and of their slots; None for the slot of an operation that acts on none."""
    known = (actions.op >= 0) & (actions.op < len(Op))
    acts = known & RELEVANT[np.where(known, actions.op, 0), Head.SLOT]
    acts &= (actions.slot >= 0) & (actions.slot < len(space.slots))
    names = [Op(op).name if there else str(op) for op, there in zip(actions.op.tolist(), known.tolist(), strict=True)]
    slots = [space.slots[slot] if act else None for slot, act in zip(actions.slot.tolist(), acts.tolist(), strict=True)]
    return names, slots


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a row cannot hold a {type(value).__name__}")


_encoder = msgspec.json.Encoder(enc_hook=_plain)
_decoder = msgspec.json.Decoder(RunRow | StepRow | LifecycleRow | RollbackRow | EpisodeRow | RoundRow)
