"""Keeps and prunes of seeds: all are counted, and those that a page shows are held, so that a long run takes no more memory."""

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


class Decisions(NamedTuple):
    """Keeps and prunes of a run.

    Attributes:
        total (int): of all
        measured (int): of those with a contribution
        first (list of Decided): the first `LISTED`
        ends (list of Decided): the largest contributions and then the smallest, `DRAWN_DECISIONS` at most
        kept (list of pairs): slot and step of every keep outside of trainings
    """

    total: int
    measured: int
    first: list[Decided]
    ends: list[Decided]
    kept: list[tuple[str, int]]


class DecisionLog:
    """Takes in the changes of stages of a run, in order."""

    def __init__(self) -> None:
        self._count = self._measured = 0
        self._first: list[Decided] = []
        self._ends: list[Decided] = []
        self._kept: list[tuple[str, int]] = []

    def write(self, row: LifecycleRow) -> None:
        """Count a row if it is a decision to keep or to remove a seed."""
        if row.to_stage not in ("FOSSILIZED", "PRUNED") or not row.blueprint or not row.why:
            return
        decided = _decided(row)
        self._count += 1
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
        return Decisions(self._count, self._measured, list(self._first), _ends(self._ends), list(self._kept))


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
