"""Enter the opponents of an evaluation: which take part, with which search budget, and how they are made."""

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from esper.leyline.config.tree import Config, build_config
from esper.leyline.data.task import AnyTask
from esper.leyline.lifecycle.view import Space
from esper.leyline.messages import InputError, counted
from esper.runs.evaluation.contenders import ROWS, Contender, named
from esper.runs.evaluation.evaluation import Design, Runner
from esper.tolaria.engine import VectorizedEngine
from esper_bench.controllers.catalog import KEEPS, PLACEMENTS
from esper_bench.controllers.forest import Forest, Forests
from esper_bench.controllers.healing_features import FEATURES, TAUGHT_FEATURES, slot_features, table
from esper_bench.controllers.plans import UNIFORM, Placed, choices_of, plans_of
from esper_bench.controllers.tree_fitting import fit_trees
from esper_bench.controllers.trees import Trees
from esper_bench.evaluation.declared import FITTED, ORACLE, SEARCHED, Opponents, Reference
from esper_bench.evaluation.plan_menu import UNMEASURED, Candidate, space_of
from esper_bench.evaluation.plan_search import EPISODES, grow_abreast

LEAST = 32
"""Fewest training instances on which trees are fitted."""


class Budget(NamedTuple):
    """Holds the search budget of the opponents.

    Attributes:
        episodes (int): number of episodes
        reason (str): what it was derived from
        given (bool): whether it was asked for, or is that of a controller
    """

    episodes: int
    reason: str
    given: bool


class Entered(NamedTuple):
    """Lists the opponents that take part on one task.

    Attributes:
        rules (contenders): built-in controllers
        references (mapping): opponents on tasks of their own, by name
        plans (candidates): the plans of the oracle; empty without it
        fitted (bool): whether trees are fitted
        absent (mapping): opponents that take no part, with the reasons
    """

    rules: Sequence[Contender]
    references: Mapping[str, Reference]
    plans: Sequence[Candidate]
    fitted: bool
    absent: Mapping[str, str]


NOBODY = Entered((), {}, (), False, {})


def check_opponents(
    names: Sequence[str] | None, tasks: Sequence[AnyTask], declared: Sequence[Opponents], seeds: int
) -> None:
    """Raise InputError if an opponent is not one of any task, or if the oracle is asked for with a single seed."""
    known = dict.fromkeys(name for opponents in declared for name in opponents.names)
    for name in names or ():
        if name not in known:
            which = ", ".join(known) or "none"
            of = ", ".join(task.name for task in tasks)
            raise InputError(f"unknown opponent {name!r}; those of {of} are {which}, and none leaves all of them out")
    if ORACLE in (names or ()) and seeds < 2:
        raise InputError(
            f"the {ORACLE} chooses for one seed by the figures of others, and there is {counted(seeds, 'seed')}; give 2 "
            "seeds or more (--seeds 2, seeds=2), or leave it out of the opponents"
        )


def search_budget(controllers: Sequence[Contender], asked: int | None) -> Budget:
    """Return the budget that was asked for, or else that of the controller with the most episodes, or else EPISODES.

    Raises InputError if less than one episode was asked for.
    """
    if asked is not None:
        if asked < 1:
            raise InputError(
                f"the search for the {SEARCHED} was given {counted(asked, 'episode')}; give 1 or more "
                "(--search-episodes, search_episodes=)"
            )
        return Budget(asked, "as asked for", True)
    known = [
        (each.episodes, f"the longest training of {each.group}" if each.group else each.name)
        for each in controllers
        if each.episodes
    ]
    if known:
        episodes, name = max(known)
        return Budget(episodes, f"as many as {name} had", True)
    unknown = [each.name for each in controllers if each.episodes is None]
    said = f", because the file of {unknown[0]} does not say with how many it was trained" if unknown else ""
    return Budget(EPISODES, f"the default{said}", False)


def check_apart(controllers: Sequence[Contender], opponents: Sequence[Contender], others: Sequence[str]) -> None:
    """Raise InputError if a controller has the name of an opponent and is another one. others: names of no controllers."""
    settings = {each.name: each.settings for each in opponents}
    for controller in controllers:
        if controller.name in others or settings.get(controller.name, controller.settings) != controller.settings:
            raise InputError(f"a controller has the name of the opponent {controller.name!r}; give it another name")


