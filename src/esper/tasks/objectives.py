"""Define objectives: the loss that training minimises, and the metric; built in, or of a user's functions and class weights.

E rows, B examples, C outputs; ... are positions. Loss and score of a row are computed from that row alone, by operations whose
order does not depend on E.
"""

import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from numbers import Real
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.leyline.data.task import Differentiated, Label, Objective, Scaling
from esper.leyline.messages import InputError, did_you_mean, in_words, kind_of

MANY = 64
"""Classes from which on `F.cross_entropy` is faster on a CPU than the formula written out: 1.7 times at 64 and at 256. For few
classes it takes twice as long, and was a fifth of a training step."""


def _correct(output: Tensor, target: Tensor) -> Tensor:
    """Return 1 where the largest output is the label's, else 0."""
    # `max` takes two thirds of the time of `argmax` on a CPU, and of equal ones finds the first too.
    return (output.max(-1).indices == target).to(output.dtype)


@dataclass(frozen=True)
class Classification(Objective):
    """Measures a classification: the loss is the cross-entropy [nats], the metric the accuracy.

    Both are means over the positions of an example.
    """

    outputs: int  # C classes
    metric: str = field(default="accuracy", init=False)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Compute ln sum_c exp(z_c) - z_target, z = output - max.  output (E, B, ..., C), target (E, B, ...) -> (E, B) [nats]."""
        return by_example(self.losses(output, target))

    def differentiated(self, output: Tensor, target: Tensor) -> Differentiated | None:
        """Return `loss` and what its gradient is, bit for bit as with autograd; None where autograd is needed."""
        own = type(self)
        if own.loss is not Classification.loss or own.losses is not Classification.losses or self.outputs >= MANY:
            return None
        z = output - output.amax(-1, keepdim=True)
        size = z.exp()
        total, label = size.sum(-1), target.unsqueeze(-1)
        losses = total.log() - z.gather(-1, label).squeeze(-1)

        def back(gradient: Tensor) -> Tensor:
            own = gradient
            if losses.dim() > 2:  # the mean over positions
                own = (
                    (gradient / losses[0, 0].numel())
                    .view(*gradient.shape, *(1,) * (losses.dim() - 2))
                    .expand_as(losses)
                )
            softmax = size * (own / total).unsqueeze(-1)
            return softmax.scatter_add_(-1, label, -own.unsqueeze(-1))

        return by_example(losses), back

    def losses(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the loss of each position: output (E, B, ..., C), target (E, B, ...) int64 -> (E, B, ...) [nats]."""
        assert output.shape == (*target.shape, self.outputs), (output.shape, target.shape, self.outputs)
        if self.outputs >= MANY:
            return F.cross_entropy(output.flatten(0, -2), target.flatten(), reduction="none").view(target.shape)
        z = output - output.detach().amax(-1, keepdim=True)
        return z.exp().sum(-1).log() - z.gather(-1, target.unsqueeze(-1)).squeeze(-1)

    def score(self, output: Tensor, target: Tensor) -> Tensor:
        """Return 1 where the largest output is the label's, else 0.   output (E, B, ..., C), target (E, B, ...) -> (E, B)."""
        assert output.shape == (*target.shape, self.outputs), (output.shape, target.shape, self.outputs)
        return by_example(_correct(output, target))


@dataclass(frozen=True)
class NextToken(Classification):
    """Measures a model of tokens: the loss is the cross-entropy [nats], the metric minus the bits that a token takes."""

    metric: str = field(default="neg_bits_per_token", init=False)

    def score(self, output: Tensor, target: Tensor) -> Tensor:
        """Compute log2 of the probability of the token, as a mean over positions.   Shapes as for `loss`."""
        return -self.loss(output, target) / math.log(2)


@dataclass(frozen=True)
class NextByte(NextToken):
    """Measures as `NextToken` where tokens are bytes, so that the metric compares with that of other models of text."""

    metric: str = field(default="neg_bits_per_byte", init=False)


