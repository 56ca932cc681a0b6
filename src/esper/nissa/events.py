"""The rows of events.jsonl, one class per kind. E environments, S slots.

A row says what was measured and nothing else: what was not measured is nan in an array and null in the file. Fields
with one value per environment take arrays as they are; the writer turns them into lists.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from esper.leyline.actions import RELEVANT, Actions, Head, Op
from esper.leyline.stages import IN_BUDGET, Stage, among
from esper.leyline.verdicts import Refusal, Vital
from esper.leyline.view import Outcome, Scores, Seeds, Space, Transitions, View

if TYPE_CHECKING:
    Numbers = Sequence[float | None] | NDArray[np.floating[Any]]
    Matrix = Sequence[Sequence[float | None]] | NDArray[np.floating[Any]]
    Integers = Sequence[int] | NDArray[np.integer[Any]]
    Table = Sequence[Sequence[int]] | NDArray[np.integer[Any]]
    Flags = Sequence[bool] | NDArray[np.bool_]
else:  # what a reader of the file finds
    Numbers = list[float | None]
    Matrix = list[list[float | None]]
    Integers = list[int]
    Table = list[list[int]]
    Flags = list[bool]


class Row(msgspec.Struct, kw_only=True, tag_field="kind"):
    """What every row carries. The hub fills both fields in."""

    seq: int = -1  # place in the file, from 0, without a gap
    time: float = 0.0  # when the row was written [seconds since 1970]


class RunRow(Row, tag="run", kw_only=True):
    """The first row of a run, and its last; another one where it was taken up with a changed config."""

    status: Literal["running", "finished", "interrupted", "failed"]
    task: str
    controller: str
    envs: int
    steps: int
    seed: int
    device: str
    slots: Sequence[str]
    blueprints: Sequence[str]  # the menu
    host_params: Integers  # (E,); none where a run grows other hosts in every round
    changed: Sequence[str] = ()  # settings as `esper resume --set` named them, of the changes made here


class StepRow(Row, tag="step", kw_only=True):
    """One step of every environment; all lists are over environments."""

    episode: int
    step: int  # counted from 0
    metric: Numbers  # (E,) on the probe split, after the step
    loss: Numbers  # (E,) on the probe split, after the step
    train_loss: Numbers  # (E,) mean over the step's batches
    op: Sequence[str]  # (E,)
    slot: Sequence[str | None]  # (E,) null where the op acts on none
    accepted: Flags  # (E,)
    refused: Sequence[str | None]  # (E,) a `Refusal` in lower case; null where the decision was carried out
    stage: Table  # (E, S) a `Stage`
    alpha: Matrix  # (E, S)
    added_params: Integers  # (E,) of the seeds in BLENDING, HOLDING or FOSSILIZED
    twin_metric: Numbers | None = None  # (E,) of the never-grow twins, where there are any


class LifecycleRow(Row, tag="lifecycle", kw_only=True, rename={"from_stage": "from", "to_stage": "to"}):
    """One slot of one environment went from one stage to another."""

    episode: int
    step: int
    env: int
    slot: str
    from_stage: str
    to_stage: str
    blueprint: str | None  # null where the slot held no seed
    alpha: float  # dose after the transition


class RollbackRow(Row, tag="rollback", kw_only=True):
    """One row of the population failed in a step and was put back to its last healthy snapshot."""

    episode: int
    step: int
    env: int
    twin: bool  # the never-grow twin of the environment, and not the environment itself
    reason: str  # a `Vital` in lower case
    metric: float | None  # on the probe split, of what failed
    loss: float | None
    pruned: Sequence[str]  # slots whose seed did not come back
    stage: Sequence[int]  # (S,) a `Stage` each, after it


class EpisodeRow(Row, tag="episode", kw_only=True):
    """One environment at the end of an episode; the figures are those of the network that would be exported."""

    episode: int
    step: int  # steps taken
    env: int
    metric: float | None  # on the probe split
    loss: float | None  # on the probe split
    host_params: int
    added_params: int
    fossilized: int  # seeds kept
    grown: dict[str, str]  # blueprint by slot, of the seeds kept
    unfinished: Sequence[str]  # slots whose seed was not kept, and is left out
    rollbacks: int  # in the episode


class RoundRow(Row, tag="round", kw_only=True):
    """One round of a controller's training; figures that were not measured are null."""

    round: int  # counted from 0; those of imitation are below 0
    seconds: float  # of the round
    figures: Mapping[str, float | None]  # by name, docs/training.md


def step_row(view: View, outcome: Outcome, *, twin_metric: Numbers | None = None) -> StepRow:
    """The row of the step that `outcome` describes and that led to `view`."""
    measured, seeds = view.measurements, view.seeds
    ops, slots = _decisions(outcome.actions, view.space)
    return StepRow(
        episode=outcome.episode,
        step=outcome.step,
        metric=outcome.after.metric,
        loss=outcome.after.loss,
        train_loss=measured.train_loss,
        op=ops,
        slot=slots,
        accepted=outcome.accepted,
        refused=[Refusal(why).name.lower() if why else None for why in outcome.refused.tolist()],
        stage=seeds.stage,
        alpha=seeds.alpha,
        added_params=outcome.after.added_params,
        twin_metric=twin_metric,
    )


def lifecycle_rows(
    episode: int, step: int, space: Space, changes: Transitions, before: Seeds, after: Seeds
) -> Iterator[LifecycleRow]:
    """One row per change of stage between two states of the seeds, in the order of `changes`.

    A seed that has just been removed is named by what it was, as its slot no longer holds it.
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
        )


def rollback_rows(
    outcome: Outcome, space: Space, found: NDArray[np.int8], failed: Scores, before: Seeds, after: Seeds
) -> Iterator[RollbackRow]:
    """One row per rollback of a step: `found` (rows,) over environments and then their twins, what `failed` was worth, and the
    seeds on either side of the rollback.
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
            stage=after.stage[row].tolist(),
        )


def episode_rows(outcome: Outcome, space: Space, seeds: Seeds, rollbacks: NDArray[np.int64]) -> Iterator[EpisodeRow]:
    """One row per environment at the end of an episode, from the outcome of its last step, the seeds after it, and how often
    each was rolled back, (E,) or longer.
    """
    scores = outcome.exported
    assert scores is not None, "an episode has ended where the exported network was measured"
    for env, (stages, blueprints) in enumerate(zip(seeds.stage.tolist(), seeds.blueprint.tolist(), strict=True)):
        slots = list(zip(space.slots, stages, blueprints, strict=True))
        grown = {name: space.blueprints[index].name for name, stage, index in slots if stage == Stage.FOSSILIZED}
        yield EpisodeRow(
            episode=outcome.episode,
            step=outcome.step + 1,
            env=env,
            metric=float(scores.metric[env]),
            loss=float(scores.loss[env]),
            host_params=int(outcome.host_params[env]),
            added_params=int(scores.added_params[env]),
            fossilized=len(grown),
            grown=grown,
            unfinished=[name for name, stage, index in slots if index >= 0 and stage != Stage.FOSSILIZED],
            rollbacks=int(rollbacks[env]),
        )


def encode(row: Row) -> bytes:
    """The row as one line of strict JSON with its newline."""
    return _encoder.encode(row) + b"\n"


def decode(line: bytes | str) -> Row:
    """A line of events.jsonl as the row that it was."""
    row: Row = _decoder.decode(line)
    return row


def _decisions(actions: Actions, space: Space) -> tuple[list[str], list[str | None]]:
    """Names of the ops and, where they act on one, of the slots."""
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
