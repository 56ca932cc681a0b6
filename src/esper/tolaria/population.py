"""What an engine grows: the protocol of a population, and what it is asked and answers. R rows, S slots, X branches.

A population holds networks and their data, and nothing of the lifecycle: which seed is in which stage is told to it with every
call. `StackedPopulation` (tolaria/stacked.py) trains stacked networks, `LivePopulation` (tolaria/live.py) is one network that a
loop of a person's own trains, and `FormulaPopulation` (lab/formula.py) looks its figures up in formulas.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from esper.kasmina.lifecycle import Edits
from esper.leyline.config import Config
from esper.leyline.stages import ADDED, Stage
from esper.leyline.view import Bools, Floats, Seeds, Space
from esper.tolaria.coalitions import Coalitions

Indices = NDArray[np.int64]


class Asked(NamedTuple):
    """What a probe is to find out beside the figures of every row."""

    coalitions: Coalitions  # with some seeds at another dose
    trained: bool  # what the training of this step came to
    sensors: bool = False  # the growth sensors
    finite: bool = False  # whether each row's data are
    validation: bool = False  # the validation split


class TrainedFigures(NamedTuple):
    """What the training of a step came to."""

    loss: Floats  # (R,) mean over the step's batches
    gradient_norm: (
        Floats | None
    )  # (R,) of the host's parameters, mean over the step's optimizer steps; None where another trains it
    seed_norms: list[Floats]  # (n,) likewise, for each entry of `seed_owners`
    seed_owners: tuple[tuple[int, Indices], ...]  # the slot and the rows (n,) that the norms belong to


class Figures(NamedTuple):
    """What a probe found, on the host."""

    loss: Floats  # (R,) on the probe split, at the real doses
    metric: Floats  # (R,) likewise
    branch_loss: Floats  # (X,)
    branch_metric: Floats  # (X,)
    loss_rise: Floats  # (X, 2) mean and standard error of branch loss minus the row's own, example by example
    metric_fall: Floats  # (X, 2) likewise of the row's own metric minus the branch's
    participation: Floats  # (R, S) of the stream at each slot / its width
    signs: Floats  # (R, 3) standard error of the metric, spread of the outputs, a sum of all parameters
    sensors: Floats | None = None  # (R, S, F), where they were asked for
    finite: Bools | None = None  # (R,) whether a row's data are, likewise
    validation: tuple[Floats, Floats] | None = None  # (R,) metric and loss of what would be exported, likewise
    trained: TrainedFigures | None = None


class Keeper(Protocol):
    """A place for one earlier moment of every row, each of its own step, to put the row back to."""

    seeds: Seeds  # (R, S) as they were
    step: Indices  # (R,) steps that had been taken in the episode; -1 where nothing is kept

    def take(self, seeds: Seeds, rows: Bools, step: int) -> None:
        """Keep some rows, (R,) bool, as they are after `step` steps."""

    def put_back(self, seeds: Seeds, rows: Bools, kept: Seeds) -> Seeds:
        """Make some rows, (R,) bool, what they were, bit for bit; returns the seeds of all, of those rows those of `kept`.

        `kept` (R, S) is `self.seeds` without the seeds that are not to come back.
        """

    def state(self, now: int) -> dict[str, Any]:
        """As a tree of arrays, after `now` steps of the episode."""

    def load_state(self, state: Mapping[str, Any], seeds: Seeds) -> None:
        """Go on from what `state` gave, with a population that is as it was then. Raises ValueError if it was another."""


class Population(Protocol):
    """R networks that are trained and measured together.

    environment (R,): the environment that each row belongs to.
    space: of all rows; its costs, widths and bounds are known once an episode has begun.
    host_params (R,): likewise.
    label: the population in words, for messages.
    """

    device: torch.device
    environment: Indices
    space: Space
    host_params: Indices
    label: str

    def begin(self, instance: Indices, episode: int) -> None:
        """Fresh hosts of these instances (R,), and empty slots."""

    def edit(self, changes: Edits, seeds: Seeds, step: int) -> None:
        """Draw and free seeds as the edits say, after `step` steps; `seeds` (R, S) are what is there afterwards."""

    def train(self, seeds: Seeds) -> None:
        """One step's training of every row."""

    def probe(self, seeds: Seeds, asked: Asked) -> Figures:
        """Measure every row as it is now: one read of the device."""

    def tainted(self, rows: Indices, step: int) -> list[int]:
        """Those of some rows (n,) that were shown data in this step which are not finite. DataFault where that ends a run."""

    def added_params(self, seeds: Seeds, stages: frozenset[Stage] = ADDED) -> Indices:
        """(R,) parameters of the seeds in the given stages."""

    def price(self, rows: Indices, slot: Indices, blueprint: Indices, blend: NDArray[np.integer[Any]]) -> Indices:
        """(n,) parameters that seeds would add."""

    def growth(self, slot: Indices, blueprint: Indices) -> int:
        """Bytes that further seeds (n,) would take."""

    def keeper(self, seeds: Seeds) -> Keeper:
        """An empty one for this population."""

    def snapshot(self) -> dict[str, Any]:
        """All that the next step depends on, as entries of a tree of arrays; tensors share memory."""

    def load(self, tree: Mapping[str, Any], instance: Indices, episode: int) -> None:
        """Go on from what `snapshot` gave. Raises ValueError if it was another population's."""


def row_environments(config: Config) -> Indices:
    """(R,) the environment that each row belongs to: environments, then their twins, then a ghost where there were one row alone.

    Nobody sees the ghost: a population of two rows computes the same numbers for each as a larger one.
    """
    rows = config.envs * (2 if config.twin else 1)
    return np.arange(rows) % config.envs if rows > 1 else np.zeros(2, np.int64)


def row_numbers(config: Config) -> Indices:
    """(R,) the number of each row's environment among all that are grown, of which a population may hold a part."""
    return config.first_instance + row_environments(config)