@dataclass(frozen=True)
class Regression(Objective):
    """Measures a regression: the loss is the squared error, the metric R2; both are means over the targets."""

    outputs: int  # C targets along the last axis; 1 where an example has a single one
    metric: str = field(default="r2", init=False)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Compute mean (output - target)^2.   output (E, B, ...), target as output, or (E, B) for outputs (E, B, 1) -> (E, B)."""
        return by_example((output - self._by_output(output, target)).square())

    def score(self, output: Tensor, target: Tensor) -> Tensor:
        """Compute mean 1 - (output - target)^2 / variance.   Shapes as for `loss`.

        The variance is the mean squared deviation of a row's targets over B. The mean over B of the score of a whole split is
        therefore R2, averaged over targets (scikit-learn's `uniform_average`). A split whose targets are constant has no R2;
        `splits.check_targets` raises InputError for it.
        """
        target = self._by_output(output, target)
        variance = (target - target.mean(1, keepdim=True)).square().mean(1, keepdim=True)
        return by_example(1 - (output - target).square() / variance)

    def _by_output(self, output: Tensor, target: Tensor) -> Tensor:
        if target.dim() == 2 and output.dim() == 3:
            target = target.unsqueeze(-1)
        assert output.shape == target.shape, (output.shape, target.shape)
        assert output.dim() == 2 or output.shape[-1] == self.outputs, (output.shape, self.outputs)
        return target


def by_example(values: Tensor) -> Tensor:
    """Return (E, B, ...) -> (E, B), the mean over the positions and targets of an example."""
    if values.dim() == 3:
        return values.mean(-1)
    return values.flatten(2).mean(-1) if values.dim() > 3 else values


Function = Callable[[Tensor, Tensor], Tensor]
"""A function of outputs (B, ..., C) and of labels (B, ...) int64 or targets (B, ..., C), which returns a number for each example,
position or target."""


@dataclass(frozen=True, eq=False)
class CustomObjective(Objective):
    """Measures as the objective `base`, with another loss, another metric, or class weights.

    A user's function is called once with the rows of a stack as one batch, (E B, ..., C), so the number that it returns for
    an example must not depend on the other examples.
    """

    base: Classification | Regression  # provides the loss or the metric where none is given
    user_loss: Function | None
    user_score: Function | None  # an entry of SCORES takes whole splits (E, B, ..., C) and (E, B, ...)
    metric: str  # its name
    class_weights: tuple[float, ...] | None  # (C,) factors of the loss by class; the metric has none
    outputs: int  # C

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Map output (E, B, ..., C), target (E, B, ...) -> (E, B), the loss of each position times the weight of its class."""
        if self.class_weights is None:
            return self.base.loss(output, target) if self.user_loss is None else _each(self.user_loss, output, target)
        if self.user_loss is not None:
            losses = _values(self.user_loss, output, target)
            losses = losses.mean(-1) if losses.dim() > target.dim() else losses
        else:
            assert isinstance(self.base, Classification), "only classes have weights"
            losses = self.base.losses(output, target)
        weights = _tensor_on(self.class_weights, torch.Size((-1,)), losses.device, losses.dtype)
        return by_example(losses * weights.index_select(0, target.reshape(-1)).view_as(target))

    def score(self, output: Tensor, target: Tensor) -> Tensor:
        """Map output (E, B, ..., C), target (E, B, ...), a whole split -> (E, B) whose mean over B is the metric."""
        if self.user_score is None:
            return self.base.score(output, target)
        if self.user_score is SCORES.get(self.metric):
            return by_example(self.user_score(output, target))
        return _each(self.user_score, output, target)


@dataclass(frozen=True, eq=False)
class StandardizedObjective(Objective):
    """Measures a regression whose networks return standardized targets, (y - mean) / deviation.

    The squared error is that of standardized targets. R2 is the same in both units. A loss or a metric that a user gives takes
    outputs and targets in the units of y.
    """

    base: Regression | CustomObjective
    mean: tuple[float, ...]  # of each target of an example, in order [units of y]
    deviation: tuple[float, ...]  # standard deviation of each, in the same order [units of y]
    metric: str = field(init=False)
    outputs: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "metric", self.base.metric)
        object.__setattr__(self, "outputs", self.base.outputs)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Map output (E, B, ...) standardized, target of that shape or (E, B) in the units of y -> (E, B)."""
        in_units_of_y = isinstance(self.base, CustomObjective) and self.base.user_loss is not None
        return self.base.loss(*self._in_units(output, target, in_units_of_y))

    def score(self, output: Tensor, target: Tensor) -> Tensor:
        """Map output (E, B, ...) standardized, target of that shape or (E, B) in the units of y, a whole split -> (E, B)."""
        in_units_of_y = isinstance(self.base, CustomObjective) and self.base.user_score is not None
        return self.base.score(*self._in_units(output, target, in_units_of_y))

    def _in_units(self, output: Tensor, target: Tensor, units_of_y: bool) -> tuple[Tensor, Tensor]:
        """Return outputs and targets, both in the units of y or both standardized."""
        shape, device, dtype = output.shape[2:], output.device, output.dtype
        scaling = Scaling(*(_tensor_on(each, shape, device, dtype) for each in (self.mean, self.deviation)))
        return (scaling.restore(output), target) if units_of_y else (output, scaling.read(target.reshape(output.shape)))


@lru_cache
def _tensor_on(values: tuple[float, ...], shape: torch.Size, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Make constants a tensor of a shape, which is copied to the device once."""
    return torch.tensor(values, dtype=dtype).reshape(shape).to(device)


