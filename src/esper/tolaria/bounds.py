"""The range of a metric: its values for the best constant prediction and for a perfect one. N examples, C classes or targets."""

from typing import NamedTuple

import torch
from torch import Tensor

from esper.leyline.task import Objective, Scaling, Split

CERTAIN = 30.0
"""Logit of the predicted class; the logits of the others are 0. The probability is 1 in float32."""


class Bounds(NamedTuple):
    """The range of a metric on one split; nan where a value is not finite, or the objective takes no such prediction.

    Attributes:
        floor (float): metric of the best constant prediction: the shares of the classes at each position, or the mean target
        ceiling (float): metric of the perfect prediction
    """

    floor: float
    ceiling: float


def bounds(objective: Objective, split: Split, scaling: Scaling | None = None) -> Bounds:
    """Return the metric of an objective on a split for the best constant prediction and for the perfect prediction.

    For accuracy these are the share of the most frequent class and 1; for R2 they are 0 and 1.

    scaling: scaling of the targets if hosts return them standardized.
    """
    y = split.y.cpu()
    if y.is_floating_point():
        target = y[:, None] if y.dim() == 1 else y
        if scaling is not None:
            target = scaling.read(target)
        constant, right = target.mean(0).expand_as(target), target
    else:
        labels = y.long()
        if (
            labels.min() < 0 or labels.max() >= objective.outputs
        ):  # targets that an objective interprets, and not classes
            return Bounds(float("nan"), float("nan"))
        right = _logits(labels, objective.outputs)
        constant = _shares(labels, objective.outputs).expand_as(right)
    return Bounds(_metric(objective, constant, y), _metric(objective, right, y))


def _logits(labels: Tensor, classes: int) -> Tensor:
    """Return logits (..., C) with all weight on the labels (...)."""
    shape = (*labels.shape, classes)
    return torch.zeros(shape).scatter_(-1, labels[..., None], CERTAIN)


def _shares(labels: Tensor, classes: int) -> Tensor:
    """(N, ...) labels -> logits (..., C), the logarithm of the share of each class at each position.

    Of all constant predictions they have the least log loss, and the most frequent class has the largest logit.
    """
    flat = labels.flatten(1) if labels.dim() > 1 else labels[:, None]
    places = flat + classes * torch.arange(flat.shape[1])
    counts = torch.bincount(places.flatten(), minlength=flat.shape[1] * classes).view(*labels.shape[1:], classes)
    return (counts / len(labels)).log().clamp(min=-CERTAIN)


def _metric(objective: Objective, output: Tensor, y: Tensor) -> float:
    """Return the metric of predictions (N, ..., C) on labels (N, ...), or on targets."""
    try:
        value = float(objective.score(output[None], y[None]).mean())
    except (RuntimeError, ValueError, IndexError, AssertionError):  # the objective does not take these predictions
        return float("nan")
    return value if abs(value) < float("inf") else float("nan")
