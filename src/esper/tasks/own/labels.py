"""Read y: whether it holds class labels or regression targets, and the names of the classes. N examples, C columns."""

from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.leyline.config.arguments import is_number
from esper.leyline.data.arrays import Frame, is_missing, numeric_array, to_array
from esper.leyline.data.task import Label, which
from esper.leyline.messages import InputError, kind_of

Kind = Literal["classification", "regression"]
FEW = 20
"""A floating-point y with at most this number of distinct values, all whole, is ambiguous: they may be classes or targets."""


Target = tuple[Tensor, tuple[Label, ...] | None]
"""(N, ...) float64, the index of each example's or position's class, NaN where it has no label, with the names of the classes in
that order; or targets and None."""


def read_target(values: NDArray[Any], kind: Kind | None, classes: int | Sequence[Label] | None) -> Target:
    """Read labels or targets from y, an array that `read_y` returns; kind and classes are those of `esper.task`."""
    if _infer_kind(values, kind, classes) == "regression":
        if values.dtype.kind not in "biuf":
            raise InputError(
                f"y holds {_content(values)}, which a regression cannot predict; give numbers, or leave kind out"
            )
        return torch.from_numpy(values.astype(np.float64)), None
    if values.ndim > 1:
        columns = len(classes) if isinstance(classes, Sequence) else classes
        if _is_one_hot(values) and columns in (None, values.shape[1]):
            return read_target(values.argmax(1), kind, classes)
        flat, names = read_target(values.reshape(-1), "classification", classes)
        return flat.reshape(values.shape), names
    labels = [None if is_missing(entry) else entry for entry in values.tolist()]
    if classes is None:  # the classes are the distinct labels, sorted, as in scikit-learn
        distinct = np.unique(
            np.array([label for label in labels if label is not None])
        ).tolist()  # plain, as of an enumeration
        if len(distinct) < 2:
            only = f"the one class {distinct[0]!r}" if distinct else "no label"
            raise InputError(f"y holds {only}; give examples of at least two classes")
        names = class_names(distinct)
    else:
        names = class_names(classes)
        if not isinstance(classes, Iterable) or (isinstance(names[0], str) and values.dtype.kind in "biuf"):
            return _numbered(values, len(names)), names  # also scikit-learn's target with its target_names
    number = {name: k for k, name in enumerate(names)}
    for label in labels:
        if label is not None and label not in number:
            raise InputError(
                f"y holds the label {str(label)[:40]!r}, which is not among the classes {str(list(names))[:80]}; name every class"
            )
    return torch.tensor([np.nan if label is None else number[label] for label in labels], dtype=torch.float64), names


def check_kind(kind: Kind | None, classes: object) -> None:
    """Raise InputError if a kind of task is unknown, or predicts no classes where classes are given."""
    if kind is not None and kind not in ("classification", "regression"):
        raise InputError(f"kind is {kind!r}; give 'classification', 'regression', or leave it out")
    if kind == "regression" and classes is not None:
        raise InputError(f"kind is 'regression', but classes is {classes!r}; leave one of them out")


