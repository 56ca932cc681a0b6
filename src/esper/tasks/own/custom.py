"""Make a task from a user's examples and host. B examples, C outputs."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from esper.kasmina.blueprints import get_blueprint
from esper.kasmina.host import CutHost, SegmentedHost, check_host, dtype_of
from esper.kasmina.network.grown_network import GrownNetwork, RegrownHost, lost_slots
from esper.leyline.config.arguments import check_integer, known_as, required_arguments
from esper.leyline.config.tree import build_config, merge_settings
from esper.leyline.data.batches import Batch, cast, leaves, map_leaves, picked, run
from esper.leyline.data.duplicates import example_digests, repeated
from esper.leyline.data.preprocess import preprocess_from
from esper.leyline.data.task import Instance, Label, Objective, Split, Task
from esper.leyline.messages import DataWarning, InputError, counted, in_words, kind_of, warn, with_article
from esper.tasks.hosts import menu_of
from esper.tasks.objectives import (
    Classification,
    CustomObjective,
    NextByte,
    NextToken,
    Regression,
    StandardizedObjective,
    check_objective,
    custom_objective,
    weights_of_classes,
)
from esper.tasks.own.examples import Examples, Given, read_examples
from esper.tasks.own.labels import Kind
from esper.tasks.splits import Splits, check_targets, scaling_of

FRACTIONS = (0.6, 0.15, 0.1, 0.15)
"""Fractions of the examples in train, probe, validation and test."""

FAR = 3.0
"""Largest absolute mean of targets without a warning [standard deviations of the targets]."""
USUAL = (0.1, 10.0)
"""Range of the standard deviation of targets without a warning [units of y]."""

LISTED = 8
"""Largest number of classes that a message lists."""

DEFAULTS: Mapping[str, Any] = {
    "early_stopping": {"enabled": True},
    "reward": {"rent_size": 1000},
    # The narrow segment may contain the only nonlinearity of the host, which a linear bypass would not replace.
    "heuristic": {"narrow_blueprints": ("bypass-mlp", "bypass-conv-3x3")},
}
"""Config of every custom task. The `defaults` of a task take precedence."""


@known_as("esper.task")
def task_from(
    name: str,
    x: Any = None,
    y: Any = None,
    *,
    host: Callable[[], SegmentedHost] | None = None,
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
    workers: processes of torch's DataLoader that read a Dataset, or with stream=True its batches before training needs them; 0
    reads it in this process, to the same result.
    length: positions of a window of tokens; None takes that of a transformer host.
    stream: True leaves training examples in the Dataset or memmap, to be read when a batch needs them.
    plain: plain(parameters) returns a factory of hosts of at least that size, for the baseline `plain`; None derives one.
    preprocess: a transformer of scikit-learn, fitted on training examples, that makes numbers of x; it is saved with grown
    networks, whose `predict` takes raw features.

    Raises InputError for arguments that cannot be used. Issues a `DataWarning` for what is probably a mistake.
    """
    if not isinstance(name, str) or not name:
        what = f"the task's name is {name!r}; give it one in quotes" if name else "the task has no name; give one"
        raise InputError(f"{what}, as in task('wine', ...)")
    if not isinstance(standardize, bool) and standardize != "features":
        raise InputError(
            f"standardize is {standardize!r}; give True, False, or 'features' to leave targets as they are"
        )
    if menu is not None:
        if isinstance(menu, str) or not isinstance(menu, Sequence) or not menu:
            raise InputError(f"menu is {menu!r}; give a list of blueprint names, as in ['bypass-linear']")
        for entry in menu:
            get_blueprint(entry)
            if list(menu).count(entry) > 1:
                raise InputError(f"menu names the blueprint {entry!r} {list(menu).count(entry)} times; name it once")
    check_integer(seed, "seed", 0, "a whole number from 0 on, the seed of the random splits")
    if splits is not None and tuple(fractions) != FRACTIONS:
        raise InputError(f"splits and fractions {tuple(fractions)} were given; leave one of them out")
    if host is None:
        raise InputError(
            "esper.task was given no host; give a function that makes the network to be grown, as host=esper.mlp(inputs, "
            "classes=...) with the numbers of features and classes (`esper docs tasks`)"
        )
    if preprocess is not None:
        pairs = {} if x is not None or splits is None else splits
        whole = {each: pair for each, pair in pairs.items() if isinstance(pair, tuple | list) and len(pair) == 2}
        raw = whole["train"][0] if "train" in whole else x
        if raw is None or isinstance(raw, Dataset | Mapping | tuple):
            what = "no pairs (x, y)" if raw is None else kind_of(raw)
            raise InputError(
                f"preprocess was given, but the examples are {what}; "
                "give x as one frame or array, or leave preprocess out and transform the examples yourself"
            )
        preprocess = preprocess_from(preprocess, raw)
        if x is not None:
            x = preprocess.apply(x)
        else:
            made = {each: (preprocess.apply(own, f"the {each} split"), labels) for each, (own, labels) in whole.items()}
            splits = {**pairs, **made}
    skip = build_config(defaults or {}).data.nonfinite == "skip"
    given = Given(x, y, splits, fractions, seed, kind, classes, sample_weights, workers, stream, skip)
    data = read_examples(given, host, length)
    base = _objective(data, loss, metric, class_weights)
    host = _read_host(host)
    parts = _as_the_host_takes(data.splits, host, standardized=bool(standardize))
    if data.source is not None and standardize:
        raise InputError(
            f"standardize is {standardize!r}, but the training examples are read batch by batch, so their mean is not known; "
            "leave it out, and scale the features in the Dataset"
        )
    if isinstance(host, RegrownHost):  # its scalings are part of the network that was grown
        scaling, target_scaling = host.scaling, host.target_scaling
    else:
        scaling = scaling_of(parts.train.x) if standardize else None
        target_scaling = scaling_of(parts.train.y) if standardize is True and data.classes is None else None
    problem = Instance(host, *parts[:3], base.outputs, scaling=scaling)
    drawn: Any = _draw_host(host)
    if isinstance(drawn, nn.Module) and not isinstance(drawn, SegmentedHost):
        host = CutHost(host, problem.read(picked(parts.train.x, slice(2))))
    sizes = {base.outputs, *parts.train.y.shape[1:]}
    few = next(size for size in range(5, 1, -1) if size not in sizes or size == 2)  # (B,) and (C,) are different shapes
    target = parts.train.y[:few]
    labels = [] if data.classes is None else [split.y.flatten() for split in parts]
    counts = torch.bincount(torch.cat(labels), minlength=len(data.classes or ())).tolist() if labels else []
    first, second = _draw_host(host), _draw_host(host)
    if first is second:
        raise InputError("the host factory returned the same module twice; build a new one in every call")
    if isinstance(first, SegmentedHost):
        floating = {name: p.dtype for name, p in first.named_parameters() if p.is_floating_point()}
        for each, dtype in floating.items():
            if dtype != dtype_of(first):
                raise InputError(
                    f"the host's {next(iter(floating))} is {dtype_of(first)} and its {each} is {dtype}; build it in one dtype"
                )
    if data.classes is None:
        targets = counted(base.outputs, "floating-point target")
        wanted = f"y holds {targets} per example (for classes give whole numbers or text, or kind='classification')"
    else:
        rarest = sorted(zip(counts, range(len(data.classes)), strict=True))[:LISTED]  # they may be typing errors
        listed = ", ".join(f"{repr(data.classes[index])[:40]} ({counted(count, 'example')})" for count, index in rarest)
        which = "" if len(data.classes) <= LISTED else ", the rarest of them"
        wanted = f"y has {len(data.classes)} classes{which}: {listed}"
    x_few = problem.read(picked(parts.train.x, slice(few)), dtype_of(first))
    outputs = check_host(first, x_few, base.outputs, wanted, base, target)
    check_objective(base, outputs if target_scaling is None else target_scaling.restore(outputs), target)
    _warn_of_mistakes(data, parts, counts, host if loss is None else None, standardize)
    objective: Objective = base
    if target_scaling is not None:
        assert not isinstance(base, Classification), "classes have no units"
        mean, deviation = (tuple(values.reshape(-1).tolist()) for values in target_scaling)
        objective = StandardizedObjective(base, mean, deviation)
    described = f"{data.total:,} examples of your own, {objective.outputs} outputs, {objective.metric}"
    return Task(
        name=name,
        summary=summary or described,
        host=host,
        **parts._asdict(),
        objective=objective,
        menu=tuple(menu) if menu is not None else menu_of(_draw_host(host)),
        defaults=merge_settings(DEFAULTS, defaults or {}),
        scaling=scaling,
        classes=data.classes,
        weights=data.weights,
        columns=data.columns,
        plain=plain,
        target_scaling=target_scaling,
        source=None if data.source is None else replace(data.source, like=parts.train),
        preprocess=preprocess,
    )


