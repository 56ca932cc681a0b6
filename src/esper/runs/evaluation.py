"""Evaluation of controllers on the same held-out instances, with the same seeds, by the test split.

C contenders, N instances, R seeds, E environments of a population.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from esper.kasmina.static import Absent
from esper.leyline.config import BASELINES, baseline_names, build_config
from esper.leyline.errors import InputError
from esper.leyline.opponents import FITTED, ORACLE, SEARCHED
from esper.leyline.pace import Pace
from esper.leyline.task import AnyTask, Mixture
from esper.leyline.text import counted
from esper.runs.contenders import BEST, ROWS, RULES, Contender, Say, named
from esper.runs.crews import ALONE, Asked
from esper.runs.design import Design, Grower, grow_all, stacked
from esper.runs.environment import describe_environment
from esper.runs.evaluation_record import Evaluation, Figures, Record, findings
from esper.runs.evaluation_work import References, check_size, evaluation_work, hired
from esper.runs.opponents import NOBODY, Budget, Entered, check_opponents, enter, fitted_tree, search_budget
from esper.runs.plan_search import EPISODES, Found, search_plans
from esper.runs.ranks_crew import serve_rank
from esper.tamiyo.plans import NONE, UNIFORM
from esper.tolaria.fitting import instance_keys
from esper.tolaria.runtime import resolve_device


class Beside(NamedTuple):
    """What is grown on one task beside the controllers.

    Attributes:
        static (names): static networks
        sized_by (str or None): the contender whose networks determine their sizes
        entered (Entered): the opponents
        budget (Budget): of the opponents that are searched for
        tasks (mapping): the tasks of references, by name
    """

    static: Sequence[str] = ()
    sized_by: str | None = None
    entered: Entered = NOBODY
    budget: Budget = Budget(EPISODES, "the default", False)
    tasks: Mapping[str, AnyTask] = MappingProxyType({})


def run_evaluation(
    controllers: Sequence[Contender],
    tasks: Sequence[AnyTask],
    *,
    instances: int = 200,
    seeds: int = 3,
    part: str = "heldout",
    first: int = 0,
    settings: Sequence[Mapping[str, Any]] = (),
    search_episodes: int | None = None,
    baselines: Sequence[str] = BASELINES,
    opponents: Sequence[str] | None = None,
    folder: Path | None = None,
    watch: Say | None = None,
    workers: Asked = ALONE,
) -> Record:
    """Compare controllers with never, random-valid, heuristic, the best fixed plan and the opponents of every task.

    search_episodes: the search budget of the opponents; None takes that of the controllers (`search_budget`). baselines:
    static networks that are compared too (`esper docs baselines`); the controller never is the twin. They have the sizes of the
    networks that the first controller grew, or of those of the heuristic if no controller is given. opponents: names of those
    of the tasks that take part; None for all. settings: layers of config over that of the tasks, the same for all contenders.
    folder: stores the results of populations, which are reused. watch: called with lines of progress. workers: the actors that
    grow the populations; the results do not depend on their number. In a rank of torchrun above 0, this process is one of them
    until the evaluation ends.

    Returns a strict JSON object. Raises InputError before anything is grown.
    """
    rules, ours = _contenders(controllers)
    _check_names([contender.name for contender in (*rules, *ours)], tasks, baselines)
    check_opponents(opponents, tasks, seeds)
    static = [name for name in baseline_names(list(baselines)) if name != BASELINES[0]]
    designs = [Design.of(task, settings, seeds, part, first, instances) for task in tasks]
    budget = search_budget(ours, search_episodes)
    references = _reference_makers(asked := _besides(designs, rules, ours, budget, opponents, settings, static))
    _check_size(workers, designs, asked, [*rules, *ours])
    if workers.is_rank:
        return serve_rank(evaluation_work(workers, tasks, references), workers.devices or (None,))
    with hired(workers, tasks, references, [*rules, *ours], watch) as actors:
        _create(folder)
        pace = _plan(len(rules) + len(ours) + 1 + len(static), asked, instances * seeds, watch)
        evaluations, searches = [], []
        for design, own in zip(designs, asked, strict=True):
            grower = Grower.of(design, folder, watch, pace, actors)
            searches.append(_search(grower, budget))
            evaluations.append(_compared(grower, [*rules, searches[-1].contender, *ours], own, folder))
        waited = {} if actors is None else {"actors": actors.summary()}
    rows = [contender.group or contender.name for contender in controllers]
    return {
        "named": list(dict.fromkeys(rows)),
        "instances": instances,
        "seeds": list(evaluations[0].seeds),
        "part": part,
        "first_instance": first,
        "settings": [dict(layer) for layer in settings],
        "search_budget": {"episodes": budget.episodes, "reason": budget.reason},
        "environment": describe_environment(resolve_device(build_config(tasks[0].defaults, *settings).device)),
        **findings(evaluations, searches, static, rows),
        **waited,
    }


def _besides(
    designs: Sequence[Design],
    rules: Sequence[Contender],
    ours: Sequence[Contender],
    budget: Budget,
    opponents: Sequence[str] | None,
    settings: Sequence[Mapping[str, Any]],
    static: Sequence[str],
) -> list[Beside]:
    """What is grown beside the controllers, by task. InputError if a contender cannot be compared there."""
    sized_by = ours[0].name if ours else RULES[2]
    asked = []
    for design in designs:
        entered = enter(design.task, opponents, settings, len(design.seeds), budget)
        _check_apart(ours, entered.rules)
        for contender in (*rules, *entered.rules, *ours):
            design.check(contender)
        asked.append(Beside(static, sized_by, entered, budget, _reference_tasks(entered)))
    return asked


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
    return _compared(Grower.of(design, folder, watch, pace), contenders, Beside(static, sized_by), folder)


def _compared(grower: Grower, contenders: Sequence[Contender], asked: Beside, folder: Path | None) -> Evaluation:
    """Return the figures of all contenders, of the opponents, and of the static networks that were asked for."""
    design, entered = grower.design, asked.entered
    task, absent = design.task, dict(entered.absent)
    opponents = _opponents(grower, entered, asked.budget)
    episodes = {contender.name: contender.episodes for contender in (*contenders, *opponents)}
    references = _references(grower, asked, folder)
    episodes |= {contender.name: contender.episodes for _, contender in references}
    own = {each.name: (grower, each) for each in (*opponents, *contenders)}  # a controller may be an opponent
    others = {contender.name: (each, contender) for each, contender in references}
    fresh = [plan for plan in entered.plans if _ALIKE.get(plan.name) not in own]
    plans = [(grower, plan.contender(f"plan {plan.name}")) for plan in fresh]
    grown = grow_all([*own.values(), *others.values(), *plans])
    runs = dict(zip([*own, *others], grown, strict=False))
    against = {name: runs[name] for name in (*(each.name for each in opponents), *others)}
    if entered.plans:
        planned = dict(zip((plan.name for plan in fresh), grown[len(runs) :], strict=True))
        every = [planned[plan.name] if plan.name in planned else runs[_ALIKE[plan.name]] for plan in entered.plans]
        against[ORACLE] = grower.oracle([*every, runs[BEST]])
    ours = contenders[len(RULES) + 1 :] if against else []
    order = [*(each.name for each in contenders if each not in ours), *against, *(each.name for each in ours)]
    runs = {name: (runs | against)[name] for name in dict.fromkeys(order)}
    if asked.static:
        sizer = next(contender for contender in contenders if contender.name == asked.sized_by)
        trained = grower.train(asked.static, sizer, runs[sizer.name])
        absent |= {name: each.reason for name, each in trained.items() if isinstance(each, Absent)}
        runs |= {name: each for name, each in trained.items() if not isinstance(each, Absent)}
    groups = {each.group: tuple(own.name for own in contenders if own.group == each.group) for each in contenders}
    groups.pop("", None)
    return Evaluation(
        task=task.name,
        metric=task.objective.metric,
        contenders=tuple(runs),
        instances=instance_keys(task, design.config(contenders[0], design.seeds[0])),
        seeds=design.seeds,
        sampled=isinstance(task, Mixture),
        figures=Figures(*(np.stack([stacked(each, name) for each in runs.values()]) for name in Figures._fields)),
        static=tuple(name for name in asked.static if name not in absent),
        absent=absent,
        sized_by=asked.sized_by,
        opponents=tuple(against),
        groups=groups,
        episodes=episodes
        | {name: max((episodes[own] or 0 for own in of), default=0) or None for name, of in groups.items()},
    )


def _opponents(grower: Grower, entered: Entered, budget: Budget) -> list[Contender]:
    """Return the opponents on the task itself."""
    return [*entered.rules, fitted_tree(grower, budget)] if entered.fitted else list(entered.rules)


def _references(grower: Grower, asked: Beside, folder: Path | None) -> list[tuple[Grower, Contender]]:
    """Return the opponents on tasks of their own, which grow the same instances, each with its grower."""
    found = []
    for name, reference in asked.entered.references.items():
        design = grower.design._replace(task=asked.tasks[name])
        own = Grower.of(design, folder, grower.watch, grower.pace, grower.actors)
        contender = (
            _search(own, asked.budget).contender if reference.controller == SEARCHED else named(reference.controller)
        )
        found.append((own, contender._replace(name=name)))
    return found


def _reference_tasks(entered: Entered) -> dict[str, AnyTask]:
    """Make the tasks of references."""
    return {name: reference.task() for name, reference in entered.references.items()}


def _reference_makers(beside: Sequence[Beside]) -> References:
    """Return the tasks of all references with the functions that make them."""
    return [(task, own.entered.references[name].task) for own in beside for name, task in own.tasks.items()]


def _check_size(
    asked: Asked, designs: Sequence[Design], beside: Sequence[Beside], contenders: Sequence[Contender]
) -> None:
    """Raise InputError if there are more actors than populations."""
    runs = [len(list(design.populations(contenders[0]))) for design in designs]
    others = [_opposing(own.entered) for own in beside]
    check_size(asked, max(each * (len(contenders) + 1 + more) for each, more in zip(runs, others, strict=True)))


_ALIKE = {NONE.name: RULES[0], UNIFORM.name: "uniform"}
"""Plans of the oracle that equal a contender, which has their figures where it takes part."""


def _search(grower: Grower, budget: Budget) -> Found:
    """Search for the best fixed plan of the task of a design."""
    design = grower.design
    return search_plans(
        design.task,
        design.settings,
        episodes=budget.episodes,
        kept=grower.kept,
        watch=grower.watch,
        pace=grower.pace,
        actors=grower.actors,
    )


def _opposing(entered: Entered) -> int:
    """Return how many opponents grow networks of their own, the plans of the oracle included."""
    fresh = [plan for plan in entered.plans if plan.name not in (NONE.name, UNIFORM.name)]
    return len(entered.rules) + entered.fitted + len(entered.references) + len(fresh)


def _plan(contenders: int, asked: Sequence[Beside], runs: int, watch: Say | None) -> Pace | None:
    """Report the number of networks that an evaluation grows. Returns None without `watch`."""
    if watch is None:
        return None
    grown, search = 0, 0
    for own in asked:
        grown += (contenders + _opposing(own.entered)) * runs
        searched = [each for each in own.entered.references.values() if each.controller == SEARCHED]
        search += own.budget.episodes * (1 + own.entered.fitted + len(searched))
    budget = asked[0].budget
    watch(
        f"{counted(grown, 'network')} to grow on {counted(len(asked), 'task')}, with static networks and opponents, and "
        f"{search:,} in searches on training instances ({budget.episodes:,} for each opponent that is searched for: "
        f"{budget.reason})"
    )
    for own in asked:
        for name, reason in own.entered.absent.items():
            watch(f"{name} takes no part: {reason}")
    return Pace(search + grown, "networks", watch)


def _contenders(controllers: Sequence[Contender]) -> tuple[list[Contender], list[Contender]]:
    """Return the rules that every evaluation has, and the controllers that are none of them."""
    rules = [named(name) for name in RULES]
    again = [(rule.name, rule.settings) for rule in rules]
    return rules, [controller for controller in controllers if (controller.name, controller.settings) not in again]


def _check_names(contenders: Sequence[str], tasks: Sequence[AnyTask], baselines: Sequence[str]) -> None:
    """Raise InputError if a contender or a task is named twice, or a name is reserved or unknown."""
    references = dict.fromkeys(name for task in tasks for name in task.opponents.references)
    reserved = (BEST, ORACLE, FITTED, *references, *BASELINES)
    if len(set(contenders)) < len(contenders) or set(reserved) & set(contenders):
        raise InputError(
            f"the controllers are {', '.join(contenders)}; give each a name of its own, and none of "
            f"{', '.join(map(repr, reserved))}"
        )
    try:
        baseline_names(list(baselines))
    except ValueError as error:
        raise InputError(f"baselines is {', '.join(map(str, baselines))!r}; {error}") from None
    if len({task.name for task in tasks}) < len(tasks) or not tasks:
        given = ", ".join(task.name for task in tasks) or "none"
        raise InputError(f"the tasks of the evaluation are {given}; give one or more, each once")


def _check_apart(controllers: Sequence[Contender], opponents: Sequence[Contender]) -> None:
    """Raise InputError if a controller has the name of an opponent and is another one."""
    settings = {each.name: each.settings for each in opponents}
    for controller in controllers:
        if settings.get(controller.name, controller.settings) != controller.settings:
            raise InputError(f"a controller has the name of the opponent {controller.name!r}; give it another name")


def _create(folder: Path | None) -> None:
    try:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot keep figures in {folder}: {error.strerror}; name another folder") from None
