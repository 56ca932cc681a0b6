"""Compare controllers with opponents: searched plans, rules that place seeds, fitted trees, references and an oracle."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import Any

import numpy as np
from numpy.typing import NDArray

import esper
from esper.leyline.data.task import AnyTask, Mixture
from esper.leyline.lifecycle.view import Floats
from esper.leyline.messages import counted, rounded
from esper.runs.evaluation.contenders import RULES, Contender, named
from esper.runs.evaluation.evaluation import Arrays, Design, Entry, Rivals, Runner
from esper.runs.evaluation.record import Evaluation, Record, RecordedFigures, estimate
from esper.runs.evaluation.statistics import Tasks, mean_difference
from esper_bench.controllers.plans import NONE, UNIFORM, Placed
from esper_bench.evaluation.declared import FITTED, ORACLE, SEARCHED, Opponents, opponents_of
from esper_bench.evaluation.opponents import (
    Budget,
    Entered,
    check_apart,
    check_opponents,
    enter,
    fitted_tree,
    search_budget,
)
from esper_bench.evaluation.plan_menu import entry_line
from esper_bench.evaluation.plan_search import Found, search_plans
from esper_bench.records import FIELD, SUITE

_ALIKE = {NONE.name: RULES[0], UNIFORM.name: "uniform"}
"""Plans of the oracle that equal a contender, which has their figures where it takes part."""


class Opposition(Rivals):
    """Enters the best fixed plan, which always takes part, and the opponents that a task declares (`opponents_of`).

    names: those that take part; None for all. search_episodes: the search budget of the best fixed plan and of fitted trees;
    None takes that of the controllers, or `plan_search.EPISODES`. declared: opponents by the name of a task, for tasks of one's
    own.
    """

    def __init__(
        self,
        names: Sequence[str] | None = None,
        search_episodes: int | None = None,
        declared: Mapping[str, Opponents] | None = None,
    ) -> None:
        self.wanted, self.search_episodes, self.declared = names, search_episodes, dict(declared or {})
        self.controllers: Sequence[Contender] = ()
        self.entered: list[Entered] = []
        self.elsewhere: list[dict[str, AnyTask]] = []
        self.taught: list[bool] = []
        self.facts: list[Record] = []  # of the tasks that were searched
        self.budget: Budget

    def enter(
        self, designs: Sequence[Design], controllers: Sequence[Contender], settings: Sequence[Any]
    ) -> Sequence[int]:
        """Decide who takes part in each task, and count those who grow. Raises InputError where a contender cannot."""
        tasks = [design.task for design in designs]
        declared = [self.declared.get(task.name) or opponents_of(task.name) for task in tasks]
        check_opponents(self.wanted, tasks, declared, len(designs[0].seeds))
        self.controllers, self.budget = controllers, search_budget(controllers, self.search_episodes)
        for design, own in zip(designs, declared, strict=True):
            entered = enter(design.task, own, self.wanted, settings, len(design.seeds), self.budget)
            check_apart(controllers, entered.rules, (SEARCHED, ORACLE, FITTED, *own.references))
            for contender in entered.rules:
                design.check(contender)
            self.entered.append(entered)
            self.taught.append("drift" in own.rules)
            self.elsewhere.append({name: reference.task() for name, reference in entered.references.items()})
        episodes, reason = self.budget.episodes, self.budget.reason
        searches, counts, lines = 0, list[int](), [f"{episodes:,} episodes for each search: {reason}"]
        for entered in self.entered:
            searched = [each for each in entered.references.values() if each.controller == SEARCHED]
            searches += 1 + entered.fitted + len(searched)
            fresh = [plan for plan in entered.plans if plan.name not in _ALIKE]  # of the oracle
            counts.append(1 + len(entered.rules) + entered.fitted + len(entered.references) + len(fresh))
            lines += [f"{name} takes no part: {reason}" for name, reason in entered.absent.items()]
        self.references = [
            (task, entered.references[name].task)
            for entered, own in zip(self.entered, self.elsewhere, strict=True)
            for name, task in own.items()
        ]
        self.searched, self.lines = episodes * searches, lines
        return counts

    def grow(self, at: int, design: Design, runner: Runner) -> Entry:
        """Search for the best fixed plan, and return it with the opponents of a task."""
        entered = self.entered[at]
        found = self._search(design, runner)
        self.facts.append(_facts(found, entered))
        opponents = [(design, rule) for rule in entered.rules]
        if entered.fitted:
            opponents.append((design, fitted_tree(design, runner, self.budget, taught=self.taught[at])))
        for name, reference in entered.references.items():
            own = replace(design, task=self.elsewhere[at][name])
            searched = reference.controller == SEARCHED
            contender = self._search(own, runner).contender if searched else named(reference.controller)
            opponents.append((own, contender._replace(name=name)))
        takes_part = {*RULES, *(each.name for each in (*self.controllers, *entered.rules))}
        alike = {name: own for name, own in _ALIKE.items() if own in takes_part}
        chosen_from = [alike.get(plan.name, f"plan {plan.name}") for plan in entered.plans]
        chosen_from += [found.contender.name]
        return Entry(
            rules=[found.contender],
            opponents=opponents,
            plans=[plan.contender(f"plan {plan.name}") for plan in entered.plans if plan.name not in alike],
            best_of=(ORACLE, partial(oracle, design.task, chosen_from)) if entered.plans else None,
            absent=entered.absent,
        )

    def complete(self, record: Record, evaluations: Sequence[Evaluation]) -> None:
        """Add the search budget, what was found on each task, and shares of the headroom."""
        budget = {"episodes": self.budget.episodes, "reason": self.budget.reason}
        line = f"search budget of each opponent: {counted(self.budget.episodes, 'episode')}, {self.budget.reason}"
        record |= {FIELD: SUITE, "search_budget": budget, "lines": [line]}
        for task, evaluation, facts in zip(record["tasks"], evaluations, self.facts, strict=True):
            task |= facts
            _add_headroom(task, [evaluation])
        if record["together"] is not None:
            _add_headroom(record["together"], evaluations)

    def _search(self, design: Design, runner: Runner) -> Found:
        """Search for the best fixed plan of the task of a design."""
        return search_plans(design.task, design.settings, episodes=self.budget.episodes, runner=runner)


def evaluate(
    controllers: Any = (),
    tasks: Any = "repair",
    *,
    opponents: Sequence[str] | None = None,
    search_episodes: int | None = None,
    out: str | PathLike[str] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Compare controllers as `esper.evaluate` does, and with the best fixed plan and the opponents of every task.

    opponents: names of opponents of the tasks; None for all, () for none. search_episodes: see `Opposition`. Other arguments are
    those of `esper.evaluate`. Raises InputError before anything is grown.
    """
    return esper.evaluate(controllers, tasks, out=out, rivals=Opposition(opponents, search_episodes), **options)