def _objective(
    data: Examples, loss: Any, metric: Any, class_weights: Any
) -> Classification | Regression | CustomObjective:
    y, names, weights = data.splits.train.y, data.classes, None
    if class_weights is not None:
        if names is None:
            raise InputError("class_weights was given, but y holds targets of a regression; give sample_weights")
        if data.source is not None:
            raise InputError(
                "class_weights was given, but the training examples are read batch by batch, so their classes are not counted; "
                "leave it out, and weigh the classes in a loss of your own"
            )
        weights = weights_of_classes(class_weights, names, torch.bincount(y.flatten(), minlength=len(names)).tolist())
    if names is None:
        base: Classification | Regression = Regression(y.shape[-1] if y.dim() > 1 else 1)
    else:
        base = {None: Classification, "byte": NextByte, "token": NextToken}[data.tokens](len(names))
    objective = custom_objective(base, loss, metric, weights)
    if objective.metric == "r2":
        check_targets(data.splits)
    return objective


def _as_the_host_takes(splits: Splits, host: Callable[[], SegmentedHost], *, standardized: bool) -> Splits:
    """Turn whole numbers and truth values of the splits into torch's default dtype, unless the host runs on them."""
    x = splits.train.x
    if all(leaf.is_floating_point() for leaf in leaves(x)):
        return splits
    made, few = _draw_host(host), picked(x, slice(2))
    embeds = isinstance(made, nn.Module) and any(
        isinstance(each, nn.Embedding | nn.EmbeddingBag) for each in made.modules()
    )
    if not standardized and (_runs(made, few) or (embeds and not _runs(made, _floating(few)))):
        return splits
    return Splits(*(Split(_floating(split.x), split.y) for split in splits))


