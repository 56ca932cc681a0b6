"""Reading a user's Dataset once and in full, in this process or in worker processes."""

import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from esper.leyline.arrays import as_tensor
from esper.leyline.batches import Batch, map_leaves
from esper.leyline.errors import InputError, UserCodeError, first_line, typed_line

CHUNK = 64
"""Number of examples that a worker sends at a time."""


Example = tuple[Batch, Tensor]
"""The features of one example, a tensor or a mapping of them, and its label or target."""


def read_dataset(dataset: Dataset[Any], workers: int) -> tuple[Batch, Tensor]:
    """Read all features (N, ...) and labels or targets (N, ...) of a map-style Dataset, on the CPU.

    workers: number of worker processes; 0 reads in this process.

    Raises InputError if the Dataset has no length, examples differ in shape, or a worker ends, and UserCodeError, with the
    original error as its cause, where the Dataset raises.
    """
    count = length_of(dataset)
    return _stacked(enumerate(_by_workers(dataset, count, workers)) if workers else _here(dataset, range(count)))


def read_chosen(dataset: Dataset[Any], indices: Sequence[int]) -> tuple[Batch, Tensor]:
    """Read the examples of these indices in this process, as `read_dataset` reads all of them."""
    return _stacked(_here(dataset, indices))


def length_of(dataset: Dataset[Any]) -> int:
    """The number of examples of a map-style Dataset. InputError if it is 0 or not known."""
    name = type(dataset).__name__
    if isinstance(dataset, IterableDataset):
        raise InputError(
            f"x is a {name}, an IterableDataset, whose examples have no index, by which they are split and drawn, and found "
            "again after a resume; read it into tensors x and y, or write it to an indexed file, such as one of numpy.memmap, "
            "and give a Dataset with __len__ and __getitem__"
        )
    try:
        count = len(dataset)  # type: ignore[arg-type]
    except TypeError:
        raise InputError(f"x is a {name} without a length; give it __len__") from None
    if not count:
        raise InputError(f"x is a {name} of length 0; give examples")
    return count


def _here(dataset: Dataset[Any], indices: Sequence[int]) -> Iterator[tuple[int, Example]]:
    """The examples of these indices with their index, read in this process."""
    dtype = torch.get_default_dtype()
    return ((index, _pair(dataset, index, dtype)) for index in indices)


def _stacked(examples: Iterator[tuple[int, Example]]) -> tuple[Batch, Tensor]:
    """Examples in one tensor for each leaf and one for the labels or targets. InputError if two differ in shape."""
    features: list[Batch] = []
    targets: list[Tensor] = []
    first = None
    for index, (x, y) in examples:
        features.append(x)
        targets.append(y)
        first = index if first is None else first
        for what, given, wanted in (("features", x, features[0]), ("label or target", y, targets[0])):
            if _shapes(given) != _shapes(wanted):
                raise InputError(
                    f"example {index} has {what} of shape {_shapes(given)} and example {first} of shape {_shapes(wanted)}; give "
                    "every example one shape"
                )
    stacked: Batch = map_leaves(lambda *leaf: torch.stack(leaf), *features)
    return stacked, torch.stack(targets)


def _shapes(example: Batch) -> Any:
    return map_leaves(lambda leaf: tuple(leaf.shape), example)


def _by_workers(dataset: Dataset[Any], count: int, workers: int) -> Iterator[Example]:
    """Every example in order, read by worker processes. InputError if a worker cannot be started, or ends."""
    chunks = [range(start, min(start + CHUNK, count)) for start in range(0, count, CHUNK)]
    loader = DataLoader(
        _Chunks(dataset, torch.get_default_dtype()),
        batch_size=None,
        sampler=chunks,
        num_workers=workers,
        collate_fn=_identity,
        generator=torch.Generator(),  # seeds the workers without a draw from the caller's random state
    )
    done = 0
    try:
        for chunk in loader:
            if isinstance(chunk, str):
                raise InputError(chunk)
            if isinstance(chunk, _Raised):
                raise UserCodeError(chunk.sentence) from RuntimeError(f"in the worker:\n{chunk.trace}")
            for features, target in chunk:
                yield _unpacked(features), target.unpacked()
            done += len(chunk)
    except (InputError, UserCodeError):
        raise
    except Exception as error:  # a worker ended, or could not be started
        raise InputError(
            f"a worker ended while it read the {type(dataset).__name__}, after {done} of {count} examples: {first_line(error)}; "
            "give workers=0 to see which example it is, or fewer workers where memory ran out"
        ) from error


class _Packed(NamedTuple):
    """A tensor as bytes, which are sent through a pipe. Tensors would need shared memory and open file descriptors."""

    content: NDArray[np.uint8]
    dtype: torch.dtype
    shape: torch.Size

    @classmethod
    def of(cls, tensor: Tensor) -> "_Packed":
        return cls(tensor.reshape(-1).view(torch.uint8).numpy(), tensor.dtype, tensor.shape)

    def unpacked(self) -> Tensor:
        return torch.from_numpy(self.content).view(self.dtype).reshape(self.shape)


def _packed(features: Batch) -> "_Packed | dict[str, _Packed]":
    if isinstance(features, dict):
        return {name: _Packed.of(leaf) for name, leaf in features.items()}
    assert isinstance(features, Tensor), "an example holds one tensor or a mapping"
    return _Packed.of(features)


def _unpacked(features: "_Packed | dict[str, _Packed]") -> Batch:
    if isinstance(features, dict):
        return {name: leaf.unpacked() for name, leaf in features.items()}
    return features.unpacked()


class _Chunks(Dataset[Any]):
    """A Dataset that a worker reads several indices at a time. An item is a list of packed pairs, or an error as data."""

    def __init__(self, dataset: Dataset[Any], dtype: torch.dtype) -> None:
        self.dataset, self.dtype = dataset, dtype

    def __getitem__(
        self, indices: Sequence[int]
    ) -> "list[tuple[_Packed | dict[str, _Packed], _Packed]] | str | _Raised":
        try:
            pairs = [_pair(self.dataset, index, self.dtype) for index in indices]
        except InputError as error:
            return str(error)
        except UserCodeError as error:
            if get_worker_info() is None:
                raise
            return _Raised(str(error), "".join(traceback.format_exception(error.__cause__)))
        return [(_packed(features), _Packed.of(target)) for features, target in pairs]


class _Raised(NamedTuple):
    """An error of the Dataset in a worker, as text, because some exceptions cannot be pickled."""

    sentence: str
    trace: str


def _identity(chunk: Any) -> Any:
    return chunk


def _pair(dataset: Dataset[Any], index: int, dtype: torch.dtype) -> Example:
    """Features and target of one example. UserCodeError if the Dataset raises, InputError if the item is not a pair."""
    try:
        item = dataset[index]
    except Exception as error:
        raise UserCodeError(
            f"example {index} of the {type(dataset).__name__} cannot be read: {typed_line(error)}; correct the Dataset, or leave "
            "the example out with torch.utils.data.Subset"
        ) from error
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise InputError(
            f"example {index} of the Dataset is a {type(item).__name__}, not a pair; give pairs of features, an array or a "
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


def check_names(features: Mapping[Any, Any], what: str) -> None:
    """Raise InputError if a mapping of tensors is empty, or a name is none that a forward can take."""
    if not features:
        raise InputError(f"{what} is an empty mapping; give at least one tensor")
    odd = [name for name in features if not isinstance(name, str) or not name.isidentifier()]
    if odd:
        raise InputError(
            f"{what} has the key {odd[0]!r}, which no forward can take as a name; give names such as 'image'"
        )
