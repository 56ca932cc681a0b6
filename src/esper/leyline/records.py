"""Print records of arrays (NamedTuples and dataclasses) in short, and turn them into the nested dicts of checkpoints."""

import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import numpy as np

from esper.leyline.config.input import SHOWN, show

Record = TypeVar("Record", bound=type)

_FEW = 8
"""Longest array whose numbers are shown."""


def brief(record: Record) -> Record:
    """Give a NamedTuple or dataclass a `repr` of one short line, without the values of large arrays; a class decorator.

    Split(x=float32 (90, 4), y=int64 (90,))
    """
    setattr(record, "__repr__", _repr)  # noqa: B010 (to a type checker, no method may be assigned)
    return record


def _repr(record: Any) -> str:
    names = [field.name for field in fields(record) if field.repr] if is_dataclass(record) else record._fields
    shown = (f"{name}={_value(getattr(record, name))}" for name in names)
    return f"{type(record).__name__}({', '.join(shown)})"


def _value(value: Any) -> str:
    torch = sys.modules.get("torch")  # `esper --help` must not import torch
    if torch is not None and isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if isinstance(value, np.ndarray):
        if value.ndim != 1 or value.size > _FEW:
            return f"{value.dtype} {value.shape}"
        return f"[{', '.join(f'{each:.4g}' if isinstance(each, float) else str(each) for each in value.tolist())}]"
    if _is_record(value):
        text = _repr(value)
        return text if len(text) <= SHOWN else f"{type(value).__name__}(...)"
    plain = not any("__repr__" in vars(base) for base in type(value).__mro__[:-1])  # its repr would be an address
    if callable(value) or plain:
        return str(getattr(value, "__qualname__", type(value).__name__))
    if isinstance(value, Mapping):
        return show({key: item if isinstance(item, str | int | float) else ... for key, item in value.items()})
    if isinstance(value, tuple | list) and any(map(_is_record, value)):
        return f"{len(value)} {type(value[0]).__name__}"
    return show(value)


def _is_record(value: Any) -> bool:
    """Return whether a value is a NamedTuple or an object of a dataclass."""
    return (is_dataclass(value) or (isinstance(value, tuple) and hasattr(value, "_fields"))) and not isinstance(
        value, type
    )


def as_tree(record: Any) -> Any:
    """Return a NamedTuple of arrays, nested or not, as nested dicts."""
    if not isinstance(record, tuple):
        return record
    return {name: as_tree(field) for name, field in record._asdict().items()}  # type: ignore[attr-defined]


def from_tree(known: Any, tree: Any, name: str) -> Any:
    """Return the inverse of `as_tree`: a record of the type of `known`. ValueError if a shape or dtype differs from `known`."""
    if isinstance(known, tuple):
        fields = zip(type(known)._fields, known, strict=True)  # type: ignore[attr-defined]
        return type(known)(*(from_tree(field, tree[key], f"{name}.{key}") for key, field in fields))
    if isinstance(known, np.ndarray) and (tree.shape, tree.dtype) != (known.shape, known.dtype):
        raise ValueError(f"{name} is {tree.shape} {tree.dtype}, where {known.shape} {known.dtype} was expected")
    return tree
