"""Labels and targets of a person's own: which of the two y holds, and what the classes are called. N examples, C columns."""

from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.leyline.arrays import Frame, array, is_missing, numbers
from esper.leyline.errors import InputError
from esper.leyline.task import Label, which

Kind = Literal["classification", "regression"]
FEW = 20
"""Most distinct whole numbers of a floating-point y that may be classes, and so are asked about."""


class Target(NamedTuple):
    """y, read."""

    values: Tensor  # (N,) float64 index of each example's class, NaN where it has no label; or (N,) or (N, C) targets
    classes: tuple[Label, ...] | None  # what the classes are called, in the order of the indices; None for targets


def read_target(values: NDArray[Any], kind: Kind | None, classes: int | Sequence[Label] | None) -> Target:
    """y, as `as_read` gives it, as classes or as targets, and the names of the classes.

    kind, classes: as in `esper.task`. Raises InputError where y may be either, or is neither.
    """
    found = decide(values, kind, classes)
    if found == "regression":
        if values.dtype.kind not in "biuf":
            raise InputError(
                f"y holds {_said(values)}, which no regression can predict; give numbers, or leave kind out"
            )
        return Target(_plain(values), None)
    if values.ndim > 1:
        values = _from_columns(values)
    if classes is None:
        return _distinct(values)
    if isinstance(classes, int | np.integer) and not isinstance(classes, bool):
        return Target(_numbered(values, int(classes)), tuple(range(int(classes))))
    return _named(values, classes)


def decide(values: NDArray[Any], kind: Kind | None, classes: object) -> Kind:
    """Whether y holds classes or targets. InputError where it may be either."""
    if kind is not None and kind not in ("classification", "regression"):
        raise InputError(f"kind is {kind!r}; give 'classification', 'regression', or leave it out")
    if kind == "regression" and classes is not None:
        raise InputError(f"kind is 'regression', but classes is {classes!r}; leave one of them out")
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
        shown = " and ".join(f"{value:g}" for value in distinct) if len(distinct) == 2 else f"{len(distinct)} different"
        lost = torch.from_numpy(np.isnan(values))
        missing = (
            f"y is NaN in {which(lost)}; label or drop {'it' if lost.sum() == 1 else 'them'}. Apart from that, "
            if lost.any()
            else ""
        )
        raise InputError(
            f"{missing}y holds floating-point numbers, and only {shown}{' whole ones' if len(distinct) > 2 else ''}, which may "
            "be classes or values; give kind='classification' or kind='regression'"
        )
    return "regression"


def as_read(y: Any) -> NDArray[Any]:
    """y as an array of numbers, truth values or objects; a single column is one entry per example."""
    if isinstance(y, Tensor):
        y = y.detach().cpu()
        values = y.to(torch.float64).numpy() if y.is_floating_point() else y.numpy()
    elif isinstance(y, Frame):
        names = list(y.columns)
        values = np.asarray(y[names[0]]) if len(names) == 1 else numbers(y, "y")
    else:
        values = array(y, "y")
    if values.ndim == 0:
        raise InputError("x or y is a single number; give one row of features and one label or target per example")
    if not len(values):
        raise InputError("x and y hold no examples; give at least a few dozen")
    if values.dtype.kind == "c":
        raise InputError("x or y holds complex numbers; give their real and imaginary parts as numbers of their own")
    if values.dtype.kind in "UT":  # of a list that mixes text and numbers NumPy makes text of all
        values = np.array(y, object) if isinstance(y, list | tuple) else values.astype(object)
    if values.dtype.kind not in "biufO":
        raise InputError(
            f"y has dtype {values.dtype}; give class labels as text or whole numbers, or targets as numbers"
        )
    values = values[:, 0] if values.ndim == 2 and values.shape[1] == 1 else values
    return _of_one_type(values) if values.dtype.kind == "O" else values


