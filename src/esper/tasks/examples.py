"""Reading a user's examples: x and y, or a Dataset, all at once or in four splits. N examples."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from esper.leyline.arrays import Frame, as_tensor, column_names, numeric_array, select_columns, to_array
from esper.leyline.batches import Batch, first, leaves, map_leaves, shapes
from esper.leyline.errors import InputError
from esper.leyline.task import Split, finite, nonfinite
from esper.leyline.text import counted
from esper.tasks.dataset import check_names, read_dataset
from esper.tasks.labels import concatenate_y, read_y
from esper.tasks.splits import Splits

Indices = NDArray[np.int64]


class Examples(NamedTuple):
    """All examples of a task.

    Attributes:
        x ((N, ...) tensor, or a tuple or a dict of them): features, on the CPU: floating point, int64 or bool
        y ((N, ...) array): labels or targets, as `labels.read_y` returns them
        parts (four int64 arrays or None): indices of the train, probe, validation and test examples; None draws them
        weights ((N,) float64 array or None): weights in the training loss; None where the user gives none
        columns (names or None): names of the features of a frame
    """

    x: Batch
    y: NDArray[Any]
    parts: tuple[Indices, ...] | None
    weights: NDArray[np.float64] | None
    columns: tuple[str, ...] | None


def read_examples(x: Any, y: Any, splits: Any, sample_weights: Any, workers: int) -> Examples:
    """Read these arguments of `esper.task`. InputError if one cannot be read, or they do not fit together."""
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 0:
        raise InputError(f"workers is {workers!r}; give a number of processes, or 0 to read in this one")
    if splits is not None:
        check_split_names(splits)
    if splits is None or x is not None:
        features, values = _read(x, y, workers)
        parts = None if splits is None else indices_of(splits, len(first(features)))
        weights = None if sample_weights is None else _weights(sample_weights, len(first(features)), "x")
        return Examples(features, values, parts, weights, column_names(x))
    if y is not None:
        raise InputError("y was given without x; leave y out, because the splits contain their own y, or give x too")
    return _read_splits(splits, sample_weights, workers)


def _read_splits(splits: Mapping[str, Any], sample_weights: Any, workers: int) -> Examples:
    """Read four splits, each a pair (x, y) or a Dataset."""
    columns = column_names(splits["train"][0]) if isinstance(splits["train"], tuple | list) else None
    pairs = [_read_split(name, splits[name], columns, workers) for name in Splits._fields]
    for name, (features, _) in zip(Splits._fields, pairs, strict=True):
        if shapes(features) != shapes(pairs[0][0]):
            raise InputError(
                f"the {name} split has features of shape {shapes(features)} and the train split of shape "
                f"{shapes(pairs[0][0])}; give every example one shape"
            )
    ends = np.cumsum([0, *(len(values) for _, values in pairs)])
    parts = tuple(np.arange(start, end) for start, end in itertools.pairwise(ends))
    weights = None
    if sample_weights is not None:
        weights = np.ones(ends[-1])
        weights[parts[0]] = _weights(sample_weights, len(parts[0]), "the train split")
    features = map_leaves(lambda *parts: torch.cat(parts), *(x for x, _ in pairs))
    values = concatenate_y([y for _, y in pairs])
    return Examples(features, values, parts, weights, columns)


def drop_nonfinite(examples: Examples, values: Tensor) -> tuple[Examples, Tensor]:
    """The examples and y (N, ...), floating point, without the examples that hold NaN or infinite values."""
    if any(
        not x.dim() or len(x) != len(values) for x in leaves(examples.x)
    ):  # `check_examples` raises InputError for these
        return examples, values
    keep = ~nonfinite(Split(examples.x, values)).numpy()
    features, values = finite(Split(examples.x, values), "x or y", "skip")
    new_index = np.cumsum(keep) - 1
    parts = None if examples.parts is None else tuple(new_index[part[keep[part]]] for part in examples.parts)
    weights = None if examples.weights is None else examples.weights[keep]
    return Examples(features, examples.y[keep], parts, weights, examples.columns), values


def train_weights(examples: Examples, train: Indices) -> Tensor | None:
    """(n,) weights of the train split, divided by their mean, in the dtype of targets; None where none are given."""
    if examples.weights is None:
        return None
    weights = examples.weights[train]
    if not weights.any():
        raise InputError(
            "sample_weights is 0 for every example of the train split; give some of them a positive weight"
        )
    return torch.from_numpy(weights / weights.mean()).to(dtype_of_targets(examples.x))


def dtype_of_targets(x: Batch) -> torch.dtype:
    """The dtype that targets take: that of the first floating-point features, or torch's default dtype."""
    return next((leaf.dtype for leaf in leaves(x) if leaf.is_floating_point()), torch.get_default_dtype())


def _read(x: Any, y: Any, workers: int) -> tuple[Batch, NDArray[Any]]:
    """Features on the CPU, in a floating-point dtype, int64 or bool, and y as an array."""
    if workers and x is not None and not isinstance(x, Dataset | DataLoader):
        raise InputError(
            f"workers is {workers}, but x is a {type(x).__name__}, and workers read a Dataset only; leave workers out"
        )
    if isinstance(x, DataLoader):
        raise InputError("x is a DataLoader; give its data set, x.dataset: the task makes its own batches")
    if isinstance(x, Dataset):
        if y is not None:
            raise InputError("x is a Dataset, which contains its own labels, and y was given too; leave y out")
        features, y = read_dataset(x, workers)
        given: Batch = map_leaves(in_one_of_three_dtypes, features)
    elif x is None:
        raise InputError("x and y are missing; give examples x and y, a Dataset as x, or splits")
    elif y is None:
        raise InputError(
            f"y is missing and x is a {type(x).__name__}; give both, or a Dataset of (features, label) pairs"
        )
    else:
        given = _features(x, y)
    return given, read_y(y)


