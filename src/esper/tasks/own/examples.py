"""Read a user's examples into four splits: from x and y, a Dataset or tokens, at once or batch by batch.

N examples, L positions of a window of tokens.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Timer
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from esper.leyline.config.arguments import check_integer, check_switch, is_number
from esper.leyline.data.arrays import Frame, as_tensor, column_names, numeric_array, select_columns, to_array
from esper.leyline.data.batches import Batch, check_lengths, leaves, map_leaves, named_leaves, shapes
from esper.leyline.data.task import SENSED, Label, Split, finite, nonfinite, which
from esper.leyline.data.workers import read_by_workers
from esper.leyline.messages import InputError, RunWarning, UserCodeError, amended, counted, kind_of, typed_line, warn
from esper.tasks.hosts import GRU, Transformer
from esper.tasks.own.labels import Kind, check_kind, class_names, concatenate_y, read_target, read_y
from esper.tasks.splits import Splits, check_examples, cut, dealt, sizes_of

HELD = 2048
"""Most examples in the probe, validation and test split of a Dataset that is read batch by batch and split by fractions."""

CHUNK = 64
"""Number of examples that are read, and that a worker sends, at a time."""
SLOW = 10.0
"""How long examples may be read before anything is trained, until a warning says so [seconds]."""
LOGITS, LEAST = 2**28, 16
"""Most logits of all positions of a split that networks are measured on, which are held at once, and its fewest windows."""

Indices = NDArray[np.int64]
Example = tuple[Batch, Tensor]
"""The features of one example, a tensor or a mapping of them, and its label or target."""


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
    source: "DatasetSource | None" = None  # what training examples are read from, batch by batch
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
        columns, count = column_names(x), len(labels)
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
        read, y = read_dataset(x, workers)
        return map_leaves(numbers_as_kept, read), read_y(y)
    if x is None:
        raise InputError("x and y are missing; give examples x and y, a Dataset as x, or splits")
    if y is None:
        raise InputError(f"y is missing and x is {kind_of(x)}; give both, or a Dataset of (features, label) pairs")

    def rows(values: Any) -> int:
        return len(values) if hasattr(values, "__len__") and getattr(values, "ndim", 1) != 0 else 0

    arrays = isinstance(x, tuple) and len(x) > 1 and all(isinstance(each, Tensor | np.ndarray | Frame) for each in x)
    # a tuple of arrays with one entry per example is one tensor
    if arrays and all(rows(each) > 0 for each in x) and not rows(y) == len(x) != rows(x[0]):
        dtype = torch.get_default_dtype()
        features: Batch = tuple(as_tensor(value, f"x[{place}]", dtype) for place, value in enumerate(x))
    else:
        features = _tensors(x, "x")
    return map_leaves(numbers_as_kept, features), read_y(y)


def _tensors(x: Any, what: str) -> Batch:
    """Turn an array, or a mapping of names to arrays, into tensors on the CPU; `what` names it in messages."""
    if not isinstance(x, Mapping):
        return as_tensor(x, what, torch.get_default_dtype())
    if not x:
        raise InputError(f"{what} is an empty mapping; give at least one tensor")
    odd = [name for name in x if not isinstance(name, str) or not name.isidentifier()]
    if odd:
        raise InputError(
            f"{what} has the key {odd[0]!r}, which no forward can take as a name; give names such as 'image'"
        )
    return {name: as_tensor(value, f"{what}[{name!r}]", torch.get_default_dtype()) for name, value in x.items()}


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
    check_kind(given.kind, given.classes)
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


def read_dataset(dataset: Dataset[Any], workers: int) -> tuple[Batch, Tensor]:
    """Read all features and labels or targets of a map-style Dataset, in this process or in so many workers.

    InputError if the Dataset cannot be used or a worker ends; UserCodeError, with its cause, where the Dataset raises.
    """
    count, name = length_of(dataset), type(dataset).__name__
    read = partial(_pairs, dataset)
    chunks = [range(start, min(start + CHUNK, count)) for start in range(0, count, CHUNK)]

    def done(chunks: int) -> str:
        return f"{min(chunks * CHUNK, count)} of {count} examples"

    pairs = read_by_workers(read, chunks, workers, name, done) if workers else map(read, chunks)
    with told_where_slow(name, count):
        return _stacked(range(count), itertools.chain.from_iterable(pairs))


@contextmanager
def told_where_slow(name: str, count: int) -> Iterator[None]:
    """Warn once where the block, which reads so many examples of a Dataset before anything is trained, takes long."""
    sentence = (
        f"reading {counted(count, 'example')} of the {name} into memory has taken {SLOW:.0f} seconds so far and goes on; nothing "
        "is trained before. If it should not take so long, see what its __getitem__ waits for"
    )
    timer = Timer(SLOW, warn, (sentence, RunWarning))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def length_of(dataset: Dataset[Any]) -> int:
    """Return the number of examples of a map-style Dataset. InputError if it is 0 or not known."""
    kind = kind_of(dataset)
    if isinstance(dataset, IterableDataset):
        raise InputError(
            f"x is {kind}, an IterableDataset, whose examples have no index, by which they are split and drawn, and found "
            "again after a resume; read it into tensors x and y, or write it to an indexed file, such as one of numpy.memmap, "
            "and give a Dataset with __len__ and __getitem__"
        )
    try:
        count = len(dataset)  # type: ignore[arg-type]
    except TypeError:
        raise InputError(f"x is {kind} without a length; give it __len__") from None
    if not count:
        raise InputError(f"x is {kind} of length 0; give examples")
    return count


def _stacked(indices: Sequence[int], examples: Iterable[Example]) -> tuple[Batch, Tensor]:
    """Stack examples in one tensor for each leaf and one for the labels or targets. InputError if two differ in shape."""
    features: list[Batch] = []
    targets: list[Tensor] = []
    for index, (x, y) in zip(indices, examples, strict=True):
        features.append(x)
        targets.append(y)
        for what, *pair in (("features", x, features[0]), ("label or target", y, targets[0])):
            given, wanted = (map_leaves(lambda leaf: tuple(leaf.shape), each) for each in pair)
            check_alike(f"example {index}", what, given, f"example {indices[0]}", wanted)
    stacked: Batch = map_leaves(lambda *leaf: torch.stack(leaf), *features)
    return stacked, torch.stack(targets)


def _pairs(dataset: Dataset[Any], indices: Iterable[int]) -> list[Example]:
    return [_pair(dataset, index) for index in indices]


def _pair(dataset: Dataset[Any], index: int) -> Example:
    """Return features and target of one example. UserCodeError if the Dataset raises, InputError if the item is not a pair."""
    try:
        item = dataset[index]
    except Exception as error:
        raise UserCodeError(
            f"example {index} of the {type(dataset).__name__} cannot be read: {typed_line(error)}; correct the Dataset, or leave "
            "the example out with torch.utils.data.Subset"
        ) from error
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise InputError(
            f"example {index} of the Dataset is {kind_of(item)}, not a pair; give pairs of features, an array or a "
            "mapping of names to arrays, and a label or target"
        )
    features, target = item
    if isinstance(target, str):
        raise InputError(
            f"the label of example {index} of the Dataset is the text {target[:40]!r}; give whole numbers from 0 on, and the "
            "names of the classes as classes=[...]"
        )
    label = as_tensor(target, f"the label or target of example {index}", torch.get_default_dtype())
    x = _tensors(features, f"x of example {index}")
    return map_leaves(Tensor.contiguous, x), label.contiguous()


def check_alike(of: str, what: str, given: Any, other: str, wanted: Any) -> None:
    """Raise InputError if what is given `of` some examples has another shape than that of others, which is `wanted`."""
    if given != wanted:
        raise InputError(
            f"{of} has {what} of shape {given} and {other} of shape {wanted}; give every example one shape"
        )


def numbers_as_kept(features: Tensor) -> Tensor:
    """Convert real features to torch's default dtype or float64, to int64, or to bool."""
    if features.dtype in (torch.float64, torch.bool):
        return features
    return features.to(torch.get_default_dtype() if features.is_floating_point() else torch.int64)


