"""Define batches: one tensor, a tuple of tensors, or a mapping from names to tensors. Each of these tensors is a leaf.

A module is called with a batch as `module(x)`, `module(*batch)` or `module(**batch)`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from esper.leyline.data.duplicates import is_dense
from esper.leyline.messages import InputError, counted, kind_of

Batch = Tensor | tuple[Tensor, ...] | dict[str, Tensor]
"""The inputs of a network: leaves (..., B, *shape), of which each has a shape and a dtype of its own."""

Shape = tuple[int, ...]
Shapes = Shape | tuple[Shape, ...] | dict[str, Shape]
"""The shape of one example of each leaf, in the structure of the batch."""


def check_pairs(batches: Sequence[Any], what: str) -> None:
    """Raise InputError unless there are batches, and each is a pair of one example or more. `what` names them in messages."""
    if not batches:
        raise InputError(f"{what} has no batches; give at least one (input, target) pair")
    for pair in batches:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise InputError(f"a batch of {what} is {kind_of(pair)}; give (input, target) pairs")
        for leaf in pytree.tree_leaves(pair):
            if isinstance(leaf, Tensor) and not is_dense(leaf):
                raise InputError(
                    f"a batch of {what} holds a tensor of {leaf.dtype} that is sparse, nested, quantized or on the meta device; "
                    "give dense tensors"
                )
        if not all(len(leaf) for leaf in pytree.tree_leaves(pair) if isinstance(leaf, Tensor) and leaf.dim()):
            raise InputError(f"a batch of {what} holds no examples; give batches of one example or more")


def check_lengths(name: str, count: int, targets: int) -> None:
    """Raise InputError unless features hold as many examples as there are labels or targets."""
    if count != targets:
        raise InputError(
            f"{name} holds {counted(count, 'example')} and y {targets:,}; give one label or target per example"
        )


def map_leaves(function: Callable[..., Any], batch: Batch, *others: Any) -> Any:
    """Return what a function returns for each leaf, in the structure of the batch; `others` are trees of that structure."""
    if isinstance(batch, Tensor):
        return function(batch, *others)
    if isinstance(batch, dict):
        return {name: function(leaf, *(other[name] for other in others)) for name, leaf in batch.items()}
    return tuple(function(*each) for each in zip(batch, *others, strict=True))


def named_leaves(tree: Batch | Shapes) -> dict[str, Any]:
    """Return each leaf of a batch, or its shape, by what sentences call it: 'x', 'x[0]', or "x['image']"."""
    if isinstance(tree, dict):
        return {f"x[{name!r}]": part for name, part in tree.items()}
    if isinstance(tree, Tensor) or not tree or isinstance(tree[0], int):
        return {"x": tree}
    return {f"x[{place}]": part for place, part in enumerate(tree)}


def leaves(batch: Batch) -> list[Tensor]:
    """Return the tensors of a batch, in its order."""
    return list(named_leaves(batch).values())


def first(batch: Batch) -> Tensor:
    """Return the first leaf, whose leading axes are those of all."""
    return batch if isinstance(batch, Tensor) else leaves(batch)[0]


def shapes(batch: Batch) -> Shapes:
    """Return the shape of one example of each leaf (N, *shape)."""
    return map_leaves(lambda leaf: tuple(leaf.shape[1:]), batch)


def shapes_to_json(inputs: Shapes) -> Any:
    """Return the shapes as lists and mappings, which JSON can hold."""
    if isinstance(inputs, dict):
        return {name: list(shape) for name, shape in inputs.items()}
    return [list(part) if isinstance(part, tuple) else part for part in inputs]


def shapes_from_json(saved: Any) -> Shapes:
    """Return the shapes that `shapes_to_json` gave as lists and mappings."""
    if isinstance(saved, dict):
        return {name: tuple(shape) for name, shape in saved.items()}
    return tuple(tuple(part) if isinstance(part, list) else part for part in saved)


def picked(batch: Batch, index: Any) -> Batch:
    """Pick examples of every leaf (N, ...), as indexing does: by a slice, a mask or indices."""
    return batch[index] if isinstance(batch, Tensor) else map_leaves(lambda leaf: leaf[index], batch)


def cast(batch: Batch, dtype: torch.dtype) -> Batch:
    """Return the batch with its floating-point leaves in a dtype; whole numbers and truth values stay what they are."""
    return map_leaves(lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, batch)


def on_cpu(batch: Batch, dtype: torch.dtype) -> Batch:
    """Return the batch on the CPU, with its floating-point leaves in a dtype."""
    return map_leaves(lambda leaf: leaf.cpu(), cast(batch, dtype))


def stream_of(batch: Batch) -> Tensor | None:
    """Return the batch where it is one floating-point tensor, which a seed can read; None elsewhere."""
    return batch if isinstance(batch, Tensor) and batch.is_floating_point() else None


def unstacked(batch: Batch) -> list[Batch]:
    """Return the rows of leaves (n, ...), each a batch of the same structure."""
    if isinstance(batch, Tensor):
        return list(batch.unbind(0))
    return [picked(batch, row) for row in range(len(first(batch)))]


def arguments(batch: Batch) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Return the positional arguments and those by name with which a module is called."""
    if isinstance(batch, Tensor):
        return (batch,), {}
    return ((), batch) if isinstance(batch, dict) else (batch, {})


def batch_of(positional: tuple[Tensor, ...], named: dict[str, Tensor]) -> Batch:
    """Return the batch that a module was called with."""
    return named or (positional[0] if len(positional) == 1 else positional)


def run(module: Callable[..., Any], batch: Batch) -> Tensor:
    """Return what a module returns for a batch."""
    positional, named = arguments(batch)
    return module(*positional, **named)
