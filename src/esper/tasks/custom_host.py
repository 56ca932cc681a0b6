"""Checking a user's host: the factory, what it returns for a few examples, and which dtypes it takes. B examples, C outputs."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from esper.kasmina.cut import CutHost
from esper.kasmina.host import SegmentedHost, check_host, dtype_of
from esper.leyline.arguments import required_arguments
from esper.leyline.batches import Batch, cast, leaves, map_leaves, picked, run
from esper.leyline.errors import InputError, typed_line
from esper.leyline.task import Objective, Scaling, Split, one_tensor
from esper.tasks.custom_objective import CustomObjective, check_objective
from esper.tasks.objectives import Classification, Regression
from esper.tasks.regrown import host_factory
from esper.tasks.splits import Splits


def check_custom_host(
    host: Callable[[], SegmentedHost],
    splits: Splits,
    base: Classification | Regression | CustomObjective,
    scaling: Scaling | None,
    target_scaling: Scaling | None,
    wanted: str,
) -> None:
    """Run the host, and a user's loss and metric on its outputs. InputError if one of them cannot be used."""
    sizes = {base.outputs, *splits.train.y.shape[1:]}
    few = next(
        size for size in range(5, 1, -1) if size not in sizes or size == 2
    )  # so that (B,) and (C,) are different shapes
    x, y = picked(splits.train.x, slice(few)), splits.train.y[:few]
    outputs = _check_factory(host, x if scaling is None else scaling.read(one_tensor(x, "scaling")), base, y, wanted)
    check_objective(base, outputs if target_scaling is None else target_scaling.restore(outputs), y)


def as_the_host_takes(splits: Splits, host: Callable[[], SegmentedHost], *, standardized: bool) -> Splits:
    """The splits in the dtypes that a host takes.

    Whole numbers and truth values, such as token ids and masks, keep their dtype where the host runs on them. Where it does not,
    or where features are standardized, they become numbers of torch's default dtype.
    """
    x = splits.train.x
    if all(leaf.is_floating_point() for leaf in leaves(x)):
        return splits
    made, few = draw_host(host), picked(x, slice(2))
    embeds = isinstance(made, nn.Module) and any(
        isinstance(part, nn.Embedding | nn.EmbeddingBag) for part in made.modules()
    )
    if not standardized and (_runs(made, few) or (embeds and not _runs(made, _floating(few)))):
        return splits
    return Splits(*(Split(_floating(split.x), split.y) for split in splits))


@torch.no_grad()
def _runs(host: SegmentedHost, x: Batch) -> bool:
    """Whether a host runs on a batch without an error. `check_host` reports the error, and checks the outputs."""
    try:
        run(host.eval(), cast(x, dtype_of(host)))
    except Exception:  # a user's module can raise anything
        return False
    return True


def _floating(x: Batch) -> Batch:
    """The batch with every whole number and truth value as a number of torch's default dtype."""
    found: Batch = map_leaves(lambda leaf: leaf if leaf.is_floating_point() else leaf.to(torch.get_default_dtype()), x)
    return found


def draw_host(host: Callable[[], SegmentedHost]) -> SegmentedHost:
    """The host that a factory returns. The caller's random state does not change."""
    with torch.random.fork_rng(devices=[]):
        return host()


def cut_host(host: Callable[[], Any], splits: Splits, scaling: Scaling | None) -> Callable[[], SegmentedHost]:
    """The factory itself, or a `CutHost` where it returns a module that is no `SegmentedHost`."""
    made: Any = draw_host(host)
    if not isinstance(made, nn.Module) or isinstance(made, SegmentedHost):
        return host
    few = picked(splits.train.x, slice(2))
    return CutHost(host, few if scaling is None else scaling.read(one_tensor(few, "scaling")))


def _check_arguments(host: Callable[[], nn.Module]) -> None:
    """Raise InputError if a host factory cannot be called without arguments."""
    if isinstance(host, nn.Module) or not callable(host):
        name = type(host).__name__
        made = f"nn.{name}(...)" if type(host).__module__.startswith("torch.nn") else f"{name}(...)"
        shown = made if isinstance(host, nn.Module) else "MyHost()"
        raise InputError(f"host is a {name}; give a function that returns a fresh one, as lambda: {shown}")
    if needed := required_arguments(host):
        called = getattr(host, "__name__", "<lambda>")
        called = type(host).__name__ if called == "<lambda>" and not inspect.isfunction(host) else called
        what = f"the class {called}" if isinstance(host, type) else "a function"
        raise InputError(
            f"host is {what} that needs {' and '.join(needed)}, but it is called without arguments; give a function without, as "
            f"in host=lambda: {called if called.isidentifier() else 'MyHost'}({', '.join(f'{each}=...' for each in needed)})"
        )


def read_host(host: Callable[[], SegmentedHost]) -> Callable[[], SegmentedHost]:
    """The result of `host_factory` for a user's factory. InputError if the factory cannot be called, or raises."""
    _check_arguments(host)
    try:
        return host_factory(host)
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"the host factory raised {typed_line(error)}; correct the function") from error


def _check_factory(host: Callable[[], SegmentedHost], x: Batch, objective: Objective, y: Tensor, wanted: str) -> Tensor:
    """The outputs (B, ..., C) of a host for a few examples x (B, ...). InputError if the host cannot be used.

    objective, y: the outputs must fit them. wanted: why the host needs that number of outputs, for the message.
    """
    first, second = draw_host(host), draw_host(host)
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