def dtype_of_targets(x: Batch) -> torch.dtype:
    """Return the dtype that targets take: that of the first floating-point features, or torch's default dtype."""
    return next((leaf.dtype for leaf in leaves(x) if leaf.is_floating_point()), torch.get_default_dtype())


@dataclass(frozen=True, eq=False)
class DatasetSource:
    """Reads examples of a map-style Dataset by their place in a split; implements `leyline.data.task.Source`."""

    dataset: Dataset[Any]  # of pairs of features and a label or target
    indices: Tensor  # (N,) int64, the example of the Dataset at each place
    kind: Kind
    classes: int | tuple[Label, ...] | None  # of a classification, as in `esper.task`
    # examples in the shapes and dtypes that `read` returns; None returns those of the Dataset
    like: Split | None = None
    # processes that read the batches of a training ahead of it; no part of what the examples are, and not compared in a resume
    workers: int = field(default=0, compare=False)

    @property
    def name(self) -> str:
        """What messages call the Dataset."""
        return type(self.dataset).__name__

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, places: NDArray[np.int64]) -> Split:
        """Return the examples at these places (n,), checked. InputError if one cannot be used, UserCodeError if reading fails."""
        index = self.indices.numpy()[places]
        if isinstance(self.dataset, Windows):
            windows = Split(*self.dataset.stacked(index))
            return windows if self.like is None else self._as_like(*windows, self.like, index)
        features, y = _stacked(index.tolist(), _pairs(self.dataset, index.tolist()))
        x: Batch = map_leaves(numbers_as_kept, features)
        labels = read_y(y)
        # A few rows of labels for positions can look one-hot, which the first examples did not.
        positions = self.classes is not None and self.like is not None and self.like.y.dim() > 1
        with amended(f"a batch of the {self.name} with example {index[0]} cannot be used: "):
            values, names = read_target(labels.reshape(-1) if positions else labels, self.kind, self.classes)
        values = values.reshape(labels.shape) if positions else values
        bad = nonfinite(Split(x, values))
        self._refuse(bad, index, "holds a NaN or infinite number; replace it in the Dataset, or leave the example out")
        if names is not None:
            outside = ((values < 0) | (values >= len(names))).reshape(len(values), -1).any(1)
            self._refuse(
                outside, index, f"has a label that is not from 0 to {len(names) - 1}; correct it, or raise classes"
            )
        y = values.to(torch.int64 if names is not None else dtype_of_targets(x))
        return Split(x, y) if self.like is None else self._as_like(x, y, self.like, index)

    def _refuse(self, bad: Tensor, index: NDArray[np.int64], reason: str) -> None:
        """Raise InputError for the first example that is marked in bad (n,) bool."""
        if bad.any():
            raise InputError(f"example {index[int(bad.nonzero()[0])]} of the {self.name} {reason}")

    def _as_like(self, x: Batch, y: Tensor, like: Split, index: NDArray[np.int64]) -> Split:
        """Convert examples to the dtypes of others. InputError if shapes differ, or fractions would be whole numbers."""
        of = f"example {index[0]} of the {self.name}"
        check_alike(of, "features", shapes(x), "others", shapes(like.x))
        check_alike(of, "y", tuple(y.shape[1:]), "others", tuple(like.y.shape[1:]))
        for (name, leaf), wanted in zip(named_leaves(x).items(), leaves(like.x), strict=True):
            if leaf.is_floating_point() and not wanted.is_floating_point():
                raise InputError(
                    f"{of} has {leaf.dtype} in {name}, and others have {wanted.dtype}; give every example one dtype"
                )
        cast: Batch = map_leaves(lambda leaf, wanted: leaf.to(wanted.dtype), x, like.x)
        return Split(cast, y.to(like.y.dtype))


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Cuts tokens into windows x, y (L,) int64, of which y is x moved on by one token.

    tokens: a stream (N,), whose window k holds the tokens k L to k L + L, or windows (W, L + 1). A memmap is read where a window
    is asked for, and not before.
    """

    def __init__(self, tokens: NDArray[Any], length: int, vocabulary: int) -> None:
        self.tokens, self.length, self.vocabulary = tokens, length, vocabulary

    def __len__(self) -> int:
        return len(self.tokens) if self.tokens.ndim == 2 else max(len(self.tokens) - 1, 0) // self.length

    def stacked(self, index: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Return the windows of these indices (n,): x, y (n, L) int64. InputError if a token is not in the vocabulary."""
        places = index if self.tokens.ndim == 2 else index[:, None] * self.length + np.arange(self.length + 1)
        windows = np.asarray(self.tokens[places]).astype(np.int64)
        outside = (windows < 0) | (windows >= self.vocabulary)
        if outside.any():
            raise InputError(
                f"the tokens hold {windows[outside][0]}, but the vocabulary has {self.vocabulary:,}, numbered from 0; give a "
                "host with a larger vocabulary, and classes to match"
            )
        x = torch.from_numpy(windows)
        return x[:, :-1].contiguous(), x[:, 1:].contiguous()

    @property
    def most_held(self) -> int:
        """Most windows of a split that networks are measured on. A large vocabulary allows fewer."""
        return max(LOGITS // (self.length * self.vocabulary), LEAST)


def is_tokens(value: Any) -> bool:
    """Return whether a value without labels is tokens: bytes, or whole numbers along one or two axes."""
    if isinstance(value, Tensor):
        return value.dim() in (1, 2) and not (
            value.is_floating_point() or value.is_complex() or value.dtype == torch.bool
        )
    if isinstance(value, np.ndarray):
        return value.ndim in (1, 2) and value.dtype.kind in "iu"
    return isinstance(value, bytes | bytearray)


def windows_of(value: Any, of: str, host: Any, length: int | None, classes: Any) -> Windows:
    """Cut tokens into windows. `of` names them in messages; host, length and classes are those of `esper.task`."""
    if isinstance(value, bytes | bytearray):
        tokens = np.frombuffer(value, np.uint8)
    else:
        tokens = value.detach().cpu().numpy() if isinstance(value, Tensor) else value
    known = host if isinstance(host, Transformer | GRU) else None
    vocabulary = known.vocabulary if known is not None and classes is None else classes
    if not is_number(vocabulary, int) or vocabulary < 1:
        raise InputError(
            f"{of} holds tokens, and classes is {str(classes)[:40]!r}; give the size of the vocabulary, as in classes=256, or a "
            "host of esper.transformer or esper.gru"
        )
    if tokens.ndim == 2:
        if length is not None and length != tokens.shape[1] - 1:
            raise InputError(
                f"length is {length}, but the windows of {of} hold {tokens.shape[1]} tokens, of which {tokens.shape[1] - 1} are "
                "labels; leave length out"
            )
        length = tokens.shape[1] - 1
    elif length is None and isinstance(known, Transformer):
        length = known.length
    if length is None or not is_number(length, int) or length < 1:
        raise InputError(
            f"{of} holds tokens, and length is {length!r}; give the number of positions of a window, as in length=64"
        )
    windows = Windows(tokens, length, vocabulary)
    if not len(windows):
        raise InputError(
            f"{of} holds {len(tokens):,} tokens, too few for a window of {length} positions and the token behind it; give more "
            "tokens or a smaller length"
        )
    return windows
