"""Reading a user's Dataset once and in full, in this process or in worker processes."""

import traceback
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from esper.leyline.arrays import as_tensor
from esper.leyline.errors import InputError, UserCodeError, first_line, typed_line

CHUNK = 64
"""Number of examples that a worker sends at a time."""


def read_dataset(dataset: Dataset[Any], workers: int) -> tuple[Tensor, Tensor]:
    """Read all features (N, ...) and labels or targets (N, ...) of a map-style Dataset, on the CPU.

    workers: number of worker processes; 0 reads in this process.

    Raises InputError where the Dataset has no length, examples differ in shape, or a worker ends, and UserCodeError, with the
    original error as its cause, where the Dataset raises.
    """
    name = type(dataset).__name__
    if isinstance(dataset, IterableDataset):
        raise InputError(
            f"x is a {name}, an IterableDataset, whose examples have no index to split by; read it into tensors x and y"
        )
    try:
        count = len(dataset)  # type: ignore[arg-type]
    except TypeError:
        raise InputError(f"x is a {name} without a length; give it __len__") from None
    if not count:
        raise InputError(f"x is a {name} of length 0; give examples")
    features: list[Tensor] = []
    targets: list[Tensor] = []
    dtype = torch.get_default_dtype()
    here = (_pair(dataset, index, dtype) for index in range(count))
    for index, pair in enumerate(_by_workers(dataset, count, workers) if workers else here):
        for values, value, what in zip((features, targets), pair, ("features", "label or target"), strict=True):
            values.append(value)
            if value.shape != values[0].shape:
                raise InputError(
                    f"example {index} has {what} of shape {tuple(value.shape)} and example 0 of shape "
                    f"{tuple(values[0].shape)}; give every example one shape"
                )
    return torch.stack(features), torch.stack(targets)


def _by_workers(dataset: Dataset[Any], count: int, workers: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Every example in order, read by worker processes. InputError where a worker cannot be started, or ends."""
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
                yield features.unpacked(), target.unpacked()
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


class _Chunks(Dataset[Any]):
    """A Dataset that a worker reads several indices at a time. An item is a list of packed pairs, or an error as data."""

    def __init__(self, dataset: Dataset[Any], dtype: torch.dtype) -> None:
        self.dataset, self.dtype = dataset, dtype

    def __getitem__(self, indices: Sequence[int]) -> "list[tuple[_Packed, _Packed]] | str | _Raised":
        try:
            pairs = [_pair(self.dataset, index, self.dtype) for index in indices]
        except InputError as error:
            return str(error)
        except UserCodeError as error:
            if get_worker_info() is None:
                raise
            return _Raised(str(error), "".join(traceback.format_exception(error.__cause__)))
        return [(_Packed.of(features), _Packed.of(target)) for features, target in pairs]


class _Raised(NamedTuple):
    """An error of the Dataset in a worker, as text, because some exceptions cannot be pickled."""

    sentence: str
    trace: str


def _identity(chunk: Any) -> Any:
    return chunk


def _pair(dataset: Dataset[Any], index: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Features and target of one example. UserCodeError where the Dataset raises, InputError where the item is not a pair."""
    try:
        item = dataset[index]
    except Exception as error:
        raise UserCodeError(
            f"example {index} of the {type(dataset).__name__} cannot be read: {typed_line(error)}; correct the Dataset, or leave "
            "the example out with torch.utils.data.Subset"
        ) from error
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise InputError(
            f"example {index} of the Dataset is a {type(item).__name__}, not a pair; "
            "give pairs of features and a label or target"
        )
    features, target = item
    if isinstance(target, str):
        raise InputError(
            f"the label of example {index} of the Dataset is the text {target[:40]!r}; give whole numbers from 0 on, and the "
            "names of the classes as classes=[...]"
        )
    return (
        as_tensor(features, f"the features of example {index}", dtype).contiguous(),
        as_tensor(target, f"the label or target of example {index}", dtype).contiguous(),
    )
