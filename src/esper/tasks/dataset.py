"""A Dataset of one's own, read once and in full, by this process or by workers."""

import traceback
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from esper.leyline.arrays import as_tensor
from esper.leyline.errors import InputError, UserCodeError

CHUNK = 64
"""Examples that a worker reads before it hands them over."""


def read_dataset(dataset: Dataset[Any], workers: int) -> tuple[Tensor, Tensor]:
    """All features (N, ...) and labels or targets (N, ...) of a map-style Dataset, read by so many processes, or 0 by this one.

    InputError where it has no length, an example is of another shape, or a worker ends; UserCodeError where reading an example
    raises, with what it raised as the cause.
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
    for index, pair in enumerate(_by_workers(dataset, count, workers) if workers else _one_by_one(dataset, count)):
        for values, value, what in zip((features, targets), pair, ("features", "label or target"), strict=True):
            values.append(value)
            if value.shape != values[0].shape:
                raise InputError(
                    f"example {index} has {what} of shape {tuple(value.shape)} and example 0 of shape "
                    f"{tuple(values[0].shape)}; give every example one shape"
                )
    return torch.stack(features), torch.stack(targets)


def _one_by_one(dataset: Dataset[Any], count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Every example, in order."""
    for index in range(count):
        yield _pair(dataset, index, torch.get_default_dtype())


def _by_workers(dataset: Dataset[Any], count: int, workers: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The same from processes of their own. InputError where one of them cannot be started, or ends."""
    chunks = [range(start, min(start + CHUNK, count)) for start in range(0, count, CHUNK)]
    loader = DataLoader(
        _Chunks(dataset, torch.get_default_dtype()),
        batch_size=None,
        sampler=chunks,
        num_workers=workers,
        collate_fn=_as_it_is,
        generator=torch.Generator(),  # which seeds the workers, and leaves the caller's random state as it was
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
    except Exception as error:  # a worker that ends, or that cannot be started: its first line says which
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"a worker ended while it read the {type(dataset).__name__}, {done} of {count} examples being there: {reason}; "
            "give workers=0 to see which example it is, or fewer workers where memory ran out"
        ) from error


class _Packed(NamedTuple):
    """A tensor as bytes, which go through a pipe: no shared memory can run out, and no file descriptor stays open."""

    content: NDArray[np.uint8]
    dtype: torch.dtype
    shape: torch.Size

    @classmethod
    def of(cls, tensor: Tensor) -> "_Packed":
        return cls(tensor.reshape(-1).view(torch.uint8).numpy(), tensor.dtype, tensor.shape)

    def unpacked(self) -> Tensor:
        return torch.from_numpy(self.content).view(self.dtype).reshape(self.shape)


class _Chunks(Dataset[Any]):
    """A Dataset read by several indices at once, in a worker: packed pairs, or the sentence that says what is wrong."""

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
    """What a Dataset raised in a worker, whose exceptions may not be copied to another process."""

    sentence: str
    trace: str


def _as_it_is(chunk: Any) -> Any:
    return chunk


def _pair(dataset: Dataset[Any], index: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Features and target of one example. UserCodeError where the Dataset raises, InputError where it gives something else."""
    try:
        item = dataset[index]
    except Exception as error:  # whatever a person's Dataset raises, its first line says why
        reason = (str(error).splitlines() or [""])[0]
        raise UserCodeError(
            f"example {index} of the {type(dataset).__name__} cannot be read: {type(error).__name__}"
            f"{f': {reason}' if reason else ''}; mend it, or leave it out with torch.utils.data.Subset"
        ) from error
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise InputError(
            f"example {index} of the Dataset is no pair but a {type(item).__name__}; "
            "give pairs of features and a label or target"
        )
    features, target = item
    if isinstance(target, str):
        raise InputError(
            f"the label of example {index} of the Dataset is the text {target[:40]!r}; give whole numbers from 0 on, and their "
            "names by classes=[...]"
        )
    return (
        as_tensor(features, f"the features of example {index}", dtype).contiguous(),
        as_tensor(target, f"the label or target of example {index}", dtype).contiguous(),
    )
