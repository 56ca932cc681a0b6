"""Search for the best fixed plan of a task by successive halving. E environments."""

import itertools
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from esper.leyline.actions import Actions, Op
from esper.leyline.config import Config, build_config
from esper.leyline.errors import InputError
from esper.leyline.opponents import SEARCHED
from esper.leyline.pace import Pace
from esper.leyline.protocols import PolicyClient
from esper.leyline.task import AnyTask
from esper.leyline.text import counted
from esper.leyline.view import Floats, Outcome, Space, View, take
from esper.runs.contenders import ROWS, Contender, Say, contender_config, grow_contender, probe_objective, tell
from esper.runs.evaluation_work import EvaluationActors, EvaluationPart, computed
from esper.runs.kept import Kept
from esper.runs.static_contenders import Arrays
from esper.tamiyo.baselines import Rule
from esper.tamiyo.placement import Fixed
from esper.tamiyo.plans import Placed, plans_of
from esper.tamiyo.schedule import Entry, Schedule
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.play import Observer

EPISODES = 2048
"""Default number of episodes of a search."""

SEARCH_SEED = 2**40
"""Run seed of a search. It differs from the seeds of evaluations, so the starts on a data set differ too."""

SEARCH_START = 2
"""The first step at which schedules plant. Plans plant in step 0."""

PERMISSIVE = {"gates": {"permissive": True}}
"""Settings of a plan, and of every other schedule: what was planted is kept."""
UNMEASURED = {**PERMISSIVE, "probe": {"coalitions_every": 2**20}}
"""Settings of a plan, which asks for no contributions of seeds."""


class Candidate(NamedTuple):
    """A fixed plan, or a schedule.

    Attributes:
        name (str): what it does, in words
        choice (Placed or entries): what is planted
        settings (mapping): config of its runs
    """

    name: str
    choice: Placed | tuple[Entry, ...]
    settings: Mapping[str, Any]

    @property
    def content(self) -> str:
        """All that defines it, as JSON."""
        choice = self.choice
        if isinstance(choice, Placed):
            return json.dumps([*choice.plan, choice.slot])
        return json.dumps([entry_line(entry) for entry in choice])

    def contender(self, name: str) -> Contender:
        """Return it as a contender of an evaluation."""
        return Contender(name, {"controller": name, **self.settings}, partial(abreast, [self], name), self.content)


class Found(NamedTuple):
    """The best fixed plan, and the cost of the search.

    Attributes:
        best (Candidate): the plan
        objective (float): mean J on the probe split over the instances
        candidates (int): number of candidates of the full menu
        tried (int): number of candidates for which the episodes sufficed
        instances (int): number of instances on which the last candidates were grown
        episodes (int): number of networks that were grown
        seconds (float): duration of the search
    """

    best: Candidate
    objective: float
    candidates: int
    tried: int
    instances: int
    episodes: int
    seconds: float

    @property
    def contender(self) -> Contender:
        """The plan as a contender."""
        return self.best.contender(SEARCHED)._replace(episodes=self.episodes)


