"""Records of arrays as trees, as a snapshot holds them."""

from typing import Any

import numpy as np


def as_tree(record: Any) -> Any:
    """A record of arrays, nested or not, as a tree."""
    if not isinstance(record, tuple):
        return record
    return {name: as_tree(field) for name, field in zip(type(record)._fields, record, strict=True)}  # type: ignore[attr-defined]


def like(known: Any, tree: Any, name: str) -> Any:
    """The record that `as_tree` took apart, of the kind and the shapes of a known one. ValueError where it is not."""
    if isinstance(known, tuple):
        fields = zip(type(known)._fields, known, strict=True)  # type: ignore[attr-defined]
        return type(known)(*(like(field, tree[key], f"{name}.{key}") for key, field in fields))
    if isinstance(known, np.ndarray) and (tree.shape, tree.dtype) != (known.shape, known.dtype):
        raise ValueError(f"{name} is {tree.shape} {tree.dtype}, where {known.shape} {known.dtype} was expected")
    return tree