@lru_cache
def _module_on(module: nn.Module, device: torch.device) -> nn.Module:
    return copy.deepcopy(module).to(device)


def _each(function: Function, output: Tensor, target: Tensor) -> Tensor:
    """Call a function once for all rows: (E, B, ..., C), (E, B, ...) -> (E, B) in the dtype of the outputs."""
    values = _values(function, output, target)
    return values.reshape(*values.shape[:2], -1).mean(-1)


def _values(function: Function, output: Tensor, target: Tensor) -> Tensor:
    """Return the same for each example, position or target: (E, B), (E, B, ...) or (E, B, ..., C)."""
    if target.is_floating_point():
        target = target.reshape(output.shape)
    if isinstance(function, nn.Module):
        function = _module_on(function, output.device)
    values = function(output.flatten(0, 1), target.flatten(0, 1)).to(output.dtype)
    return values.reshape(*output.shape[:2], *values.shape[1:])


def balanced(output: Tensor, target: Tensor) -> Tensor:
    """Return B / (K n_y) where the largest output is that of label y, else 0. n_y of the B labels of a row are y; K occur.

    The mean over B is the mean over classes of their accuracies (scikit-learn's `balanced_accuracy_score`).
    """
    labels = target.flatten(1)
    counts = F.one_hot(labels, output.shape[-1]).sum(-2)  # (E, C)
    share = labels.shape[-1] / ((counts > 0).sum(-1, keepdim=True) * counts).to(output.dtype)
    return _correct(output, target) * share.gather(-1, labels).view_as(target)


METRICS: Mapping[str, Mapping[str, Function]] = {
    "classification": {
        "accuracy": _correct,
        "balanced_accuracy": balanced,
        "neg_log_loss": lambda output, target: output.log_softmax(-1).gather(-1, target.unsqueeze(-1)).squeeze(-1),
    },
    "regression": {
        "r2": lambda output, target: Regression(output.shape[-1]).score(output, target),
        "neg_mean_squared_error": lambda output, target: -(output - target.reshape(output.shape)).square(),
        "neg_mean_absolute_error": lambda output, target: -(output - target.reshape(output.shape)).abs(),
    },
}
"""Metrics that are means over the examples of a split, by kind and by the names that scikit-learn gives them:
(E, B, ..., C), (E, B, ...) -> (E, B), or a number for each position or target."""
SCORES: Mapping[str, Function] = {name: score for kind in METRICS.values() for name, score in kind.items()}


def custom_objective(
    base: Classification | Regression, loss: Any, metric: Any, class_weights: tuple[float, ...] | None
) -> Classification | Regression | CustomObjective:
    """Give `base` a user's loss, metric and class weights in place of its own. InputError if they cannot be used."""
    kind = "classification" if isinstance(base, Classification) else "regression"
    known, score, name = list(METRICS[kind]), None, None
    if isinstance(metric, str):
        if metric not in known:
            hint = did_you_mean(metric, known, similarity=0.7)
            raise InputError(
                f"metric is {metric!r}; give {', '.join(known)} for a {kind}, or a function of outputs (B, C) and y that returns "
                "one score per example, because networks are compared example by example and their mean is the metric"
                + (f"; {hint}" if hint else "")
            )
        score, name = SCORES[metric], metric
    elif metric is not None:
        if isinstance(metric, type) or not callable(metric):
            raise InputError(
                f"metric is {metric!r}; give a name, as in {known[0]!r}, or a function of outputs (B, C) and y"
            )
        score, name = metric, getattr(metric, "__name__", type(metric).__name__)
        if str(getattr(metric, "__module__", "")).startswith("sklearn."):
            raise InputError(
                f"metric is scikit-learn's {name}, which takes predicted labels of a whole split; give one of the names "
                f"{', '.join(known)}, or a function of outputs (B, C) and y that returns one score per example"
            )
        name = name if name.isidentifier() else "score"
        if name in ("loss", "objective") or name in SCORES:
            raise InputError(
                f"metric is a function named {name!r}, which the summary uses already; give it another name"
            )
    if loss is None and class_weights is None and name in (None, base.metric):
        return base
    if loss is not None and (isinstance(loss, type) or not callable(loss)):
        given = f"the class {loss.__name__}" if isinstance(loss, type) else repr(loss)
        raise InputError(
            f"loss is {given}; give a function of outputs (B, C) and y, such as torch.nn.HuberLoss() with parentheses"
        )
    # A loss returns a number for each example: with reduction='none' where it has that argument.
    if isinstance(loss, nn.Module):
        if any(parameter.requires_grad for parameter in loss.parameters()):
            raise InputError(
                f"loss is {kind_of(loss)} with trainable parameters, which no optimizer would train; give a loss without"
            )
        if vars(loss).get("reduction", "none") != "none":
            loss = copy.deepcopy(loss)
            loss.reduction = "none"
    elif loss is not None:
        with suppress(TypeError, ValueError):  # some callables that are written in C have no signature
            if "reduction" in inspect.signature(loss).parameters:
                loss = partial(loss, reduction="none")
    return CustomObjective(base, loss, score, name or base.metric, class_weights, base.outputs)


