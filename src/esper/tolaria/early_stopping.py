"""Stop early: keep the best state of every row on its validation split, and the rows that have stopped. E rows, S slots.

The candidates of a row are its networks as exported, at reset and after each step: the host with the fossilized seeds,
without live and incubating seeds. A row that grows stops independently of all other rows. A network that does not grow
chooses among as many candidates as the grown network that it is compared with: a twin stops when its environment stops.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from esper.leyline.config.tree import Config
from esper.leyline.lifecycle.view import Bools, Floats, Seeds
from esper.leyline.lifecycle.vocabulary import IN_BUDGET, Stage, among
from esper.leyline.messages import counted
from esper.tolaria.population import Keeper

UNDER_WAY = IN_BUDGET - {Stage.FOSSILIZED}
"""Stages of seeds that can still become part of the network."""


class EarlyStopping:
    """Keeps the best state of every row for the end of the episode."""

    def __init__(self, keeper: Keeper, environment: NDArray[np.int64], config: Config) -> None:
        """Start without a best state. environment (E,): of each row; its twin and its padding stop with it."""
        self.patience = config.early_stopping.patience
        self.keeper, rows = keeper, len(keeper.step)
        self.score = np.full(rows, -np.inf)  # (E,) best validation score so far; -inf where none was finite
        self.latest = np.zeros(rows, np.int64)  # (E,) last step at which the score improved or a seed was fossilized
        self.stopped = np.full(rows, -1, np.int64)  # (E,) steps after which the row stopped; -1 if it has not stopped
        # (E,) steps after which each row stops, whatever its scores; None stops rows by their patience
        self.until: NDArray[np.int64] | None = None
        self._environment = environment

    @property
    def best_step(self) -> NDArray[np.int64]:
        """(E,) the number of steps after which the score of the row was best."""
        return self.keeper.step

    @property
    def over(self) -> bool:
        return bool((self.stopped >= 0).all())

    def begin(self, seeds: Seeds, score: Floats) -> None:
        """Begin an episode. score: (E,) validation scores of the fresh hosts."""
        self.score[:], self.latest[:], self.stopped[:] = np.where(np.isfinite(score), score, -np.inf), 0, -1
        self.keeper.take(seeds, np.ones(len(score), bool), 0)

    def observe(self, seeds: Seeds, score: Floats, healthy: Bools, step: int) -> None:
        """Compare the scores (E,) after a step with the best. Only rows that are marked in `healthy` (E,) can improve."""
        going = self.stopped < 0
        with np.errstate(invalid="ignore"):
            better = going & healthy & (score > self.score)
        self.score[better] = score[better]
        self.keeper.take(seeds, better, step)
        fossilized = (seeds.stage == Stage.FOSSILIZED) & (seeds.age <= 1)
        self.latest[going & (better | fossilized.any(1))] = step
        waiting = among(seeds.stage, UNDER_WAY).any(1)
        out_of_patience = ~waiting & (step - self.latest >= self.patience)
        over = out_of_patience[self._environment] if self.until is None else step >= self.until
        self.stopped[going & over] = step

    def restore(self, seeds: Seeds) -> Seeds:
        """Restore every row to its best state, without live and incubating seeds. Returns the seeds of all rows."""
        return self.keeper.put_back(seeds, np.ones(len(self.score), bool))

    def state(self, step: int) -> dict[str, Any]:
        """Return the scores, the steps and the snapshots, as a tree of arrays, after `step` steps of the episode."""
        return {
            "score": self.score,
            "latest": self.latest,
            "stopped": self.stopped,
            "snapshot": self.keeper.state(step),
        }

    def load_state(self, state: Mapping[str, Any], seeds: Seeds) -> None:
        """Restore a `state`. An environment that had stopped continues, with its twin, where the patience is larger now."""
        self.score, self.latest, self.stopped = (np.array(state[name]) for name in ("score", "latest", "stopped"))
        self.stopped[(self.stopped - self.latest < self.patience)[self._environment]] = -1
        self.keeper.load_state(state["snapshot"], seeds)


def stopping_figures(stopping: EarlyStopping | None, config: Config, steps: int) -> dict[str, Any]:
    """Return the entries `best_step`, `stopped_early` and `stopped_because` of the summary of a run of `steps` steps.

    `best_step` is the number of steps after which each network had its best validation score; 0 is before the first
    step, and None stands for runs without early stopping.
    """
    if stopping is None:
        return {"best_step": None, "stopped_early": False, "stopped_because": None}
    best = stopping.best_step.tolist()
    early = stopping.over and steps < config.steps
    patience = config.early_stopping.patience
    why = (
        f"no validation score rose and no seed was fossilized for {counted(patience, 'step')} (early_stopping.patience)"
        if early
        else None
    )
    pair = {"host": best[config.envs : 2 * config.envs] if config.twin else None, "grown": best[: config.envs]}
    return {"best_step": pair, "stopped_early": early, "stopped_because": why}
