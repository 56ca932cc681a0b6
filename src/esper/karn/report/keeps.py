"""Plantings, keeps and prunes of seeds: all are counted, and those that a page shows are held, so that memory is bounded."""

import math
from typing import NamedTuple

from msgspec import UNSET

from esper.nissa.rows import LifecycleRow

DRAWN_DECISIONS = 60
"""Most decisions that the figure of contributions shows; the largest contributions and the smallest."""
LISTED = 200
"""Most rows of a table of single decisions or rollbacks."""


class Decided(NamedTuple):
    """A decision to keep or to remove a seed, and what was measured for it.

    Attributes:
        round (int or None): round of a training; None in other runs
        env (int): environment
        step (int): step
        slot (str): name of the slot
        blueprint (str): name of the blueprint
        kept (bool): whether the seed was kept
        contribution (float): contribution to the metric; nan if it was not measured
        error (float): its standard error
        why (str): the reason
    """

    round: int | None
    env: int
    step: int
    slot: str
    blueprint: str
    kept: bool
    contribution: float
    error: float
    why: str


class Planting(NamedTuple):
    """A decision to plant a seed: where, when, which, and the reason in words."""

    env: int
    step: int
    slot: str
    blueprint: str
    why: str


class Decisions(NamedTuple):
    """Plantings, keeps and prunes of a run; of a training those of its episodes, without those of validations.

    Attributes:
        total (int): of all
        measured (int): of those with a contribution
        first (list of Decided): the first `LISTED`
        ends (list of Decided): the largest contributions and then the smallest, `DRAWN_DECISIONS` at most
        kept (list of pairs): slot and step of every keep outside of trainings
        planted (int): plantings outside of trainings
        plantings (list of Planting): the first `LISTED` of them
        idle (int): prunes of seeds in TRAINING whose gain was exactly 0, so that switching them on changed no loss
    """

    total: int
    measured: int
    first: list[Decided]
    ends: list[Decided]
    kept: list[tuple[str, int]]
    planted: int
    plantings: list[Planting]
    idle: int


class DecisionLog:
    """Takes in the changes of stages of a run, in order."""

    def __init__(self) -> None:
        self._count = self._measured = self._planted = self._idle = 0
        self._plantings: list[Planting] = []
        self._first: list[Decided] = []
        self._ends: list[Decided] = []
        self._kept: list[tuple[str, int]] = []

    def write(self, row: LifecycleRow) -> None:
        """Count a row if it is a decision to plant, to keep or to remove a seed, and not one of a validation."""
        if row.cohort not in (UNSET, "training"):
            return
        if row.to_stage == "GERMINATED" and row.cohort is UNSET and row.why:
            self._planted += 1
            if len(self._plantings) < LISTED:
                self._plantings.append(Planting(row.env, row.step, row.slot, row.blueprint or "", row.why))
        if row.to_stage not in ("FOSSILIZED", "PRUNED") or not row.blueprint or not row.why:
            return
        decided = _decided(row)
        self._count += 1
        self._idle += row.to_stage == "PRUNED" and row.gain_mean == 0 and row.gain_se == 0
        if len(self._first) < LISTED:
            self._first.append(decided)
        if decided.kept and row.cohort is UNSET:
            self._kept.append((decided.slot, decided.step))
        if not math.isnan(decided.contribution):
            self._measured += 1
            self._ends.append(decided)
            if len(self._ends) > 8 * DRAWN_DECISIONS:
                self._ends = _ends(self._ends)

    def decisions(self) -> Decisions:
        """The decisions so far."""
        return Decisions(
            self._count,
            self._measured,
            list(self._first),
            _ends(self._ends),
            list(self._kept),
            self._planted,
            list(self._plantings),
            self._idle,
        )


def _ends(decided: list[Decided]) -> list[Decided]:
    """Both ends of the order of contributions; of equal ones the earlier comes first, so parts give the ends of the whole."""
    ordered = sorted(decided, key=lambda each: -each.contribution)
    half = DRAWN_DECISIONS // 2
    return ordered if len(ordered) <= DRAWN_DECISIONS else ordered[:half] + ordered[-half:]


def _decided(row: LifecycleRow) -> Decided:
    nothing = float("nan")
    return Decided(
        row.round if isinstance(row.round, int) else None,
        row.env,
        row.step,
        row.slot,
        row.blueprint or "",
        row.to_stage == "FOSSILIZED",
        nothing if row.contribution_mean is None else row.contribution_mean,
        nothing if row.contribution_se is None else row.contribution_se,
        row.why or "",
    )
