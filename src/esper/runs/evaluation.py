"""Controllers against each other: the same held-out instances, the same keys, and the test split at the end.

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
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from esper.kasmina.static import Absent
from esper.leyline.actions import Actions, Op
from esper.leyline.brought import check_brought
from esper.leyline.config import BASELINES, Config, baseline_names, build_config
from esper.leyline.errors import InputError
from esper.leyline.length import with_steps
from esper.leyline.pace import Pace
from esper.leyline.protocols import PolicyClient
from esper.leyline.stages import Stage
from esper.leyline.task import AnyTask, Mixture
from esper.leyline.text import counted
from esper.leyline.view import Floats, Outcome, View, take
from esper.runs.baselines import grown_of
from esper.runs.environment import describe_environment
from esper.runs.origin import fingerprint
from esper.runs.static_contenders import Arrays, grown_as_arrays, grown_from, static_figures
from esper.runs.statistics import (
    CONFIDENCE,
    DRAWS,
    Interval,
    Tasks,
    interquartile_mean,
    interval,
    mean,
    mean_difference,
    probability_of_improvement,
)
from esper.simic.rewards import objective
from esper.store.disk import file_name, write_atomic
from esper.store.reading import read_named
from esper.tamiyo.baselines import Rule
from esper.tamiyo.catalog import CONTROLLERS, get_controller, settings_of, trained, with_sensors
from esper.tamiyo.controller import FACTS, WEIGHTS
from esper.tamiyo.schedule import Entry, Schedule
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.fitting import instance_keys
from esper.tolaria.play import play
from esper.tolaria.runtime import resolve_device

ROWS = 64
"""Environments that are grown together; the speed of a step is flat beyond, and memory is not [environments]."""

RULES = ("never", "random-valid", "heuristic")
BEST = "best schedule"
"""What every evaluation compares with, the fixed schedule found by a search among them."""

SEARCHED = 64
"""Training instances that the last candidates of a search are grown on."""
FIRST_RUNG = 8
SEARCH_SEED = 2**40
"""Far from the seeds of any evaluation, so that on one data set too no start is searched on that is evaluated."""
SEARCH_START = 2
"""The decision from which schedules of a search plant [steps]."""
PERMISSIVE = {"gates": {"permissive": True}}

ASKED = ("task", "tasks", "controller", "envs", "twin", "baselines", "instances", "first_instance", "models")
"""What an evaluation sets by itself, so that its settings may not."""

Say = Callable[[str], None]
Record = dict[str, Any]


class Contender(NamedTuple):
    """A controller that takes part."""

    name: str
    settings: Mapping[str, Any]  # over the task's and the evaluation's: its controller, and keys of `leyline.brought`
    make: Callable[[Config], PolicyClient]  # a fresh controller for a population, which must not learn
    content: str = ""  # what `make` reads beside the config; kept results of other content are not taken for its own


class Figures(NamedTuple):
    """What grown networks came to; every field has the same shape."""

    objective: Floats  # J on the test split, of the network that would be exported
    metric: Floats  # of that network on the test split
    added_params: Floats  # parameters of that network beyond its host's
    kept: Floats  # seeds that were fossilized
    seconds: Floats  # of training, probing and deciding: a population's time, in equal shares


class Evaluation(NamedTuple):
    """Contenders on one task, paired by instance and seed."""

    task: str
    metric: str  # its name
    contenders: tuple[str, ...]  # (C,) their names
    instances: NDArray[np.int64]  # (N,) keys
    seeds: tuple[int, ...]  # (R,)
    sampled: bool  # instances are problems drawn from a mixture; else they are starts on one data set
    figures: Figures  # (C, N, R)
    static: tuple[str, ...] = ()  # the contenders that are static networks
    absent: Mapping[str, str] = MappingProxyType({})  # static networks that the task's hosts do not have, and why
    sized_by: str | None = None  # the contender whose grown networks the static ones are sized by

    def problems(self, figure: Floats) -> Floats:
        """(N, R) of one contender as `statistics` wants it: problems by runs. Every start on one data set is a run of it."""
        return figure if self.sampled else figure.reshape(1, -1)


class Found(NamedTuple):
    """The best fixed schedule, and what it cost to find."""

    contender: Contender
    entries: tuple[Entry, ...]
    objective: float  # mean J on the probe split over the instances that it was grown on
    candidates: int
    instances: int  # that the last candidates were grown on
    episodes: int  # one environment grown once is one
    seconds: float


def named(name_or_path: str) -> Contender:
    """A contender by the name of its controller, or from a schedule file or the folder of a trained one.

    What is read of the latter two is part of who it is; whatever else a folder holds is not looked at.
    """
    path, folder, content = Path(name_or_path), trained(name_or_path), hashlib.sha256()
    parts = [Path(FACTS), Path(WEIGHTS)] if folder is not None else [Path()]
    for part in [] if name_or_path in CONTROLLERS else parts:
        file = (folder or path) / part
        if file.is_file():
            data = read_named(file, 64 * 2**20, "give a schedule file, or the folder of a trained controller")
            content.update(f"{part} {len(data)} ".encode() + data)
    return Contender(
        name_or_path,
        {**settings_of(name_or_path), "controller": name_or_path},
        lambda config: get_controller(name_or_path, config),
        content.hexdigest(),
    )


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
    """Controllers beside never, random-valid, heuristic and the best fixed schedule, on every task: a strict JSON object.

    `baselines` are the static networks beside them (docs/baselines.md), of which never growing is the twin; they are sized by
    what the first of the controllers grew, or the heuristic without one. `settings` are layers of config over the tasks' own,
    the same for all. What was grown is kept in `folder`, where one is named, and not grown again. `watch` is told in a line
    what is done. Raises InputError before anything is grown.
    """
    rules = [named(name) for name in RULES]
    again = [(rule.name, rule.settings) for rule in rules]
    ours = [controller for controller in controllers if (controller.name, controller.settings) not in again]
    _check_names([contender.name for contender in (*rules, *ours)], tasks, baselines)
    static = [name for name in baseline_names(list(baselines)) if name != BASELINES[0]]
    for task, contender in itertools.product(tasks, (*rules, *ours)):
        _check(task, contender, instances, seeds, part, first, settings)
    if searched < 1:
        raise InputError(f"the search for a schedule is to end with {counted(searched, 'instance')}; give 1 or more")
    if folder is not None:
        _create(folder)
    pace = _plan(tasks, len(rules) + len(ours) + 1 + len(static), instances * seeds, searched, settings, watch)
    evaluations, searches = [], []
    for task in tasks:
        found = search_schedules(task.sealed(), settings, instances=searched, watch=watch, pace=pace)
        searches.append(found)
        evaluations.append(
            evaluate(
                task,
                [*rules, found.contender, *ours],
                instances=instances,
                seeds=seeds,
                part=part,
                first=first,
                settings=settings,
                static=static,
                sized_by=ours[0].name if ours else RULES[2],
                folder=folder,
                watch=watch,
                pace=pace,
            )
        )
    where = resolve_device(build_config(tasks[0].defaults, *settings).device)
    return {
        "named": [controller.name for controller in controllers],
        "instances": instances,
        "seeds": list(evaluations[0].seeds),
        "part": part,
        "first_instance": first,
        "settings": [dict(layer) for layer in settings],
        "environment": describe_environment(where),
        **_findings(evaluations, searches, static),
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
    """Grow N instances from R seeds under every contender, and score what would be exported on the test split.

    Instance n of seed r has one host, one data order and one set of births, whatever the contender. Seeds count up from that
    of the config. At most `rows` environments are grown at once; what becomes of one does not depend on the others, but a
    controller that draws by row, as random-valid does, draws alike in every population. With a `folder` each population's
    figures are kept there, and those that are there already are not grown again. `static` names networks that do not grow,
    which stand as further contenders behind the others: each instance has those of what the contender `sized_by` grew there.
    Raises InputError before anything is grown.
    """
    assert contenders
    for contender in contenders:
        _check(task, contender, instances, seeds, part, first, settings)
    if folder is not None:
        _create(folder)
    data = fingerprint(task) if folder is not None else {}
    base = build_config(task.defaults, *settings).seed
    chosen = tuple(range(base, base + seeds))
    kept = Kept(folder, data)
    runs: dict[str, list[list[Arrays]]] = {}  # by contender, seed and population
    absent: dict[str, str] = {}
    for contender in contenders:
        runs[contender.name] = [[] for _ in chosen]
        for at, start, config in _populations(task, contender, settings, chosen, part, first, instances, rows):
            begin = time.perf_counter()
            runs[contender.name][at].append(kept.grow(task, contender, config))
            if pace is not None:
                seconds = time.perf_counter() - begin
                fresh = seconds > runs[contender.name][at][-1]["seconds"].sum() / 2  # else they were kept
                pace.add(config.envs, seconds if fresh else None)
            done = f"{start + config.envs} of {counted(instances, 'instance')}"
            _tell(watch, f"{task.name}: {contender.name}, seed {config.seed}, {done}")
    for name in static:
        sizer = next(contender for contender in contenders if contender.name == sized_by)
        beside: list[list[Arrays]] = [[] for _ in chosen]
        for at, start, config in _populations(task, sizer, settings, chosen, part, first, instances, rows):
            trained = kept.train(name, task, sizer, config, runs[sizer.name][at][start // rows])
            if isinstance(trained, Absent):
                absent[name] = trained.reason
                _tell(watch, f"{task.name}: {name} is absent: {trained.reason}")
                break
            beside[at].append(trained)
            done = f"{start + config.envs} of {counted(instances, 'instance')}"
            _tell(watch, f"{task.name}: {name}, seed {config.seed}, {done}")
        else:
            runs[name] = beside
    return Evaluation(
        task=task.name,
        metric=task.objective.metric,
        contenders=tuple(runs),
        instances=instance_keys(task, _config(task, contenders[0], settings, base, part, first, instances)),
        seeds=chosen,
        sampled=isinstance(task, Mixture),
        figures=Figures(*(_stacked(runs, name) for name in Figures._fields)),
        static=tuple(name for name in static if name not in absent),
        absent=absent,
        sized_by=sized_by,
    )


def _populations(
    task: AnyTask,
    contender: Contender,
    settings: Sequence[Mapping[str, Any]],
    seeds: Sequence[int],
    part: str,
    first: int,
    instances: int,
    rows: int,
) -> Iterator[tuple[int, int, Config]]:
    """Every population of a contender: the index of its seed, its first instance, and its config."""
    for (at, seed), start in itertools.product(enumerate(seeds), range(0, instances, rows)):
        envs = min(rows, instances - start)
        yield at, start, _config(task, contender, settings, seed, part, first + start, envs)


def _stacked(runs: Mapping[str, Sequence[Sequence[Arrays]]], name: str) -> Floats:
    """(C, N, R) one figure of all contenders, seeds and populations."""
    seeds = [[np.concatenate([chunk[name] for chunk in chunks]) for chunks in each] for each in runs.values()]
    return np.stack([np.stack(each, 1) for each in seeds])


def search_schedules(
    task: AnyTask,
    settings: Sequence[Mapping[str, Any]] = (),
    *,
    instances: int = SEARCHED,
    part: str = "training",
    watch: Say | None = None,
    pace: Pace | None = None,
) -> Found:
    """The fixed schedule of the highest mean J on training instances, by successive halving.

    Candidates plant one blueprint from step `SEARCH_START` on, at one slot, at two or at all, within `max_seeds`, and keep
    what the gates let them keep; each is tried with the gates of the config and with permissive ones, and planting nothing
    is a candidate too. All of them are grown on a few instances, then the better half on as many more, and so on (Karnin,
    Koren and Somekh, "Almost Optimal Exploration in Multi-Armed Bandits", ICML 2013, section 3), one seed each. J is on the
    probe split: a test split is not needed, and `task` may be sealed.
    """
    task = task.sealed()
    candidates = _candidates(task, settings)
    count = min(instances, len(task.keys(part)))
    if count < 1:
        raise InputError(f"the search for a schedule was given {counted(instances, 'instance')}; give 1 or more")
    totals, keys = np.zeros(len(candidates)), np.array(task.keys(part)[:count])
    alive, done, episodes, begin = np.arange(len(candidates)), 0, 0, time.perf_counter()
    while done < count:
        more = min(max(done, FIRST_RUNG), count - done)
        some = counted(len(alive), "schedule") if len(alive) == len(candidates) else f"the better {len(alive)}"
        where = counted(more, "more training instance" if done else "training instance")
        _tell(watch, f"{task.name}: search for the best fixed schedule, {some} on {where}")
        for own in ({}, PERMISSIVE):
            group = [index for index in alive if candidates[index].settings == own]
            chosen = [candidates[index].entries for index in group]
            for start in range(done, done + more, ROWS):
                instance = keys[start : min(start + ROWS, done + more)]
                started = time.perf_counter()
                totals[group] += _try(task, chosen, instance, [*settings, own], part).sum(1)
                if pace is not None:
                    pace.add(len(group) * len(instance), time.perf_counter() - started)
        episodes += more * len(alive)
        done += more
        alive = alive[np.argsort(-np.nan_to_num(totals[alive], nan=-np.inf), kind="stable")]
        alive = alive[: -(-len(alive) // 2)] if done < count else alive[:1]
    best = candidates[alive[0]]
    return Found(
        contender=Contender(
            BEST,
            {"controller": BEST, **best.settings},
            lambda config: Schedule(best.entries, BEST),
            json.dumps([_line(entry) for entry in best.entries]),
        ),
        entries=best.entries,
        objective=float(totals[alive[0]] / done),
        candidates=len(candidates),
        instances=done,
        episodes=episodes,
        seconds=time.perf_counter() - begin,
    )


def searched_networks(candidates: int, instances: int) -> int:
    """How many networks `search_schedules` grows for so many candidates and instances."""
    alive, done, networks = candidates, 0, 0
    while done < instances:
        more = min(max(done, FIRST_RUNG), instances - done)
        networks += more * alive
        done += more
        alive = -(-alive // 2)
    return networks


def _plan(
    tasks: Sequence[AnyTask],
    contenders: int,
    runs: int,
    searched: int,
    settings: Sequence[Mapping[str, Any]],
    watch: Say | None,
) -> Pace | None:
    """Say how much an evaluation grows; None where nobody is told."""
    if watch is None:
        return None
    search = sum(
        searched_networks(len(_candidates(task.sealed(), settings)), min(searched, len(task.keys("training"))))
        for task in tasks
    )
    grown = len(tasks) * contenders * runs
    some = f"{counted(contenders, 'contender')}, static networks included, on {counted(len(tasks), 'task')}"
    watch(f"{some}: {counted(grown, 'network')} to grow, and {search:,} in the search for the best schedule")
    return Pace(search + grown, "networks", watch)


class _Candidate(NamedTuple):
    entries: tuple[Entry, ...]
    settings: Mapping[str, Any]


class _Abreast(Rule):
    """Schedules side by side, each for as many environments as any other."""

    def __init__(self, schedules: Sequence[Schedule]) -> None:
        self.schedules = schedules

    def act(self, view: View) -> Actions:
        """What each schedule decides where masks and seeds are those of its own environments; it reads nothing else."""
        each = len(view.masks.op) // len(self.schedules)
        decided = []
        for index, schedule in enumerate(self.schedules):
            own = slice(index * each, (index + 1) * each)
            decided.append(schedule.act(view._replace(masks=take(view.masks, own), seeds=take(view.seeds, own))))
        return Actions(*map(np.concatenate, zip(*decided, strict=True)))


def _try(
    task: AnyTask,
    schedules: Sequence[Sequence[Entry]],
    instance: NDArray[np.int64],
    settings: Sequence[Mapping[str, Any]],
    part: str,
) -> Floats:
    """(schedules, instances) J on the probe split; several schedules share a population where it has room."""
    room = max(1, min(ROWS, len(task.keys(part))) // len(instance))
    if len(schedules) > room:
        parts = (schedules[:room], schedules[room:])
        return np.concatenate([_try(task, some, instance, settings, part) for some in parts])
    if not schedules:
        return np.zeros((0, len(instance)))
    contender = Contender("schedules", {}, lambda config: _Abreast([Schedule(entries) for entries in schedules]))
    config = _config(task, contender, settings, SEARCH_SEED, part, 0, len(schedules) * len(instance))
    _, outcome, _ = _play(task, contender, config, np.tile(instance, len(schedules)))
    return _probe_objective(outcome, config).reshape(len(schedules), -1)


def _candidates(task: AnyTask, settings: Sequence[Mapping[str, Any]]) -> list[_Candidate]:
    """The schedules that are tried, each with its gates; planting nothing is the first."""
    config = build_config(task.defaults, *settings, {"envs": 1, "baselines": []})
    space = VectorizedEngine(task, config).space
    at, places = SEARCH_START, range(len(space.slots))
    sizes = {1, 2, len(places)} & set(range(1, config.lifecycle.max_seeds + 1))
    found = [_Candidate((), {})]
    for size in sorted(sizes):
        for slots, (index, blueprint) in itertools.product(
            itertools.combinations(places, size), enumerate(space.blueprints)
        ):
            if space.fits[list(slots), index].all():
                entries = tuple(
                    Entry(at=at, op=Op.GERMINATE, slot=space.slots[slot], blueprint=blueprint.name, keep=True)
                    for slot in slots
                )
                gates = ({},) if config.gates.permissive else ({}, PERMISSIVE)
                found += [_Candidate(entries, own) for own in gates]
    return found


def _play(
    task: AnyTask, contender: Contender, config: Config, instance: NDArray[np.int64] | None = None
) -> tuple[VectorizedEngine, Outcome, float]:
    """Grow one population for an episode; returns it with its last outcome, and how long the steps took [s].

    instance (E,) names its instances; without it they are those of the config.
    """
    client = contender.make(config)
    engine = VectorizedEngine(task, with_sensors(config, client))
    engine.reset(instance)
    begin = time.perf_counter()
    outcome = play(engine, client)
    assert outcome is not None, "an episode has a step"
    exported = engine.finish()
    if exported is not None:
        outcome = outcome._replace(exported=exported, seeds=engine.view().seeds)
    return engine, outcome, time.perf_counter() - begin


def _probe_objective(outcome: Outcome, config: Config) -> Floats:
    """(E,) J on the probe split, of the networks that would be exported."""
    assert outcome.exported is not None, "the episode is not over"
    metric, loss, added = outcome.exported
    value = metric if config.reward.objective == "metric" else -loss
    return objective(value, added, outcome.host_params, config.reward.rent, config.reward.rent_size)


def _figures(task: AnyTask, contender: Contender, config: Config) -> Arrays:
    """(E,) figures of one population, and what it grew. The only reader of test data here."""
    engine, outcome, seconds = _play(task.sealed(), contender, config)
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


def _config(
    task: AnyTask,
    contender: Contender,
    settings: Sequence[Mapping[str, Any]],
    seed: int,
    part: str,
    first: int,
    envs: int,
) -> Config:
    """The run of a contender on some instances. InputError where it brings a key that all contenders must share."""
    ours = {
        "task": task.name,
        "seed": seed,
        "baselines": [],
        "envs": envs,
        "instances": part,
        "first_instance": first,
        "telemetry": {"level": "off"},
        "models": "none",
    }
    check_brought({name: value for name, value in contender.settings.items() if name != "controller"}, contender.name)
    return with_steps(build_config(task.defaults, *settings, contender.settings, ours), task)


def _check(
    task: AnyTask,
    contender: Contender,
    instances: int,
    seeds: int,
    part: str,
    first: int,
    settings: Sequence[Mapping[str, Any]],
) -> None:
    """See that a contender can decide on a task, by one decision for one environment. InputError where it cannot."""
    if task.test is None:
        raise InputError(f"task {task.name!r} has no test split, which an evaluation reads; give it one")
    for name, count in (("instances", instances), ("seeds", seeds)):
        if count < 1:
            raise InputError(f"{name} is {count}; an evaluation needs 1 or more")
    base = build_config(task.defaults, *settings).seed
    for name in ASKED:
        if any(name in layer for layer in settings):
            raise InputError(f"{name} is among the settings, but an evaluation sets it by itself; leave it out")
    instance_keys(task, _config(task, contender, settings, base + seeds - 1, part, first, instances))
    config = _config(task, contender, settings, base, part, first, 1)
    contender.make(config).act(VectorizedEngine(task.sealed(), config).reset())


def _check_names(contenders: Sequence[str], tasks: Sequence[AnyTask], baselines: Sequence[str]) -> None:
    """InputError where contenders, tasks or static networks do not have names of their own, or ones that nothing has."""
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
    """Figures of populations on `data`, from a folder where they are there, and else worked out and left there."""

    def __init__(self, folder: Path | None, data: Mapping[str, str]) -> None:
        self.folder, self.data = folder, data

    def grow(self, task: AnyTask, contender: Contender, config: Config) -> Arrays:
        """(E,) figures of a contender's population, and what it grew."""
        found = self._find([contender.name, contender.content], config, lambda: _figures(task, contender, config))
        assert not isinstance(found, Absent)
        return found

    def train(self, name: str, task: AnyTask, sizer: Contender, config: Config, grown: Arrays) -> Arrays | Absent:
        """(E,) figures of the static networks beside a population of `sizer`, whose figures and growth are `grown`."""
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


