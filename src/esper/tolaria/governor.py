"""The governor: rolls back rows that are broken, and refuses edits that had better not be made. E rows, S slots.

Each step it holds every row's vital signs against the row's own past (tolaria/vitals.py), keeps healthy rows as they are,
and puts the others back. All of it is array operations over rows.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from esper.kasmina.lifecycle import uprooted
from esper.leyline.actions import Actions, Op
from esper.leyline.config import Config, GovernorConfig
from esper.leyline.masks import allowed
from esper.leyline.stages import IN_BUDGET, among
from esper.leyline.verdicts import Refusal, Vital
from esper.leyline.view import Bools, Masks, Seeds
from esper.tolaria.population import Keeper, Population
from esper.tolaria.runtime import available_memory
from esper.tolaria.vitals import History, Signs, examine, lowered, remembered

Verdicts = NDArray[np.int8]
"""(E,) a `Vital` or a `Refusal` of every row."""
Counts = dict[str, dict[str, int]]
"""Under `rollbacks` and `refused`, how many there were by reason."""


def preflight(
    population: Population, seeds: Seeds, actions: Actions, masks: Masks, max_seeds: int, config: GovernorConfig
) -> Verdicts:
    """Which decisions are refused before anything is changed, and why, (E,) a `Refusal`.

    Memory is weighed for all that would be planted in the step together, and too little of it refuses all of that.
    """
    refused = np.full(len(seeds.stage), Refusal.NONE, np.int8)
    plants, legal = actions.op == Op.GERMINATE, allowed(masks, actions)
    full = among(seeds.stage, IN_BUDGET).sum(1) >= max_seeds
    refused[~legal] = Refusal.MASKED
    refused[~legal & plants & full] = Refusal.SEED_CAP
    env = np.flatnonzero(legal & plants)
    if not len(env):
        return refused
    slot, blueprint = actions.slot[env], actions.blueprint[env]
    if config.param_limit is not None:
        price = population.price(env, slot, blueprint, actions.blend[env])
        whole = population.added_params(seeds, IN_BUDGET)[env] + price
        refused[env[whole > config.param_limit * population.host_params[env]]] = Refusal.PARAM_BUDGET
    left = refused[env] == Refusal.NONE
    needed = population.growth(slot[left], blueprint[left])
    if needed and needed > config.memory_share * available_memory(population.device):
        refused[env[left]] = Refusal.MEMORY
    return refused


class Record(NamedTuple):
    """What happened so far."""

    rollbacks: NDArray[np.int64]  # (E,) of the present episode
    found: NDArray[np.int64]  # (vitals,) rollbacks by reason since the engine was made, twins included
    refused: NDArray[np.int64]  # (refusals,) decisions likewise

    @classmethod
    def empty(cls, rows: int) -> "Record":
        """Nothing yet."""
        return cls(np.zeros(rows, np.int64), np.zeros(len(Vital), np.int64), np.zeros(len(Refusal), np.int64))

    def counts(self) -> Counts:
        """The totals by reason; reasons that did not occur are left out."""
        return {"rollbacks": _by_name(self.found, Vital), "refused": _by_name(self.refused, Refusal)}


def total(counts: Iterable[Counts]) -> Counts:
    """The sums of the `Record.counts` of several engines."""
    summed: Counts = {"rollbacks": {}, "refused": {}}
    for count in counts:
        for kind, reasons in count.items():
            for name, number in reasons.items():
                summed[kind][name] = summed[kind].get(name, 0) + number
    return summed


class Governor:
    """Its own part of the state of a population: what rows are held against, and what they are put back to."""

    def __init__(self, keeper: Keeper, real: int, config: Config) -> None:
        """The first `real` rows are counted; a ghost behind them is not."""
        self.config, self.embargo = config.governor, config.lifecycle.embargo
        self.keeper = keeper
        self.history: History | None = None  # none before the first episode
        self.record = Record.empty(len(keeper.step))
        self._real = np.arange(len(keeper.step)) < real

    def begin(self, seeds: Seeds, signs: Signs) -> None:
        """An episode begins with fresh hosts, whose first measurement is at hand."""
        self.record.rollbacks[:] = 0
        if self.config.enabled:
            self.history = History.begin(signs, self.config)
            self.keeper.take(seeds, np.ones(len(seeds.stage), bool), 0)

    def inspect(self, before: Seeds, after: Seeds, signs: Signs) -> Verdicts:
        """What is found of every row, (E,) a `Vital`, after a step that led from one state of the seeds to another."""
        if not self.config.enabled:
            return np.full(len(after.stage), Vital.GOOD, np.int8)
        assert self.history is not None, "an episode was begun"
        self.history, found = examine(self.history.restart(lowered(before, after)), signs, self.config)
        return found

    def put_back(self, seeds: Seeds, rows: Bools) -> Seeds:
        """Roll back some rows, (E,) bool; returns the state of all.

        Their fossils and hosts are what they were at the snapshot, and so are ages and embargos. Seeds that were live or
        incubating then are pruned.
        """
        return self.keeper.put_back(seeds, rows, uprooted(self.keeper.seeds, rows, self.embargo))

    def resume(self, found: Verdicts, signs: Signs) -> None:
        """Rows that were rolled back are counted and begin a new history, with what was measured of them since."""
        assert self.history is not None, "an episode was begun"
        rows = found != Vital.GOOD
        self.record.rollbacks[rows] += 1
        np.add.at(self.record.found, found[rows & self._real], 1)
        self.history = remembered(self.history.restart(rows), signs, rows)

    def keep(self, seeds: Seeds, found: Verdicts, step: int) -> None:
        """Take the snapshot of rows that are well, where it is due, and of those that have just been rolled back."""
        if not self.config.enabled:
            return
        assert self.history is not None, "an episode was begun"
        well = ~self.history.strikes.any(1) & (step % self.config.snapshot_every == 0)
        self.keeper.take(seeds, well | (found != Vital.GOOD), step)

    def count(self, refused: Verdicts) -> None:
        """Take the refusals of a step into the record."""
        np.add.at(self.record.refused, refused[self._real], 1)

    def state(self, step: int) -> dict[str, Any]:
        """All that it goes by, as a tree of arrays, after so many steps of the episode."""
        return {
            "record": self.record._asdict(),
            "history": None if self.history is None else self.history._asdict(),
            "snapshot": self.keeper.state(step) if self.config.enabled else None,
        }

    def load_state(self, state: Mapping[str, Any], seeds: Seeds) -> None:
        """Go on from what `state` gave, with population and seeds as they were then. ValueError where they were others."""
        self.record = Record(**state["record"])
        self.history = None if state["history"] is None else History(**state["history"])
        if state["snapshot"] is not None:
            self.keeper.load_state(state["snapshot"], seeds)


def _by_name(counts: NDArray[np.int64], kind: type[Vital] | type[Refusal]) -> dict[str, int]:
    return {kind(index).name.lower(): int(count) for index, count in enumerate(counts) if index and count}