@torch.no_grad()
def _runs(host: SegmentedHost, x: Batch) -> bool:
    """Return whether a host runs on a batch without an error. `check_host` reports the error, and checks the outputs."""
    try:
        run(host.eval(), cast(x, dtype_of(host)))
    except Exception:  # a user's module can raise anything
        return False
    return True


def _floating(x: Batch) -> Batch:
    """Return the batch with every whole number and truth value as a number of torch's default dtype."""
    return map_leaves(lambda leaf: leaf if leaf.is_floating_point() else leaf.to(torch.get_default_dtype()), x)


def _draw_host(host: Callable[[], SegmentedHost]) -> SegmentedHost:
    """Return the host that a factory returns. The caller's random state does not change."""
    with torch.random.fork_rng(devices=[]):
        return host()


def _read_host(host: Callable[[], SegmentedHost]) -> Callable[[], SegmentedHost]:
    """Return a user's factory, or a `RegrownHost` where it returns a grown network, as `lambda: esper.load(folder)` does."""
    if isinstance(host, nn.Module) or not callable(host):
        name = type(host).__name__
        made = f"nn.{name}(...)" if type(host).__module__.startswith("torch.nn") else f"{name}(...)"
        shown = made if isinstance(host, nn.Module) else "MyHost()"
        raise InputError(f"host is {with_article(name)}; give a function that returns a fresh one, as lambda: {shown}")
    if needed := required_arguments(host):
        called = getattr(host, "__name__", "<lambda>")
        called = type(host).__name__ if called == "<lambda>" and not inspect.isfunction(host) else called
        what = f"the class {called}" if isinstance(host, type) else "a function"
        raise InputError(
            f"host is {what} that needs {' and '.join(needed)}, but it is called without arguments; give a function without, as "
            f"in host=lambda: {called if called.isidentifier() else 'MyHost'}({', '.join(f'{each}=...' for each in needed)})"
        )
    with in_words("the host factory raised an error", "correct the function"):
        network: nn.Module = _draw_host(host)
    if not isinstance(network, GrownNetwork):
        return host
    if lost := lost_slots(network):
        warn(
            f"the {'slot' if len(lost) == 1 else 'slots'} {', '.join(lost)} of the grown network cannot be used again, because "
            "a later seed reads the input of the host, or of an earlier segment; the segments from there up to that seed are one "
            "segment now",
            UserWarning,
        )
    return RegrownHost(network)


