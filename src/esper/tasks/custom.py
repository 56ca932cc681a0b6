"""Making a task from a user's examples and host."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints import get_blueprint
from esper.kasmina.host import SegmentedHost, check_host, dtype_of
from esper.kasmina.regrow import RegrownHost
from esper.leyline.arguments import known_as, required_arguments
from esper.leyline.batches import Batch, cast, leaves, map_leaves, picked, run
from esper.leyline.config import build_config, merge_settings
from esper.leyline.errors import DataWarning, InputError, typed_line, warn
from esper.leyline.task import Label, Objective, Scaling, Split, Task, one_tensor
from esper.tasks.custom_objective import (
    CustomObjective,
    StandardizedObjective,
    check_objective,
    custom_objective,
    weights_of_classes,
)
from esper.tasks.examples import (
    Examples,
    check_classes_train,
    drop_nonfinite,
    dtype_of_targets,
    read_examples,
    train_weights,
)
from esper.tasks.hosts import menu_of
from esper.tasks.labels import Kind, check_labels, read_target
from esper.tasks.objectives import Classification, Regression
from esper.tasks.regrown import host_factory
from esper.tasks.splits import Splits, check_examples, check_targets, cut, dealt, scaling_of, sizes_of
from esper.tasks.suspicions import wanted_outputs, warn_of_single_examples, warn_of_softmax

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
    plain: Callable[[int], Callable[[], SegmentedHost]] | None = None,
) -> Task:
    """Make a task from examples and a host factory.

    x, y: features (N, ...), and labels or floating-point targets (N, ...), as tensors, NumPy arrays, pandas frames and series, or
    lists. Labels may be text, categories, bools or whole numbers. y has one entry per example, (N,), or several, such as one
    label for each position of a sequence, (N, L), or C targets, (N, C). x may be a tuple of arrays (N, ...), or a mapping from
    names to arrays, with which the first segment of the host is called: segment(*x) or segment(**x). Or x alone: a map-style
    `torch.utils.data.Dataset` of (features, label or target) pairs, which is read once and in full; random transforms are
    therefore applied once. The task holds copies on the CPU.
    host: a function without arguments that returns a freshly initialised `SegmentedHost`, or a grown network, as
    `lambda: esper.load(folder)`. In the second case every environment starts from the weights of the grown network, its seeds
    are part of the host, and features and targets keep the scaling of the network.
    kind: 'classification' or 'regression'. None infers it: text, bools and whole numbers are labels, floating-point numbers are
    targets, and an ambiguous y raises InputError. Ambiguous are floating-point numbers with few distinct, whole values, one-hot
    rows, and whole numbers that hardly repeat. A classification accepts one-hot rows, one column per class.
    classes: None takes the sorted distinct labels. Otherwise the number of classes, which y numbers from 0, or the list of
    their names, which y contains or numbers from 0. The outputs have the order of the classes.
    menu: names of the blueprints that a controller may plant. None takes those of the built-in tasks for the kinds of stream at
    the slots of the host.
    loss: the function that training minimises. It takes outputs (B, C) and y, int64 class indices (B,) or targets (B, C), and
    returns the loss of each example, (B,) or (B, C), whose mean is taken. Where y has labels for positions (B, ...), outputs
    are (B, ..., C). A loss of torch.nn or torch.nn.functional is called
    with reduction='none'. None takes the cross-entropy for a classification and the squared error for a regression.
    metric: the score of a network; higher is better. One of scikit-learn's names, which are 'accuracy', 'balanced_accuracy' and
    'neg_log_loss' for a classification, and 'r2', 'neg_mean_squared_error' and 'neg_mean_absolute_error' for a regression; or a
    function with the arguments of a loss, whose mean over a split is the metric. None takes accuracy or R2.
    class_weights: factors of the loss by class: 'balanced', a mapping from labels to weights, or a list in the order of the
    classes. They apply to the training loss and to the reported loss, but not to the metric.
    sample_weights: (N,) factors of the training loss by example. Both kinds of weights are divided by their mean over the train
    split.
    splits: a mapping with the keys train, probe, validation and test. The values are pairs (x, y), which replace the arguments
    x and y, and sample_weights are then those of the train split; or they are indices of the examples of x and y, and an
    example may be in no split.
    fractions: fractions of the examples in train, probe, validation and test, stratified by class.
    seed: seed of the random splits.
    standardize: True lets the host read (x - mean) / deviation, with the mean and the standard deviation of the train split,
    and return the targets of a regression in the same way; 'features' leaves targets as they are. The splits and the grown
    network use the original units, as do a `loss` and a `metric` that are given. A grown network as the host keeps its own
    means and deviations.
    summary: one line for `esper tasks`.
    defaults: nested config of the task. The user's config takes precedence. It is merged into the config of every custom task,
    which sets early_stopping.enabled (docs/runs.md), reward.rent_size (docs/training.md) and heuristic.narrow_blueprints
    (docs/tasks.md). With data.nonfinite 'skip', examples with NaN or infinite values are left out with a `DataWarning`.
    workers: number of processes of torch's DataLoader that read a Dataset; 0 reads it in this process. The result is the same
    bit for bit unless the Dataset draws random numbers.
    plain: plain(parameters) returns a factory of hosts with at least that number of parameters, for the baseline `plain`
    (docs/baselines.md). None derives it from the host.

    Floating-point features are converted to torch's default dtype, except that a float64 tensor stays float64. Whole numbers
    become int64, and stay so where the host runs on them, as on token ids; bools likewise. Elsewhere they are converted without
    scaling. Targets get the dtype of the features. A run converts features and targets to the dtype of the host's parameters.

    Raises InputError for examples, labels, splits, a host or defaults that cannot be used. Issues a `DataWarning` for a class
    with a single example, for a host that ends with a Softmax before the cross-entropy, and for targets far from 0 to 1.
    """
    _check_settings(name, menu, splits, fractions, seed, standardize)
    examples = read_examples(x, y, splits, sample_weights, workers)
    values, names = read_target(examples.y, kind, classes)
    if build_config(defaults or {}).data.nonfinite == "skip":
        examples, values = drop_nonfinite(examples, values)
    values = _check_values(examples, values, names)
    parts = _parts(examples, values, fractions, seed)
    cuts = cut(examples.x, values, parts)
    if names is not None and splits is not None:
        check_classes_train(cuts, names)
    objective = _objective(cuts, names, loss, metric, class_weights)
    host = _read_host(host)
    cuts = _as_the_host_takes(cuts, host, standardized=bool(standardize))
    scaling, target_scaling = _scalings(cuts, host, standardize)
    _check_host(host, cuts, objective, scaling, target_scaling, wanted_outputs(cuts, names, objective.outputs))
    fresh = _draw(host)
    if names is not None:
        warn_of_single_examples(cuts, names)
        if loss is None:
            warn_of_softmax(fresh)
    elif loss is None and standardize is False and not isinstance(host, RegrownHost):
        _warn_of_targets(cuts.train.y)
    return Task(
        name=name,
        summary=summary or f"{len(values):,} examples of your own, {objective.outputs} outputs, {objective.metric}",
        host=host,
        **cuts._asdict(),
        objective=objective if target_scaling is None else _standardized(objective, target_scaling),
        menu=tuple(menu) if menu is not None else menu_of(fresh),
        defaults=merge_settings(DEFAULTS, defaults or {}),
        scaling=scaling,
        classes=names,
        weights=train_weights(examples, parts[0].numpy()),
        columns=examples.columns,
        plain=plain,
        target_scaling=target_scaling,
    )


def _check_settings(
    name: Any, menu: Any, splits: Mapping[str, Any] | None, fractions: Sequence[float], seed: Any, standardize: Any
) -> None:
    """Check the arguments that can be checked without the examples. InputError where one cannot be used."""
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


def _check_values(examples: Examples, values: Tensor, names: tuple[Label, ...] | None) -> Tensor:
    """y as int64 class indices, or as targets in the dtype of the features. InputError for examples that cannot be used."""
    if names is not None:
        check_labels(values)
    values = values.to(dtype_of_targets(examples.x) if names is None else torch.int64)
    check_examples(examples.x, values, None if names is None else len(names))
    return values


def _parts(examples: Examples, y: Tensor, fractions: Sequence[float], seed: int) -> Sequence[Tensor]:
    """The indices of the examples in each of the four splits."""
    if examples.parts is not None:
        return [torch.from_numpy(part) for part in examples.parts]
    return dealt(y, sizes_of(fractions, len(y)), seed)


def _objective(
    splits: Splits, names: tuple[Label, ...] | None, loss: Any, metric: Any, class_weights: Any
) -> Classification | Regression | CustomObjective:
    y, weights = splits.train.y, None
    if names is None and class_weights is not None:
        raise InputError("class_weights was given, but y holds targets of a regression; give sample_weights")
    if names is not None and class_weights is not None:
        weights = weights_of_classes(class_weights, names, torch.bincount(y.flatten(), minlength=len(names)).tolist())
    base = Regression(y.shape[-1] if y.dim() > 1 else 1) if names is None else Classification(len(names))
    objective = custom_objective(base, loss, metric, weights)
    if objective.metric == "r2":
        check_targets(splits)
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


def _check_host(
    host: Callable[[], SegmentedHost],
    splits: Splits,
    base: Classification | Regression | CustomObjective,
    scaling: Scaling | None,
    target_scaling: Scaling | None,
    wanted: str,
) -> None:
    """Run the host, and a user's loss and metric on its outputs. InputError where one of them cannot be used."""
    sizes = {base.outputs, *splits.train.y.shape[1:]}
    few = next(
        size for size in range(5, 1, -1) if size not in sizes or size == 2
    )  # so that (B,) and (C,) are different shapes
    x, y = picked(splits.train.x, slice(few)), splits.train.y[:few]
    outputs = _check_factory(host, x if scaling is None else scaling.read(one_tensor(x, "scaling")), base, y, wanted)
    check_objective(base, outputs if target_scaling is None else target_scaling.restore(outputs), y)