def joined(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Several y, as `as_read` gives them, as one."""
    if len({part.shape[1:] for part in parts}) > 1:
        shapes = " and ".join(str(part.shape) for part in parts)
        raise InputError(
            f"y has the shapes {shapes} in the four splits; give every example's label or target one shape"
        )
    mixed = len({part.dtype.kind for part in parts} - {"i", "u", "f"}) > 0
    values = np.concatenate([part.astype(object) if mixed else part for part in parts])
    return _of_one_type(values) if mixed else values


def _of_one_type(values: NDArray[Any]) -> NDArray[Any]:
    """Objects as numbers or truth values where all of them are, and else as they are: text, with None for no label."""
    flat = [None if is_missing(entry) else entry for entry in values.ravel().tolist()]
    kinds: dict[str, object] = {}
    for entry in flat:
        if entry is not None:
            kinds.setdefault(_type_of(entry), entry)
    if len(kinds) > 1 and kinds.keys() != {"a whole number", "a number"}:
        shown = " and ".join(f"{str(entry)[:40]!r}, {kind}," for kind, entry in kinds.items())
        raise InputError(f"y holds {shown} among its labels; give labels of one type")
    if "a number" in kinds:
        return np.array([np.nan if entry is None else float(entry) for entry in flat]).reshape(values.shape)
    if None not in flat and kinds.keys() & {"a whole number", "a truth value"}:
        return np.array(flat).reshape(values.shape)
    return np.array(flat, object).reshape(values.shape)


def _type_of(entry: object) -> str:
    if isinstance(entry, str):
        return "text"
    if isinstance(entry, bool | np.bool_):
        return "a truth value"
    if isinstance(entry, Integral):
        return "a whole number"
    if isinstance(entry, Real):
        return "a number"
    raise InputError(
        f"y holds {str(entry)[:40]!r}, a {type(entry).__name__}; give class labels as text or whole numbers, or targets as "
        "numbers"
    )


def _plain(values: NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.array(values, np.float64))


def _is_one_hot(values: NDArray[Any]) -> bool:
    """Whether every row of (N, C) holds a single 1 and else 0."""
    if values.dtype.kind not in "biuf" or values.ndim != 2 or values.shape[1] < 2 or not len(values):
        return False
    return bool(np.isin(values, (0, 1)).all() and (values.sum(1) == 1).all())


def _from_columns(values: NDArray[Any]) -> NDArray[Any]:
    """The class of each row of one-hot labels (N, C)."""
    if not _is_one_hot(values):
        raise InputError(
            f"y has shape {values.shape} and is not one-hot; give one class label per example, as in (N,), or "
            "kind='regression' for several targets"
        )
    found: NDArray[Any] = values.argmax(1)
    return found


def _numbered(values: NDArray[Any], classes: int) -> Tensor:
    """Labels that number the classes from 0. The range is checked with the examples."""
    if values.dtype.kind not in "biuf" or (
        values.dtype.kind == "f" and (values != values.round())[~np.isnan(values)].any()
    ):
        raise InputError(
            f"classes is {classes}, but y holds {_said(values)}; give whole numbers from 0 to {classes - 1}, or classes as "
            "the list of the labels"
        )
    return _plain(values)


def _named(values: NDArray[Any], classes: object) -> Target:
    """Labels that are among the names of the classes, or that number them from 0."""
    names = _names(classes)
    place = {name: index for index, name in enumerate(names)}
    found = [None if is_missing(entry) else entry for entry in values.tolist()]
    strange = next((entry for entry in found if entry is not None and entry not in place), None)
    if strange is None:
        return Target(_plain(np.array([np.nan if e is None else place[e] for e in found])), names)
    if isinstance(names[0], str) and values.dtype.kind in "biuf":  # as scikit-learn's target and target_names
        return Target(_numbered(values, len(names)), names)
    raise InputError(
        f"y holds the label {str(strange)[:40]!r}, which is not among the classes {str(list(names))[:80]}; name every class"
    )


def _names(classes: object) -> tuple[Label, ...]:
    """The names of classes, each a plain Python object."""
    if isinstance(classes, str | bytes | bool) or not isinstance(classes, Iterable):
        raise InputError(
            f"classes is {classes!r}; give the number of classes as a whole number from 2 on, or a list of their names"
        )
    names = tuple(entry.item() if isinstance(entry, np.generic) else entry for entry in classes)
    kinds = {type(name) for name in names}
    if len(names) < 2 or len(set(names)) < len(names) or len(kinds) > 1 or not kinds <= {str, int, float, bool}:
        raise InputError(
            f"classes is {str(classes)[:80]}; give at least two names, each of its own and all of one type, text or numbers"
        )
    return names


def _distinct(values: NDArray[Any]) -> Target:
    """The distinct labels, sorted, as scikit-learn numbers them."""
    missing = np.array([is_missing(entry) for entry in values.tolist()], bool)
    known = values[~missing]
    names, index = np.unique(np.array(known.tolist()), return_inverse=True)  # of text and of whole numbers, not objects
    if len(names) < 2:
        only = f"the one class {names[0].item()!r}" if len(names) else "no label"
        raise InputError(f"y holds {only}; give examples of at least two classes")
    found = np.full(len(values), np.nan)
    found[~missing] = index
    return Target(_plain(found), tuple(names.tolist()))


def check_labels(target: Tensor) -> None:
    """InputError where an example, of (N,) indices of classes, has no label."""
    bad = target.isnan()
    if bad.any():
        raise InputError(
            f"y holds no label for {which(bad)}; drop those examples, label them, or give the task "
            "defaults={'data': {'nonfinite': 'skip'}}"
        )


def _said(values: NDArray[Any]) -> str:
    return "text" if values.dtype.kind == "O" else f"values of dtype {values.dtype}"
