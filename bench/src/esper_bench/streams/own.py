"""Read streams of a person's own data: examples in order of time, each of a known context. N streams, n examples.

The contexts are used to cut the batches and to measure retention; the learners are not told of them.
"""

import itertools
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.leyline.config.arguments import to_path
from esper.leyline.config.input import show
from esper.leyline.data import keys
from esper.leyline.data.keys import Purpose
from esper.leyline.messages import InputError
from esper_bench.streams.data import BATCH, Ints, Segment, StreamDraw
from esper_bench.streams.play import SUPPORT

DATA = "data"
"""What stands in a record in place of a change."""
HELD = 5
"""Of the examples of a context every fifth one is held back to measure retention."""
_FORM = "give features (n, ...), labels (n,), and contexts (n,) or the lengths of segments"


@dataclass(frozen=True)
class OwnStreams:
    """Plays the same examples for N networks, whose initial weights differ.

    Attributes:
        keys (Ints): (N,) keys of the initial weights
        updates (int): batches of the stream
        segments (tuple): of each stream, the segments in order; the same for all
        x (Tensor): (n, D) float32 features, with mean 0 and standard deviation 1 over all of them
        y (Tensor): (n,) int64 classes
        order (Ints): (T, B) the examples of each batch
        held (Sequence): for each context, the examples that are held back
        classes (int): C
    """

    keys: Ints
    updates: int
    segments: tuple[tuple[Segment, ...], ...]
    x: Tensor
    y: Tensor
    order: Ints
    held: Sequence[Ints]
    classes: int

    @property
    def inputs(self) -> int:
        """D."""
        return self.x.shape[1]

    @property
    def changes(self) -> tuple[str, ...]:
        """(N,) the word DATA."""
        return (DATA,) * len(self.keys)

    def batch(self, update: int) -> tuple[Tensor, Tensor]:
        """Return x (N, B, D) float32 and y (N, B) int64."""
        own, count = torch.from_numpy(self.order[update]), len(self.keys)
        return self.x[own].repeat(count, 1, 1), self.y[own].repeat(count, 1)

    def test(self, contexts: Ints, count: int) -> tuple[Tensor, Tensor]:
        """Return examples of one context of each stream that no batch has: x (N, count, D), y (N, count).

        They are drawn with replacement. The first 32 come from one half of them and the others from the other half.
        """
        draws = keys.uniform(
            keys.key(Purpose.STREAM, self.keys[:, None], StreamDraw.TEST, contexts[:, None], np.arange(count))
        )
        chosen = np.empty((len(contexts), count), np.int64)
        for row, context in enumerate(contexts.tolist()):
            halves = self.held[context][::2], self.held[context][1::2]
            for own, drawn in zip(halves, (slice(0, SUPPORT), slice(SUPPORT, count)), strict=True):
                chosen[row, drawn] = own[(draws[row, drawn] * len(own)).astype(np.int64)]
        index = torch.from_numpy(chosen)
        return self.x[index], self.y[index]


def own_streams(
    data: str | PathLike[str] | Mapping[str, Any], stream_keys: Sequence[int], *, updates: int | None = None
) -> OwnStreams:
    """Read the streams of a .npz file, or of arrays by name: features, labels, and contexts or segments.

    features (n, ...) are numbers, and labels (n,) of any kind. So are contexts (n,), whose runs of equal ones are the segments;
    segments (S,) are lengths instead, each of a context of its own. `updates` cuts the stream. Raises InputError if an array
    is missing or has another shape, or if a segment is too short for a batch.
    """
    arrays = dict(data) if isinstance(data, Mapping) else _read(data)
    x, labels = _features(arrays), _array(arrays, "labels")
    if labels.shape != (len(x),):
        raise InputError(f"labels have the shape {labels.shape}, but there are {len(x)} features; {_FORM}")
    names, y = np.unique(labels, return_inverse=True)
    if len(names) < 2:
        raise InputError(f"all labels are {show(names[0].item())}; give at least two classes")
    runs = _runs(arrays, len(x))
    order, segments, held = list[Ints](), list[Segment](), dict[int, list[Ints]]()
    for number, (start, stop, context) in enumerate(runs):
        every = np.arange(start, stop)
        kept = every[every % HELD != HELD - 1]
        batches = len(kept) // BATCH
        if not batches:
            raise InputError(
                f"segment {number} has {stop - start} examples; give at least {BATCH * HELD // (HELD - 1)}"
            )
        segments.append(Segment(len(order), len(order) + batches, context))
        order.extend(kept[: batches * BATCH].reshape(batches, BATCH))
        held.setdefault(context, []).append(every[every % HELD == HELD - 1])
    length = len(order) if updates is None else updates
    if length > len(order):
        raise InputError(
            f"updates is {length}, but the data have {len(order)} batches of {BATCH}; give at most that many"
        )
    cut = tuple(Segment(start, min(stop, length), context) for start, stop, context in segments if start < length)
    return OwnStreams(
        np.array(stream_keys, np.int64),
        length,
        (cut,) * len(stream_keys),
        torch.from_numpy(((x - x.mean()) / x.std()).astype(np.float32)),
        torch.from_numpy(y.astype(np.int64)),
        np.stack(order[:length]),
        [np.concatenate(held[context]) for context in range(len(held))],
        len(names),
    )


