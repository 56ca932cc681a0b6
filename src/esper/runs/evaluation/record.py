"""Record an evaluation: figures with intervals. C contenders, N instances, R runs of each."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from esper.leyline.lifecycle.view import Floats
from esper.runs.evaluation import statistics

Record = dict[str, Any]


class RecordedFigures(NamedTuple):
    """Holds figures of networks as exported; all fields have the same shape, float64."""

    objective: Floats  # J on the test split
    metric: Floats  # metric on the test split
    added_params: Floats  # parameters in addition to those of the host
    kept: Floats  # number of fossilized seeds
    seconds: Floats  # time of training, probing and deciding, an equal share of the time of the population


class Evaluation(NamedTuple):
    """Holds the figures of all contenders on one task, paired by instance and seed."""

    task: str  # name of the task
    metric: str  # name of the metric
    contenders: tuple[str, ...]  # names of the contenders
    instances: NDArray[np.int64]  # (N,) keys of the instances
    seeds: tuple[int, ...]  # seeds of the runs
    sampled: bool  # True where instances are problems of a mixture, False where they are starts on one data set
    figures: RecordedFigures  # (C, N, R) the figures
    static: tuple[str, ...] = ()  # the contenders that are static networks
    # static networks and opponents that could not take part, with the reasons
    absent: Mapping[str, str] = MappingProxyType({})
    sized_by: str | None = None  # the contender whose grown networks determine the sizes of the static networks
    rules: tuple[str, ...] = ()  # the contenders that all others are compared with
    opponents: tuple[str, ...] = ()  # contenders that a package adds (`runs.evaluation.Rivals`)
    # contenders that are trainings of one controller, by the name of the controller
    groups: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    # number of episodes that contenders were trained or searched with; None if unknown
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


def findings(evaluations: Sequence[Evaluation], static: Sequence[str], named: Sequence[str] = ()) -> Record:
    """Return the results on every task, and on all tasks together if they have the same metric.

    named: the rows that are compared with every opponent; all others are compared with the rules and the static networks.
    """
    alike, tasks = len({evaluation.metric for evaluation in evaluations}) == 1, []
    for evaluation in evaluations:
        problems, runs = evaluation.problems(evaluation.figures.objective[0]).shape
        task = {
            "task": evaluation.task,
            "metric": evaluation.metric,
            "sampled": evaluation.sampled,
            "problems": problems,
            "runs_of_each": runs,
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
        tasks.append(task)
    return {
        "confidence": statistics.CONFIDENCE,
        "draws": statistics.DRAWS,
        "rules": list(evaluations[0].rules),
        "baselines": list(static),
        "sized_by": evaluations[0].sized_by,
        "tasks": tasks,
        "together": _estimates(evaluations, named) if alike and len(evaluations) > 1 else None,
    }


def estimate(
    evaluations: Sequence[Evaluation], statistic: Callable[..., Floats], figure: str, *names: str
) -> dict[str, float | None]:
    """Return a statistic of a figure of rows, over one task or several, with its interval."""
    repeats = {name: len(evaluations[0].groups.get(name, (name,))) for name in names}
    most = max(repeats.values())
    assert set(repeats.values()) <= {1, most}, "trainings of two controllers are not paired"
    tasks: list[statistics.Tasks] = [
        [np.tile(each.scores(name, figure), (1, most // repeats[name])) for each in evaluations] for name in names
    ]
    found = statistics.interval(statistic, *tasks, trainings=most)
    return {name: _number(value) for name, value in found._asdict().items()}


def _estimates(evaluations: Sequence[Evaluation], named: Sequence[str]) -> Record:
    """Return estimates for every row, and for every row compared with rules, over one task or several."""
    first, of = evaluations[0], partial(estimate, evaluations)
    rows = [name for name in first.rows if all(name in each.rows for each in evaluations)]
    rules, shown = first.rules, (*first.rules, *first.static)
    controllers = [
        {
            "name": name,
            "rule": name in rules,
            "static": name in first.static,
            "opponent": name in first.opponents,
            "trainings": len(first.groups.get(name, (name,))),
            "episodes": first.episodes.get(name),
            "objective": of(statistics.mean, "objective", name),
            "objective_iqm": of(statistics.interquartile_mean, "objective", name),
            "metric": of(statistics.mean, "metric", name),
            "added_params": of(statistics.mean, "added_params", name),
            "kept": of(statistics.mean, "kept", name),
            "seconds": round(float(sum(each.scores(name, "seconds").sum() for each in evaluations)), 3),
        }
        for name in rows
    ]
    comparisons = [
        {
            "controller": name,
            "rule": rule,
            "difference": of(statistics.mean_difference, "objective", name, rule),
            "probability": of(statistics.probability_of_improvement, "objective", name, rule),
        }
        for name in rows
        for rule in rows
        if rule != name and rule in (*shown, *(first.opponents if name in named else ()))
    ]
    return {"controllers": controllers, "comparisons": comparisons}


def _number(value: float) -> float | None:
    """Return a number for JSON: None if it is not finite."""
    return float(value) if np.isfinite(value) else None