def search_plans(
    task: AnyTask,
    settings: Sequence[Mapping[str, Any]] = (),
    *,
    episodes: int = EPISODES,
    part: str = "training",
    kept: Kept | None = None,
    watch: Say | None = None,
    pace: Pace | None = None,
    actors: EvaluationActors | None = None,
) -> Found:
    """Find the fixed plan with the highest mean J on training instances, by successive halving of all plans of the menu.

    See `candidate_plans` for the candidates. All are grown on a few instances, then the better half on further ones, and so
    on until one is left, with one seed and the same share of the episodes for every half (Karnin, Koren and Somekh, "Almost
    Optimal Exploration in Multi-Armed Bandits", ICML 2013, section 3). J is computed on the probe split, so `task` may be
    sealed.

    episodes: number of networks that the search grows. Where they do not suffice for all candidates, the last ones are left
    out. kept: stores the results of populations, which are reused. actors: grow the populations; None
    grows them in this process.

    Raises InputError if `episodes` is below 1.
    """
    if episodes < 1:
        raise InputError(f"the search for the best fixed plan was given {counted(episodes, 'episode')}; give 1 or more")
    kept = kept or Kept(None, {})
    every = candidate_plans(task, settings)
    keys, begin = task.keys(part), time.perf_counter()
    steps = rungs(len(every), episodes, len(keys))
    candidates = every[: steps[0][0]]
    totals, alive, done = np.zeros(len(candidates)), np.arange(len(candidates)), 0
    for count, more in steps:
        alive = alive[np.argsort(-np.nan_to_num(totals[alive], nan=-np.inf), kind="stable")][:count]
        where = counted(more, "further training instance" if done else "training instance")
        of = f" of {len(every)}" if not done and count < len(every) else ""
        tell(watch, f"{task.name}: search for the {SEARCHED}, {counted(count, 'plan')}{of} on {where}")
        blocks = [np.array(keys[start : min(start + ROWS, done + more)]) for start in range(done, done + more, ROWS)]
        together = list(itertools.product(_alike(candidates, alive), blocks))
        asked = [([candidates[index] for index in group], instance) for group, instance in together]
        grown = grow_abreast(task, asked, settings, part, kept, pace, actors)
        for (group, _), own in zip(together, grown, strict=True):
            totals[group] += own.sum(1)
        done += more
    best = alive[np.argmax(np.nan_to_num(totals[alive], nan=-np.inf))]
    return Found(
        best=candidates[best],
        objective=float(totals[best] / done),
        candidates=len(every),
        tried=len(candidates),
        instances=done,
        episodes=sum(count * more for count, more in steps),
        seconds=time.perf_counter() - begin,
    )


