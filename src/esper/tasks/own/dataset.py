"""Read datasets: a user's, once in full or batch by batch, and windows of tokens. N examples, L positions of a window."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from threading import Timer
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from esper.leyline.config.arguments import is_number
from esper.leyline.data.arrays import as_tensor
from esper.leyline.data.batches import Batch, leaves, map_leaves, named_leaves, shapes
from esper.leyline.data.task import Label, Split, nonfinite
from esper.leyline.data.workers import read_by_workers
from esper.leyline.errors import InputError, RunWarning, UserCodeError, amended, typed_line, warn
from esper.leyline.text import counted, kind_of
from esper.tasks.hosts.factories import GRU, Transformer
from esper.tasks.own.labels import Kind, read_target, read_y

CHUNK = 64
"""Number of examples that are read, and that a worker sends, at a time."""
SLOW = 10.0
"""How long examples may be read before anything is trained, until a warning says so [seconds]."""
LOGITS, LEAST = 2**28, 16
"""Most logits of all positions of a split that networks are measured on, which are held at once, and its fewest windows."""


Example = tuple[Batch, Tensor]
"""The features of one example, a tensor or a mapping of them, and its label or target."""


def read_dataset(dataset: Dataset[Any], workers: int) -> tuple[Batch, Tensor]:
    """Read all features and labels or targets of a map-style Dataset, in this process or in so many workers.

    InputError if the Dataset cannot be used or a worker ends; UserCodeError, with its cause, where the Dataset raises.
    """
    count, name = length_of(dataset), type(dataset).__name__
    read = partial(_pairs, dataset, torch.get_default_dtype())
    chunks = [range(start, min(start + CHUNK, count)) for start in range(0, count, CHUNK)]

    def done(chunks: int) -> str:
        return f"{min(chunks * CHUNK, count)} of {count} examples"

    pairs = read_by_workers(read, chunks, workers, name, done) if workers else map(read, chunks)
    with told_where_slow(name, count):
        return _stacked(range(count), chain.from_iterable(pairs))


@contextmanager
def told_where_slow(name: str, count: int) -> Iterator[None]:
    """Warn once where the block, which reads so many examples of a Dataset before anything is trained, takes long."""

    def tell() -> None:
        warn(
            f"reading {counted(count, 'example')} of the {name} into memory has taken {SLOW:.0f} seconds so far and goes on; "
            "nothing is trained before. If it should not take so long, see what its __getitem__ waits for",
            RunWarning,
        )

    timer = Timer(SLOW, tell)
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


def _pairs(dataset: Dataset[Any], dtype: torch.dtype, indices: Iterable[int]) -> list[Example]:
    return [_pair(dataset, index, dtype) for index in indices]


def _pair(dataset: Dataset[Any], index: int, dtype: torch.dtype) -> Example:
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
    label = as_tensor(target, f"the label or target of example {index}", dtype).contiguous()
    if isinstance(features, Mapping):
        check_names(features, f"the features of example {index}")
        return {
            name: as_tensor(leaf, f"{name!r} of example {index}", dtype).contiguous() for name, leaf in features.items()
        }, label
    return as_tensor(features, f"the features of example {index}", dtype).contiguous(), label


def check_alike(of: str, what: str, given: Any, other: str, wanted: Any) -> None:
    """Raise InputError if what is given `of` some examples has another shape than that of others, which is `wanted`."""
    if given != wanted:
        raise InputError(
            f"{of} has {what} of shape {given} and {other} of shape {wanted}; give every example one shape"
        )


def check_names(features: Mapping[Any, Any], what: str) -> None:
    """Raise InputError if a mapping of tensors is empty, or a name is none that a forward can take."""
    if not features:
        raise InputError(f"{what} is an empty mapping; give at least one tensor")
    odd = [name for name in features if not isinstance(name, str) or not name.isidentifier()]
    if odd:
        raise InputError(
            f"{what} has the key {odd[0]!r}, which no forward can take as a name; give names such as 'image'"
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
        features, y = _stacked(index.tolist(), _pairs(self.dataset, torch.get_default_dtype(), index.tolist()))
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
