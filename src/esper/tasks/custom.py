"""A task from one's own examples and host."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from esper.kasmina.blueprints import get_blueprint
from esper.kasmina.host import SegmentedHost, check_host
from esper.leyline.config import build_config
from esper.leyline.errors import InputError
from esper.leyline.task import Objective, Split, Task, finite
from esper.tasks.dataset import as_tensor, read_dataset
from esper.tasks.hosts import VECTOR_MENU
from esper.tasks.objectives import Classification, Regression
from esper.tasks.splits import check_examples, sizes_of, split, standardized


def task_from(
    name: str,
    x: Any,
    y: Any = None,
    *,
    host: Callable[[], SegmentedHost],
    classes: int | None = None,
    menu: Sequence[str] = VECTOR_MENU,
    fractions: Sequence[float] = (0.6, 0.15, 0.1, 0.15),
    seed: int = 0,
    standardize: bool = False,
    summary: str | None = None,
    defaults: Mapping[str, Any] | None = None,
    workers: int = 0,
) -> Task:
    """A task from examples and a host factory.

    x, y: tensors, NumPy arrays or what NumPy makes an array of: (N, ...) features, and (N,) whole-number labels or (N,)
    or (N, C) floating-point targets. Or x alone: a map-style `torch.utils.data.Dataset` of (features, label or target)
    pairs, read once and in full; what it draws at random is frozen. The task holds copies, on the CPU.

    host: returns a freshly drawn `SegmentedHost` of any modules each time it is called.
    classes: how many; None means as many as the largest label and 1, where y holds whole numbers, and regression, where
    it holds floating-point numbers. To regress on counts, give y.float().
    menu: names of the blueprints that a controller may plant.
    fractions: of the examples in train, probe, validation and test, dealt class by class, the same for the same seed.
    standardize: features less their mean over the train split, over their standard deviation; the grown network then
    expects such features.
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
    features, target = _examples(x, y, workers)
    skips = build_config(defaults or {}).data.nonfinite == "skip"
    if (
        skips and features.dim() and target.dim() and len(features) == len(target)
    ):  # else `check_examples` says what is wrong
        features, target = finite(Split(features, target), "x or y", "skip")
    objective: Objective
    if target.is_floating_point() and classes is None:
        target = target.unsqueeze(1) if target.dim() == 1 else target
        check_examples(features, target, None)
        objective = Regression(target.shape[1])
    else:
        if classes is not None and (isinstance(classes, bool) or not isinstance(classes, int)):
            raise InputError(f"classes is {classes!r}; give the number of classes as a whole number from 2 on")
        if classes is None:
            classes = int(target.max()) + 1 if target.numel() else 2
        check_examples(features, target, classes)
        objective = Classification(classes)
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise InputError(f"seed is {seed!r}; give a whole number from 0 on, by which examples are dealt into splits")
    splits = split(features, target, sizes=sizes_of(fractions, len(features)), seed=seed)
    if standardize:
        splits = standardized(splits)
    _check_factory(host, splits.train.x[:4], objective.outputs)
    return Task(
        name=name,
        summary=summary or f"{len(features):,} examples of your own, {objective.outputs} outputs, {objective.metric}",
        host=host,
        **splits._asdict(),
        objective=objective,
        menu=tuple(menu),
        defaults=dict(defaults or {}),
    )


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


def _examples(x: Any, y: Any, workers: int) -> tuple[Tensor, Tensor]:
    """Features in a floating-point dtype, and int64 labels or targets in the same dtype as the features, on the CPU."""
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
        dtype = torch.get_default_dtype()
        features, target = as_tensor(x, "x", dtype), as_tensor(y, "y", dtype)
    if features.is_complex() or target.is_complex():
        raise InputError("x or y holds complex numbers; give their real and imaginary parts as numbers of their own")
    if features.dtype != torch.float64:
        features = features.to(torch.get_default_dtype())
    return features, target.to(features.dtype if target.is_floating_point() else torch.int64)
