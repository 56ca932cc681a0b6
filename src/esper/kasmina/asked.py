"""Check the examples given to `predict`, and convert them to the tensors that a grown network takes. B examples."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from esper.leyline.arrays import as_tensor, select_columns
from esper.leyline.batches import Batch, Shape, leaf_names, shape_leaves
from esper.leyline.errors import InputError
from esper.leyline.task import Interface, Split, nonfinite, which


def read_examples(x: Any, taken: Interface, dtype: torch.dtype) -> Batch:
    """Convert features to the tensors (B, ...) that a network takes; `dtype` is that of its floating-point parameters.

    Byte tensors stay bytes where the network standardizes its input itself. Raises InputError if the features have
    another structure, shape or kind of number than the network takes, hold no example, or are not finite.
    """
    if taken.preprocess is not None:
        x = taken.preprocess.apply(x)
    inputs, names, whole = taken.inputs, leaf_names(taken.inputs), _whole(taken)
    if isinstance(inputs, dict):
        if not isinstance(x, Mapping) or set(x) != set(inputs):
            given = f"has the keys {', '.join(map(str, x))}" if isinstance(x, Mapping) else f"is a {type(x).__name__}"
            raise InputError(f"x {given}, but the network takes a mapping with the keys {', '.join(inputs)}; give that")
        values = [x[name] for name in inputs]
    elif names != ["x"]:
        if not isinstance(x, tuple | list) or len(x) != len(inputs):
            given = f"has {len(x)} tensors" if isinstance(x, tuple | list) else f"is a {type(x).__name__}"
            raise InputError(f"x {given}, but the network takes a tuple of {len(inputs)} tensors; give that")
        values = list(x)
    else:
        values = [select_columns(x, taken.columns, "x")]
    read = [
        _leaf(value, name, shape, dtype, held, taken.scaling is not None)
        for value, name, shape, held in zip(values, names, shape_leaves(inputs), whole, strict=True)
    ]
    if len({len(leaf) for leaf in read}) > 1:
        counts = " and ".join(f"{len(leaf):,} in {name}" for leaf, name in zip(read, names, strict=True))
        raise InputError(f"x holds different numbers of examples, {counts}; give every tensor one row per example")
    if isinstance(inputs, dict):
        return dict(zip(inputs, read, strict=True))
    return read[0] if names == ["x"] else tuple(read)


def _whole(taken: Interface) -> tuple[torch.dtype | None, ...]:
    """Return the dtype of each leaf of whole numbers or truth values, and None for each leaf of floating-point numbers."""
    if taken.whole is None:
        return (None,) * len(shape_leaves(taken.inputs))
    return taken.whole


def _leaf(value: Any, name: str, shape: Shape, dtype: torch.dtype, whole: torch.dtype | None, scaled: bool) -> Tensor:
    """Convert one leaf to a tensor (B, *shape), in the dtype of the network or in that of its whole numbers."""
    examples = as_tensor(value, name, dtype)
    if examples.shape == shape:
        batch = "predict([x])" if name == "x" else "predict of a batch"
        raise InputError(
            f"{name} has shape {shape}, which is one example and not a batch; give a batch of one, as {batch}"
        )
    if examples.shape[1:] != shape or not examples.dim() or not len(examples):
        mend = f"give at least one example, as (B, {', '.join(map(str, shape))})"
        raise InputError(f"{name} has shape {tuple(examples.shape)}, but the network takes examples of {shape}; {mend}")
    if whole is not None and not scaled:
        if examples.is_floating_point():
            raise InputError(
                f"{name} has dtype {examples.dtype}, but the network takes whole numbers there, such as token ids; give them as "
                f"{whole}"
            )
        return examples.to(whole)
    if not scaled or examples.is_floating_point():
        examples = examples.to(dtype)
    bad = nonfinite(Split(examples, torch.zeros(len(examples))))
    if bad.any():
        raise InputError(
            f"{name} holds NaN or infinite values, in {which(bad)}; fill them in, or leave those examples out"
        )
    return examples
