"""The record of an evaluation: figures with intervals. C contenders, N instances, R runs of each."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from esper.leyline.opponents import ORACLE
from esper.leyline.view import Floats
from esper.runs.contenders import BEST, RULES
from esper.runs.plan_menu import entry_line
from esper.runs.plan_search import Found
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
    share_of_headroom,
)
from esper.tamiyo.plans import Placed

Record = dict[str, Any]


class Figures(NamedTuple):
    """Figures of networks as exported; all fields have the same shape, float64.

    Attributes:
        objective (array): J on the test split
        metric (array): metric on the test split
        added_params (array): parameters in addition to those of the host
        kept (array): number of fossilized seeds
        seconds (array): time of training, probing and deciding, an equal share of the time of the population
    """

    objective: Floats
    metric: Floats
    added_params: Floats
    kept: Floats
    seconds: Floats


class Evaluation(NamedTuple):
    """The figures of all contenders on one task, paired by instance and seed.

    Attributes:
        task (str): name of the task
        metric (str): name of the metric
        contenders (C names): names of the contenders
        instances ((N,) int64 array): keys of the instances
        seeds (R ints): seeds of the runs
        sampled (bool): True where instances are problems of a mixture, False where they are starts on one data set
        figures (Figures, (C, N, R)): the figures
        static (names): the contenders that are static networks
        absent (mapping): static networks and opponents that could not take part, with the reasons
        sized_by (str or None): the contender whose grown networks determine the sizes of the static networks
        opponents (names): the contenders that the task declares as opponents
        groups (mapping): contenders that are trainings of one controller, by the name of the controller
        episodes (mapping): number of episodes that contenders were trained or searched with; None if unknown
    """

    task: str
    metric: str
    contenders: tuple[str, ...]
    instances: NDArray[np.int64]
    seeds: tuple[int, ...]
    sampled: bool
    figures: Figures
    static: tuple[str, ...] = ()
    absent: Mapping[str, str] = MappingProxyType({})
    sized_by: str | None = None
    opponents: tuple[str, ...] = ()
    groups: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    episodes: Mapping[str, int | None] = MappingProxyType({})

    @property
    def rows(self) -> tuple[str, ...]:
        """The contenders as they are shown: a controller that was trained several times is one of them."""
        of = {member: name for name, members in self.groups.items() for member in members}
        return tuple(dict.fromkeys(of.get(name, name) for name in self.contenders))

    def problems(self, figure: Floats) -> Floats:
        """Return a figure (N, R) of one contender as problems by runs. All starts on one data set are runs of one problem."""
        return figure if self.sampled else figure.reshape(1, -1)

    def scores(self, name: str, figure: str) -> Floats:
        """Return a figure of a row as problems by runs; the runs of all of its trainings come one after the other."""
        all_of = getattr(self.figures, figure)
        members = self.groups.get(name, (name,))
        return np.concatenate([self.problems(all_of[self.contenders.index(member)]) for member in members], 1)


def findings(
    evaluations: Sequence[Evaluation], searches: Sequence[Found], static: Sequence[str], named: Sequence[str] = ()
) -> Record:
    """Return the results on every task, and on all tasks together if they have the same metric.

    named: the rows that are compared with every opponent; all others are compared with the rules and the static networks.
    """
    alike = len({evaluation.metric for evaluation in evaluations}) == 1
    return {
        "confidence": CONFIDENCE,
        "draws": DRAWS,
        "rules": [*RULES, BEST],
        "baselines": list(static),
        "sized_by": evaluations[0].sized_by,
        "tasks": [
            task_record(evaluation, found, named) for evaluation, found in zip(evaluations, searches, strict=True)
        ],
        "together": _estimates(evaluations, named) if alike and len(evaluations) > 1 else None,
    }


def task_record(evaluation: Evaluation, found: Found, named: Sequence[str] = ()) -> Record:
    """Return the results on one task: estimates, the search, and every run."""
    problems, runs = evaluation.problems(evaluation.figures.objective[0]).shape
    return {
        "task": evaluation.task,
        "metric": evaluation.metric,
        "sampled": evaluation.sampled,
        "problems": problems,
        "runs_of_each": runs,
        "search": _search(found),
        "absent": dict(evaluation.absent),
        "opponents": list(evaluation.opponents),
        "groups": {name: list(members) for name, members in evaluation.groups.items()},
        **_estimates([evaluation], named),
        "instance_keys": evaluation.instances.tolist(),
        "runs": {
            contender: {
                name: [[_number(value) for value in row] for row in figure[index].tolist()]
                for name, figure in evaluation.figures._asdict().items()
            }
            for index, contender in enumerate(evaluation.contenders)
        },
    }


def _search(found: Found) -> Record:
    """Return the plan that was found, and what the search cost. `entries` is empty for a plan that is no schedule."""
    choice = found.best.choice
    return {
        "plan": found.best.name,
        "plants": found.best.plants,
        "entries": [] if isinstance(choice, Placed) else [entry_line(entry) for entry in choice],
        "permissive_gates": "gates" in found.best.settings,
        "probe_objective": _number(found.objective),
        "candidates": found.candidates,
        "tried": found.tried,
        "instances": found.instances,
        "episodes": found.episodes,
        "seconds": round(found.seconds, 3),
    }


def _estimates(evaluations: Sequence[Evaluation], named: Sequence[str]) -> Record:
    """Return estimates for every row, and for every row compared with rules, over one task or several."""
    first = evaluations[0]
    rows = [name for name in first.rows if all(name in each.rows for each in evaluations)]
    rules, shown = (*RULES, BEST), (*RULES, BEST, *first.static)

    def estimate(statistic: Callable[..., Floats], figure: str, *names: str) -> Record:
        repeats = {name: len(first.groups.get(name, (name,))) for name in names}
        most = max(repeats.values())
        assert set(repeats.values()) <= {1, most}, "trainings of two controllers are not paired"
        tasks: list[Tasks] = [
            [np.tile(each.scores(name, figure), (1, most // repeats[name])) for each in evaluations] for name in names
        ]
        return _interval(interval(statistic, *tasks, trainings=most))

    controllers = [
        {
            "name": name,
            "rule": name in rules,
            "static": name in first.static,
            "opponent": name in first.opponents,
            "trainings": len(first.groups.get(name, (name,))),
            "episodes": first.episodes.get(name),
            "objective": estimate(mean, "objective", name),
            "objective_iqm": estimate(interquartile_mean, "objective", name),
            "share_of_headroom": estimate(share_of_headroom, "objective", name, BEST, ORACLE)
            if ORACLE in rows
            else None,
            "metric": estimate(mean, "metric", name),
            "added_params": estimate(mean, "added_params", name),
            "kept": estimate(mean, "kept", name),
            "seconds": round(float(sum(each.scores(name, "seconds").sum() for each in evaluations)), 3),
        }
        for name in rows
    ]
    comparisons = [
        {
            "controller": name,
            "rule": rule,
            "difference": estimate(mean_difference, "objective", name, rule),
            "probability": estimate(probability_of_improvement, "objective", name, rule),
        }
        for name in rows
        for rule in rows
        if rule != name and rule in (*shown, *(first.opponents if name in named else ()))
    ]
    return {"controllers": controllers, "comparisons": comparisons}


def _interval(estimate: Interval) -> Record:
    return {name: _number(value) for name, value in estimate._asdict().items()}


def _number(value: float) -> float | None:
    """Return a number for JSON: None if it is not finite."""
    return float(value) if np.isfinite(value) else None
