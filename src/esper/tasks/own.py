"""A loss, a metric and weights of a task's own, for a stack of rows. E rows, B examples, C outputs."""

import copy
import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from numbers import Real
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.leyline.errors import InputError
from esper.leyline.task import Label, Objective, Scaling
from esper.tasks.objectives import Classification, Regression

Function = Callable[[Tensor, Tensor], Tensor]
"""outputs (B, C) and labels (B,) int64 or targets (B, C) -> a number for each example."""


@dataclass(frozen=True, eq=False)
class OwnObjective(Objective):
    """The loss or the metric of `base`, and what the task brings in place of the other.

    A function of one's own sees the rows of a stack as one batch, (E B, C), so an example's number must not depend on others.
    """

    base: Classification | Regression
    own_loss: Function | None
    own_score: Function | None  # of whole splits, (E, B, C) and (E, B), where it is one of METRICS
    metric: str
    class_weights: tuple[float, ...] | None  # (C,), of the loss alone
    outputs: int

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """output (E, B, C), target (E, B) or (E, B, C) -> (E, B), times the weight of the example's class."""
        losses = self.base.loss(output, target) if self.own_loss is None else _each(self.own_loss, output, target)
        if self.class_weights is None:
            return losses
        weights = _row_of(self.class_weights, losses.device, losses.dtype)
        return losses * weights.index_select(0, target.reshape(-1)).view_as(target)

    def score(self, output: Tensor, target: Tensor) -> Tensor:
        """output (E, B, C), target (E, B) or (E, B, C), a whole split -> (E, B) whose mean over B is the metric."""
        if self.own_score is None:
            return self.base.score(output, target)
        if self.metric in METRICS and self.own_score is METRICS[self.metric].score:
            return self.own_score(output, target)
        return _each(self.own_score, output, target)


@dataclass(frozen=True, eq=False)
class OfStandardized(Objective):
    """The objective of a regression whose networks return standardized targets, (y - mean) / deviation.

    The squared error and R2 are those of standardized targets, of which R2 is the same. A loss or a metric that the task brings
    takes outputs and targets in the units of y.
    """

    base: Regression | OwnObjective
    mean: tuple[float, ...]  # (C,) [units of y]
    deviation: tuple[float, ...]  # (C,) [units of y]
    metric: str = field(init=False)
    outputs: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "metric", self.base.metric)
        object.__setattr__(self, "outputs", self.base.outputs)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """output (E, B, C) standardized, target (E, B) or (E, B, C) in the units of y -> (E, B)."""
        brought = isinstance(self.base, OwnObjective) and self.base.own_loss is not None
        return self.base.loss(*self._in_units(output, target, brought))

    def score(self, output: Tensor, target: Tensor) -> Tensor:
        """output (E, B, C) standardized, target (E, B) or (E, B, C) in the units of y, a whole split -> (E, B)."""
        brought = isinstance(self.base, OwnObjective) and self.base.own_score is not None
        return self.base.score(*self._in_units(output, target, brought))

    def _in_units(self, output: Tensor, target: Tensor, of_y: bool) -> tuple[Tensor, Tensor]:
        """Both in the units of y, or both standardized."""
        scaling = _scaling_on(self.mean, self.deviation, output.device, output.dtype)
        return (scaling.restore(output), target) if of_y else (output, scaling.read(target.reshape(output.shape)))


@lru_cache
def _scaling_on(
    mean: tuple[float, ...], deviation: tuple[float, ...], device: torch.device, dtype: torch.dtype
) -> Scaling:
    """Mean and deviation (C,), brought to the device once."""
    return Scaling(*(torch.tensor(values, dtype=dtype).to(device) for values in (mean, deviation)))


def _each(function: Function, output: Tensor, target: Tensor) -> Tensor:
    """(E, B, C), (E, B) or (E, B, C) -> (E, B) in the dtype of the outputs, by one call for all rows."""
    rows, examples, outputs = output.shape
    if target.is_floating_point():
        target = target.reshape(rows, examples, outputs)
    found = _on(function, output.device)(output.flatten(0, 1), target.flatten(0, 1)).to(output.dtype)
    return found.reshape(rows, examples, -1).mean(-1)


