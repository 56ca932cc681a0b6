"""What the contenders of an evaluation share, and the figures that each of them has. N instances, R seeds, E environments."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from esper.kasmina.lifecycle import dormant
from esper.kasmina.network.static import Absent
from esper.leyline.config.tree import Config, build_config
from esper.leyline.data.task import AnyTask, Mixture
from esper.leyline.errors import InputError
from esper.leyline.lifecycle.actions import checked_actions
from esper.leyline.lifecycle.stages import Stage
from esper.leyline.lifecycle.view import Floats, Outcome
from esper.leyline.progress import Pace
from esper.leyline.text import counted
from esper.runs.baselines import GrowthResult, grown_of, train_baseline
from esper.runs.evaluation.contenders import ROWS, Contender, Say, contender_config, grow_contender, tell
from esper.runs.evaluation.record import RecordedFigures
from esper.runs.evaluation.statistics import best_by_others
from esper.runs.evaluation.work import Arrays, EvaluationActors, EvaluationPart, Kept, computed, play_parts
from esper.runs.figures import exported_objective, test_splits
from esper.runs.folder.environment import fingerprint
from esper.simic.rewards import objective
from esper.tamiyo.catalog import with_sensors
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.play import Observer
from esper.tolaria.stacked.population import instance_keys

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
        client = contender.make(config)
        view = VectorizedEngine(self.task.sealed(), with_sensors(config, client)).reset()
        checked_actions(client.act(view), 1)

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
    """Names the populations of a design, and has them grown."""

    design: Design  # the task and what contenders share
    kept: Kept  # the stored results
    watch: Say | None = None  # called with lines of progress
    pace: Pace | None = None  # counts what was grown
    actors: EvaluationActors | None = None  # compute the populations; None computes them in this process

    @classmethod
    def of(
        cls,
        design: Design,
        folder: Path | None,
        watch: Say | None,
        pace: Pace | None,
        actors: EvaluationActors | None = None,
    ) -> "Grower":
        """Return a grower that stores results in a folder, if one is given."""
        kept = Kept(folder, {} if folder is None else fingerprint(design.task), partial(tell, watch))
        return cls(design, kept, watch, pace, actors)

    def parts(self, contender: Contender) -> list[EvaluationPart]:
        """Return every population of a contender, by seed and first instance."""
        return [
            grown_part(self.kept, self.design.task, contender, config)._replace(
                said=self._said(contender.name, config, start)
            )
            for _, start, config in self.design.populations(contender)
        ]

    def train(self, names: Sequence[str], sizer: Contender, grown: Runs) -> dict[str, Runs | Absent]:
        """Train the static networks of names for every population that `sizer` grew; Absent are those that the task lacks."""
        design, populations = self.design, list(self.design.populations(sizer))
        parts = [
            EvaluationPart(
                self.kept,
                design.task,
                [name, sizer.name, sizer.content],
                config,
                RecordedFigures._fields,
                partial(_trained, name, grown[at][start // design.rows]),
                self._said(name, config, start),
            )
            for name in names
            for at, start, config in populations
        ]
        made, found = iter(play_parts(parts, self.actors, self.watch, self.pace)), dict[str, Runs | Absent]()
        for name in names:
            trained = list(itertools.islice(made, len(populations)))
            absent = next((each for each in trained if isinstance(each, Absent)), None)
            if absent is not None:
                tell(self.watch, f"{design.task.name}: {name} is absent: {absent.reason}")
            found[name] = absent or self.by_seed([each for each in trained if not isinstance(each, Absent)])
        return found

    def by_seed(self, grown: Sequence[Arrays]) -> Runs:
        """Return the results of the parts of a contender by seed."""
        each = len(grown) // len(self.design.seeds)
        return [list(grown[start : start + each]) for start in range(0, len(grown), each)]

    def oracle(self, plans: Sequence[Runs]) -> Runs:
        """Return the figures of the best plan of every instance and seed, chosen by J of the other seeds (`best_by_others`).

        On one data set, the other runs are those from all other starts.
        """
        values = {
            name: np.stack([stacked(runs, name) for runs in plans]) for name in RecordedFigures._fields
        }  # (K, N, R)
        scores = values["objective"]
        alike = scores if isinstance(self.design.task, Mixture) else scores.reshape(len(scores), 1, -1)
        chosen = best_by_others(alike).reshape(scores.shape[1:])
        taken = {name: np.take_along_axis(value, chosen[None], 0)[0] for name, value in values.items()}
        return [[{name: value[:, at] for name, value in taken.items()}] for at in range(len(self.design.seeds))]

    def _said(self, name: str, config: Config, start: int) -> str:
        done = f"{start + config.envs} of {counted(self.design.instances, 'instance')}"
        return f"{self.design.task.name}: {name}, seed {config.seed}, {done}"


def grow_all(asked: Sequence[tuple[Grower, Contender]]) -> list[Runs]:
    """Grow every population of contenders, each by its grower. The populations of all are played together."""
    parts = [grower.parts(contender) for grower, contender in asked]
    first, _ = asked[0]
    made = iter(computed([*itertools.chain(*parts)], actors=first.actors, watch=first.watch, pace=first.pace))
    return [
        grower.by_seed(list(itertools.islice(made, len(own)))) for (grower, _), own in zip(asked, parts, strict=True)
    ]


def stacked(runs: Sequence[Sequence[Arrays]], name: str) -> Floats:
    """Return one figure of a contender, (N, R)."""
    return np.stack([np.concatenate([chunk[name] for chunk in chunks]) for chunks in runs], 1)


def grown_part(kept: Kept, task: AnyTask, contender: Contender, config: Config) -> EvaluationPart:
    """Return the part that computes the figures (E,) of a contender's population, and its growth as arrays."""
    who = [contender.name, contender.content]
    return EvaluationPart(kept, task, who, config, RecordedFigures._fields, partial(_figures, contender))


