"""Evaluation of controllers on the same held-out instances, with the same seeds, by the test split.

C contenders, N instances, R seeds, E environments of a population.
"""

import hashlib
import io
import itertools
import json
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from esper.kasmina.static import Absent
from esper.leyline.config import BASELINES, Config, baseline_names, build_config
from esper.leyline.errors import InputError
from esper.leyline.pace import Pace
from esper.leyline.stages import Stage
from esper.leyline.task import AnyTask, Mixture
from esper.leyline.text import counted
from esper.leyline.view import Floats
from esper.runs.baselines import grown_of
from esper.runs.contenders import (
    BEST,
    ROWS,
    RULES,
    Contender,
    Say,
    contender_config,
    grow_contender,
    named,
    tell,
)
from esper.runs.environment import describe_environment
from esper.runs.evaluation_record import (
    Evaluation,
    Figures,
    Record,
    findings,
)
from esper.runs.origin import fingerprint
from esper.runs.schedule_search import (
    SEARCHED,
    candidate_schedules,
    search_schedules,
    searched_networks,
)
from esper.runs.static_contenders import Arrays, grown_as_arrays, grown_from, static_figures
from esper.simic.rewards import objective
from esper.store.disk import file_name, write_atomic
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.fitting import instance_keys
from esper.tolaria.runtime import resolve_device

ASKED = ("task", "tasks", "controller", "envs", "twin", "baselines", "instances", "first_instance", "models")
"""Config keys that an evaluation sets itself. Settings must not contain them."""


def run_evaluation(
    controllers: Sequence[Contender],
    tasks: Sequence[AnyTask],
    *,
    instances: int = 200,
    seeds: int = 3,
    part: str = "heldout",
    first: int = 0,
    settings: Sequence[Mapping[str, Any]] = (),
    searched: int = SEARCHED,
    baselines: Sequence[str] = BASELINES,
    folder: Path | None = None,
    watch: Say | None = None,
) -> Record:
    """Compare controllers with never, random-valid, heuristic and the best fixed schedule on every task.

    baselines: static networks that are compared too (docs/baselines.md); the controller never is the twin. They have
    the sizes of the networks that the first controller grew, or of those of the heuristic if no controller is given.
    settings: layers of config over that of the tasks, the same for all contenders. folder: stores the results of
    populations, which are reused. watch: called with lines of progress.

    Returns a strict JSON object. Raises InputError before anything is grown.
    """
    rules, ours = _contenders(controllers, tasks, baselines)
    static = [name for name in baseline_names(list(baselines)) if name != BASELINES[0]]
    designs = [Design.of(task, settings, seeds, part, first, instances) for task in tasks]
    for design, contender in itertools.product(designs, (*rules, *ours)):
        design.check(contender)
    if searched < 1:
        raise InputError(f"the search for a schedule is to end with {counted(searched, 'instance')}; give 1 or more")
    if folder is not None:
        _create(folder)
    pace = _plan(tasks, len(rules) + len(ours) + 1 + len(static), instances * seeds, searched, settings, watch)
    sized_by = ours[0].name if ours else RULES[2]
    evaluations, searches = [], []
    for design in designs:
        found = search_schedules(design.task.sealed(), settings, instances=searched, watch=watch, pace=pace)
        contenders = [*rules, found.contender, *ours]
        searches.append(found)
        evaluations.append(_compared(design, contenders, static, sized_by, folder, watch, pace))
    return {
        "named": [controller.name for controller in controllers],
        "instances": instances,
        "seeds": list(evaluations[0].seeds),
        "part": part,
        "first_instance": first,
        "settings": [dict(layer) for layer in settings],
        "environment": describe_environment(resolve_device(build_config(tasks[0].defaults, *settings).device)),
        **findings(evaluations, searches, static),
    }


