"""List the fixed plans of a menu: what a search for the best one tries, in a declared order. E environments."""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from esper.leyline.config.tree import Config, build_config
from esper.leyline.data.task import AnyTask
from esper.leyline.lifecycle.view import Outcome, Space, View, take
from esper.leyline.lifecycle.vocabulary import Actions, Op
from esper.leyline.protocols import Controller
from esper.runs.evaluation.contenders import Contender
from esper.tamiyo.policy.packages import indices
from esper.tamiyo.rules.base import Rule
from esper.tamiyo.rules.schedule import Schedule, ScheduleEntry
from esper.tolaria.engine import VectorizedEngine
from esper_bench.controllers.placement import Fixed
from esper_bench.controllers.plans import Placed, plans_of

SEARCH_START = 2
"""The first step at which schedules plant. Plans plant in step 0."""

PERMISSIVE = {"gates": {"permissive": True}}
"""Settings of a plan, and of every other schedule: what was planted is kept."""
UNMEASURED = {**PERMISSIVE, "probe": {"coalitions_every": 2**20}}
"""Settings of a plan, which asks for no contributions of seeds."""


Part = tuple[int, int]
"""A seed: the index of its blueprint in the menu, and that of its slot."""


class Candidate(NamedTuple):
    """Describes a fixed plan, or a schedule.

    Attributes:
        name (str): what it does, in words
        choice (Placed or entries): what is planted
        settings (mapping): config of its runs
        parts (pairs): the single seeds that it is made of, each as the index of its blueprint in the menu and of its slot;
            empty for nothing and for the plans of rules
        plants (str): what a plan with a name of its own plants where, in words
    """

    name: str
    choice: Placed | tuple[ScheduleEntry, ...]
    settings: Mapping[str, Any]
    parts: tuple[Part, ...] = ()
    plants: str = ""

    @property
    def first(self) -> bool:
        """Whether it is of the first stage of a search: nothing, a plan of a rule, or a single seed in step 0."""
        return isinstance(self.choice, Placed) and not self.choice.plan.everywhere

    @property
    def content(self) -> str:
        """All that defines it, as JSON."""
        choice = self.choice
        if isinstance(choice, Placed):
            return json.dumps([*choice.plan, *choice.slots])
        return json.dumps([entry_line(entry) for entry in choice])

    def contender(self, name: str) -> Contender:
        """Return it as a contender of an evaluation."""
        return Contender(name, {"controller": name, **self.settings}, partial(abreast, [self], name), self.content)


def candidate_plans(task: AnyTask, settings: Sequence[Mapping[str, Any]] = ()) -> list[Candidate]:
    """Return every fixed plan of the full menu, those of the first stage of a search before all others.

    The first stage has nothing, the plans of the rules, and each blueprint at each slot, planted in step 0 and kept whatever
    it contributes (`tamiyo.plans.plans_of`). All others are made of these single seeds: each blueprint at every slot, two
    seeds at two slots from step 0 on, and schedules that plant one blueprint at one, two or all slots in step
    `SEARCH_START`, up to `max_seeds`, each with the gates of the config and with permissive ones. The first candidate plants
    nothing.
    """
    space = space_of(task, settings)
    config = build_config(task.defaults, *settings)
    most = config.lifecycle.max_seeds
    plans = [_planted(placed, space) for placed in (plans_of(space) if most else plans_of(space)[:1])]
    places, kinds = range(len(space.slots)), range(len(space.blueprints))
    gates = ({},) if config.gates.permissive else ({}, PERMISSIVE)
    pairs = itertools.product(itertools.combinations(places, 2), itertools.product(kinds, repeat=2))
    found = [each for each in plans if each.first] + [each for each in plans if not each.first]
    for where, chosen in pairs if most >= 2 else ():
        parts = tuple(zip(chosen, where, strict=True))
        if all(space.fits[slot, kind].all() for kind, slot in parts):
            found.append(_scheduled(parts, 0, UNMEASURED, space))
    for size in sorted({1, 2, len(places)} & set(range(1, most + 1))):
        for slots, kind in itertools.product(itertools.combinations(places, size), kinds):
            if space.fits[list(slots), kind].all():
                alike = tuple((kind, slot) for slot in slots)
                found += [_scheduled(alike, SEARCH_START, own, space) for own in gates]
    return found


def _planted(placed: Placed, space: Space) -> Candidate:
    """Return a plan that plants in step 0. One that chooses among blueprints is made of no single seeds."""
    plan, parts = placed.plan, tuple[Part, ...]()
    kinds = indices(space, plan.here)
    if len(kinds) == 1 and not indices(space, plan.others):
        slots = range(len(space.slots)) if plan.everywhere else placed.slots
        parts = tuple((kinds[0], slot) for slot in slots if slot >= 0 and space.fits[slot, kinds[0]].all())
    return Candidate(placed.words(space), placed, UNMEASURED, parts, placed.plants(space))


def _scheduled(parts: tuple[Part, ...], at: int, settings: Mapping[str, Any], space: Space) -> Candidate:
    """Return a schedule that plants seeds and keeps those that pass their gates."""
    seeds = [(space.blueprints[kind].name, space.slots[slot]) for kind, slot in parts]
    entries = tuple(
        ScheduleEntry(at=at, op=Op.GERMINATE, slot=slot, blueprint=blueprint, keep=True) for blueprint, slot in seeds
    )
    alike = len({blueprint for blueprint, _ in seeds}) == 1
    where = f"{seeds[0][0]} at {', '.join(slot for _, slot in seeds)}"
    name = where if alike else " and ".join(f"{blueprint} at {slot}" for blueprint, slot in seeds)
    return Candidate(f"{name} in step {at}", entries, settings, parts)


def space_of(task: AnyTask, settings: Sequence[Mapping[str, Any]]) -> Space:
    """Return the space of a few instances of a task."""
    config = build_config(task.defaults, *settings, {"task": task.name, "envs": 8, "baselines": []})
    return VectorizedEngine(task.sealed(), config).space


def abreast(candidates: Sequence[Candidate], name: str, config: Config) -> Controller:
    """Return the controller of several candidates of one kind, each for an equal share of the environments.

    It does not depend on the config.
    """
    plans = [each.choice for each in candidates if isinstance(each.choice, Placed)]
    if plans:
        assert len(plans) == len(candidates), "plans and schedules are grown apart"
        return Fixed(plans)
    return _Schedules([Schedule(each.choice, name) for each in candidates if not isinstance(each.choice, Placed)])


class _Schedules(Rule):
    """Carries out several schedules, each for an equal share of the environments."""

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


def entry_line(entry: ScheduleEntry) -> dict[str, Any]:
    """Return an entry as a mapping in the form of a schedule file."""
    return {**entry.model_dump(mode="json", exclude_none=True), "op": entry.op.name.lower()}