def _read(path: str | PathLike[str]) -> dict[str, Any]:
    file = to_path(path, "data")
    try:
        arrays = np.load(file, allow_pickle=False)
        if not isinstance(arrays, np.lib.npyio.NpzFile):
            raise InputError(f"{file} is a single array, not a .npz file; {_FORM}")
        with arrays:
            return dict(arrays)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        if isinstance(error, InputError):
            raise
        said = error.strerror or str(error) if isinstance(error, OSError) else "it is no .npz file of plain arrays"
        raise InputError(f"{file} cannot be read: {said}; {_FORM}") from None


def _array(arrays: Mapping[str, Any], name: str) -> NDArray[Any]:
    if name not in arrays:
        raise InputError(f"the data have no {name}; {_FORM}")
    found = np.asarray(arrays[name])
    if found.dtype == object:
        raise InputError(f"{name} are Python objects or rows of different lengths; {_FORM}")
    if name in ("labels", "contexts") and found.dtype.kind in "fc" and np.isnan(found).any():
        raise InputError(f"{name} hold nan; give each example one of the {name}, or leave it out")
    return found


def _features(arrays: Mapping[str, Any]) -> NDArray[np.float64]:
    """Check the features, and return them as (n, D)."""
    x = _array(arrays, "features")
    if x.dtype.kind not in "fiub" or x.ndim < 2 or not x.size:
        raise InputError(f"features have the shape {x.shape} and the dtype {x.dtype}; give numbers (n, ...)")
    wide = x.reshape(len(x), -1).astype(np.float64)
    if not np.isfinite(wide).all():
        raise InputError("features hold nan or infinite numbers; give finite ones")
    if np.abs(wide).max() > np.finfo(np.float32).max:
        raise InputError("features hold numbers beyond the range of float32; give them on a smaller scale")
    if wide.std() == 0:
        raise InputError("all features are equal; give features that vary")
    return wide


def _runs(arrays: Mapping[str, Any], count: int) -> list[tuple[int, int, int]]:
    """Return the segments as examples [start, stop) and the number of a context. InputError if there are none."""
    if ("contexts" in arrays) == ("segments" in arrays):
        which = "both contexts and segments" if "contexts" in arrays else "no segments and no contexts"
        raise InputError(f"the data have {which}; {_FORM}")
    if "segments" in arrays:
        lengths = _array(arrays, "segments")
        if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or (lengths < 1).any() or lengths.sum() != count:
            raise InputError(
                f"segments are {show(lengths.tolist())}; give lengths of at least 1 that add up to {count}"
            )
        ends = np.cumsum(lengths)
        return [
            (int(stop - own), int(stop), number) for number, (stop, own) in enumerate(zip(ends, lengths, strict=True))
        ]
    contexts = _array(arrays, "contexts")
    if contexts.shape != (count,):
        raise InputError(f"contexts have the shape {contexts.shape}, but there are {count} features; {_FORM}")
    number = np.unique(contexts, return_inverse=True)[1]
    starts = [0, *(np.nonzero(np.diff(number))[0] + 1).tolist(), count]
    return [(start, stop, int(number[start])) for start, stop in itertools.pairwise(starts)]