def rungs(candidates: int, episodes: int, instances: int) -> list[tuple[int, int]]:
    """Return the steps of successive halving: the number of candidates, and the number of further instances for each.

    The products sum to `episodes`, unless the instances come to an end before. As many candidates take part as can be grown on
    an instance in every step; the rest of an integer division goes to the last candidate.
    """
    assert candidates > 0 < episodes, (candidates, episodes)
    alive = next(count for count in range(candidates, 0, -1) if count * max(_halvings(count), 1) <= episodes)
    steps, left = [], episodes
    for halving in range(_halvings(alive), 0, -1):
        more = min(left // (halving * alive), instances)
        steps.append((alive, more))
        left, instances, alive = left - alive * more, instances - more, -(-alive // 2)
    steps.append((1, min(left, instances)))
    return [(count, more) for count, more in steps if more]


def _halvings(count: int) -> int:
    return math.ceil(math.log2(count))


def candidate_plans(task: AnyTask, settings: Sequence[Mapping[str, Any]] = ()) -> list[Candidate]:
    """Return every fixed plan of the full menu: plans that plant in step 0, then schedules that plant in step `SEARCH_START`.

    The plans are those of `tamiyo.plans.plans_of`, and keep what they planted. A schedule plants one blueprint at one, two or
    all slots, up to `max_seeds`, and keeps the seeds that pass their gates; each is tried with the gates of the config and
    with permissive gates. The first candidate plants nothing.
    """
    space = space_of(task, settings)
    config = build_config(task.defaults, *settings)
    plans = plans_of(space) if config.lifecycle.max_seeds else plans_of(space)[:1]
    found = [Candidate(placed.words(space), placed, UNMEASURED) for placed in plans]
    places = range(len(space.slots))
    for size in sorted({1, 2, len(places)} & set(range(1, config.lifecycle.max_seeds + 1))):
        for slots, (index, blueprint) in itertools.product(
            itertools.combinations(places, size), enumerate(space.blueprints)
        ):
            if space.fits[list(slots), index].all():
                names = [space.slots[slot] for slot in slots]
                entries = tuple(
                    Entry(at=SEARCH_START, op=Op.GERMINATE, slot=slot, blueprint=blueprint.name, keep=True)
                    for slot in names
                )
                name = f"{blueprint.name} at {', '.join(names)} in step {SEARCH_START}"
                gates = ({},) if config.gates.permissive else ({}, PERMISSIVE)
                found += [Candidate(name, entries, own) for own in gates]
    return found


def space_of(task: AnyTask, settings: Sequence[Mapping[str, Any]]) -> Space:
    """Return the space of a few instances of a task."""
    config = build_config(task.defaults, *settings, {"task": task.name, "envs": 8, "baselines": []})
    return VectorizedEngine(task.sealed(), config).space


def grow_abreast(
    task: AnyTask,
    asked: Sequence[tuple[Sequence[Candidate], NDArray[np.int64]]],
    settings: Sequence[Mapping[str, Any]],
    part: str,
    kept: Kept,
    pace: Pace | None = None,
    actors: EvaluationActors | None = None,
) -> list[Floats]:
    """Return J (candidates, instances) on the probe split, for each pair of candidates and keys of instances in `asked`.

    The candidates of a pair must be of one kind and have the same settings. They share populations of at most ROWS environments.
    """
    most = min(ROWS, len(task.keys(part)))
    rooms = [max(1, most // len(instance)) for _, instance in asked]
    parts = [
        [
            _part(task, candidates[start : start + room], instance, settings, part, kept)
            for start in range(0, len(candidates), room)
        ]
        for (candidates, instance), room in zip(asked, rooms, strict=True)
    ]
    grown = iter(computed([*itertools.chain(*parts)], actors=actors, pace=pace))
    return [
        np.concatenate([each["objective"].reshape(-1, len(instance)) for each in itertools.islice(grown, len(own))])
        for own, (_, instance) in zip(parts, asked, strict=True)
    ]


def _part(
    task: AnyTask,
    candidates: Sequence[Candidate],
    instance: NDArray[np.int64],
    settings: Sequence[Mapping[str, Any]],
    part: str,
    kept: Kept,
) -> EvaluationPart:
    """Return the population of candidates, each on all instances."""
    contender = Contender("search", candidates[0].settings, partial(abreast, candidates, SEARCHED))
    config = contender_config(task, contender, settings, SEARCH_SEED, part, 0, len(candidates) * len(instance))
    who = ["search", *(candidate.content for candidate in candidates), json.dumps(instance.tolist())]
    compute = partial(_searched, contender, np.tile(instance, len(candidates)))
    return EvaluationPart(kept, task, who, config, ("objective", "seconds"), compute)


def _searched(
    contender: Contender, instance: NDArray[np.int64], task: AnyTask, config: Config, *observers: Observer
) -> Arrays:
    """Return J (E,) of a population on the probe split, and the duration of its steps."""
    _, outcome, seconds = grow_contender(task.sealed(), contender, config, instance, observers)
    return {"objective": probe_objective(outcome, config), "seconds": np.array(seconds)}


def abreast(candidates: Sequence[Candidate], name: str, config: Config) -> PolicyClient:
    """Return the controller of several candidates of one kind, each for an equal share of the environments.

    It does not depend on the config.
    """
    plans = [each.choice for each in candidates if isinstance(each.choice, Placed)]
    if plans:
        assert len(plans) == len(candidates), "plans and schedules are grown apart"
        return Fixed(plans)
    return _Schedules([Schedule(each.choice, name) for each in candidates if not isinstance(each.choice, Placed)])


class _Schedules(Rule):
    """Several schedules, each for an equal share of the environments."""

    def __init__(self, schedules: Sequence[Schedule]) -> None:
        self.schedules = schedules

    def act(self, view: View) -> Actions:
        """Return the decisions of every schedule. A schedule reads only masks and seeds, so the other fields are not
        divided.
        """
        decided = [
            schedule.act(view._replace(masks=take(view.masks, own), seeds=take(view.seeds, own)))
            for schedule, own in self._shares(len(view.masks.op))
        ]
        return Actions(*map(np.concatenate, zip(*decided, strict=True)))

    def store(self, outcome: Outcome) -> None:
        """Tell every schedule which of its decisions were refused."""
        for schedule, own in self._shares(len(outcome.refused)):
            schedule.store(outcome._replace(refused=outcome.refused[own]))

    def _shares(self, envs: int) -> Iterator[tuple[Schedule, slice]]:
        each = envs // len(self.schedules)
        return ((own, slice(index * each, (index + 1) * each)) for index, own in enumerate(self.schedules))


def _alike(candidates: Sequence[Candidate], alive: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Return the candidates that are alive in groups that can be grown together."""
    groups: dict[tuple[bool, str], list[int]] = {}
    for index in sorted(alive.tolist()):
        candidate = candidates[index]
        kind = isinstance(candidate.choice, Placed), json.dumps(candidate.settings, sort_keys=True)
        groups.setdefault(kind, []).append(index)
    return [np.array(group) for group in groups.values()]


def entry_line(entry: Entry) -> dict[str, Any]:
    """Return an entry as a mapping in the form of a schedule file."""
    return {**entry.model_dump(mode="json", exclude_none=True), "op": entry.op.name.lower()}
