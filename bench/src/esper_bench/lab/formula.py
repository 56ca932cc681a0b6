"""Compute the scores of a population as formulas of its seeds, so that nothing is trained. R rows, S slots, K blueprints.

Stages, masks, gates, measurements and rewards work as in any population; only the scores of the networks are formulas.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from esper.kasmina.lifecycle import Edits, doses, exported, uprooted
from esper.kasmina.stack.layout import HostTable
from esper.leyline.config.tree import Config
from esper.leyline.data.keys import Purpose, key
from esper.leyline.lifecycle.view import BlueprintInfo, Bools, Floats, Seeds, Space, choose, take
from esper.leyline.lifecycle.vocabulary import Blend, Ints
from esper.leyline.messages import counted
from esper.tolaria.population import Figures, Indices, Keeper, ProbeRequest, TrainedFigures, row_environments

HOST_PARAMS = 1000
WIDTH = 16
"""Features of the stream at every slot."""


class EpisodeDraw(NamedTuple):
    """Holds the random draws of an episode."""

    kind: Ints  # (R,) index of the problem: instance modulo number of problems
    key: Ints  # (R,) random key of all other draws


@dataclass(frozen=True)
class Process:
    """Describes a growth process: its slots, its menu, and the formulas of its measurements."""

    name: str
    kinds: int  # number of problems, which have different best policies
    slots: tuple[str, ...]
    menu: tuple[BlueprintInfo, ...]
    cost: tuple[int, ...]  # (K,) parameters of each blueprint, at every slot
    sensors: tuple[str, ...]
    settings: Mapping[str, Any]  # the first layer of the config
    metric: Callable[[EpisodeDraw, int, Seeds, Floats], Floats]  # draw, steps taken, seeds, doses (R, S) -> (R,)
    sense: Callable[[EpisodeDraw], tuple[Floats, Floats]]  # draw -> participation (R, S), sensors (R, S, F)


class FormulaPopulation:
    """Computes the scores of R networks by a process; implements `tolaria.population.Population`.

    Formulas have no sampling error, so all standard errors are 0. The loss is 1 - metric. Gradient norms fall
    with training time, and have no other meaning.
    """

    def __init__(self, process: Process, config: Config, instance: Indices) -> None:
        """`instance` (R,) names the rows' instances."""
        rows, slots = len(instance), len(process.slots)
        self.process, self.config = process, config
        self.device = torch.device("cpu")
        self.environment = row_environments(config, ghost=False)
        self.label = f"{counted(rows, 'row')} of {process.name}"
        self.host_params = np.full(rows, HOST_PARAMS)
        self.set_aside = [np.zeros(0, np.int64)] * rows  # formulas have no examples
        self.step = 0  # training steps in the episode
        self.space = Space(
            slots=process.slots,
            blueprints=process.menu,
            tempos=config.lifecycle.tempos,
            targets=config.lifecycle.targets,
            cost=np.broadcast_to(np.array(process.cost), (rows, slots, len(process.menu))).copy(),
            fits=np.ones((slots, len(process.menu)), bool),
            width=np.full((rows, slots), WIDTH),
            sensors=process.sensors,
            max_seeds=config.lifecycle.max_seeds,
            seed=config.seed,
            number=config.first_instance + self.environment,
            instance=instance,
            floor=np.full(rows, np.nan),
            ceiling=np.full(rows, np.nan),
            objective=config.reward.objective,
            rent=config.reward.rent,
            rent_size=config.reward.rent_size,
            frozen=np.zeros(rows, bool),
            blends=np.arange(len(Blend)) == Blend.ADD,  # the formulas ignore the blend
        )
        self.table = HostTable(rows, slots, ())
        self.table.cost, self.table.reads = self.space.cost, np.zeros_like(self.space.cost)
        self._draw_for(instance, 0)

    @property
    def waits(self) -> None:
        """None: nothing is read."""

    def begin(self, instance: Indices, episode: int) -> None:
        """Draw an episode of these instances (R,)."""
        self.space = self.space._replace(instance=instance)
        self._draw_for(instance, episode)
        self.step = 0

    def edit(self, changes: Edits, seeds: Seeds, step: int) -> None:
        """Do nothing: the formulas depend only on the seeds."""

    def train(self, seeds: Seeds, *, parameter_norms: bool = False) -> None:
        """Advance the learning curves by one step. Formulas have no parameters, and so no norms of them."""
        self.step += 1

    def probe(self, seeds: Seeds, asked: ProbeRequest) -> Figures:
        """Compute all figures of the rows."""
        branches, dose = asked.branches, doses(seeds).astype(np.float64)
        metric = self.process.metric(self.draw, self.step, seeds, dose)
        env = branches.env
        there = EpisodeDraw(self.draw.kind[env], self.draw.key[env])
        branched = self.process.metric(there, self.step, take(seeds, env), branches.dose.astype(np.float64))
        fall = np.stack([metric[env] - branched, np.zeros(len(env))], 1)
        participation, sensors = self.process.sense(self.draw)
        rows = len(metric)
        return Figures(
            loss=1 - metric,
            metric=metric,
            branch_loss=1 - branched,
            branch_metric=branched,
            loss_rise=fall,
            metric_fall=fall,
            participation=participation,
            signs=np.tile((0.0, 1.0, 0.0), (rows, 1)),
            sensors=sensors if asked.sensors else None,
            finite=np.ones(rows, bool) if asked.finite else None,
            validation=self.final(seeds) if asked.validation else None,
            trained=self._trained(seeds, metric) if asked.trained else None,
        )

    def tainted(self, rows: Indices, step: int) -> list[int]:
        """Return an empty list: there are no data."""
        return []

    def growth(self, rows: Indices, slot: Indices, blueprint: Indices) -> int:
        """Return 0 bytes, because formulas need no memory."""
        return 0

    def keeper(self, seeds: Seeds) -> Keeper:
        """Make a keeper of snapshots of seeds, which are the whole state of a row."""
        return _SeedSnapshots(seeds, self.config.lifecycle.embargo)

    def snapshot(self) -> dict[str, Any]:
        """Return the number of training steps."""
        return {"trained": self.step}

    def load(self, tree: Mapping[str, Any], instance: Indices, episode: int) -> None:
        """Restore a state that `snapshot` returned."""
        self.begin(instance, episode)
        self.step = tree["trained"]

    def final(self, seeds: Seeds) -> tuple[Floats, Floats]:
        """Return (R,) the metric and the loss of the networks that would be exported, in which only fossilized seeds act."""
        kept = exported(seeds)
        metric = self.process.metric(self.draw, self.step, kept, doses(kept).astype(np.float64))
        return metric, 1 - metric

    def _draw_for(self, instance: Indices, episode: int) -> None:
        self.draw = EpisodeDraw(
            instance % self.process.kinds, key(self.config.seed, Purpose.INSTANCE, instance, episode)
        )

    def _trained(self, seeds: Seeds, metric: Floats) -> TrainedFigures:
        """Compute figures of training, which fall as a network and its seeds learn."""
        steps = trained_steps(seeds)
        training = (steps > 0) & ~seeds.doomed
        return TrainedFigures(1 - metric, 1 - metric, np.where(training, 1 / (1 + steps), np.nan), training)