def _features(x: Any, y: Any) -> Batch:
    """x as one tensor, or as a tuple or a dict of them. A tuple of arrays with one entry per example is one tensor."""
    if isinstance(x, Mapping):
        check_names(x, "x")
        return {name: _leaf(value, f"x[{name!r}]") for name, value in x.items()}
    arrays = isinstance(x, tuple) and len(x) > 1 and all(isinstance(each, Tensor | np.ndarray | Frame) for each in x)
    if arrays and all(_length(each) > 0 for each in x) and not _length(y) == len(x) != _length(x[0]):
        return tuple(_leaf(value, f"x[{place}]") for place, value in enumerate(x))
    return _leaf(x, "x")


def _length(values: Any) -> int:
    """How many rows something has; 0 where it has none."""
    return len(values) if hasattr(values, "__len__") and getattr(values, "ndim", 1) != 0 else 0


def _leaf(value: Any, name: str) -> Tensor:
    return in_one_of_three_dtypes(as_tensor(value, name, torch.get_default_dtype()))


def in_one_of_three_dtypes(features: Tensor) -> Tensor:
    """Features in torch's default dtype or float64, as int64, or as bool. InputError for complex numbers."""
    if features.is_complex():
        raise InputError("x or y holds complex numbers; give their real and imaginary parts as numbers of their own")
    if features.dtype in (torch.float64, torch.bool):
        return features
    return features.to(torch.get_default_dtype() if features.is_floating_point() else torch.int64)


def check_split_names(splits: Any) -> None:
    """Raise InputError unless splits is a mapping whose keys are the names of the four splits."""
    names = sorted(map(str, splits)) if isinstance(splits, Mapping) else None
    if names != sorted(Splits._fields):
        given = f"has the keys {', '.join(names) or 'none'}" if names is not None else f"is a {type(splits).__name__}"
        raise InputError(
            f"splits {given}; give a mapping with the keys {', '.join(Splits._fields)}, each to a pair (x, y), or to indices of "
            "examples where x and y are given"
        )


def _read_split(name: str, given: Any, columns: tuple[str, ...] | None, workers: int) -> tuple[Batch, NDArray[Any]]:
    """Read one split. The columns of a frame are put in the order of `columns`."""
    if isinstance(given, Dataset):
        return _read(given, None, workers)
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise InputError(
            f"the {name} split is a {type(given).__name__}; give a pair (x, y) or a Dataset, or give indices together with x and "
            "y of all examples"
        )
    features, values = _read(select_columns(given[0], columns, f"the {name} split"), given[1], workers)
    for leaf in leaves(features):
        if leaf.dim() and len(leaf) == len(values):
            continue
        examples = counted(len(leaf) if leaf.dim() else 1, "example")
        raise InputError(f"the {name} split has {examples}, but {len(values):,} labels or targets; give one for each")
    return features, values


def indices_of(splits: Mapping[str, Any], examples: int) -> tuple[Indices, ...]:
    """The examples of each split. InputError for an index out of range, and for an example that is named twice."""
    parts, owner = [], np.full(examples, -1)
    for place, name in enumerate(Splits._fields):
        given = splits[name]
        given = given.cpu().numpy() if isinstance(given, Tensor) else to_array(given, f"the {name} split")
        if given.dtype == bool and given.shape == (examples,):
            given = np.flatnonzero(given)
        if given.ndim != 1 or given.dtype.kind not in "iu":
            raise InputError(
                f"the {name} split is an array of shape {given.shape} and dtype {given.dtype}; give indices of examples of x, "
                f"whole numbers from 0 to {examples - 1}, or leave x and y out and give a pair (x, y)"
            )
        part = given.astype(np.int64)
        strange = part[(part < 0) | (part >= examples)]
        if len(strange):
            raise InputError(f"the {name} split names example {strange[0]}; give indices from 0 to {examples - 1}")
        twice = part[owner[part] >= 0]
        if len(twice):
            raise InputError(
                f"example {twice[0]} is in the {Splits._fields[owner[twice[0]]]} split and in the {name} split; put every "
                "example in one split"
            )
        owner[part] = place
        if len(np.unique(part)) < len(part):
            raise InputError(f"the {name} split names an example twice; name it once")
        parts.append(part)
    return tuple(parts)


def _weights(given: Any, examples: int, of: str) -> NDArray[np.float64]:
    weights = given.detach().cpu().numpy() if isinstance(given, Tensor) else numeric_array(given, "sample_weights")
    if weights.shape != (examples,):
        raise InputError(
            f"sample_weights has shape {weights.shape}; give one weight for each of the {examples} examples of {of}"
        )
    if weights.dtype.kind not in "biuf" or not np.isfinite(weights).all() or (weights < 0).any():
        raise InputError("sample_weights holds a negative, infinite or missing weight; give finite numbers from 0 on")
    return weights.astype(np.float64)


def check_classes_train(splits: Splits, names: Sequence[Any]) -> None:
    """Raise InputError if a class of another split has no example in the train split."""
    for name, split in zip(Splits._fields[1:], splits[1:], strict=True):
        unseen = np.setdiff1d(split.y.numpy(), splits.train.y.numpy())
        if len(unseen):
            raise InputError(
                f"the {name} split has the class {names[unseen[0]]!r}, of which the train split has no example; add some"
            )
