"""Making a task from a user's examples and host."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from esper.kasmina.blueprints import get_blueprint
from esper.kasmina.host import SegmentedHost
from esper.kasmina.regrow import RegrownHost
from esper.leyline.arguments import known_as
from esper.leyline.config import build_config, merge_settings
from esper.leyline.errors import DataWarning, InputError, warn
from esper.leyline.preprocess import Preprocess, preprocess_from
from esper.leyline.task import Label, Objective, Scaling, Task
from esper.tasks.custom_host import as_the_host_takes, check_custom_host, cut_host, draw_host, read_host
from esper.tasks.custom_objective import (
    CustomObjective,
    StandardizedObjective,
    custom_objective,
    weights_of_classes,
)
from esper.tasks.hosts import menu_of
from esper.tasks.labels import Kind
from esper.tasks.objectives import Classification, NextByte, NextToken, Regression
from esper.tasks.prepared import Given, Prepared, prepare
from esper.tasks.splits import Splits, check_targets, scaling_of
from esper.tasks.streamed import DatasetSource
from esper.tasks.suspicions import wanted_outputs, warn_of_duplicates, warn_of_single_examples, warn_of_softmax

FRACTIONS = (0.6, 0.15, 0.1, 0.15)
"""Fractions of the examples in train, probe, validation and test."""

FAR = 3.0
"""Largest absolute mean of targets without a warning [standard deviations of the targets]."""
USUAL = (0.1, 10.0)
"""Range of the standard deviation of targets without a warning [units of y]."""

DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "early_stopping": {"enabled": True},
        "reward": {"rent_size": 1000},
        # The narrow segment may contain the only nonlinearity of the host, which a linear bypass would not replace.
        "heuristic": {"narrow_blueprints": ("bypass-mlp", "bypass-conv-3x3")},
    }
)
"""Config of every custom task. The `defaults` of a task take precedence."""


@known_as("esper.task")
def task_from(
    name: str,
    x: Any = None,
    y: Any = None,
    *,
    host: Callable[[], SegmentedHost],
    kind: Kind | None = None,
    classes: int | Sequence[Label] | None = None,
    menu: Sequence[str] | None = None,
    loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    metric: str | Callable[[Tensor, Tensor], Tensor] | None = None,
    class_weights: Literal["balanced"] | Mapping[Any, float] | Sequence[float] | None = None,
    sample_weights: Any = None,
    splits: Mapping[str, Any] | None = None,
    fractions: Sequence[float] = FRACTIONS,
    seed: int = 0,
    standardize: bool | Literal["features"] = False,
    summary: str | None = None,
    defaults: Mapping[str, Any] | None = None,
    workers: int = 0,
    length: int | None = None,
    stream: bool = False,
    plain: Callable[[int], Callable[[], SegmentedHost]] | None = None,
    preprocess: Any = None,
) -> Task:
    """Make a task from examples and a host factory. `esper docs tasks` explains each argument with examples.

    x, y: features (N, ...), and labels or floating-point targets (N, ...), as tensors, arrays, data frames or lists; x may be a
    tuple or a mapping of them, with which the host is called. Or x alone: a map-style `torch.utils.data.Dataset` of pairs, or
    tokens, whole numbers (N,) or (W, L + 1) or bytes, in which the label of every position is the token behind it.
    host: a function without arguments that returns a fresh `SegmentedHost`, an `nn.Sequential` or another module, which is cut
    into segments, or a grown network: `lambda: esper.load(folder)`.
    kind: 'classification' or 'regression'; None infers it from y, and an ambiguous y raises InputError.
    classes: number of classes, or their names in the order of the outputs; None takes the sorted distinct labels.
    menu: names of the blueprints that may be planted; None takes those of the built-in tasks for such slots.
    loss: takes outputs (B, ..., C) and labels (B, ...) int64 or targets (B, ..., C), and returns the loss of each example; None
    takes the cross-entropy or the squared error.
    metric: a name of scikit-learn's, or a function with the arguments of a loss; higher is better. None takes accuracy, R2, or
    for tokens minus the bits that one takes.
    class_weights: factors of the loss by class: 'balanced', a mapping from labels, or a list in the order of the classes.
    sample_weights: (N,) factors of the training loss by example. Both kinds are divided by their mean over the train split.
    splits: mapping of train, probe, validation and test to indices of examples of x, or to pairs (x, y), Datasets or tokens.
    fractions, seed: fractions of the examples in these splits, and the seed by which they are dealt, stratified by class.
    standardize: True: hosts read and return (value - mean) / deviation over the train split; 'features' leaves targets alone.
    summary, defaults: a line for `esper tasks`, and nested config of the task, over which the user's own takes precedence.
    workers: processes of torch's DataLoader that read a Dataset; 0 reads it in this process, to the same result.
    length: positions of a window of tokens; None takes that of a transformer host.
    stream: True leaves training examples in the Dataset or memmap, to be read when a batch needs them.
    plain: plain(parameters) returns a factory of hosts of at least that size, for the baseline `plain`; None derives one.
    preprocess: a transformer of scikit-learn, fitted on training examples, that makes numbers of x; it is saved with grown
    networks, whose `predict` takes raw features.

    Raises InputError for arguments that cannot be used. Issues a `DataWarning` for what is probably a mistake.
    """
    _check_settings(name, menu, splits, fractions, seed, standardize)
    before = None if preprocess is None else preprocess_from(preprocess, _raw(x, splits))
    if before is not None:
        x, splits = _transformed(before, x, splits)
    skip = build_config(defaults or {}).data.nonfinite == "skip"
    given = Given(x, y, splits, fractions, seed, kind, classes, sample_weights, workers, stream, skip)
    data = prepare(given, host, length)
    goal = _goal(data, read_host(host), loss, metric, class_weights, standardize)
    return _task(_About(name, summary, menu, defaults, plain, before), data, goal)


def _raw(x: Any, splits: Mapping[str, Any] | None) -> Any:
    """The raw features with which a transformer is compared: x, or that of the train split. InputError if it takes no such."""
    pair = splits.get("train") if x is None and splits is not None else None
    found = pair[0] if isinstance(pair, tuple | list) and len(pair) == 2 else x
    if found is None or isinstance(found, Dataset | Mapping | tuple):
        given = "no pairs (x, y)" if found is None else f"a {type(found).__name__}"
        raise InputError(
            f"preprocess was given, but the examples are {given}; "
            "give x as one frame or array, or leave preprocess out and transform the examples yourself"
        )
    return found


def _transformed(before: Preprocess, x: Any, splits: Mapping[str, Any] | None) -> tuple[Any, Mapping[str, Any] | None]:
    """The features of x, or those of the four splits, as a transformer makes them."""
    if x is not None or splits is None:
        return before.apply(x), splits
    return None, {
        name: (before.apply(pair[0], f"the {name} split"), pair[1])
        if isinstance(pair, tuple | list) and len(pair) == 2
        else pair
        for name, pair in splits.items()
    }


class _About(NamedTuple):
    """The arguments of `esper.task` that need no examples."""

    name: str
    summary: str | None
    menu: Sequence[str] | None
    defaults: Mapping[str, Any] | None
    plain: Callable[[int], Callable[[], SegmentedHost]] | None
    preprocess: Preprocess | None


def _task(about: _About, data: Prepared, goal: "_Goal") -> Task:
    objective = goal.objective
    described = f"{data.examples:,} examples of your own, {objective.outputs} outputs, {objective.metric}"
    return Task(
        name=about.name,
        summary=about.summary or described,
        host=goal.host,
        **goal.splits._asdict(),
        objective=objective,
        menu=tuple(about.menu) if about.menu is not None else menu_of(draw_host(goal.host)),
        defaults=merge_settings(DEFAULTS, about.defaults or {}),
        scaling=goal.scaling,
        classes=data.classes,
        weights=data.weights,
        columns=data.columns,
        plain=about.plain,
        target_scaling=goal.target_scaling,
        source=goal.source,
        preprocess=about.preprocess,
    )


class _Goal(NamedTuple):
    """The problem that a host is given: examples in the dtypes that it takes, and the objective in its units."""

    host: Callable[[], SegmentedHost]
    splits: Splits
    source: DatasetSource | None
    objective: Objective
    scaling: Scaling | None
    target_scaling: Scaling | None


def _goal(
    data: Prepared,
    host: Callable[[], SegmentedHost],
    loss: Any,
    metric: Any,
    class_weights: Any,
    standardize: bool | Literal["features"],
) -> _Goal:
    """Fit examples, host and objective together. InputError if they do not fit; warns of what is probably a mistake."""
    base = _objective(data, loss, metric, class_weights)
    splits = as_the_host_takes(data.splits, host, standardized=bool(standardize))
    if data.source is not None and standardize:
        raise InputError(
            f"standardize is {standardize!r}, but the training examples are read batch by batch, so their mean is not known; "
            "leave it out, and scale the features in the Dataset"
        )
    scaling, target_scaling = _scalings(splits, host, standardize)
    host = cut_host(host, splits, scaling)
    wanted = wanted_outputs(splits, data.classes, base.outputs)
    check_custom_host(host, splits, base, scaling, target_scaling, wanted)
    warn_of_duplicates(splits, sampled=data.source is not None)
    if data.classes is not None:
        if data.source is None and data.tokens is None:
            warn_of_single_examples(splits, data.classes)
        if loss is None:
            warn_of_softmax(draw_host(host))
    elif loss is None and standardize is False and not isinstance(host, RegrownHost):
        _warn_of_targets(splits.train.y)
    source = None if data.source is None else replace(data.source, like=splits.train)
    objective = base if target_scaling is None else _standardized(base, target_scaling)
    return _Goal(host, splits, source, objective, scaling, target_scaling)


def _check_settings(
    name: Any, menu: Any, splits: Mapping[str, Any] | None, fractions: Sequence[float], seed: Any, standardize: Any
) -> None:
    """Check the arguments that can be checked without the examples. InputError if one cannot be used."""
    if not isinstance(name, str) or not name:
        raise InputError(
            f"the task's name is {name!r}; give it one in quotes, as in task('wine', ...)"
            if name
            else "the task has no name; give one, as in task('wine', ...)"
        )
    if not isinstance(standardize, bool) and standardize != "features":
        raise InputError(
            f"standardize is {standardize!r}; give True, False, or 'features' to leave targets as they are"
        )
    if menu is not None:
        _check_menu(menu)
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise InputError(f"seed is {seed!r}; give a whole number from 0 on, the seed of the random splits")
    if splits is not None and tuple(fractions) != FRACTIONS:
        raise InputError(f"splits and fractions {tuple(fractions)} were given; leave one of them out")


def _objective(
    data: Prepared, loss: Any, metric: Any, class_weights: Any
) -> Classification | Regression | CustomObjective:
    y, names, weights = data.splits.train.y, data.classes, None
    if names is None and class_weights is not None:
        raise InputError("class_weights was given, but y holds targets of a regression; give sample_weights")
    if data.source is not None and class_weights is not None:
        raise InputError(
            "class_weights was given, but the training examples are read batch by batch, so their classes are not counted; leave "
            "it out, and weigh the classes in a loss of your own"
        )
    if names is not None and class_weights is not None:
        weights = weights_of_classes(class_weights, names, torch.bincount(y.flatten(), minlength=len(names)).tolist())
    if names is None:
        base: Classification | Regression = Regression(y.shape[-1] if y.dim() > 1 else 1)
    else:
        base = {None: Classification, "byte": NextByte, "token": NextToken}[data.tokens](len(names))
    objective = custom_objective(base, loss, metric, weights)
    if objective.metric == "r2":
        check_targets(data.splits)
    return objective


def _scalings(
    splits: Splits, host: Callable[[], SegmentedHost], standardize: bool | Literal["features"]
) -> tuple[Scaling | None, Scaling | None]:
    """Scalings of the features and of the targets: those of a grown network as the host, or those of the train split."""
    if isinstance(host, RegrownHost):
        return host.scaling, host.target_scaling
    if standardize and not isinstance(splits.train.x, Tensor):
        raise InputError(
            f"standardize is {standardize!r}, but an example holds {len(splits.train.x)} tensors; leave it out, and let the host "
            "scale what it takes, for example by a normalisation layer"
        )
    targets = standardize is True and splits.train.y.is_floating_point()
    return scaling_of(splits.train.x) if standardize else None, scaling_of(splits.train.y) if targets else None


def _standardized(base: Classification | Regression | CustomObjective, scaling: Scaling) -> StandardizedObjective:
    assert not isinstance(base, Classification), "classes have no units"
    mean, deviation = (tuple(values.reshape(-1).tolist()) for values in scaling)
    return StandardizedObjective(base, mean, deviation)


def _warn_of_targets(y: Tensor) -> None:
    """Issue a DataWarning where targets y (N,) or (N, C) are far from the first outputs of a host, which are about 0 to 1."""
    mean, deviation = (values.reshape(-1) for values in scaling_of(y))
    far = (mean.abs() > FAR * deviation) | (deviation < USUAL[0]) | (deviation > USUAL[1])
    if far.any():
        first = int(far.nonzero()[0])
        which = f"target {first} has" if len(mean) > 1 else "the targets have"
        warn(
            f"{which} mean {mean[first]:.3g} and standard deviation {deviation[first]:.3g} in the train split, but a host starts "
            "with outputs near 0 and learns slowly to return such numbers; give standardize=True, or standardize='features' to "
            "leave the targets as they are without this warning",
            DataWarning,
        )


def _check_menu(menu: Sequence[str]) -> None:
    if isinstance(menu, str) or not isinstance(menu, Sequence) or not menu:
        raise InputError(f"menu is {menu!r}; give a list of blueprint names, as in ['bypass-linear']")
    for entry in menu:
        get_blueprint(entry)
        if list(menu).count(entry) > 1:
            raise InputError(f"menu names the blueprint {entry!r} {list(menu).count(entry)} times; name it once")
