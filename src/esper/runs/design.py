"""What the contenders of an evaluation share, and the figures that each of them has. N instances, R seeds, E environments."""

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from esper.kasmina.static import Absent
from esper.leyline.config import Config, build_config
from esper.leyline.errors import InputError
from esper.leyline.pace import Pace
from esper.leyline.stages import Stage
from esper.leyline.task import AnyTask, Mixture
from esper.leyline.text import counted
from esper.leyline.view import Floats
from esper.runs.baselines import grown_of
from esper.runs.contenders import ROWS, Contender, Say, contender_config, grow_contender, tell
from esper.runs.evaluation_record import Figures
from esper.runs.kept import Kept
from esper.runs.origin import fingerprint
from esper.runs.static_contenders import Arrays, grown_as_arrays, grown_from, static_figures
from esper.runs.statistics import best_by_others
from esper.simic.rewards import objective
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.fitting import instance_keys

ASKED = ("task", "tasks", "controller", "envs", "twin", "baselines", "instances", "first_instance", "models")
"""Config keys that an evaluation sets itself. Settings must not contain them."""


class Design(NamedTuple):
    """The task, instances, seeds and settings that contenders share."""

    task: AnyTask
    settings: Sequence[Mapping[str, Any]]  # layers of config over that of the task
    seeds: tuple[int, ...]
    part: str  # the part of the task's instances
    first: int
    instances: int
    rows: int  # largest number of environments of a population

    @classmethod
    def of(
        cls,
        task: AnyTask,
        settings: Sequence[Mapping[str, Any]],
        seeds: int,
        part: str,
        first: int,
        instances: int,
        rows: int = ROWS,
    ) -> "Design":
        """Return the design with consecutive seeds from that of the config on. Raises InputError if nothing can be evaluated."""
        if task.test is None:
            raise InputError(f"task {task.name!r} has no test split, which an evaluation reads; give it one")
        for name, count in (("instances", instances), ("seeds", seeds)):
            if count < 1:
                raise InputError(f"{name} is {count}; an evaluation needs 1 or more")
        base = build_config(task.defaults, *settings).seed
        for name in ASKED:
            if any(name in layer for layer in settings):
                raise InputError(f"{name} is among the settings, but an evaluation sets it by itself; leave it out")
        return cls(task, settings, tuple(range(base, base + seeds)), part, first, instances, rows)

    def check(self, contender: Contender) -> None:
        """Check that a contender can decide on the task, by one decision in one environment. Raises InputError if it cannot."""
        instance_keys(self.task, self.config(contender, self.seeds[-1]))
        config = contender_config(self.task, contender, self.settings, self.seeds[0], self.part, self.first, 1)
        contender.make(config).act(VectorizedEngine(self.task.sealed(), config).reset())

    def config(self, contender: Contender, seed: int) -> Config:
        """Return the config of a contender on all instances at once."""
        return contender_config(self.task, contender, self.settings, seed, self.part, self.first, self.instances)

    def populations(self, contender: Contender) -> Iterator[tuple[int, int, Config]]:
        """Yield every population of a contender: the index of its seed, its first instance, and its config."""
        for (at, seed), start in itertools.product(enumerate(self.seeds), range(0, self.instances, self.rows)):
            envs, first = min(self.rows, self.instances - start), self.first + start
            yield at, start, contender_config(self.task, contender, self.settings, seed, self.part, first, envs)


Runs = list[list[Arrays]]
"""The figures of a contender, by seed and population."""


