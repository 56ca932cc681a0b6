"""What became of each blueprint at each slot, counted from the rows of one run."""

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

import numpy as np

from esper.nissa.rows import DecisionRow, EpisodeRow, LifecycleRow, PlayedRow, RollbackRow, Row

Place = tuple[object, ...]
"""A slot of an environment in an episode."""


class Tally(NamedTuple):
    """What became of the seeds of one blueprint at one slot.

    Attributes:
        blueprint (str): name of the blueprint
        slot (str): name of the slot
        tried (int): seeds planted
        kept (int): seeds fossilized
        pruned (int): seeds removed by a decision or by a rollback
        contribution (float): mean contribution to the metric when a seed was kept or removed; nan if never measured
        error (float): standard error of that mean over seeds; nan with fewer than two
        measured (int): number of seeds over which that mean is taken
        params_bought (int or None): parameters of the seeds that were kept; None if the run has no decision rows
        steps_to_keep (float): mean number of steps from planting to keeping; nan if none was kept
    """

    blueprint: str
    slot: str
    tried: int
    kept: int
    pruned: int
    contribution: float
    error: float
    measured: int
    params_bought: int | None
    steps_to_keep: float


class _Seed(NamedTuple):
    """A seed that is in a slot."""

    blueprint: str
    step: int  # at which it was planted
    kept: bool
    params: int | None


class BlueprintAnalytics:
    """Counts the rows that it is given; it can be an output of a run (`esper.grow(..., outputs=[...])`).

    Two objects share nothing.
    """

    def __init__(self) -> None:
        self._seeds: dict[Place, _Seed] = {}  # of the slots that are not empty
        self._counts: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        self._measured: dict[tuple[str, str], array[float]] = defaultdict(lambda: array("d"))
        self._waited: dict[tuple[str, str], array[int]] = defaultdict(lambda: array("l"))
        self._prices: dict[Place, int] = {}  # of the decisions to plant that were carried out

    @classmethod
    def of(cls, rows: Iterable[Row]) -> Self:
        """The analytics of all rows of a run."""
        found = cls()
        for row in rows:
            found.write(row)
        return found

    def write(self, row: Row) -> None:
        """Count a row."""
        match row:
            case DecisionRow(op="GERMINATE", carried_out=True, slot=str(slot), price=int(price)):
                self._prices[_place(row, row.env, slot)] = price
            case LifecycleRow(to_stage="GERMINATED" | "FOSSILIZED" | "PRUNED", blueprint=str(blueprint)):
                self._moved(row, blueprint)
            case RollbackRow(twin=False):
                for slot in row.pruned:
                    self._rolled_back(_place(row, row.env, slot), slot)
            case EpisodeRow():
                for slot in (*row.grown, *row.unfinished):  # the next episode begins with empty slots
                    self._seeds.pop(_place(row, row.env, slot), None)

    def close(self) -> None:
        """Nothing is to be closed."""

    def tallies(self) -> list[Tally]:
        """One for each blueprint and slot, that which was tried most first."""
        found = [
            Tally(
                *key,
                count["GERMINATED"],
                count["FOSSILIZED"],
                count["PRUNED"],
                *_mean_and_error(self._measured[key]),
                len(self._measured[key]),
                count["params"] if count["priced"] == count["GERMINATED"] else None,
                _mean_and_error(self._waited[key])[0],
            )
            for key, count in self._counts.items()
        ]
        return sorted(found, key=lambda tally: (-tally.tried, tally.slot, tally.blueprint))

    def _moved(self, row: LifecycleRow, blueprint: str) -> None:
        key, place = (blueprint, row.slot), _place(row, row.env, row.slot)
        count = self._counts[key]
        count[row.to_stage] += 1
        if row.to_stage == "GERMINATED":
            price = self._prices.pop(place, None)
            count["priced"] += price is not None
            self._seeds[place] = _Seed(blueprint, row.step, False, price)
            return
        if row.contribution_mean is not None:
            self._measured[key].append(row.contribution_mean)
        seed = self._seeds.pop(place, None)
        if row.to_stage == "FOSSILIZED" and seed is not None:
            self._waited[key].append(row.step - seed.step)
            count["params"] += seed.params or 0
            self._seeds[place] = seed._replace(kept=True)

    def _rolled_back(self, place: Place, slot: str) -> None:
        """A rollback removed a seed, which may have been kept in the same step."""
        seed = self._seeds.pop(place, None)
        if seed is None:
            return
        count = self._counts[seed.blueprint, slot]
        count["PRUNED"] += 1
        if seed.kept:
            count["FOSSILIZED"] -= 1
            count["params"] -= seed.params or 0
            self._waited[seed.blueprint, slot].pop()


def _place(row: PlayedRow, env: int, slot: str) -> Place:
    episode = getattr(row, "episode", None)
    return row.cohort, row.task, row.round, episode, env, slot


def _mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error; nan for what so few values do not give."""
    if not values:
        return float("nan"), float("nan")
    error = float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else float("nan")
    return float(np.mean(values)), error
