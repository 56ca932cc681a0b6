"""A task from one's own examples and host."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints import get_blueprint
from esper.kasmina.host import SegmentedHost, check_host
from esper.kasmina.regrow import RegrownHost
from esper.leyline.arguments import known_as
from esper.leyline.config import build_config, merge_settings
from esper.leyline.errors import DataWarning, InputError, warn
from esper.leyline.task import Label, Scaling, Task
from esper.tasks.examples import Brought, check_classes_train, complete, read_examples, train_weights
from esper.tasks.hosts import menu_of
from esper.tasks.labels import Kind, Target, check_labels, read_target
from esper.tasks.objectives import Classification, Regression
from esper.tasks.own import OfStandardized, OwnObjective, check_objective, own_objective, weights_of_classes
from esper.tasks.regrown import host_factory
from esper.tasks.splits import Splits, check_examples, check_targets, cut, dealt, scaling_of, sizes_of
from esper.tasks.suspicions import wanted_outputs, warn_of_single_examples, warn_of_softmax

FRACTIONS = (0.6, 0.15, 0.1, 0.15)
"""Of the examples in train, probe, validation and test."""

FAR = 3.0
"""Deviations from 0 that the mean of targets may have before a warning says so."""
USUAL = (0.1, 10.0)
"""Deviations of targets without a warning [units of y]."""

DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "early_stopping": {"enabled": True},
        "reward": {"rent_size": 1000},
        # The narrow segment may hold the only nonlinearity of the host, which a linear bypass around it would not replace.
        "heuristic": {"narrow_blueprints": ("bypass-mlp", "bypass-conv-3x3")},
    }
)
"""Config of a task of one's own, under the `defaults` that it is given."""


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
    plain: Callable[[int], Callable[[], SegmentedHost]] | None = None,
) -> Task:
    """A task from examples and a host factory.

    x, y: tensors, NumPy arrays, pandas frames and series, or what NumPy makes an array of: (N, ...) features, and (N,) labels,
    which may be text, categories, truth values or whole numbers, or (N,) or (N, C) floating-point targets. Or x alone: a
    map-style `torch.utils.data.Dataset` of (features, label or target) pairs, read once and in full; what it draws at random
    is frozen. The task holds copies, on the CPU.

    host: returns a freshly drawn `SegmentedHost` of any modules each time it is called, or a grown network, as
    `lambda: esper.load(folder)`: every environment then starts from its weights, its seeds are part of the host, and features
    and targets are standardized as the network does it.
    kind: 'classification' or 'regression'. None takes text, truth values and whole numbers for classes and floating-point
    numbers for targets, and asks where y may be either: floating-point numbers that are few and whole, one-hot rows, and
    whole numbers that hardly repeat. A classification takes one-hot rows too, one class a column.
    classes: None takes the distinct labels, sorted. Or how many classes there are, numbered from 0; or the list of their
    names, which y holds or numbers from 0. The order is that of the outputs.
    menu: names of the blueprints that a controller may plant. None takes those that Esper's own tasks use, for vectors or for
    maps, as the slots of the host are.
    loss: what training minimises, a function of outputs (B, C) and y, (B,) int64 indices of classes or (B, C) targets, that
    returns the loss of each example, (B,) or (B, C); the mean is taken. A loss of torch.nn or torch.nn.functional is asked
    for them by reduction='none'. None takes the cross-entropy of the softmax, or the squared error.
    metric: what is reported, and what growth is judged by; higher is better. A name of scikit-learn's: 'accuracy',
    'balanced_accuracy' or 'neg_log_loss' of a classification, 'r2', 'neg_mean_squared_error' or 'neg_mean_absolute_error' of a
    regression; or a function like a loss, whose mean over a split is the metric. None takes accuracy, or R2.
    class_weights: factors of the loss by class: 'balanced', a mapping from labels, or a list in the order of the classes. The
    loss that is reported has them too, the metric has none.
    sample_weights: (N,) factors of the loss by example in training alone. Both kinds of weights are divided by their mean over
    the train split.
    splits: four of your own, a mapping with the keys train, probe, validation and test: pairs (x, y), in place of x and y, with
    sample_weights of the train split; or indices of examples of x and y, of which some may be in no split.
    fractions: of the examples in train, probe, validation and test, dealt class by class, the same for the same seed.
    standardize: the host reads features less their mean over the train split, over their standard deviation, and returns the
    targets of a regression likewise; 'features' leaves the targets as they are. The splits hold both as they came, and a grown
    network takes and returns them so: means and deviations are part of it. A loss or a metric that the task brings takes outputs
    and targets in the units of y. A grown network as the host keeps its own means and deviations.
    defaults: nested config, under what the user of the task sets, and over that of every task of one's own, which sets
    early_stopping.enabled (docs/runs.md), reward.rent_size (docs/training.md) and heuristic.narrow_blueprints
    (docs/tasks.md). With data.nonfinite 'skip' examples that are not finite are left out here, with a `DataWarning`.
    plain: the static network of the baseline `plain`, where it cannot be derived from the host or should be another one:
    plain(parameters) returns a host factory of at least so many parameters (docs/baselines.md).
    workers: processes that read a Dataset, by torch's DataLoader; 0 reads it in this one. The task is the same bit for bit
    where the Dataset draws nothing at random.

    Features become torch's default dtype, except that a float64 tensor stays float64; NumPy's float64 does not, since
    it is what NumPy makes of any number. Whole-number features (bytes, counts) are converted and not scaled, because a
    host's weights are floating point and only the caller knows their range. Targets take the dtype of the features.

    Raises InputError, in one sentence, for examples, labels, splits, a host or defaults that cannot be used. A `DataWarning`
    names a class with a single example, and a host that ends with a Softmax where the loss is the cross-entropy.
    """
    _check_settings(name, menu, splits, fractions, seed, standardize)
    brought = read_examples(x, y, splits, sample_weights, workers)
    target = read_target(brought.y, kind, classes)
    skips = build_config(defaults or {}).data.nonfinite == "skip"
    brought, values = _checked(*complete(brought, target.values, skip=skips), target.classes)
    parts = _parts(brought, values, fractions, seed)
    four = cut(brought.x, values, parts)
    if target.classes is not None and splits is not None:
        check_classes_train(four, target.classes)
    base = _objective(four, target, loss, metric, class_weights)
    host = _taken_up(host)
    scaling, target_scaling = _scalings(four, host, standardize)
    _check_host(host, four, base, scaling, target_scaling, wanted_outputs(four, target.classes, base.outputs))
    if target.classes is not None:
        warn_of_single_examples(four, target.classes)
        if loss is None:
            _warn_of_host(host)
    if target.classes is None and loss is None and standardize is False and not isinstance(host, RegrownHost):
        _warn_of_targets(four.train.y)
    return Task(
        name=name,
        summary=summary or f"{len(values):,} examples of your own, {base.outputs} outputs, {base.metric}",
        host=host,
        **four._asdict(),
        objective=base if target_scaling is None else _of_standardized(base, target_scaling),
        menu=tuple(menu) if menu is not None else _default_menu(host),
        defaults=merge_settings(DEFAULTS, defaults or {}),
        scaling=scaling,
        classes=target.classes,
        weights=train_weights(brought, parts[0].numpy()),
        columns=brought.columns,
        plain=plain,
        target_scaling=target_scaling,
    )