def _as_the_host_takes(splits: Splits, host: Callable[[], SegmentedHost], *, standardized: bool) -> Splits:
    """The splits with whole numbers and truth values as they came where a host runs on them, such as token ids; else in torch's
    default dtype. What is standardized is converted.
    """
    x = splits.train.x
    if all(leaf.is_floating_point() for leaf in leaves(x)):
        return splits
    made, few = _draw(host), picked(x, slice(2))
    embeds = isinstance(made, nn.Module) and any(
        isinstance(part, nn.Embedding | nn.EmbeddingBag) for part in made.modules()
    )
    if not standardized and (_runs(made, few) or (embeds and not _runs(made, _floating(few)))):
        return splits
    return Splits(*(Split(_floating(split.x), split.y) for split in splits))


@torch.no_grad()
def _runs(host: SegmentedHost, x: Batch) -> bool:
    """Whether a host returns anything for a batch; what it returns, and why not, is for `check_host` to say."""
    try:
        run(host.eval(), cast(x, dtype_of(host)))
    except Exception:  # a user's module can raise anything
        return False
    return True


def _floating(x: Batch) -> Batch:
    """The batch with every whole number and truth value as a number of torch's default dtype."""
    found: Batch = map_leaves(lambda leaf: leaf if leaf.is_floating_point() else leaf.to(torch.get_default_dtype()), x)
    return found