def _findings(evaluations: Sequence[Evaluation], searches: Sequence[Found], static: Sequence[str]) -> Record:
    """What came out on every task and, where all have one metric, together; and what it is compared with."""
    alike = len({evaluation.metric for evaluation in evaluations}) == 1
    return {
        "confidence": CONFIDENCE,
        "draws": DRAWS,
        "rules": [*RULES, BEST],
        "baselines": list(static),
        "sized_by": evaluations[0].sized_by,
        "tasks": [_task_record(evaluation, found) for evaluation, found in zip(evaluations, searches, strict=True)],
        "together": _estimates(evaluations) if alike and len(evaluations) > 1 else None,
    }


def _task_record(evaluation: Evaluation, found: Found) -> Record:
    """One task: estimates, the search, and every run."""
    problems, runs = evaluation.problems(evaluation.figures.objective[0]).shape
    return {
        "task": evaluation.task,
        "metric": evaluation.metric,
        "sampled": evaluation.sampled,
        "problems": problems,
        "runs_of_each": runs,
        "search": {
            "entries": [_line(entry) for entry in found.entries],
            "permissive_gates": "gates" in found.contender.settings,
            "probe_objective": _number(found.objective),
            "candidates": found.candidates,
            "instances": found.instances,
            "episodes": found.episodes,
            "seconds": round(found.seconds, 3),
        },
        "absent": dict(evaluation.absent),
        **_estimates([evaluation]),
        "instance_keys": evaluation.instances.tolist(),
        "runs": {
            contender: {
                name: [[_number(value) for value in row] for row in figure[index].tolist()]
                for name, figure in evaluation.figures._asdict().items()
            }
            for index, contender in enumerate(evaluation.contenders)
        },
    }


