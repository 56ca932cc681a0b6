"""Records of arrays as nested dicts, which checkpoints can hold, and back."""

from typing import Any

import numpy as np


def as_tree(record: Any) -> Any:
    """A NamedTuple of arrays, nested or not, as nested dicts."""
    if not isinstance(record, tuple):
        return record
    return {name: as_tree(field) for name, field in zip(type(record)._fields, record, strict=True)}  # type: ignore[attr-defined]


def from_tree(known: Any, tree: Any, name: str) -> Any:
    """The inverse of `as_tree`: a record of the type of `known`. ValueError if a shape or dtype differs from `known`."""
    if isinstance(known, tuple):
        fields = zip(type(known)._fields, known, strict=True)  # type: ignore[attr-defined]
        return type(known)(*(from_tree(field, tree[key], f"{name}.{key}") for key, field in fields))
    if isinstance(known, np.ndarray) and (tree.shape, tree.dtype) != (known.shape, known.dtype):
        raise ValueError(f"{name} is {tree.shape} {tree.dtype}, where {known.shape} {known.dtype} was expected")
    return tree
