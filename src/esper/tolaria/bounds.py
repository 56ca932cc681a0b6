"""Between what a metric moves: the best constant prediction and a perfect one. N examples, C outputs."""

from typing import NamedTuple

import torch
from torch import Tensor

from esper.leyline.task import Objective, Scaling, Split

CERTAIN = 30.0
"""Logit of the right class over the others: a probability of 1 in float32."""


class Bounds(NamedTuple):
    """A metric on one split; nan where it is not a finite number."""

    floor: float  # of the best constant prediction: the most frequent class, or the mean target
    ceiling: float  # of the prediction that is always right


def bounds(objective: Objective, split: Split, scaling: Scaling | None = None) -> Bounds:
    """What a network that learns nothing reaches on a split, and what no network exceeds, by the task's own metric.

    Accuracy has the share of the most frequent class and 1, R2 has 0 and 1. `scaling` is that of targets that hosts return
    standardized.
    """
    y = split.y.cpu()
    if y.is_floating_point():
        target = y.reshape(len(y), -1)
        if scaling is not None:
            target = scaling.read(target)
        constant, right = target.mean(0).expand_as(target), target
    else:
        labels = y.long()
        most = labels.bincount(minlength=objective.outputs).argmax()
        right = CERTAIN * torch.nn.functional.one_hot(labels, objective.outputs).to(torch.get_default_dtype())
        constant = CERTAIN * torch.nn.functional.one_hot(most, objective.outputs).to(right).expand_as(right)
    return Bounds(_metric(objective, constant, y), _metric(objective, right, y))


def _metric(objective: Objective, output: Tensor, y: Tensor) -> float:
    """The metric of predictions (N, C) on labels (N,) or targets (N,) or (N, C)."""
    value = float(objective.score(output[None], y[None]).mean())
    return value if abs(value) < float("inf") else float("nan")