def check_objective(objective: Objective, output: Tensor, target: Tensor) -> None:
    """Raise InputError if a user's loss or metric cannot be used for outputs (B, ..., C) and targets (B, ...) of examples."""
    if not isinstance(objective, CustomObjective):
        return
    output = output.detach().clone().requires_grad_()
    if output.dtype.is_floating_point and target.is_floating_point():
        target = target.reshape(output.shape)
    if objective.user_loss is not None:
        losses = _numbers("loss", objective.user_loss, output, target)
        (gradient,) = torch.autograd.grad(losses.sum(), output, allow_unused=True) if losses.requires_grad else (None,)
        if gradient is None or not gradient.isfinite().all():
            raise InputError(
                "loss has no finite gradient with respect to the outputs; compute the loss from the outputs by torch alone"
            )
    if objective.user_score is not None and objective.metric not in SCORES:
        _numbers("metric", objective.user_score, output.detach(), target)


def _numbers(what: str, function: Function, output: Tensor, target: Tensor) -> Tensor:
    """Return the numbers that a user's function returns: (B,), (B, ...) or (B, ..., C). InputError if they cannot be used."""
    allowed = output.shape[:1], output.shape[: max(output.dim() - 1, 1)], output.shape
    shapes = f"outputs {tuple(output.shape)} and y {tuple(target.shape)}"
    with in_words(f"{what} raised an error for {shapes}", f"correct the {what}"):
        whole, part = function(output, target), function(output[:2], target[:2])
    if not isinstance(whole, Tensor) or whole.shape not in allowed:
        got = f"a tensor of shape {tuple(whole.shape)}" if isinstance(whole, Tensor) else kind_of(whole)
        raise InputError(
            f"{what} returned {got} for {shapes}; return one number per example instead of their mean, as a tensor of shape "
            f"{tuple(output.shape[:1])}"
        )
    if not whole.isfinite().all():
        raise InputError(f"{what} is NaN or infinite for {shapes} of the training examples; correct the {what}")
    if not torch.allclose(whole[:2].to(output.dtype), part.to(output.dtype), rtol=1e-3, atol=1e-5):
        raise InputError(
            f"{what} of an example depends on the other examples of its batch; compute it from the outputs and y of that example"
        )
    return whole


def weights_of_classes(given: Any, classes: Sequence[Label], counts: Sequence[int]) -> tuple[float, ...]:
    """Return the weight of each class (C,), divided by the mean weight of the training examples.

    given: 'balanced', which gives a class the inverse of its share as its weight; a mapping from labels to weights; or the
    weights in the order of the classes.
    counts: number of training examples of each class.
    """
    if isinstance(given, str) and given == "balanced":
        present = sum(count > 0 for count in counts)
        weights = [sum(counts) / (present * count) if count else 1.0 for count in counts]
    elif isinstance(given, Mapping):
        if set(given) != set(classes):
            odd = sorted(set(given) ^ set(classes), key=str)[0]
            raise InputError(
                f"class_weights {'lacks' if odd in classes else 'names'} {odd!r}; give a weight for each of the classes "
                f"{str(list(classes))[:80]}"
            )
        weights = [given[name] for name in classes]
    else:
        weights = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else []
    if len(weights) != len(classes) or not all(isinstance(w, Real) and 0 < w < float("inf") for w in weights):
        raise InputError(
            f"class_weights is {repr(given)[:80]}; give 'balanced', or a positive number for each of the classes "
            f"{str(list(classes))[:80]}"
        )
    mean = sum(w * count for w, count in zip(weights, counts, strict=True)) / sum(counts)
    return tuple(float(w) / mean for w in weights)