def _on(function: Function, device: torch.device) -> Function:
    """The function with its tensors on the device of the outputs, where it is a module."""
    return _moved(function, device) if isinstance(function, nn.Module) else function


@lru_cache
def _moved(module: nn.Module, device: torch.device) -> nn.Module:
    return copy.deepcopy(module).to(device)


@lru_cache
def _row_of(weights: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.tensor(weights, dtype=dtype, device=device)


# Metrics by name, as scikit-learn calls them.


@dataclass(frozen=True)
class Metric:
    """A metric that is a mean over the examples of a split."""

    score: Function  # (E, B, C), (E, B) or (E, B, C) -> (E, B)
    kind: str  # of tasks that have it


def _right(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(-1) == target).to(output.dtype)


def balanced(output: Tensor, target: Tensor) -> Tensor:
    """B / (K n_y) where the largest output is the label's, else 0; n_y of the B examples have label y, of K that occur.

    Its mean is the mean over classes of the share that is right (scikit-learn's `balanced_accuracy_score`).
    """
    counts = F.one_hot(target, output.shape[-1]).sum(-2)  # (E, C)
    share = target.shape[-1] / ((counts > 0).sum(-1, keepdim=True) * counts).to(output.dtype)
    return _right(output, target) * share.gather(-1, target)


def _by_output(output: Tensor, target: Tensor) -> Tensor:
    return target.reshape(output.shape)


METRICS: Mapping[str, Metric] = {
    "accuracy": Metric(_right, "classification"),
    "balanced_accuracy": Metric(balanced, "classification"),
    "neg_log_loss": Metric(
        lambda output, target: output.log_softmax(-1).gather(-1, target.unsqueeze(-1)).squeeze(-1), "classification"
    ),
    "r2": Metric(lambda output, target: Regression(output.shape[-1]).score(output, target), "regression"),
    "neg_mean_squared_error": Metric(
        lambda output, target: -(output - _by_output(output, target)).square().mean(-1), "regression"
    ),
    "neg_mean_absolute_error": Metric(
        lambda output, target: -(output - _by_output(output, target)).abs().mean(-1), "regression"
    ),
}


# What a person brings, checked on examples of theirs.


def own_objective(
    base: Classification | Regression, loss: Any, metric: Any, class_weights: tuple[float, ...] | None
) -> Classification | Regression | OwnObjective:
    """The objective of a task; `base` itself where nothing takes the place of its own. InputError for what cannot be used."""
    score, name = _metric_of(metric, "classification" if isinstance(base, Classification) else "regression")
    if loss is None and class_weights is None and name in (None, base.metric):
        return base
    used = None if loss is None else _loss_of(loss)
    return OwnObjective(base, used, score, name or base.metric, class_weights, base.outputs)


def _loss_of(loss: Any) -> Function:
    """A loss that gives each example's, made of one that gives their mean where it can be asked for them."""
    if isinstance(loss, type) or not callable(loss):
        given = f"the class {loss.__name__}" if isinstance(loss, type) else repr(loss)
        raise InputError(
            f"loss is {given}; give a function of outputs (B, C) and y, such as torch.nn.HuberLoss() with its brackets"
        )
    if isinstance(loss, nn.Module):
        if any(parameter.requires_grad for parameter in loss.parameters()):
            raise InputError(f"loss is a {type(loss).__name__} with parameters to train, and only networks are trained")
        if vars(loss).get("reduction", "none") != "none":
            loss = copy.deepcopy(loss)
            loss.reduction = "none"
        module: Function = loss
        return module
    try:
        reduces = "reduction" in inspect.signature(loss).parameters
    except (TypeError, ValueError):  # some callables of C have no signature
        reduces = False
    function: Function = partial(loss, reduction="none") if reduces else loss
    return function


def _metric_of(metric: Any, kind: str) -> tuple[Function | None, str | None]:
    """The scores of a metric and its name; neither where there is none, or it is the usual one of the kind."""
    if metric is None:
        return None, None
    known = [name for name, each in METRICS.items() if each.kind == kind]
    if isinstance(metric, str):
        if metric in known:
            return METRICS[metric].score, metric
        near = difflib.get_close_matches(metric, known, n=1, cutoff=0.7)
        raise InputError(
            f"metric is {metric!r}; give {', '.join(known)} for a {kind}, or a function of outputs (B, C) and y that returns "
            "one score per example, because networks are compared example by example and their mean is the metric"
            + (f"; did you mean {near[0]!r}?" if near else "")
        )
    if isinstance(metric, type) or not callable(metric):
        raise InputError(
            f"metric is {metric!r}; give a name, as in {known[0]!r}, or a function of outputs (B, C) and y"
        )
    name = getattr(metric, "__name__", type(metric).__name__)
    if str(getattr(metric, "__module__", "")).startswith("sklearn."):
        raise InputError(
            f"metric is scikit-learn's {name}, which takes predicted labels of a whole split; give one of the names "
            f"{', '.join(known)}, or a function of outputs (B, C) and y that returns one score per example"
        )
    name = name if name.isidentifier() else "score"
    if name in ("loss", "objective") or name in METRICS:
        raise InputError(f"metric is a function named {name!r}, which the summary uses already; give it another name")
    return metric, name


def check_objective(objective: Objective, output: Tensor, target: Tensor) -> None:
    """Hold a task's own loss and metric against outputs (B, C) and targets of its training examples.

    Raises InputError where either cannot run, has no number for each example, or makes it depend on other examples, and
    where the loss has no gradient.
    """
    if not isinstance(objective, OwnObjective):
        return
    output = output.detach().clone().requires_grad_()
    if output.dtype.is_floating_point and target.is_floating_point():
        target = target.reshape(output.shape)
    if objective.own_loss is not None:
        losses = _numbers("loss", objective.own_loss, output, target)
        (gradient,) = torch.autograd.grad(losses.sum(), output, allow_unused=True) if losses.requires_grad else (None,)
        if gradient is None or not gradient.isfinite().all():
            raise InputError(
                "loss has no finite gradient with respect to the outputs; compute it from them by torch alone"
            )
    if objective.own_score is not None and objective.metric not in METRICS:
        _numbers("metric", objective.own_score, output.detach(), target)


def _numbers(what: str, function: Function, output: Tensor, target: Tensor) -> Tensor:
    """What a function gives for each example, (B,) or (B, C)."""
    shapes = f"outputs {tuple(output.shape)} and y {tuple(target.shape)}"
    try:
        whole, part = function(output, target), function(output[:2], target[:2])
    except Exception as error:  # whatever a person's function raises, its first line says why
        reason = (str(error).splitlines() or [""])[0]
        raise InputError(f"{what} raised {type(error).__name__} for {shapes}: {reason}; mend it") from error
    if not isinstance(whole, Tensor) or whole.shape not in (output.shape[:1], output.shape):
        got = f"a tensor of shape {tuple(whole.shape)}" if isinstance(whole, Tensor) else f"a {type(whole).__name__}"
        raise InputError(
            f"{what} returned {got} for {shapes}; return one number per example and not their mean, a tensor of shape "
            f"{tuple(output.shape[:1])}"
        )
    if not whole.isfinite().all():
        raise InputError(f"{what} is NaN or infinite for {shapes} of the training examples; mend it")
    if not torch.allclose(whole[:2].to(output.dtype), part.to(output.dtype), rtol=1e-3, atol=1e-5):
        raise InputError(
            f"{what} of an example depends on the other examples of its batch; compute it from its own alone"
        )
    return whole


def weights_of_classes(given: Any, classes: Sequence[Label], counts: Sequence[int]) -> tuple[float, ...]:
    """(C,) the weight of each class, divided by their mean over the training examples, of which each class has `counts`.

    given: 'balanced', which weighs a class by the inverse of its share, a mapping from labels to weights, or weights in the
    order of the classes. InputError where it is none of them.
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
