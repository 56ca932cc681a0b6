"""What an evaluation found, as figures with intervals. C contenders, N instances, R runs of each."""

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


def findings(evaluations: Sequence[Evaluation], searches: Sequence[Found], static: Sequence[str]) -> Record:
    """What came out on every task and, where all have one metric, together; and what it is compared with."""
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
    """One task: estimates, the search, and every run."""
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