def _line(entry: Entry) -> Record:
    """An entry as a line of a schedule file says it."""
    return {**entry.model_dump(mode="json", exclude_none=True), "op": entry.op.name.lower()}


def _estimates(evaluations: Sequence[Evaluation]) -> Record:
    """Every contender, and every contender against every rule, over one task or several."""
    contenders = [name for name in evaluations[0].contenders if all(name in each.contenders for each in evaluations)]
    rules = (*RULES, BEST)

    def tasks(figure: str, contender: int) -> Tasks:
        return [
            each.problems(getattr(each.figures, figure)[each.contenders.index(contenders[contender])])
            for each in evaluations
        ]

    controllers = [
        {
            "name": contender,
            "rule": contender in rules,
            "static": contender in evaluations[0].static,
            "objective": _interval(interval(mean, tasks("objective", index))),
            "objective_iqm": _interval(interval(interquartile_mean, tasks("objective", index))),
            "metric": _interval(interval(mean, tasks("metric", index))),
            "added_params": _interval(interval(mean, tasks("added_params", index))),
            "kept": _interval(interval(mean, tasks("kept", index))),
            "seconds": round(float(sum(seconds.sum() for seconds in tasks("seconds", index))), 3),
        }
        for index, contender in enumerate(contenders)
    ]
    comparisons = [
        {
            "controller": contender,
            "rule": contenders[rule],
            "difference": _interval(interval(mean_difference, tasks("objective", index), tasks("objective", rule))),
            "probability": _interval(
                interval(probability_of_improvement, tasks("objective", index), tasks("objective", rule))
            ),
        }
        for index, contender, rule in _pairs(contenders, (*rules, *evaluations[0].static))
    ]
    return {"controllers": controllers, "comparisons": comparisons}


def _pairs(contenders: Sequence[str], rules: Sequence[str]) -> Iterator[tuple[int, str, int]]:
    """Every contender with every rule but itself: (its index, its name, index of the rule)."""
    for index, contender in enumerate(contenders):
        yield from ((index, contender, rule) for rule, name in enumerate(contenders) if name in rules and rule != index)


def _interval(estimate: Interval) -> Record:
    return {name: _number(value) for name, value in estimate._asdict().items()}


def _number(value: float) -> float | None:
    """What JSON has for it: null for what is not a finite number."""
    return float(value) if np.isfinite(value) else None


def _tell(watch: Say | None, text: str) -> None:
    if watch is not None:
        watch(text)
