"""Read a user's examples into four splits: from x and y, a Dataset or tokens, at once or batch by batch. N examples."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from esper.leyline.config.arguments import check_integer, check_switch
from esper.leyline.data.arrays import Frame, as_tensor, column_names, numeric_array, select_columns, to_array
from esper.leyline.data.batches import Batch, check_lengths, first, leaves, map_leaves, shapes
from esper.leyline.data.task import SENSED, Label, Split, finite, nonfinite, which
from esper.leyline.errors import InputError
from esper.leyline.text import counted, kind_of
from esper.tasks.own.dataset import (
    DatasetSource,
    Windows,
    check_alike,
    check_names,
    dtype_of_targets,
    is_tokens,
    length_of,
    numbers_as_kept,
    read_dataset,
    told_where_slow,
    windows_of,
)
from esper.tasks.own.labels import Kind, class_names, concatenate_y, read_target, read_y
from esper.tasks.splits import Splits, check_examples, cut, dealt, sizes_of

HELD = 2048
"""Most examples in the probe, validation and test split of a Dataset that is read batch by batch and split by fractions."""

Indices = NDArray[np.int64]


class Given(NamedTuple):
    """Holds the arguments of `esper.task` that say what the examples are."""

    x: Any
    y: Any
    splits: Mapping[str, Any] | None
    fractions: Sequence[float]
    seed: int
    kind: Kind | None
    classes: int | Sequence[Label] | None
    sample_weights: Any
    workers: int
    stream: bool
    skip: bool  # leave out examples that are not finite


class Examples(NamedTuple):
    """Holds checked examples."""

    splits: Splits  # on the CPU; with a source, `train` holds the first examples of it
    classes: tuple[Label, ...] | None  # of a classification, in the order of the outputs
    total: int  # number of all examples
    weights: Tensor | None = None  # (n,) of the training examples, divided by their mean
    columns: tuple[str, ...] | None = None  # names of the features of a frame
    source: DatasetSource | None = None  # what training examples are read from, batch by batch
    tokens: str | None = None  # 'byte' or 'token' where each position's label is the next one


def read_examples(given: Given, host: Any, length: int | None) -> Examples:
    """Read, check and split examples. InputError if they cannot be used. Tokens without labels are cut into windows first."""
    check_switch(given.stream, "stream")
    check_integer(given.workers, "workers", 0, "a number of processes, or 0 to read in this one")
    if given.splits is not None:
        names = sorted(map(str, given.splits)) if isinstance(given.splits, Mapping) else None
        if names != sorted(Splits._fields):
            keys = f"has the keys {', '.join(names) or 'none'}" if names is not None else f"is {kind_of(given.splits)}"
            raise InputError(
                f"splits {keys}; give a mapping with the keys {', '.join(Splits._fields)}, each to a pair (x, y), or to indices "
                "of examples where x and y are given"
            )
    alone = given.splits.values() if given.x is None and given.splits is not None else [given.x]
    if given.y is None and alone and all(map(is_tokens, alone)):
        return _of_tokens(given, host, length)
    if length is not None:
        raise InputError(f"length is {length!r}, but no tokens are cut into windows; leave length out")
    if isinstance(given.x, Dataset) and given.y is not None:
        raise InputError("x is a Dataset, which contains its own labels, and y was given too; leave y out")
    if given.splits is not None and given.x is None and given.y is not None:
        raise InputError("y was given without x; leave y out, because the splits contain their own y, or give x too")
    return _streamed(given) if given.stream else _in_memory(given)


def _in_memory(given: Given) -> Examples:
    """Read all examples at once, and split them by fractions, by indices, or as they come in four splits."""
    x, y, splits, workers = given.x, given.y, given.splits, given.workers
    parts: tuple[Indices, ...] | None = None
    if splits is None or x is not None:
        features, labels = _read(x, y, workers)
        columns, count = column_names(x), len(first(features))
        parts = None if splits is None else _indices_of(splits, count)
        weights = _weights(given.sample_weights, count, "x")
    else:
        columns = column_names(splits["train"][0]) if isinstance(splits["train"], tuple | list) else None
        pairs = [_read_split(name, splits[name], columns, workers) for name in Splits._fields]
        for name, (part, own) in zip(Splits._fields, pairs, strict=True):
            check_alike(f"the {name} split", "features", shapes(part), "the train split", shapes(pairs[0][0]))
            check_alike(f"the {name} split", "y", own.shape[1:], "the train split", pairs[0][1].shape[1:])
        features = map_leaves(lambda *each: torch.cat(each), *(part for part, _ in pairs))
        labels = concatenate_y([part for _, part in pairs])
        ends = np.cumsum([0, *(len(part) for _, part in pairs)])
        parts = tuple(np.arange(start, end) for start, end in itertools.pairwise(ends))
        weights = _weights(given.sample_weights, len(parts[0]), "the train split")
        if weights is not None:
            weights = np.concatenate([weights, np.ones(len(labels) - len(weights))])
    values, names = read_target(labels, given.kind, given.classes)
    # `check_examples` raises InputError where a leaf is shorter or longer than y
    if given.skip and all(leaf.dim() and len(leaf) == len(values) for leaf in leaves(features)):
        keep = ~nonfinite(Split(features, values)).numpy()
        features, values = finite(Split(features, values), "x or y", "skip")
        new_index = np.cumsum(keep) - 1
        parts = None if parts is None else tuple(new_index[part[keep[part]]] for part in parts)
        weights = None if weights is None else weights[keep]
    if names is not None and (unlabelled := values.isnan().reshape(len(values), -1).any(1)).any():
        raise InputError(
            f"y holds no label for {which(unlabelled)}; drop those examples, label them, or give the task "
            "defaults={'data': {'nonfinite': 'skip'}}"
        )
    values = values.to(dtype_of_targets(features) if names is None else torch.int64)
    check_examples(features, values, None if names is None else len(names))
    if parts is None:
        parts = tuple(part.numpy() for part in dealt(values, sizes_of(given.fractions, len(values)), given.seed))
    made = cut(features, values, [torch.from_numpy(part) for part in parts])
    if names is not None and splits is not None:
        for name, split in zip(Splits._fields[1:], made[1:], strict=True):
            unseen = np.setdiff1d(split.y.numpy(), made.train.y.numpy())
            if len(unseen):
                raise InputError(
                    f"the {name} split has the class {names[unseen[0]]!r}, of which the train split has no example; add some"
                )
    scaled = None
    if weights is not None:
        weights = weights[parts[0]]
        if not weights.any():
            raise InputError(
                "sample_weights is 0 for every example of the train split; give some of them a positive weight"
            )
        scaled = torch.from_numpy(weights / weights.mean()).to(dtype_of_targets(features))
    return Examples(made, names, len(values), scaled, columns)


def _read(x: Any, y: Any, workers: int) -> tuple[Batch, NDArray[Any]]:
    """Read features on the CPU, in a floating-point dtype, int64 or bool, and y as an array."""
    if workers and x is not None and not isinstance(x, Dataset | DataLoader):
        raise InputError(
            f"workers is {workers}, but x is {kind_of(x)}, and workers read a Dataset only; leave workers out"
        )
    if isinstance(x, DataLoader):
        raise InputError("x is a DataLoader; give its data set, x.dataset: the task makes its own batches")
    if isinstance(x, Dataset):
        features, y = read_dataset(x, workers)
        return map_leaves(numbers_as_kept, features), read_y(y)
    if x is None:
        raise InputError("x and y are missing; give examples x and y, a Dataset as x, or splits")
    if y is None:
        raise InputError(f"y is missing and x is {kind_of(x)}; give both, or a Dataset of (features, label) pairs")

    def read(value: Any, name: str) -> Tensor:
        return numbers_as_kept(as_tensor(value, name, torch.get_default_dtype()))

    if isinstance(x, Mapping):
        check_names(x, "x")
        return {name: read(value, f"x[{name!r}]") for name, value in x.items()}, read_y(y)

    def rows(values: Any) -> int:
        return len(values) if hasattr(values, "__len__") and getattr(values, "ndim", 1) != 0 else 0

    arrays = isinstance(x, tuple) and len(x) > 1 and all(isinstance(each, Tensor | np.ndarray | Frame) for each in x)
    # a tuple of arrays with one entry per example is one tensor
    if arrays and all(rows(each) > 0 for each in x) and not rows(y) == len(x) != rows(x[0]):
        return tuple(read(value, f"x[{place}]") for place, value in enumerate(x)), read_y(y)
    return read(x, "x"), read_y(y)


def _read_split(name: str, given: Any, columns: tuple[str, ...] | None, workers: int) -> tuple[Batch, NDArray[Any]]:
    """Read one split, a pair (x, y) or a Dataset. The columns of a frame are put in the order of `columns`."""
    if isinstance(given, Dataset):
        return _read(given, None, workers)
    if isinstance(given, tuple | list) and len(given) == 2 and isinstance(given[0], Dataset):
        raise InputError(
            f"the {name} split is a Dataset, which contains its own labels, beside others; leave those out"
        )
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise InputError(
            f"the {name} split is {kind_of(given)}; give a pair (x, y) or a Dataset, or give indices together with x and "
            "y of all examples"
        )
    features, values = _read(select_columns(given[0], columns, f"the {name} split"), given[1], workers)
    for leaf in leaves(features):
        if not leaf.dim():
            raise InputError(f"the {name} split holds an x that is one number; give one row for each example")
        check_lengths(f"the {name} split", len(leaf), len(values))
    return features, values


def _indices_of(splits: Mapping[str, Any], examples: int) -> tuple[Indices, ...]:
    """Return the examples of each split. InputError for an index out of range, and for an example that is named twice."""
    parts = {}
    for name in Splits._fields:
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
        parts[name] = part
    named, times = np.unique(np.concatenate(list(parts.values())), return_counts=True)
    if (times > 1).any():
        twice = named[times > 1][0]
        where = " and ".join(f"the {name} split" for name, part in parts.items() if twice in part)
        raise InputError(f"example {twice} is named more than once in {where}; name every example once, in one split")
    return tuple(parts.values())


def _weights(given: Any, examples: int, of: str) -> NDArray[np.float64] | None:
    """Read the weights of so many examples; None where none are given."""
    if given is None:
        return None
    weights = given.detach().cpu().numpy() if isinstance(given, Tensor) else numeric_array(given, "sample_weights")
    if weights.shape != (examples,):
        raise InputError(
            f"sample_weights has shape {weights.shape}; give one weight for each of the {examples} examples of {of}"
        )
    if weights.dtype.kind not in "biuf" or not np.isfinite(weights).all() or (weights < 0).any():
        raise InputError("sample_weights holds a negative, infinite or missing weight; give finite numbers from 0 on")
    return weights.astype(np.float64)


def _of_tokens(given: Given, host: Any, length: int | None) -> Examples:
    """Cut tokens into windows. A stream that fractions split is cut into four runs, so that neighbours share a split."""
    splits = given.splits
    if given.x is None:
        assert splits is not None, "tokens are in x or in the splits"
        splits = {
            name: windows_of(tokens, f"the {name} split", host, length, given.classes)
            for name, tokens in splits.items()
        }
        data = splits["train"]
    else:
        data = windows_of(given.x, "x", host, length, given.classes)
        if splits is None and data.tokens.ndim == 1:
            parts = torch.arange(len(data)).split(list(_sizes(given, data)))
            splits = dict(zip(Splits._fields, parts, strict=True))
    if given.workers and not given.stream:
        raise InputError(
            f"workers is {given.workers}, but windows of tokens in memory need none; leave workers out, or set stream=True"
        )
    x = None if given.x is None else data
    made = _streamed(given._replace(x=x, splits=splits, classes=data.vocabulary, kind="classification"))
    if not given.stream:  # the windows are known to be whole, and there is nothing else to check
        assert made.source is not None
        whole = made.source.read(np.arange(len(made.source)))
        made = made._replace(splits=made.splits._replace(train=whole), source=None)
    return made._replace(tokens="byte" if data.tokens.dtype == np.uint8 else "token")


def _streamed(given: Given) -> Examples:
    """Return splits of Datasets; the train split stays in its Dataset. InputError for what needs all examples at once."""
    if given.sample_weights is not None:
        raise InputError(
            "sample_weights was given, but windows of tokens and a task with stream=True take none; leave sample_weights out"
        )
    if given.classes is None and given.kind != "regression":
        raise InputError(
            "stream is True, so the labels are not all read beforehand; give classes, the number of classes or their names, or "
            "kind='regression'"
        )
    names = None if given.classes is None else class_names(given.classes)
    in_splits = given.splits if given.x is None else None
    datasets = [given.x if in_splits is None else in_splits[name] for name in Splits._fields]
    for dataset in datasets:
        if not isinstance(dataset, Dataset):
            raise InputError(
                f"stream is True, but examples are {kind_of(dataset)}, which is in memory; give a torch.utils.data.Dataset or "
                "tokens, or leave stream out"
            )
    if in_splits is not None:
        parts: Sequence[Tensor] = [torch.arange(length_of(dataset)) for dataset in datasets]
    elif given.splits is not None:
        parts = [torch.from_numpy(part) for part in _indices_of(given.splits, length_of(given.x))]
    else:
        parts = dealt(torch.zeros(length_of(given.x)), _sizes(given, given.x), given.seed)
    classes = len(names) if names is not None and isinstance(given.classes, int | np.integer) else names
    kind = given.kind or "classification"
    sources = [DatasetSource(*each, kind, classes) for each in zip(datasets, parts, strict=True)]
    for name, source in zip(Splits._fields, sources, strict=True):
        if len(source) < 2:
            raise InputError(f"the {name} split holds {counted(len(source), 'example')}; give it at least 2")
    sensed = min(SENSED, len(sources[0]))
    with told_where_slow(sources[0].name, sensed + sum(map(len, sources[1:]))):
        train = sources[0].read(np.arange(sensed))
        sources = [replace(source, like=train) for source in sources]
        splits = Splits(train, *(source.read(np.arange(len(source))) for source in sources[1:]))
    for split in splits:
        check_examples(split.x, split.y, None if names is None else len(names))
    source = replace(sources[0], workers=given.workers)
    return Examples(splits, names, sum(map(len, sources)), source=source)


def _sizes(given: Given, dataset: Dataset[Any]) -> tuple[int, int, int, int]:
    """Count the examples in each split by fractions, in the last three at most as many as may be held; train has the rest."""
    examples = length_of(dataset)
    most = HELD if given.stream else examples
    if isinstance(dataset, Windows):
        most = min(most, dataset.most_held)
    probe, validation, test = (min(size, most) for size in sizes_of(given.fractions, examples)[1:])
    return examples - probe - validation - test, probe, validation, test