class _SeedSnapshots:
    """Keeps snapshots of the seeds of every row; implements `tolaria.population.Keeper`."""

    def __init__(self, seeds: Seeds, embargo: int) -> None:
        self.seeds, self.embargo = seeds, embargo
        self.step = np.full(len(seeds.stage), -1, np.int64)

    def take(self, seeds: Seeds, rows: Bools, step: int) -> None:
        self.seeds = choose(rows, seeds, self.seeds)
        self.step[rows] = step

    def put_back(self, seeds: Seeds, rows: Bools) -> Seeds:
        found: Seeds = choose(rows, uprooted(self.seeds, rows, self.embargo), seeds)
        return found

    def state(self, now: int) -> dict[str, Any]:
        return {"seeds": self.seeds._asdict(), "step": self.step}

    def load_state(self, state: Mapping[str, Any], seeds: Seeds) -> None:
        self.seeds, self.step = Seeds(**state["seeds"]), state["step"]


def trained_steps(seeds: Seeds) -> Ints:
    """Count the steps in which each seed was trained, (R, S): its life less the step of germination and the doomed steps."""
    frozen = 1 + np.where(seeds.doomed, seeds.age, 0)
    steps: Ints = np.maximum(seeds.life.astype(np.int64) - frozen, 0)
    return steps
