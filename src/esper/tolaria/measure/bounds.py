"""Compute the range of a metric, from the best constant prediction to a perfect one. N examples, C classes or targets."""

import torch
from torch import Tensor

from esper.leyline.data.task import Objective, Scaling, Split

CERTAIN = 30.0
"""Logit of the predicted class; the logits of the others are 0. The probability is 1 in float32."""


AT_ONCE = 2**24
"""Largest number of outputs of a constant prediction that are in memory at a time."""


def bounds(objective: Objective, split: Split, scaling: Scaling | None = None) -> tuple[float, float]:
    """Return the metric of an objective on a split for the best constant prediction and for the perfect prediction.

    For accuracy these are the share of the most frequent class and 1; for R2 they are 0 and 1. nan where a value is not finite,
    or the objective takes no such prediction.

    scaling: scaling of the targets if hosts return them standardized.
    """
    y = split.y.cpu()
    constant = _constant(objective, y, scaling)
    if constant is None:
        return float("nan"), float("nan")
    if y.is_floating_point():
        right = _target(y, scaling)
    else:  # logits with all weight on the labels
        right = torch.zeros(*y.shape, objective.outputs).scatter_(-1, y.long()[..., None], CERTAIN)
    return _metric(objective, constant.expand_as(right), y), _metric(objective, right, y)


def constant_metric(objective: Objective, known: Tensor, split: Split, scaling: Scaling | None = None) -> float:
    """Return the metric on a split of the best constant prediction for the targets `known` (N, ...) of another split.

    That is the most frequent class at each position, or the mean target; nan where `bounds` has nan.
    """
    y, constant = split.y.cpu(), _constant(objective, known.cpu(), scaling)
    if constant is None:
        return float("nan")
    size = len(y) if y.is_floating_point() else max(1, AT_ONCE // constant.numel())
    parts = [
        (_metric(objective, constant.expand(len(part), *constant.shape), part), len(part)) for part in y.split(size)
    ]
    return sum(value * count for value, count in parts) / len(y)


def _constant(objective: Objective, y: Tensor, scaling: Scaling | None) -> Tensor | None:
    """Return the best constant prediction (..., C) of targets (N, ...); None if they are whole numbers and no classes."""
    if y.is_floating_point():
        return _target(y, scaling).mean(0)
    labels = y.long()
    if labels.min() < 0 or labels.max() >= objective.outputs:  # targets that an objective interprets, and not classes
        return None
    # The logarithm of the share of each class at each position. Of all constant predictions it has the least log loss, and the
    # most frequent class has the largest logit.
    flat = labels.flatten(1) if labels.dim() > 1 else labels[:, None]
    places = flat + objective.outputs * torch.arange(flat.shape[1])
    counts = torch.bincount(places.flatten(), minlength=flat.shape[1] * objective.outputs)
    return (counts.view(*labels.shape[1:], objective.outputs) / len(labels)).log().clamp(min=-CERTAIN)


def _target(y: Tensor, scaling: Scaling | None) -> Tensor:
    """Return targets (N, ...) as hosts return them, (N, C)."""
    target = y[:, None] if y.dim() == 1 else y
    return target if scaling is None else scaling.read(target)


def _metric(objective: Objective, output: Tensor, y: Tensor) -> float:
    """Return the metric of predictions (N, ..., C) on labels (N, ...), or on targets."""
    try:
        value = float(objective.score(output[None], y[None]).mean())
    except (RuntimeError, ValueError, IndexError, AssertionError):  # the objective does not take these predictions
        return float("nan")
    return value if abs(value) < float("inf") else float("nan")