def evaluate(
    task: AnyTask,
    contenders: Sequence[Contender],
    *,
    instances: int,
    seeds: int,
    part: str = "heldout",
    first: int = 0,
    settings: Sequence[Mapping[str, Any]] = (),
    static: Sequence[str] = (),
    sized_by: str | None = None,
    folder: Path | None = None,
    rows: int = ROWS,
    watch: Say | None = None,
    pace: Pace | None = None,
) -> Evaluation:
    """Grow N instances with R seeds under every contender, and evaluate the networks as exported on the test split.

    Instance n with seed r has the same initial host, the same order of data and the same initial seeds under every
    contender. The seeds are consecutive, from that of the config.

    static: names of static networks, which become further contenders. Their sizes are those of the networks that the
    contender `sized_by` grew on the same instances. folder: stores the results of populations, which are reused. rows:
    largest number of environments that are grown together; the results do not depend on it.

    Raises InputError before anything is grown.
    """
    assert contenders
    design = Design.of(task, settings, seeds, part, first, instances, rows)
    for contender in contenders:
        design.check(contender)
    if folder is not None:
        _create(folder)
    return _compared(design, contenders, static, sized_by, folder, watch, pace)


def _compared(
    design: "Design",
    contenders: Sequence[Contender],
    static: Sequence[str],
    sized_by: str | None,
    folder: Path | None,
    watch: Say | None,
    pace: Pace | None,
) -> Evaluation:
    """Return the figures of all contenders, and of the static networks with the sizes that the contender `sized_by` grew."""
    task = design.task
    kept = Kept(folder, fingerprint(task) if folder is not None else {})
    runs = {contender.name: _grow(design, contender, kept, watch, pace) for contender in contenders}
    absent: dict[str, str] = {}
    for name in static:
        sizer = next(contender for contender in contenders if contender.name == sized_by)
        trained = _train(design, name, sizer, runs[sizer.name], kept, watch)
        if isinstance(trained, Absent):
            absent[name] = trained.reason
        else:
            runs[name] = trained
    return Evaluation(
        task=task.name,
        metric=task.objective.metric,
        contenders=tuple(runs),
        instances=instance_keys(task, design.config(contenders[0], design.seeds[0])),
        seeds=design.seeds,
        sampled=isinstance(task, Mixture),
        figures=Figures(*(_stacked(runs, name) for name in Figures._fields)),
        static=tuple(name for name in static if name not in absent),
        absent=absent,
        sized_by=sized_by,
    )


class Design(NamedTuple):
    """The instances, seeds and settings that all contenders share."""

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


def _grow(design: Design, contender: Contender, kept: "Kept", watch: Say | None, pace: Pace | None) -> Runs:
    """Grow every population of a contender, or read its stored results."""
    task = design.task
    grown: Runs = [[] for _ in design.seeds]
    for at, start, config in design.populations(contender):
        begin = time.perf_counter()
        grown[at].append(kept.grow(task, contender, config))
        if pace is not None:
            seconds = time.perf_counter() - begin
            fresh = seconds > grown[at][-1]["seconds"].sum() / 2  # else its results were stored
            pace.add(config.envs, seconds if fresh else None)
        done = f"{start + config.envs} of {counted(design.instances, 'instance')}"
        tell(watch, f"{task.name}: {contender.name}, seed {config.seed}, {done}")
    return grown