_KEPT = ("stage", "blueprint", "blend", "alpha")


def _figures(contender: Contender, task: AnyTask, config: Config, *observers: Observer) -> Arrays:
    """Return the figures (E,) of one population, and its growth as arrays, from which `_trained` makes it again."""
    engine, outcome, seconds = grow_contender(task.sealed(), contender, config, observers=observers)
    grown = grown_of(engine)
    return {
        **tested(task, config, engine, outcome, seconds)._asdict(),
        "instance": grown.instance,
        "params": grown.params,
        **{f"seeds_{name}": getattr(grown.kept, name) for name in _KEPT},
    }


def tested(
    task: AnyTask, config: Config, engine: VectorizedEngine, outcome: Outcome, seconds: float
) -> RecordedFigures:
    """Return the figures (E,) of a population that grew on `task.sealed()`; no other function reads test data of one.

    outcome: the last one. seconds: duration of the steps.
    """
    metric, loss = engine.evaluate(test_splits(engine, task))
    return RecordedFigures(
        objective=exported_objective(engine, metric, loss),
        metric=metric,
        added_params=(engine.exported_params() - outcome.host_params).astype(np.float64),
        kept=(outcome.seeds.stage == Stage.FOSSILIZED).sum(1).astype(np.float64),
        seconds=np.full(config.envs, seconds / config.envs),
    )


def _trained(name: str, arrays: Arrays, task: AnyTask, config: Config, *observers: Observer) -> Arrays | Absent:
    """Train the static networks of one baseline, which no observer sees, and return their figures (E,).

    arrays: of the population that grew, from `_figures`. The figure `kept` is nan for networks without seeds.
    """
    seeds = dormant(*arrays["seeds_stage"].shape)._replace(**{each: arrays[f"seeds_{each}"] for each in _KEPT})
    grown = GrowthResult(arrays["instance"], seeds, arrays["params"])
    trained = train_baseline(name, task, config, grown, config.steps)
    if isinstance(trained, Absent):
        return trained
    assert trained.seconds is not None
    host_params, reward = grown.params - arrays["added_params"].astype(np.int64), config.reward
    value, added = trained.metric if reward.objective == "metric" else -trained.loss, trained.params - host_params
    kept = (seeds.stage == Stage.FOSSILIZED).sum(1) if name == "same-size" else np.full(config.envs, np.nan)
    return RecordedFigures(
        objective=objective(value, added, host_params, reward.rent, reward.rent_size),
        metric=trained.metric,
        added_params=added.astype(np.float64),
        kept=kept.astype(np.float64),
        seconds=np.full(config.envs, trained.seconds / config.envs),
    )._asdict()