def _warn_of_mistakes(
    data: Examples,
    splits: Splits,
    counts: Sequence[int],
    host: Callable[[], SegmentedHost] | None,
    standardize: bool | Literal["features"],
) -> None:
    """Issue a DataWarning for each thing that is probably a mistake.

    counts: examples of each class. host: the factory of hosts, if they are trained with the task's usual loss; else None.
    """
    copies = repeated([example_digests(*split) for split in splits])
    found = [
        f"{count} of {len(split.y)} in {name}"
        for name, split, count in zip(Splits._fields[1:], splits[1:], copies, strict=True)
        if count
    ]
    if found:
        sampled = (
            f" (of train, the first {len(splits.train.y)} examples were compared)" if data.source is not None else ""
        )
        total, are = sum(copies), "is" if sum(copies) == 1 else "are"
        warn(
            f"{counted(total, 'example')} of one split {are} also in an earlier one of train, probe, validation and test, equal "
            f"in x and y: {', '.join(found)}{sampled}; what a network learns by heart raises the "
            "figures of these splits, so leave out the copies, or give splits= that keep equal examples together",
            DataWarning,
        )
    if data.classes is not None and data.source is None and data.tokens is None:
        single = [repr(name)[:40] for name, count in zip(data.classes, counts, strict=True) if count == 1]
        if single:
            listed = ", ".join(single[:LISTED]) + (", ..." if len(single) > LISTED else "")
            has = f"the class {listed} has" if len(single) == 1 else f"the classes {listed} have"
            warn(
                f"{has} a single example, which is in one split alone, so the class cannot be both learnt and tested; give more "
                "examples, or correct the label",
                DataWarning,
            )
    if data.classes is not None and host is not None:
        last: nn.Module = _draw_host(host).segments[-1]
        while isinstance(last, nn.Sequential) and len(last):
            last = last[-1]
        if isinstance(last, nn.Softmax):
            warn(
                "the host ends with a Softmax, but the loss, the cross-entropy, takes the softmax of the host's outputs itself, "
                "so the softmax is taken twice and the host learns slowly; end the host with the layer before the Softmax",
                DataWarning,
            )
    if data.classes is None and host is not None and standardize is False and not isinstance(host, RegrownHost):
        mean, deviation = (values.reshape(-1) for values in scaling_of(splits.train.y))
        far = (mean.abs() > FAR * deviation) | (deviation < USUAL[0]) | (deviation > USUAL[1])
        if far.any():
            first = int(far.nonzero()[0])
            which = f"target {first} has" if len(mean) > 1 else "the targets have"
            warn(
                f"{which} mean {mean[first]:.3g} and standard deviation {deviation[first]:.3g} in the train split, but a host "
                "starts with outputs near 0 and learns slowly to return such numbers; give standardize=True, or "
                "standardize='features' to leave the targets as they are without this warning",
                DataWarning,
            )