def _train(design: Design, name: str, sizer: Contender, grown: Runs, kept: "Kept", watch: Say | None) -> Runs | Absent:
    """Train the static networks of a name for every population that `sizer` grew; return Absent if the task has none."""
    task = design.task
    beside: Runs = [[] for _ in design.seeds]
    for at, start, config in design.populations(sizer):
        trained = kept.train(name, task, sizer, config, grown[at][start // design.rows])
        if isinstance(trained, Absent):
            tell(watch, f"{task.name}: {name} is absent: {trained.reason}")
            return trained
        beside[at].append(trained)
        done = f"{start + config.envs} of {counted(design.instances, 'instance')}"
        tell(watch, f"{task.name}: {name}, seed {config.seed}, {done}")
    return beside


def _stacked(runs: Mapping[str, Sequence[Sequence[Arrays]]], name: str) -> Floats:
    """Return one figure of all contenders, (C, N, R)."""
    seeds = [[np.concatenate([chunk[name] for chunk in chunks]) for chunks in each] for each in runs.values()]
    return np.stack([np.stack(each, 1) for each in seeds])


def _plan(
    tasks: Sequence[AnyTask],
    contenders: int,
    runs: int,
    searched: int,
    settings: Sequence[Mapping[str, Any]],
    watch: Say | None,
) -> Pace | None:
    """Report the number of networks that an evaluation grows. Returns None without `watch`."""
    if watch is None:
        return None
    search = sum(
        searched_networks(len(candidate_schedules(task.sealed(), settings)), min(searched, len(task.keys("training"))))
        for task in tasks
    )
    grown = len(tasks) * contenders * runs
    some = f"{counted(contenders, 'contender')}, static networks included, on {counted(len(tasks), 'task')}"
    watch(f"{some}: {counted(grown, 'network')} to grow, and {search:,} in the search for the best schedule")
    return Pace(search + grown, "networks", watch)


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


def _contenders(
    controllers: Sequence[Contender], tasks: Sequence[AnyTask], baselines: Sequence[str]
) -> tuple[list[Contender], list[Contender]]:
    """Return the rules that every evaluation has, and the controllers that are none of them.

    Raises InputError if a name is taken twice.
    """
    rules = [named(name) for name in RULES]
    again = [(rule.name, rule.settings) for rule in rules]
    ours = [controller for controller in controllers if (controller.name, controller.settings) not in again]
    _check_names([contender.name for contender in (*rules, *ours)], tasks, baselines)
    return rules, ours


def _check_names(contenders: Sequence[str], tasks: Sequence[AnyTask], baselines: Sequence[str]) -> None:
    """Raise InputError if a contender or a task is named twice, or a name is reserved or unknown."""
    if len(set(contenders)) < len(contenders) or {BEST, *BASELINES} & set(contenders):
        reserved = ", ".join(map(repr, (BEST, *BASELINES)))
        raise InputError(
            f"the controllers are {', '.join(contenders)}; give each a name of its own, and none of {reserved}"
        )
    try:
        baseline_names(list(baselines))
    except ValueError as error:
        raise InputError(f"baselines is {', '.join(map(str, baselines))!r}; {error}") from None
    if len({task.name for task in tasks}) < len(tasks) or not tasks:
        given = ", ".join(task.name for task in tasks) or "none"
        raise InputError(f"the tasks of the evaluation are {given}; give one or more, each once")


class Kept:
    """Computes the figures of populations on `data`, or reads them from a folder where they are stored."""

    def __init__(self, folder: Path | None, data: Mapping[str, str]) -> None:
        self.folder, self.data = folder, data

    def grow(self, task: AnyTask, contender: Contender, config: Config) -> Arrays:
        """Return the figures (E,) of a contender's population, and its growth as arrays."""
        found = self._find([contender.name, contender.content], config, lambda: _figures(task, contender, config))
        assert not isinstance(found, Absent)
        return found

    def train(self, name: str, task: AnyTask, sizer: Contender, config: Config, grown: Arrays) -> Arrays | Absent:
        """Return the figures (E,) of the static networks for a population of `sizer`, with `grown`, its figures and growth."""
        host_params = grown["params"] - grown["added_params"].astype(np.int64)
        return self._find(
            [name, sizer.name, sizer.content],
            config,
            lambda: static_figures(name, task, config, grown_from(grown), host_params),
        )

    def _find(self, who: Sequence[str], config: Config, make: Callable[[], Arrays | Absent]) -> Arrays | Absent:
        if self.folder is None:
            return make()
        asked = json.dumps([*who, config.model_dump(mode="json"), self.data], sort_keys=True)
        tag = hashlib.sha256(asked.encode()).hexdigest()[:16]
        name = f"{file_name(config.task)}-{file_name(who[0])[-40:]}-s{config.seed}-{config.first_instance}-{tag}.npz"
        path = self.folder / name
        if not path.exists():
            made = make()
            if not isinstance(made, Absent):
                content = io.BytesIO()
                np.savez_compressed(content, allow_pickle=False, **made)
                write_atomic(path, content.getvalue())
            return made
        try:
            with zipfile.ZipFile(path) as parts:
                if sum(part.file_size for part in parts.infolist()) > 2**30:
                    raise ValueError("more than any figures")
            with np.load(path, allow_pickle=False) as arrays:
                found = dict(arrays)
            if set(Figures._fields) - set(found):
                raise KeyError("some figures")
        except (OSError, ValueError, KeyError, MemoryError, zipfile.BadZipFile, zlib.error):
            raise InputError(f"{path} cannot be read as kept figures; remove it, and they are grown again") from None
        return found


def _create(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot keep figures in {folder}: {error.strerror}; name another folder") from None
