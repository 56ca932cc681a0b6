"""The record of an evaluation: figures with intervals. C contenders, N instances, R runs of each."""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from esper.leyline.view import Floats
from esper.runs.contenders import BEST, RULES
from esper.runs.schedule_search import Found, entry_line
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
        absent (mapping): static networks that could not be trained, with the reasons
        sized_by (str or None): the contender whose grown networks determine the sizes of the static networks
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

    def problems(self, figure: Floats) -> Floats:
        """Return a figure (N, R) of one contender as problems by runs. All starts on one data set are runs of one problem."""
        return figure if self.sampled else figure.reshape(1, -1)


def findings(evaluations: Sequence[Evaluation], searches: Sequence[Found], static: Sequence[str]) -> Record:
    """Return the results on every task, and on all tasks together if they have the same metric."""
    alike = len({evaluation.metric for evaluation in evaluations}) == 1
    return {
        "confidence": CONFIDENCE,
        "draws": DRAWS,
        "rules": [*RULES, BEST],
        "baselines": list(static),
        "sized_by": evaluations[0].sized_by,
        "tasks": [task_record(evaluation, found) for evaluation, found in zip(evaluations, searches, strict=True)],
        "together": _estimates(evaluations) if alike and len(evaluations) > 1 else None,
    }


def task_record(evaluation: Evaluation, found: Found) -> Record:
    """Return the results on one task: estimates, the search, and every run."""
    problems, runs = evaluation.problems(evaluation.figures.objective[0]).shape
    return {
        "task": evaluation.task,
        "metric": evaluation.metric,
        "sampled": evaluation.sampled,
        "problems": problems,
        "runs_of_each": runs,
        "search": {
            "entries": [entry_line(entry) for entry in found.entries],
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


def _estimates(evaluations: Sequence[Evaluation]) -> Record:
    """Return estimates for every contender, and for every contender compared with every rule, over one task or several."""
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
    """Yield every contender with every other rule: (index of the contender, its name, index of the rule)."""
    for index, contender in enumerate(contenders):
        yield from ((index, contender, rule) for rule, name in enumerate(contenders) if name in rules and rule != index)


def _interval(estimate: Interval) -> Record:
    return {name: _number(value) for name, value in estimate._asdict().items()}


def _number(value: float) -> float | None:
    """Return a number for JSON: None if it is not finite."""
    return float(value) if np.isfinite(value) else None
