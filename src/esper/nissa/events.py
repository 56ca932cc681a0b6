"""Making, writing and reading the rows of events.jsonl (nissa/rows.py). E environments, S slots."""

import functools
import operator
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from esper.leyline.actions import RELEVANT, Actions, Head, Op
from esper.leyline.errors import InputError
from esper.leyline.stages import IN_BUDGET, Stage, among
from esper.leyline.verdicts import Refusal, Vital
from esper.leyline.view import Bools, Outcome, Scores, Seeds, Space, Transitions, View
from esper.nissa.rows import (
    READABLE,
    ROWS,
    SCHEMA,
    EpisodeRow,
    LifecycleRow,
    Numbers,
    RollbackRow,
    Row,
    StepRow,
)
from esper.store.reading import open_regular

_DECIDED = (Stage.GERMINATED, Stage.PRUNED, Stage.FOSSILIZED)


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
    """The row of a line of events.jsonl. InputError if the line is not a row of version `SCHEMA`."""
    try:
        return _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"not a row of version {SCHEMA} of the events ({error})") from None


def read_events(path: Path) -> Iterator[Row]:
    """The rows of an events.jsonl, in order. A last line without a newline, which is still being written, is left out.

    InputError if the file cannot be read, has another version, or has a line that is not a row.
    """
    with open_regular(path, "name the events.jsonl of a run folder") as file:
        yield from decode_lines(path, file)


def decode_lines(path: Path, lines: Iterable[bytes], first: int = 0) -> Iterator[Row]:
    """The rows of lines of an events.jsonl, the first of which is line `first`, counted from 0. Raises as `read_events`."""
    for number, line in enumerate(lines, first):
        if number == 0 and (version := _version(line)) not in (None, *READABLE):
            raise InputError(
                f"{path} holds rows of version {version}, this Esper reads the versions {READABLE[0]} to {SCHEMA}; "
                "docs/events.md says what changed"
            )
        if line.endswith(b"\n"):
            try:
                yield decode(line)
            except InputError as error:
                raise InputError(f"line {number + 1} of {path}: {error}") from None


def _version(line: bytes) -> int | None:
    """The version in a run row, 1 if it has none; None if the line is not a run row."""
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
_decoder: msgspec.json.Decoder[Row] = msgspec.json.Decoder(functools.reduce(operator.or_, ROWS))