def _infer_kind(values: NDArray[Any], kind: Kind | None, classes: object) -> Kind:
    """Return whether y holds class labels or targets: `kind` where it is given. InputError if y is ambiguous."""
    check_kind(kind, classes)
    if kind is not None:
        return kind
    if classes is not None:
        return "classification"
    if values.ndim == 2 and _is_one_hot(values):
        columns = values.shape[1]
        raise InputError(
            f"every row of y is one-hot, a 1 among {columns} columns; give kind='classification' for {columns} classes, or "
            f"kind='regression' for {columns} targets"
        )
    if values.ndim > 1 and values.dtype.kind in "iu":
        raise InputError(
            f"y holds whole numbers of shape {values.shape}, {values[0].size} for each example; give kind='classification' if "
            "each is a label, or kind='regression' if each is a target"
        )
    if values.ndim != 1 or values.dtype.kind not in "iuf":
        return "regression" if values.dtype.kind == "f" else "classification"
    known = values[~np.isnan(values)] if values.dtype.kind == "f" else values
    distinct = np.unique(known)
    if values.dtype.kind in "iu":
        if len(distinct) > max(FEW, len(values) // 4):
            raise InputError(
                f"y holds {len(distinct)} different whole numbers in {len(values)} examples; give kind='regression' to "
                f"predict the numbers, or kind='classification' for {len(distinct)} classes"
            )
        return "classification"
    if 2 <= len(distinct) <= FEW and (distinct == distinct.round()).all():
        shown = (
            " and ".join(f"{v:g}" for v in distinct) if len(distinct) == 2 else f"{len(distinct)} distinct whole values"
        )
        lost = torch.from_numpy(np.isnan(values))
        missing = f"y is NaN in {which(lost)}; label or drop those examples. Apart from that, " if lost.any() else ""
        raise InputError(
            f"{missing}y holds only {shown}, as floating-point numbers, which may be classes or targets; give "
            "kind='classification' or kind='regression'"
        )
    return "regression"


def read_y(y: Any) -> NDArray[Any]:
    """Read y as an array (N, ...) of numbers, bools or objects; a single column becomes (N,)."""
    if isinstance(y, Tensor):
        y = y.detach().cpu()
        values = y.to(torch.float64).numpy() if y.is_floating_point() else y.numpy()
    elif isinstance(y, Frame):
        names = list(y.columns)
        values = np.asarray(y[names[0]]) if len(names) == 1 else numeric_array(y, "y")
    else:
        values = to_array(y, "y")
    if values.ndim == 0:
        raise InputError("y is a single number; give one label or target for each example")
    if not len(values):
        raise InputError("x and y hold no examples; give at least a few dozen")
    if values.dtype.kind in "UT":  # NumPy converts the numbers of a mixed list to text
        values = np.array(y, object) if isinstance(y, list | tuple) else values.astype(object)
    if values.dtype.kind not in "biufO":
        raise InputError(
            f"y has dtype {values.dtype}; give class labels as text or whole numbers, or targets as real numbers"
        )
    values = values[:, 0] if values.ndim == 2 and values.shape[1] == 1 else values
    return _of_one_type(values) if values.dtype.kind == "O" else values


def concatenate_y(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Return the arrays y of several splits, as `read_y` returns them and alike in shape, as one array."""
    mixed = len({part.dtype.kind for part in parts} - {"i", "u", "f"}) > 0
    values = np.concatenate([part.astype(object) if mixed else part for part in parts])
    return _of_one_type(values) if mixed else values


def _of_one_type(values: NDArray[Any]) -> NDArray[Any]:
    """Convert an array of objects to numbers or bools where all entries are; otherwise keep it, with None for a missing label."""
    flat = [None if is_missing(entry) else entry for entry in values.ravel().tolist()]
    kinds: dict[str, object] = {}
    named = ((str, "text"), (bool | np.bool_, "a truth value"), (Integral, "a whole number"), (Real, "a number"))
    for entry in filter(lambda entry: entry is not None, flat):
        kind = next((name for types, name in named if isinstance(entry, types)), None)
        if kind is None:
            raise InputError(
                f"y holds {str(entry)[:40]!r}, {kind_of(entry)}; give class labels as text or whole numbers, or targets as "
                "numbers"
            )
        kinds.setdefault(kind, entry)
    if len(kinds) > 1 and kinds.keys() != {"a whole number", "a number"}:
        shown = " and ".join(f"{str(entry)[:40]!r}, {kind}," for kind, entry in kinds.items())
        raise InputError(f"y holds {shown} among its labels; give labels of one type")
    if "a number" in kinds:
        return np.array([np.nan if entry is None else float(entry) for entry in flat]).reshape(values.shape)
    if None not in flat and kinds.keys() & {"a whole number", "a truth value"}:
        return np.array(flat).reshape(values.shape)
    return np.array(flat, object).reshape(values.shape)


def _is_one_hot(values: NDArray[Any]) -> bool:
    """Return whether every row of (N, C) holds a single 1 and is 0 elsewhere."""
    if values.dtype.kind not in "biuf" or values.ndim != 2 or values.shape[1] < 2 or not len(values):
        return False
    return bool(np.isin(values, (0, 1)).all() and (values.sum(1) == 1).all())


def _numbered(values: NDArray[Any], classes: int) -> Tensor:
    """Read labels that number the classes from 0. `check_examples` checks their range."""
    if values.dtype.kind not in "biuf" or (values.dtype.kind == "f" and (values % 1 > 0).any()):
        raise InputError(
            f"classes is {classes}, but y holds {_content(values)}; give whole numbers from 0 to {classes - 1}, or classes as "
            "the list of the labels"
        )
    return torch.from_numpy(values.astype(np.float64))


def class_names(classes: Any) -> tuple[Label, ...]:
    """Return the names of classes, each a plain Python object; a number of classes names them from 0. InputError for neither."""
    if is_number(classes, int | np.integer) and classes >= 2:
        return tuple(range(int(classes)))
    if isinstance(classes, str | bytes) or not isinstance(classes, Iterable):
        raise InputError(
            f"classes is {classes!r}; give the number of classes as a whole number from 2 on, or a list of their names"
        )
    names = tuple(entry.item() if isinstance(entry, np.generic) else entry for entry in classes)
    kinds = {type(name) for name in names}
    if len(names) < 2 or len(set(names)) < len(names) or len(kinds) > 1 or not kinds <= {str, int, float, bool}:
        raise InputError(
            f"classes is {str(classes)[:80]}; give at least two different names of one type, text or numbers"
        )
    return names


def _content(values: NDArray[Any]) -> str:
    return "text" if values.dtype.kind == "O" else f"values of dtype {values.dtype}"