def enter(
    task: AnyTask,
    declared: Opponents,
    names: Sequence[str] | None,
    settings: Sequence[Mapping[str, Any]],
    seeds: int,
    budget: Budget,
) -> Entered:
    """Return the named opponents of a task, or all of them if `names` is None.

    Absent are those that can plant nothing of the menu, the oracle with a single seed, and FITTED also where the budget is the
    default or too small.
    """
    space = space_of(task, settings)
    wanted = [name for name in declared.names if names is None or name in names]
    absent: dict[str, str] = {}
    rules = []
    for name in (name for name in declared.rules if name in wanted):
        if lacking := _lacking(name, task, settings):
            absent[name] = lacking
        else:
            rules.append(named(name))
    if FITTED in wanted and (reason := _unfitted(task, settings, space, budget)):
        absent[FITTED] = reason
    if ORACLE in wanted and seeds < 2:
        absent[ORACLE] = "it chooses for one seed by the figures of others, and there is one"
    plans = oracle_plans(space) if ORACLE in wanted and ORACLE not in absent else []
    references = {}
    for name in (name for name in declared.references if name in wanted):
        reference = declared.references[name]
        if lacking := _lacking(reference.controller, reference.task(), settings):
            absent[name] = lacking
        else:
            references[name] = reference
    return Entered(rules, references, plans, FITTED in wanted and FITTED not in absent, absent)


def _lacking(controller: str, task: AnyTask, settings: Sequence[Mapping[str, Any]]) -> str:
    """Return why a rule can plant nothing on a task; empty if it can."""
    chosen = build_config(task.defaults, *settings).blueprints
    menu = task.menu if chosen is None else chosen
    if controller not in (*PLACEMENTS, "tree") or set(UNIFORM.here) & set(menu):
        return ""
    whose = f"the menu of {task.name}" if chosen is None else "the config key blueprints"
    return f"it plants {', '.join(UNIFORM.here)}, which {whose} does not have"


def _unfitted(task: AnyTask, settings: Sequence[Mapping[str, Any]], space: Space, budget: Budget) -> str:
    """Return why no trees are fitted; empty if they are."""
    plans = choices_of(space)
    count = budget.episodes // len(plans)
    if Placed(UNIFORM) not in plans:  # trees predict gains over it
        return _lacking("tree", task, settings) or f"{', '.join(UNIFORM.here)} fits no segment that keeps the width"
    if not budget.given:
        return "it is fitted where a search budget is given (--search-episodes, or a trained controller)"
    if count < LEAST:
        return (
            f"{counted(budget.episodes, 'episode')} are {counted(count, 'instance')} under each of {len(plans)} plans, and "
            f"fitting needs {LEAST}"
        )
    return ""


def oracle_plans(space: Space) -> list[Candidate]:
    """Return the plans that rules and trees choose from; each blueprint at each slot where the menu has none of them."""
    plans = choices_of(space)
    if len(plans) == 1:
        plans = plans_of(space)
    return [Candidate(placed.words(space), placed, UNMEASURED) for placed in plans]


def fitted_tree(design: Design, runner: Runner, budget: Budget, *, taught: bool) -> Contender:
    """Return a controller of trees that are fitted on training instances, with all episodes of the budget that go into them.

    design: of the task, with the settings that the contenders share. runner: grows the networks. taught: whether the task
    measures drifts from an intact network.

    Every plan that trees choose from is grown on the same instances, with one seed; J is computed on the probe split. The
    features are those of `tree`, and the drifts where the task has them.
    """
    task, settings = design.task, design.settings
    plans = choices_of(space_of(task, settings))
    count = budget.episodes // len(plans)
    keys = np.array(task.keys("training")[:count])
    names = TAUGHT_FEATURES if taught else FEATURES
    runner.watch(f"{task.name}: {FITTED}, {counted(len(plans), 'plan')} on {counted(count, 'training instance')}")
    x, chunks = [], [keys[start : start + ROWS] for start in range(0, count, ROWS)]
    for chunk in chunks:
        layer = {"task": task.name, "envs": len(chunk), "baselines": [], "probe": {"sensors_every": 2**20}}
        view = VectorizedEngine(task.sealed(), build_config(task.defaults, *settings, layer)).reset(chunk)
        x.append(table(slot_features(view, names is TAUGHT_FEATURES), names))
    asked = [
        ([Candidate(placed.name, placed, UNMEASURED)], chunk) for chunk, placed in itertools.product(chunks, plans)
    ]
    grown = grow_abreast(task, asked, settings, "training", runner)
    objective = {placed: np.concatenate([own[0] for own in grown[at :: len(plans)]]) for at, placed in enumerate(plans)}
    forests = Forests(tuple(names), fit_trees(np.concatenate(x), objective), count * len(plans))
    return Contender(
        FITTED,
        {**KEEPS, "controller": FITTED},
        partial(_trees, forests),
        _digest(forests),
        episodes=forests.episodes,
    )


def _trees(forests: Forests, config: Config) -> Trees:
    """Make the controller of trees."""
    return Trees(forests)


def _digest(forests: Forests) -> str:
    """Compute a digest of all arrays of trees."""
    content = hashlib.sha256(" ".join(forests.features).encode())
    for name, forest in sorted(forests.models.items()):
        content.update(name.encode())
        for field in Forest._fields:
            content.update(getattr(forest, field).tobytes())
    return content.hexdigest()