def oracle(task: AnyTask, plans: Sequence[str], runs: Mapping[str, Arrays]) -> Arrays:
    """Return the figures (N, R) of the best plan of every instance and seed, chosen by J of the other seeds (`best_by_others`).

    plans: names among those of `runs`, the figures of all that was grown.

    On one data set, the other runs are those from all other starts.
    """
    # (K, N, R)
    values = {name: np.stack([runs[plan][name] for plan in plans]) for name in RecordedFigures._fields}
    scores = values["objective"]
    alike = scores if isinstance(task, Mixture) else scores.reshape(len(scores), 1, -1)
    chosen = best_by_others(alike).reshape(scores.shape[1:])
    return {name: np.take_along_axis(value, chosen[None], 0)[0] for name, value in values.items()}


def best_by_others(scores: Floats) -> NDArray[np.int64]:
    """Choose for each run the plan with the highest mean over the other runs of the problem: scores (K, P, R) -> index (P, R).

    A plan is chosen by other runs than the one whose score it then has, so the mean of the chosen scores is not raised by
    the choice. R is at least 2.
    """
    assert scores.shape[2] > 1, "the choice for a run is made by others"
    others = np.stack([np.delete(scores, run, 2).mean(2) for run in range(scores.shape[2])], 2)
    return np.asarray(np.nan_to_num(others, nan=-np.inf).argmax(0))


def _add_headroom(estimates: Record, evaluations: Sequence[Evaluation]) -> None:
    """Add to each row how much of the headroom it has; None where the oracle takes no part."""
    rows = estimates["controllers"]
    spanned = {SEARCHED, ORACLE} <= {row["name"] for row in rows}
    for row in rows:
        names = row["name"], SEARCHED, ORACLE
        share = estimate(evaluations, share_of_headroom, "objective", *names) if spanned else None
        row["share_of_headroom"] = share


def share_of_headroom(ours: Tasks, base: Tasks, ceiling: Tasks) -> Floats:
    """Compute (...) mean(ours - base) / mean(ceiling - base): 0 at the base, 1 at the ceiling; nan if that is not above."""
    room = mean_difference(ceiling, base)
    return np.where(room > 0, mean_difference(ours, base) / np.where(room > 0, room, 1), np.nan)


def _facts(found: Found, entered: Entered) -> Record:
    """Return the plan that was found on a task, and what the search cost."""
    choice = found.best.choice
    search = {
        "plan": found.best.name,
        "plants": found.best.plants,
        "entries": [] if isinstance(choice, Placed) else [entry_line(entry) for entry in choice],
        "permissive_gates": "gates" in found.best.settings,
        "probe_objective": float(found.objective),
        "candidates": found.candidates,
        "tried": found.tried,
        "instances": found.instances,
        "episodes": found.episodes,
        "seconds": round(found.seconds, 3),
    }
    return {"search": search, "lines": [*_lines(entered), *search_lines(search)]}


def _lines(entered: Entered) -> list[str]:
    """Say what the columns on opponents mean."""
    lines = []
    if entered.plans:
        lines.append(
            "headroom: the gain of a controller over the best fixed plan, as a share of the oracle's gain; for each run, the "
            "oracle plants what came to the highest J on the test split in the other runs of the instance"
        )
    lines.append(
        "searched: networks that were grown to train a controller or to search for it, of several trainings the most of one; "
        "0 for a rule, - if unknown"
    )
    return lines


def search_lines(search: Mapping[str, Any]) -> list[str]:
    """Return the plan that the search found, a schedule as lines of a schedule file, and the cost of the search."""
    gates = ", with permissive gates" if search["permissive_gates"] else ""
    plants = f", which plants {search['plants']}" if search["plants"] else ""
    of = f" of {search['candidates']:,}" if search["tried"] < search["candidates"] else ""
    cost = f"{counted(search['tried'], 'plan')}{of} in {counted(search['episodes'], 'episode')}"
    seconds = search["seconds"]
    took = f"{seconds:,.1f} seconds" if seconds >= 0.05 else "read from the results of an earlier call"
    entries = [
        f"  - {{{', '.join(f'{key}: {_yaml(value)}' for key, value in entry.items())}}}" for entry in search["entries"]
    ]
    return [
        f"best fixed plan{gates}: {search['plan']}{plants}",
        *entries,
        f"it is the best of {cost} on training instances ({took}); its J there, on the probe split: "
        f"{rounded(search['probe_objective'], '.3f')}",
    ]


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
