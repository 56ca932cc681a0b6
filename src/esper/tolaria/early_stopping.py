"""Early stopping: the best state of every row by its validation split, and which rows have stopped. E rows, S slots.

A row's candidates are the networks that would be exported at reset and after each step: its host with its fossilized seeds,
every live or incubating seed left out. Rows are kept, stop and are restored each by itself, so that what becomes of one does
not depend on the others.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from esper.kasmina.lifecycle import uprooted
from esper.leyline.config import Config
from esper.leyline.stages import IN_BUDGET, Stage, among
from esper.leyline.view import Bools, Floats, Seeds
from esper.tolaria.population import Keeper

UNDER_WAY = IN_BUDGET - {Stage.FOSSILIZED}
"""Stages of a seed that may still become part of the network."""


class EarlyStopping:
    """What is kept of every row for the end of the episode.

    score (E,): the best validation score so far; -inf where none was finite.
    latest (E,): the last step at which the score rose or a seed was fossilized.
    stopped (E,): the steps after which a row stopped; -1 where it has not.
    """

    def __init__(self, keeper: Keeper, real: int, config: Config) -> None:
        """The first `real` rows are waited for; a ghost behind them is not."""
        self.patience, self.embargo = config.early_stopping.patience, config.lifecycle.embargo
        self.keeper, rows = keeper, len(keeper.step)
        self.score, self.latest = np.full(rows, -np.inf), np.zeros(rows, np.int64)
        self.stopped = np.full(rows, -1, np.int64)
        self._real = real

    @property
    def best_step(self) -> NDArray[np.int64]:
        """(E,) the steps after which every row was at its best."""
        return self.keeper.step

    @property
    def over(self) -> bool:
        """Whether every row has stopped."""
        return bool((self.stopped[: self._real] >= 0).all())

    def begin(self, seeds: Seeds, score: Floats) -> None:
        """An episode begins; score (E,) is that of the fresh hosts."""
        self.score[:], self.latest[:], self.stopped[:] = np.where(np.isfinite(score), score, -np.inf), 0, -1
        self.keeper.take(seeds, np.ones(len(score), bool), 0)

    def observe(self, seeds: Seeds, score: Floats, healthy: Bools, step: int) -> None:
        """Take the scores (E,) after a step; rows that are not healthy, (E,) bool, were rolled back and are no candidates."""
        going = self.stopped < 0
        with np.errstate(invalid="ignore"):
            better = going & healthy & (score > self.score)
        self.score[better] = score[better]
        self.keeper.take(seeds, better, step)
        fossilized = (seeds.stage == Stage.FOSSILIZED) & (seeds.age <= 1)
        self.latest[going & (better | fossilized.any(1))] = step
        waiting = among(seeds.stage, UNDER_WAY).any(1)
        self.stopped[going & ~waiting & (step - self.latest >= self.patience)] = step

    def restore(self, seeds: Seeds) -> Seeds:
        """Make every row what it was at its best, without the seeds that were under way; returns the state of all."""
        rows = np.ones(len(self.score), bool)
        return self.keeper.put_back(seeds, rows, uprooted(self.keeper.seeds, rows, self.embargo))

    def state(self, step: int) -> dict[str, Any]:
        """All that it goes by, as a tree of arrays, after so many steps of the episode."""
        return {
            "score": self.score,
            "latest": self.latest,
            "stopped": self.stopped,
            "snapshot": self.keeper.state(step),
        }

    def load_state(self, state: Mapping[str, Any], seeds: Seeds) -> None:
        """Go on from what `state` gave, with population and seeds as they were then. ValueError where they were others.

        Rows that had stopped go on where the patience has been raised since.
        """
        self.score, self.latest, self.stopped = (np.array(state[name]) for name in ("score", "latest", "stopped"))
        self.stopped[self.stopped - self.latest < self.patience] = -1
        self.keeper.load_state(state["snapshot"], seeds)
