"""Search for the best fixed schedule of a task by successive halving. E environments."""

import itertools
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from esper.leyline.actions import Actions, Op
from esper.leyline.config import build_config
from esper.leyline.errors import InputError
from esper.leyline.pace import Pace
from esper.leyline.task import AnyTask
from esper.leyline.text import counted
from esper.leyline.view import Floats, View, take
from esper.runs.contenders import (
    BEST,
    ROWS,
    Contender,
    Say,
    contender_config,
    grow_contender,
    probe_objective,
    tell,
)
from esper.tamiyo.baselines import Rule
from esper.tamiyo.schedule import Entry, Schedule
from esper.tolaria.engine import VectorizedEngine

SEARCHED = 64
"""Number of training instances on which the last candidates are grown."""

FIRST_RUNG = 8

SEARCH_SEED = 2**40
"""Run seed of a search. It differs from the seeds of evaluations, so the starts on a data set differ too."""

SEARCH_START = 2
"""The first step at which the candidates plant."""

PERMISSIVE = {"gates": {"permissive": True}}


class Found(NamedTuple):
    """The best fixed schedule, and the cost of the search.

    Attributes:
        contender (Contender): the schedule as a contender
        entries (entries): the entries of the schedule
        objective (float): mean J on the probe split over the instances
        candidates (int): number of candidates
        instances (int): number of instances on which the last candidates were grown
        episodes (int): number of networks that were grown
        seconds (float): duration of the search
    """

    contender: Contender
    entries: tuple[Entry, ...]
    objective: float
    candidates: int
    instances: int
    episodes: int
    seconds: float


def search_schedules(
    task: AnyTask,
    settings: Sequence[Mapping[str, Any]] = (),
    *,
    instances: int = SEARCHED,
    part: str = "training",
    watch: Say | None = None,
    pace: Pace | None = None,
) -> Found:
    """Find the fixed schedule with the highest mean J on training instances, by successive halving.

    A candidate plants one blueprint from step `SEARCH_START` on, at one, two or all slots, up to `max_seeds`, and keeps
    the seeds that pass their gates. Each is tried with the gates of the config and with permissive gates. Planting
    nothing is a candidate too. All candidates are grown on a few instances, then the better half on as many more, and so
    on, with one seed (Karnin, Koren and Somekh, "Almost Optimal Exploration in Multi-Armed Bandits", ICML 2013, section
    3). J is computed on the probe split, so `task` may be sealed.
    """
    task = task.sealed()
    candidates = candidate_schedules(task, settings)
    count = min(instances, len(task.keys(part)))
    if count < 1:
        raise InputError(f"the search for a schedule was given {counted(instances, 'instance')}; give 1 or more")
    totals, keys = np.zeros(len(candidates)), np.array(task.keys(part)[:count])
    alive, done, episodes, begin = np.arange(len(candidates)), 0, 0, time.perf_counter()
    while done < count:
        more = min(max(done, FIRST_RUNG), count - done)
        some = counted(len(alive), "schedule") if len(alive) == len(candidates) else f"the better {len(alive)}"
        where = counted(more, "more training instance" if done else "training instance")
        tell(watch, f"{task.name}: search for the best fixed schedule, {some} on {where}")
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
            json.dumps([entry_line(entry) for entry in best.entries]),
        ),
        entries=best.entries,
        objective=float(totals[alive[0]] / done),
        candidates=len(candidates),
        instances=done,
        episodes=episodes,
        seconds=time.perf_counter() - begin,
    )


def searched_networks(candidates: int, instances: int) -> int:
    """Return the number of networks that `search_schedules` grows."""
    alive, done, networks = candidates, 0, 0
    while done < instances:
        more = min(max(done, FIRST_RUNG), instances - done)
        networks += more * alive
        done += more
        alive = -(-alive // 2)
    return networks


class _Candidate(NamedTuple):
    entries: tuple[Entry, ...]
    settings: Mapping[str, Any]


class _Abreast(Rule):
    """Several schedules, each for an equal share of the environments."""

    def __init__(self, schedules: Sequence[Schedule]) -> None:
        self.schedules = schedules

    def act(self, view: View) -> Actions:
        """Return the decisions of every schedule. A schedule reads only masks and seeds, so the other fields are not
        divided.
        """
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
    """Return J (schedules, instances) on the probe split. Schedules share a population of at most ROWS environments."""
    room = max(1, min(ROWS, len(task.keys(part))) // len(instance))
    if len(schedules) > room:
        parts = (schedules[:room], schedules[room:])
        return np.concatenate([_try(task, some, instance, settings, part) for some in parts])
    if not schedules:
        return np.zeros((0, len(instance)))
    contender = Contender("schedules", {}, lambda config: _Abreast([Schedule(entries) for entries in schedules]))
    config = contender_config(task, contender, settings, SEARCH_SEED, part, 0, len(schedules) * len(instance))
    _, outcome, _ = grow_contender(task, contender, config, np.tile(instance, len(schedules)))
    return probe_objective(outcome, config).reshape(len(schedules), -1)


def candidate_schedules(task: AnyTask, settings: Sequence[Mapping[str, Any]]) -> list[_Candidate]:
    """Return the candidates, each with its gates. The first plants nothing."""
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


def entry_line(entry: Entry) -> dict[str, Any]:
    """Return an entry as a mapping in the form of a schedule file."""
    return {**entry.model_dump(mode="json", exclude_none=True), "op": entry.op.name.lower()}
