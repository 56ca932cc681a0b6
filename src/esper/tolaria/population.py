"""Define the protocol of a population, which an engine grows, and its requests and results. R rows, S slots, X branches.

A population holds networks and their data. It does not know the lifecycle: every call passes in the stages of the seeds.
`StackedPopulation` (tolaria/stacked/population.py) trains stacked networks, `ShardedPopulation` (runs/workers/sharded.py) has
them trained by workers, and `LivePopulation` (tolaria/live/population.py) is one network that a user's own loop trains.
"""

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from esper.kasmina.blueprints import Blueprint
from esper.kasmina.lifecycle import Edits
from esper.kasmina.stack.layout import HostTable
from esper.kasmina.stack.plan import Branches
from esper.kasmina.stack.wider_rows import HiddenWidening
from esper.leyline.config.tree import Config, GrowthConfig
from esper.leyline.data.task import AnyTask, Split
from esper.leyline.lifecycle.view import Bools, Floats, Seeds, Space
from esper.tolaria.measure.sensors import SENSORS
from esper.tolaria.runtime import Waits

Indices = NDArray[np.int64]


class ProbeRequest(NamedTuple):
    """Names what is measured on the probe split beside the figures of every row."""

    branches: Branches  # evaluations with some seeds at another dose
    trained: bool = False  # the figures of this step's training
    sensors: bool = False  # the growth sensors
    finite: bool = False  # whether the data of each row are finite
    validation: bool = False  # the validation split
    look: Bools | None = None  # (R, S) seeds on trial that are compared on fresh examples


class ParameterNorms(NamedTuple):
    """Holds gradient norms of each trained parameter, mean over the optimizer steps of one step."""

    host: Mapping[str, Floats]  # (R,) by the name of the parameter in the host
    seeds: Mapping[str, Floats]  # (R,) by slot/name, the name being that in the seed; nan where no such seed trained


class TrainedFigures(NamedTuple):
    """Holds the figures of one step's training."""

    loss: Floats  # (R,) mean over the step's batches
    gradient_norm: Floats | None  # (R,) of the host, mean over the step's optimizer steps; None in a user's own loop
    seed_norm: Floats  # (R, S) the same of the seeds that trained; nan elsewhere
    seed_trained: Bools  # (R, S) these seeds, whose norm can be nan too
    parameter_norms: ParameterNorms | None = None  # if `train` was asked for them and the population has them
    skipped: Indices | None = None
    """(R,) updates that overflowed in float16 and were skipped; norms are then nan if all were, inf if a row is lost."""


class Figures(NamedTuple):
    """Holds what was measured on the probe split, in NumPy arrays."""

    loss: Floats  # (R,) loss on the probe split, at the real doses
    metric: Floats  # (R,) metric there
    branch_loss: Floats  # (X,)
    branch_metric: Floats  # (X,)
    loss_rise: Floats  # (X, 2) mean and standard error over examples of branch loss minus the row's loss
    metric_fall: Floats  # (X, 2) the same of the row's metric minus the branch's metric
    participation: Floats  # (R, S) of the stream at each slot / its width
    signs: Floats  # (R, 3) standard error of the metric, spread of the outputs, a sum of all parameters
    sensors: Floats | None = None  # (R, S, F) growth sensors, if asked for
    finite: Bools | None = None  # (R,) whether a row's data are finite, if asked for
    validation: tuple[Floats, Floats] | None = None  # (R,) metric and loss of the networks as exported, if asked for
    compared: Floats | None = None  # the figures of `compared` of the seeds that were looked at, if asked for
    trained: TrainedFigures | None = None
    seedless_rise: Floats | None = None  # (R, S, 2) `loss_rise` of a network trained without the seed; nan without one


class Keeper(Protocol):
    """Stores one snapshot of every row, to which a row can be restored. Rows can be saved at different steps."""

    seeds: Seeds  # (R, S) the seeds when the row was saved
    step: Indices  # (R,) steps taken in the episode when the row was saved; -1 if it was not saved

    def take(self, seeds: Seeds, rows: Bools, step: int) -> None:
        """Save some rows, (R,) bool, as they are after `step` steps."""

    def put_back(self, seeds: Seeds, rows: Bools) -> Seeds:
        """Restore some rows, (R,) bool, to their snapshots, bit for bit; return the seeds of all rows.

        Hosts, fossilized seeds, ages and embargos are those of the snapshot. Seeds that were live or incubating then are pruned.
        """

    def state(self, now: int) -> dict[str, Any]:
        """Return the snapshots as a tree of arrays, after `now` steps of the episode."""

    def load_state(self, state: Mapping[str, Any], seeds: Seeds) -> None:
        """Restore what `state` returned into a population that is restored already. ValueError if it came from another one."""