class Grower(NamedTuple):
    """Grows the populations of a design, or reads their stored results.

    Attributes:
        design (Design): the task and what contenders share
        kept (Kept): the stored results
        watch (callable or None): called with lines of progress
        pace (Pace or None): counts what was grown
    """

    design: Design
    kept: Kept
    watch: Say | None = None
    pace: Pace | None = None

    @classmethod
    def of(cls, design: Design, folder: Path | None, watch: Say | None, pace: Pace | None) -> "Grower":
        """Return a grower that stores results in a folder, if one is given."""
        return cls(design, Kept(folder, fingerprint(design.task) if folder is not None else {}), watch, pace)

    def grow(self, contender: Contender) -> Runs:
        """Grow every population of a contender."""
        design, task = self.design, self.design.task
        grown: Runs = [[] for _ in design.seeds]
        for at, start, config in design.populations(contender):
            begin = time.perf_counter()
            grown[at].append(grown_figures(self.kept, task, contender, config))
            if self.pace is not None:
                seconds = time.perf_counter() - begin
                fresh = seconds > grown[at][-1]["seconds"].sum() / 2  # else its results were stored
                self.pace.add(config.envs, seconds if fresh else None)
            self._tell(contender.name, config, start)
        return grown

    def train(self, name: str, sizer: Contender, grown: Runs) -> Runs | Absent:
        """Train the static networks of a name for every population that `sizer` grew; return Absent if the task has none."""
        design, task = self.design, self.design.task
        beside: Runs = [[] for _ in design.seeds]
        for at, start, config in design.populations(sizer):
            trained = trained_figures(self.kept, name, task, sizer, config, grown[at][start // design.rows])
            if isinstance(trained, Absent):
                tell(self.watch, f"{task.name}: {name} is absent: {trained.reason}")
                return trained
            beside[at].append(trained)
            self._tell(name, config, start)
        return beside

    def oracle(self, plans: Sequence[Runs]) -> Runs:
        """Return the figures of the best plan of every instance and seed, chosen by J of the other seeds (`best_by_others`).

        On one data set, the other runs are those from all other starts.
        """
        values = {name: np.stack([stacked(runs, name) for runs in plans]) for name in Figures._fields}  # (K, N, R)
        scores = values["objective"]
        alike = scores if isinstance(self.design.task, Mixture) else scores.reshape(len(scores), 1, -1)
        chosen = best_by_others(alike).reshape(scores.shape[1:])
        taken = {name: np.take_along_axis(value, chosen[None], 0)[0] for name, value in values.items()}
        return [[{name: value[:, at] for name, value in taken.items()}] for at in range(len(self.design.seeds))]

    def _tell(self, name: str, config: Config, start: int) -> None:
        done = f"{start + config.envs} of {counted(self.design.instances, 'instance')}"
        tell(self.watch, f"{self.design.task.name}: {name}, seed {config.seed}, {done}")


def stacked(runs: Sequence[Sequence[Arrays]], name: str) -> Floats:
    """Return one figure of a contender, (N, R)."""
    return np.stack([np.concatenate([chunk[name] for chunk in chunks]) for chunks in runs], 1)


def grown_figures(kept: Kept, task: AnyTask, contender: Contender, config: Config) -> Arrays:
    """Return the figures (E,) of a contender's population, and its growth as arrays."""
    who = [contender.name, contender.content]
    found = kept.find(who, config, Figures._fields, lambda: _figures(task, contender, config))
    assert not isinstance(found, Absent)
    return found


def trained_figures(
    kept: Kept, name: str, task: AnyTask, sizer: Contender, config: Config, grown: Arrays
) -> Arrays | Absent:
    """Return the figures (E,) of the static networks for a population of `sizer`, with `grown`, its figures and growth."""
    host_params = grown["params"] - grown["added_params"].astype(np.int64)
    return kept.find(
        [name, sizer.name, sizer.content],
        config,
        Figures._fields,
        lambda: static_figures(name, task, config, grown_from(grown), host_params),
    )


def _figures(task: AnyTask, contender: Contender, config: Config) -> Arrays:
    """Return the figures (E,) of one population, and its growth as arrays. Only this function here reads test data of a
    growth.
    """
    engine, outcome, seconds = grow_contender(task.sealed(), contender, config)
    tests = [split for key in engine.space.instance.tolist() if (split := task.test_split(key)) is not None]
    metric, loss = engine.evaluate(tests)
    value = metric if config.reward.objective == "metric" else -loss
    added = engine.exported_params() - outcome.host_params
    figures = Figures(
        objective=objective(value, added, outcome.host_params, config.reward.rent, config.reward.rent_size),
        metric=metric,
        added_params=added.astype(np.float64),
        kept=(outcome.seeds.stage == Stage.FOSSILIZED).sum(1).astype(np.float64),
        seconds=np.full(config.envs, seconds / config.envs),
    )
    return {**figures._asdict(), **grown_as_arrays(grown_of(engine))}