def _draw(host: Callable[[], SegmentedHost]) -> SegmentedHost:
    """A host. The caller's random state is kept."""
    with torch.random.fork_rng(devices=[]):
        return host()


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


def _check_arguments(host: Callable[[], nn.Module]) -> None:
    """Raise InputError where a host factory cannot be called without arguments."""
    if isinstance(host, nn.Module) or not callable(host):
        raise InputError(
            f"host is a {type(host).__name__}; give a function that returns a fresh one, as lambda: MyHost()"
        )
    if needed := required_arguments(host):
        called = getattr(host, "__name__", "<lambda>")
        called = type(host).__name__ if called == "<lambda>" and not inspect.isfunction(host) else called
        what = f"the class {called}" if isinstance(host, type) else "a function"
        raise InputError(
            f"host is {what} that needs {' and '.join(needed)}, but it is called without arguments; give a function without, as "
            f"in host=lambda: {called if called.isidentifier() else 'MyHost'}({', '.join(f'{each}=...' for each in needed)})"
        )


def _read_host(host: Callable[[], SegmentedHost]) -> Callable[[], SegmentedHost]:
    """The result of `host_factory` for a user's factory. InputError where the factory cannot be called, or raises."""
    _check_arguments(host)
    try:
        return host_factory(host)
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"the host factory raised {typed_line(error)}; correct the function") from error


def _check_factory(host: Callable[[], SegmentedHost], x: Batch, objective: Objective, y: Tensor, wanted: str) -> Tensor:
    """The outputs (B, ..., C) of a host for a few examples x (B, ...). InputError where the host cannot be used.

    objective, y: what is to take the outputs. wanted: the reason for their number, for the message.
    """
    first, second = _draw(host), _draw(host)
    if first is second:
        raise InputError("the host factory returned the same module twice; build a new one in every call")
    if isinstance(first, SegmentedHost):
        floating = {name: p.dtype for name, p in first.named_parameters() if p.is_floating_point()}
        for name, dtype in floating.items():
            if dtype != dtype_of(first):
                raise InputError(
                    f"the host's {next(iter(floating))} is {dtype_of(first)} and its {name} is {dtype}; build it in one dtype"
                )
    return check_host(first, cast(x, dtype_of(first)), objective.outputs, wanted, objective, y)