class Population(Protocol):
    """Trains and measures R networks together."""

    device: torch.device
    environment: Indices  # (R,) the environment that each row belongs to
    space: Space  # costs, widths and bounds of all rows; known once an episode has begun
    table: HostTable  # prices of the seeds of all rows; known once an episode has begun
    host_params: Indices  # (R,) parameters of the hosts; known once an episode has begun
    label: str  # the population in words, for messages

    @property
    def waits(self) -> Waits | None:
        """The waits of training for batches to be read; None where all examples are in memory."""

    @property
    def set_aside(self) -> Sequence[Indices]:
        """For each row, digests of the examples that are set aside for `gates.certify`; empty where there are none."""

    def begin(self, instance: Indices, episode: int) -> None:
        """Begin an episode: newly initialised hosts of these instances (R,), and empty slots."""

    def edit(self, changes: Edits, seeds: Seeds, step: int) -> None:
        """Make and free seeds as the edits say, after `step` steps; `seeds` (R, S) is the state afterwards."""

    def train(self, seeds: Seeds, *, parameter_norms: bool = False) -> None:
        """Train every row for one step. `parameter_norms` asks for the gradient norm of each parameter, which `probe` reads."""

    def probe(self, seeds: Seeds, asked: ProbeRequest) -> Figures:
        """Measure every row as it is now. This reads the device once."""

    def tainted(self, rows: Indices, step: int) -> list[int]:
        """Return which of some rows (n,) were trained on data that are not finite. DataFault if such data end a run."""

    def growth(self, rows: Indices, slot: Indices, blueprint: Indices) -> int:
        """Return the bytes of memory that further seeds (n,) would take, on the device where they take most."""

    def keeper(self, seeds: Seeds) -> Keeper:
        """Return an empty keeper for this population."""

    def snapshot(self) -> dict[str, Any]:
        """Return everything that the next step depends on, as a tree of arrays that share memory with the population."""

    def load(self, tree: Mapping[str, Any], instance: Indices, episode: int) -> None:
        """Restore what `snapshot` returned, beside which the tree has the `seeds`. ValueError if it came from another one."""


class TaskPopulation(Population, Protocol):
    """Holds the data of a task, so that the population can be evaluated and exported."""

    task: AnyTask
    widenings: tuple[HiddenWidening, ...]  # of the hosts, by `config.widen`
    widened: int  # how many of them there were in this episode

    def widen(self, seeds: Seeds, step: int) -> None:
        """Make all hosts wider, after `step` steps, with the seeds (R, S) and all snapshots; every row computes what it did."""

    @property
    def compiled(self) -> dict[str, float] | None:
        """What was compiled and how often it ran, for the summary; None with `compile=off`."""

    @property
    def overflowed(self) -> Indices | None:
        """(R,) updates of this episode that overflowed in float16 and were skipped; None where products have another type."""

    def validation_splits(self) -> list[Split]:
        """Return the validation split of every environment's instance."""

    def evaluate(self, seeds: Seeds, split: Split | Sequence[Split]) -> tuple[Floats, Floats]:
        """Return (R,) metric and loss as exported; InputError if a split is longer than the rows of a mixture can hold."""

    def outputs(self, seeds: Seeds, split: Split) -> Floats:
        """Return the outputs (R, N, ...) of the networks as exported for the N finite examples of a split."""

    def export(self, seeds: Seeds, env: int) -> tuple[nn.Module, dict[str, Any]]:
        """Return the network of an environment as a plain module on the CPU, and its topology."""

    def close(self) -> None:
        """End the thread and the workers that read batches; the population trains no more."""


def space_of(
    config: GrowthConfig,
    menu: Sequence[Blueprint],
    sensors: Sequence[str] = tuple(map(attrgetter("name"), SENSORS)),
    **of_hosts: Any,
) -> Space:
    """Return the space of a population. of_hosts: the fields that follow from its hosts and their data."""
    return Space(
        blueprints=tuple(entry.info for entry in menu),
        tempos=config.lifecycle.tempos,
        targets=config.lifecycle.targets,
        sensors=tuple(sensors),
        max_seeds=config.lifecycle.max_seeds,
        seed=config.seed,
        objective=config.reward.objective,
        rent=config.reward.rent,
        rent_size=config.reward.rent_size,
        **of_hosts,
    )


def row_environments(config: Config, *, ghost: bool) -> Indices:
    """Return (R,) the environment of each row: environments, twins, and a ghost beside a row alone (`needs_ghost`)."""
    rows = config.envs * (2 if config.twin else 1)
    return np.arange(rows if rows > 1 or not ghost else 2) % config.envs