def _check_settings(
    name: Any, menu: Any, splits: Mapping[str, Any] | None, fractions: Sequence[float], seed: Any, standardize: Any
) -> None:
    """InputError where an argument that needs no example to be judged cannot be used."""
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
        raise InputError(f"seed is {seed!r}; give a whole number from 0 on, by which examples are dealt into splits")
    if splits is not None and tuple(fractions) != FRACTIONS:
        raise InputError(f"splits and fractions {tuple(fractions)} were given; leave one of them out")


def _checked(brought: Brought, values: Tensor, names: tuple[Label, ...] | None) -> tuple[Brought, Tensor]:
    """The examples, and y as int64 indices of classes, or as targets in the dtype of the features. InputError for bad ones."""
    if names is None:
        values = values.to(brought.x.dtype)
        check_examples(brought.x, values, None)
    else:
        check_labels(values)
        values = values.to(torch.int64)
        check_examples(brought.x, values, len(names))
    return brought, values


def _parts(brought: Brought, y: Tensor, fractions: Sequence[float], seed: int) -> Sequence[Tensor]:
    """The indices of the examples in each of the four splits."""
    if brought.parts is not None:
        return [torch.from_numpy(part) for part in brought.parts]
    return dealt(y, sizes_of(fractions, len(y)), seed)


def _objective(
    four: Splits, target: Target, loss: Any, metric: Any, class_weights: Any
) -> Classification | Regression | OwnObjective:
    """What the task minimises and reports."""
    y, names, weights = four.train.y, target.classes, None
    if names is None and class_weights is not None:
        raise InputError("class_weights was given, but y holds targets of a regression; give sample_weights")
    if names is not None and class_weights is not None:
        weights = weights_of_classes(class_weights, names, torch.bincount(y, minlength=len(names)).tolist())
    base = Regression(y.shape[1] if y.dim() == 2 else 1) if names is None else Classification(len(names))
    objective = own_objective(base, loss, metric, weights)
    if objective.metric == "r2":
        check_targets(four)
    return objective


def _scalings(
    four: Splits, host: Callable[[], SegmentedHost], standardize: bool | Literal["features"]
) -> tuple[Scaling | None, Scaling | None]:
    """Of features and of targets: those of a grown network as the host, or the mean and deviation of the train split."""
    if isinstance(host, RegrownHost):
        return host.scaling, host.target_scaling
    targets = standardize is True and four.train.y.is_floating_point()
    return scaling_of(four.train.x) if standardize else None, scaling_of(four.train.y) if targets else None


