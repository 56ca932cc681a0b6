"""A task from one's own examples and host."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from esper.kasmina.blueprints import get_blueprint
from esper.kasmina.host import SegmentedHost, check_host
from esper.leyline.arrays import as_tensor
from esper.leyline.config import build_config
from esper.leyline.errors import InputError
from esper.leyline.task import Label, Objective, Split, Task, finite
from esper.tasks.dataset import read_dataset
from esper.tasks.hosts import VECTOR_MENU
from esper.tasks.labels import Kind, Target, check_labels, read_target
from esper.tasks.objectives import Classification, Regression
from esper.tasks.splits import check_examples, scaling_of, sizes_of, split


def task_from(
    name: str,
    x: Any,
    y: Any = None,
    *,
    host: Callable[[], SegmentedHost],
    kind: Kind | None = None,
    classes: int | Sequence[Label] | None = None,
    menu: Sequence[str] = VECTOR_MENU,
    fractions: Sequence[float] = (0.6, 0.15, 0.1, 0.15),
    seed: int = 0,
    standardize: bool = False,
    summary: str | None = None,
    defaults: Mapping[str, Any] | None = None,
    workers: int = 0,
) -> Task:
    """A task from examples and a host factory.

    x, y: tensors, NumPy arrays, pandas frames and series, or what NumPy makes an array of: (N, ...) features, and (N,) labels,
    which may be text, categories, truth values or whole numbers, or (N,) or (N, C) floating-point targets. Or x alone: a
    map-style `torch.utils.data.Dataset` of (features, label or target) pairs, read once and in full; what it draws at random
    is frozen. The task holds copies, on the CPU.

    host: returns a freshly drawn `SegmentedHost` of any modules each time it is called.
    kind: 'classification' or 'regression'. None takes text, truth values and whole numbers for classes and floating-point
    numbers for targets, and asks where y may be either: floating-point numbers that are few and whole, one-hot rows, and
    whole numbers that hardly repeat. A classification takes one-hot rows too, one class a column.
    classes: None takes the distinct labels, sorted. Or how many classes there are, numbered from 0; or the list of their
    names, which y holds or numbers from 0. The order is that of the outputs.
    menu: names of the blueprints that a controller may plant.
    fractions: of the examples in train, probe, validation and test, dealt class by class, the same for the same seed.
    standardize: the host reads features less their mean over the train split, over their standard deviation. The splits hold
    the features as they came, and a grown network takes them so: mean and deviation are part of it.
    defaults: nested config, under what the user of the task sets. With data.nonfinite 'skip' examples that are not finite
    are left out here, with a `DataWarning`.
    workers: processes that read a Dataset, by torch's DataLoader; 0 reads it in this one. The task is the same bit for bit
    where the Dataset draws nothing at random.

    Features become torch's default dtype, except that a float64 tensor stays float64; NumPy's float64 does not, since
    it is what NumPy makes of any number. Whole-number features (bytes, counts) are converted and not scaled, because a
    host's weights are floating point and only the caller knows their range. Targets take the dtype of the features.

    Raises InputError, in one sentence, for examples, labels, splits, a host or defaults that cannot be used.
    """
    if not isinstance(name, str) or not name:
        raise InputError(
            f"the task's name is {name!r}; give it one in quotes, as in task('wine', ...)"
            if name
            else "the task has no name; give one, as in task('wine', ...)"
        )
    if not isinstance(standardize, bool):
        raise InputError(f"standardize is {standardize!r}; give True or False")
    _check_menu(menu)
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise InputError(f"seed is {seed!r}; give a whole number from 0 on, by which examples are dealt into splits")
    features, y = _examples(x, y, workers)
    target = read_target(y, kind, classes)
    skips = build_config(defaults or {}).data.nonfinite == "skip"
    features, values = _complete(features, target, skip=skips)
    objective: Objective
    if target.classes is None:
        values = values.to(features.dtype)
        check_examples(features, values, None)
        objective = Regression(values.shape[1] if values.dim() == 2 else 1)
    else:
        values = values.to(torch.int64)
        check_examples(features, values, len(target.classes))
        objective = Classification(len(target.classes))
    splits = split(features, values, sizes=sizes_of(fractions, len(features)), seed=seed)
    scaling = scaling_of(splits.train.x) if standardize else None
    example = splits.train.x[:4]
    _check_factory(host, example if scaling is None else scaling.read(example), objective.outputs)
    return Task(
        name=name,
        summary=summary or f"{len(features):,} examples of your own, {objective.outputs} outputs, {objective.metric}",
        host=host,
        **splits._asdict(),
        objective=objective,
        menu=tuple(menu),
        defaults=dict(defaults or {}),
        scaling=scaling,
        classes=target.classes,
    )


def _complete(features: Tensor, target: Target, *, skip: bool) -> tuple[Tensor, Tensor]:
    """Features and y, without the examples that are not finite or have no label where these are to be skipped."""
    values = target.values
    fits = features.dim() > 0 and len(features) == len(values)  # else `check_examples` says what is wrong
    if skip and fits:
        return finite(Split(features, values), "x or y", "skip")
    if target.classes is not None:
        check_labels(values)
    return features, values


def _check_menu(menu: Sequence[str]) -> None:
    if isinstance(menu, str) or not isinstance(menu, Sequence) or not menu:
        raise InputError(f"menu is {menu!r}; give a list of blueprint names, as in ['bypass-linear']")
    for entry in menu:
        get_blueprint(entry)
        if list(menu).count(entry) > 1:
            raise InputError(f"menu names the blueprint {entry!r} {list(menu).count(entry)} times; name it once")


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


def _check_factory(host: Callable[[], nn.Module], x: Tensor, outputs: int) -> None:
    _check_arguments(host)
    try:
        with torch.random.fork_rng(devices=[]):  # the check leaves the caller's random state as it was
            first, second = host(), host()
    except InputError:
        raise
    except Exception as error:  # whatever a person's factory raises, its first line says why
        reason = (str(error).splitlines() or [""])[0]
        raise InputError(
            f"the host factory raised {type(error).__name__}{f': {reason}' if reason else ''}; mend it"
        ) from error
    if first is second:
        raise InputError("the host factory returned the same module twice; build a new one in every call")
    if isinstance(first, SegmentedHost):
        for parameter_name, parameter in first.named_parameters():
            if parameter.dtype != x.dtype:
                raise InputError(
                    f"the features are {x.dtype} and the host's {parameter_name} is {parameter.dtype}; "
                    "convert the features, or build the host in their dtype"
                )
    check_host(first, x, outputs)


def _examples(x: Any, y: Any, workers: int) -> tuple[Tensor, Any]:
    """Features in a floating-point dtype on the CPU, and y as it was given."""
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 0:
        raise InputError(f"workers is {workers!r}; give a number of processes, or 0 to read in this one")
    if workers and not isinstance(x, Dataset | DataLoader):
        raise InputError(
            f"workers is {workers}, but x is a {type(x).__name__}, which is there already; leave workers out"
        )
    if isinstance(x, DataLoader):
        raise InputError("x is a DataLoader; give its data set, x.dataset: the task makes its own batches")
    if isinstance(x, Dataset):
        if y is not None:
            raise InputError("x is a Dataset, which brings its own labels, and y was given too; leave y out")
        features, target = read_dataset(x, workers)
    elif y is None:
        raise InputError(
            f"y is missing and x is a {type(x).__name__}; give both, or a Dataset of (features, label) pairs"
        )
    else:
        features, target = as_tensor(x, "x", torch.get_default_dtype()), y
    if features.is_complex():
        raise InputError("x or y holds complex numbers; give their real and imaginary parts as numbers of their own")
    return features if features.dtype == torch.float64 else features.to(torch.get_default_dtype()), target
