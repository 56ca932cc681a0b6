"""The governor: rolls back rows that failed, and refuses operations before they are applied. E rows, S slots.

At every step it compares the vital signs of each row with the row's history (tolaria/vitals.py), takes snapshots of healthy
rows, and restores the others to their last snapshots. All computations are array operations over rows.
"""

from collections.abc import Mapping
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
"""A `Vital` or a `Refusal` for every row, (E,) int8."""
Counts = dict[str, dict[str, int]]
"""Numbers of rollbacks and refusals by reason, under the keys `rollbacks` and `refused`."""


def preflight(
    population: Population, seeds: Seeds, actions: Actions, masks: Masks, max_seeds: int, config: GovernorConfig
) -> Verdicts:
    """Check decisions before they are applied. Returns a `Refusal` for every row, (E,).

    The memory check covers all seeds of the step together. If they do not fit, all of them are refused.
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
    """Numbers of rollbacks and refusals, int64.

    Attributes:
        rollbacks ((E,) array): rollbacks of each row in this episode
        found ((vitals,) array): rollbacks by `Vital` since the engine was created, twins included
        refused ((refusals,) array): refused decisions by `Refusal` since the engine was created
    """

    rollbacks: NDArray[np.int64]
    found: NDArray[np.int64]
    refused: NDArray[np.int64]

    @classmethod
    def empty(cls, rows: int) -> "Record":
        """Return a record of zeros."""
        return cls(np.zeros(rows, np.int64), np.zeros(len(Vital), np.int64), np.zeros(len(Refusal), np.int64))

    def counts(self) -> Counts:
        """Return the totals by reason, without reasons that did not occur."""
        return {"rollbacks": _by_name(self.found, Vital), "refused": _by_name(self.refused, Refusal)}


class Governor:
    """Holds the history and the snapshots of the rows of a population, and rolls rows back."""

    def __init__(self, keeper: Keeper, real: int, config: Config) -> None:
        """real: number of rows that are counted, from the first; the padding rows after them are not."""
        self.config, self.embargo = config.governor, config.lifecycle.embargo
        self.keeper = keeper
        self.history: History | None = None  # None before the first episode
        self.record = Record.empty(len(keeper.step))
        self._real = np.arange(len(keeper.step)) < real

    def begin(self, seeds: Seeds, signs: Signs) -> None:
        """Begin an episode. `signs` are those of the newly initialised hosts."""
        self.record.rollbacks[:] = 0
        if self.config.enabled:
            self.history = History.begin(signs, self.config)
            self.keeper.take(seeds, np.ones(len(seeds.stage), bool), 0)

    def inspect(self, before: Seeds, after: Seeds, signs: Signs) -> Verdicts:
        """Examine every row after a step that changed the seeds from `before` to `after`. Returns (E,) a `Vital`."""
        if not self.config.enabled:
            return np.full(len(after.stage), Vital.GOOD, np.int8)
        assert self.history is not None, "begin() must come first"
        self.history, found = examine(self.history.restart(lowered(before, after)), signs, self.config)
        return found

    def put_back(self, seeds: Seeds, rows: Bools) -> Seeds:
        """Restore the rows that are marked in `rows` (E,) to their last snapshots. Returns the seeds of all rows.

        Hosts, fossilized seeds, ages and embargos are those of the snapshot. Seeds that were live or incubating at the
        snapshot are pruned.
        """
        return self.keeper.put_back(seeds, rows, uprooted(self.keeper.seeds, rows, self.embargo))

    def resume(self, found: Verdicts, signs: Signs) -> None:
        """Count the rows that were rolled back, and restart their histories with the signs of the restored rows."""
        assert self.history is not None, "begin() must come first"
        rows = found != Vital.GOOD
        self.record.rollbacks[rows] += 1
        np.add.at(self.record.found, found[rows & self._real], 1)
        self.history = remembered(self.history.restart(rows), signs, rows)

    def keep(self, seeds: Seeds, found: Verdicts, step: int) -> None:
        """Take snapshots of healthy rows, where they are due, and of the rows that were rolled back in this step."""
        if not self.config.enabled:
            return
        assert self.history is not None, "begin() must come first"
        well = ~self.history.strikes.any(1) & (step % self.config.snapshot_every == 0)
        self.keeper.take(seeds, well | (found != Vital.GOOD), step)

    def count(self, refused: Verdicts) -> None:
        """Add the refusals of a step to the record."""
        np.add.at(self.record.refused, refused[self._real], 1)

    def state(self, step: int) -> dict[str, Any]:
        """Return the record, the history and the snapshots, as a tree of arrays, after `step` steps of the episode."""
        return {
            "record": self.record._asdict(),
            "history": None if self.history is None else self.history._asdict(),
            "snapshot": self.keeper.state(step) if self.config.enabled else None,
        }

    def load_state(self, state: Mapping[str, Any], seeds: Seeds) -> None:
        """Restore a `state`. Population and seeds must have been restored already. Raises ValueError if they do not fit."""
        self.record = Record(**state["record"])
        self.history = None if state["history"] is None else History(**state["history"])
        if state["snapshot"] is not None:
            self.keeper.load_state(state["snapshot"], seeds)


def _by_name(counts: NDArray[np.int64], kind: type[Vital] | type[Refusal]) -> dict[str, int]:
    return {kind(index).name.lower(): int(count) for index, count in enumerate(counts) if index and count}