def _of_standardized(base: Classification | Regression | OwnObjective, scaling: Scaling) -> OfStandardized:
    assert not isinstance(base, Classification), "classes have no units"
    mean, deviation = (tuple(values.reshape(-1).tolist()) for values in scaling)
    return OfStandardized(base, mean, deviation)


def _check_host(
    host: Callable[[], SegmentedHost],
    four: Splits,
    base: Classification | Regression | OwnObjective,
    scaling: Scaling | None,
    target_scaling: Scaling | None,
    wanted: str,
) -> None:
    """InputError where the host, or a loss or metric of the task's own on its outputs, cannot be used."""
    few = 4 if base.outputs == 5 else 5  # so that shapes of losses tell examples from outputs
    x, y = four.train.x[:few], four.train.y[:few]
    outputs = _check_factory(host, x if scaling is None else scaling.read(x), base.outputs, wanted)
    check_objective(base, outputs if target_scaling is None else target_scaling.restore(outputs), y)


def _warn_of_host(host: Callable[[], SegmentedHost]) -> None:
    with torch.random.fork_rng(devices=[]):
        warn_of_softmax(host())


def _warn_of_targets(y: Tensor) -> None:
    """A DataWarning where targets y (N,) or (N, C) are far from what a host returns at first, numbers of about 0 to 1."""
    mean, deviation = (values.reshape(-1) for values in scaling_of(y))
    far = (mean.abs() > FAR * deviation) | (deviation < USUAL[0]) | (deviation > USUAL[1])
    if far.any():
        first = int(far.nonzero()[0])
        which = f"target {first} has" if len(mean) > 1 else "the targets have"
        warn(
            f"{which} mean {mean[first]:.3g} and standard deviation {deviation[first]:.3g} in the train split, but a host starts "
            "with outputs near 0 and learns slowly to return such numbers; give standardize=True, or 'features' to leave them so",
            DataWarning,
        )


def _check_menu(menu: Sequence[str]) -> None:
    if isinstance(menu, str) or not isinstance(menu, Sequence) or not menu:
        raise InputError(f"menu is {menu!r}; give a list of blueprint names, as in ['bypass-linear']")
    for entry in menu:
        get_blueprint(entry)
        if list(menu).count(entry) > 1:
            raise InputError(f"menu names the blueprint {entry!r} {list(menu).count(entry)} times; name it once")


def _default_menu(host: Callable[[], SegmentedHost]) -> tuple[str, ...]:
    with torch.random.fork_rng(devices=[]):
        return menu_of(host())


def _check_arguments(host: Callable[[], nn.Module]) -> None:
    """InputError where a host factory cannot be called without arguments."""
    if isinstance(host, nn.Module) or not callable(host):
        raise InputError(
            f"host is a {type(host).__name__}; give a function that returns a fresh one, as lambda: MyHost()"
        )
    try:
        parameters = inspect.signature(host).parameters.values()
    except (TypeError, ValueError):  # some callables of C have no signature
        return
    free = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [each.name for each in parameters if each.default is each.empty and each.kind not in free]
    if needed:
        called = getattr(host, "__name__", "<lambda>")
        called = type(host).__name__ if called == "<lambda>" and not inspect.isfunction(host) else called
        what = f"the class {called}" if isinstance(host, type) else "a function"
        raise InputError(
            f"host is {what} that needs {' and '.join(needed)}, but it is called without arguments; give a function of none, as "
            f"in host=lambda: {called if called.isidentifier() else 'MyHost'}({', '.join(f'{each}=...' for each in needed)})"
        )


def _taken_up(host: Callable[[], SegmentedHost]) -> Callable[[], SegmentedHost]:
    """What `host_factory` makes of a person's factory. InputError where it cannot be called, or raises."""
    _check_arguments(host)
    try:
        return host_factory(host)
    except InputError:
        raise
    except Exception as error:  # whatever a person's factory raises, its first line says why
        reason = (str(error).splitlines() or [""])[0]
        raise InputError(
            f"the host factory raised {type(error).__name__}{f': {reason}' if reason else ''}; mend it"
        ) from error


def _check_factory(host: Callable[[], nn.Module], x: Tensor, outputs: int, wanted: str) -> Tensor:
    """The outputs (B, C) of a host for a few examples x (B, ...). InputError where the host cannot be used.

    `wanted` says why it is to have so many.
    """
    with torch.random.fork_rng(devices=[]):  # the check leaves the caller's random state as it was
        first, second = host(), host()
    if first is second:
        raise InputError("the host factory returned the same module twice; build a new one in every call")
    if isinstance(first, SegmentedHost):
        for parameter_name, parameter in first.named_parameters():
            if parameter.dtype != x.dtype:
                raise InputError(
                    f"the features are {x.dtype} and the host's {parameter_name} is {parameter.dtype}; "
                    "convert the features, or build the host in their dtype"
                )
    check_host(first, x, outputs, wanted)
    with torch.no_grad():
        found: Tensor = first.eval()(x)
    return found
