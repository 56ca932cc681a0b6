"""Draw streams of labelled batches whose distribution changes at times that the learner is not told.

N streams, T updates, B examples in a batch, D features, C classes, K contexts. A *context* is a fixed distribution of examples: a
way to permute, turn or invert the pixels of handwritten digits, to rename their classes, or a choice of classes. A *segment* is a
run of updates with one context. All draws are hashes of the key of a stream, so a stream does not depend on the others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.leyline.data import keys
from esper.leyline.data.keys import Purpose
from esper.leyline.messages import InputError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

RANGES: Mapping[str, range] = MappingProxyType(
    {
        "training": range(2**20),
        "validation": range(2**20, 2**20 + 2**16),
        "heldout": range(2**20 + 2**16, 2**20 + 2**17),
    }
)
"""Keys of streams for the choice of settings, for the choice among controllers, and for final figures."""

UPDATES = 1664
BATCH = 32
SHORTEST, LONGEST = 16, 128
"""Bounds of the length of a segment [updates]. The logarithm of the length is uniform."""

SIDE = 8
PIXELS, CLASSES = SIDE * SIDE, 10
TRAINING = 1400
"""Digits of which batches are made. The other 397 measure retention."""
BRIGHTEST = 16


class Change(StrEnum):
    """Says how the contexts of a stream follow each other. A learner is not told which of these a stream is.

    Attributes:
        NOVEL: each segment permutes the pixels in a way of its own
        RECURRING: three to six permutations of the pixels return in random order
        SHARED: three to six of the 16 rotations, flips and inversions return in random order, which share useful features
        HALF: half of the segments return to one of three or four permutations, the others are novel
        LABELS: each segment renames the classes in a way of its own
        CLASSES: each segment has two or three of the ten classes
        DRIFT: one permutation of the pixels fades into the next over each segment, without a sudden change
    """

    NOVEL = "novel"
    RECURRING = "recurring"
    SHARED = "recurring-shared"
    HALF = "half-and-half"
    LABELS = "novel-labels"
    CLASSES = "class-arrival"
    DRIFT = "drift"


class StreamDraw(IntEnum):
    """Names the draws of a stream. The values are part of keys, so their meaning never changes."""

    LENGTH = 0
    COUNT = 1
    CONTEXT = 2
    RETURNS = 3
    PIXELS = 4
    LABELS = 5
    VIEWS = 6
    CLASSES = 7
    EXAMPLE = 8
    MEMBER = 9
    TEST = 10
    DIGITS = 11


class Segment(NamedTuple):
    """Marks updates [start, stop) of one context."""

    start: int
    stop: int
    context: int


class StreamSet(Protocol):
    """Plays N streams of the same length, batch size, features and classes side by side."""

    @property
    def inputs(self) -> int:
        """D."""
        ...

    @property
    def classes(self) -> int:
        """C."""
        ...

    @property
    def updates(self) -> int:
        """T."""
        ...

    @property
    def keys(self) -> Ints:
        """(N,) keys with which initial weights are drawn."""
        ...

    @property
    def segments(self) -> Sequence[Sequence[Segment]]:
        """The segments of each stream, in order."""
        ...

    def batch(self, update: int) -> tuple[Tensor, Tensor]:
        """Return x (N, B, D) float32 and y (N, B) int64."""
        ...

    def test(self, contexts: Ints, count: int) -> tuple[Tensor, Tensor]:
        """Return `count` test examples of one context of each stream: x (N, count, D), y (N, count)."""
        ...


class Digits(NamedTuple):
    """Holds handwritten digits in a keyed order: pixels with mean 0 and standard deviation 1 over all of them, and classes."""

    x: Tensor  # (1797, 64)
    y: Tensor  # (1797,)
    inverted: float  # value of a pixel of intensity 16 + value of one of intensity 0: x becomes inverted - x
    by_class: Ints  # (10, most) training examples of each class, padded with -1
    sizes: Ints  # (10,)


@lru_cache(maxsize=1)
def digits() -> Digits:
    """Read scikit-learn's digits (Alpaydin and Kaynak, UCI 1998)."""
    from sklearn.datasets import load_digits  # a second of imports

    read = load_digits()
    size = np.array([len(read.target)])
    order = keys.permutations(keys.key(Purpose.STREAM, StreamDraw.DIGITS), size, torch.device("cpu"))[0].numpy()
    pixels, labels = read.data[order], read.target[order].astype(np.int64)
    mean, deviation = pixels.mean(), pixels.std()
    members = [np.nonzero(labels[:TRAINING] == label)[0] for label in range(CLASSES)]
    sizes = np.array([len(each) for each in members])
    padded = np.full((CLASSES, sizes.max()), -1)
    for label, each in enumerate(members):
        padded[label, : len(each)] = each
    x = torch.from_numpy(((pixels - mean) / deviation).astype(np.float32))
    return Digits(x, torch.from_numpy(labels), float((BRIGHTEST - 2 * mean) / deviation), padded, sizes)


@dataclass(frozen=True)
class DrawnStreams:
    """Draws streams of handwritten digits from keys.

    Attributes:
        keys (Ints): (N,)
        changes (tuple): (N,) the `Change` of each stream
        updates (int): batches of each stream
        batch_size (int): examples of a batch
        segments (tuple): of each stream, the segments in order
        context (Ints): (T, N) context at every update
        fade (Tensor): (T, N) float32, how far the context has faded into the next one, as an angle from 0 to pi / 2
        pixels (Tensor): (N, K, 64) int64, the pixel that each feature shows
        inverted (Tensor): (N, K) bool
        labels (Tensor): (N, K, 10) int64, the new name of each class
        members (Ints): (N, K, 3) the classes of a context; -1 where there are fewer, all of them -1 where all classes appear
    """

    keys: Ints
    changes: tuple[Change, ...]
    updates: int
    batch_size: int
    segments: tuple[tuple[Segment, ...], ...]
    context: Ints
    fade: Tensor
    pixels: Tensor
    inverted: Tensor
    labels: Tensor
    members: Ints

    inputs = PIXELS
    classes = CLASSES

    def batch(self, update: int) -> tuple[Tensor, Tensor]:
        """Return x (N, B, 64) float32 and y (N, B) int64."""
        data, context = digits(), self.context[update]
        chosen = self._examples(update, context)
        x, y = self._show_in_context(data.x[chosen], data.y[chosen], context)
        fading = torch.nonzero(self.fade[update] > 0)[:, 0]
        if len(fading):
            rows = fading.numpy()
            angle = self.fade[update, fading][:, None, None]
            after, _ = self._show_in_context(data.x[chosen[rows]], data.y[chosen[rows]], context[rows] + 1, rows)
            x[fading] = x[fading] * angle.cos() + after * angle.sin()
        return x, y

    def test(self, contexts: Ints, count: int) -> tuple[Tensor, Tensor]:
        """Return test examples of one context of each stream: x (N, count, 64), y (N, count)."""
        data = digits()
        held = len(data.y) - TRAINING
        drawn = keys.uniform(
            keys.key(Purpose.STREAM, self.keys[:, None], StreamDraw.TEST, contexts[:, None], np.arange(count))
        )
        chosen = TRAINING + (drawn * held).astype(np.int64)
        return self._show_in_context(data.x[chosen], data.y[chosen], contexts)

    def _examples(self, update: int, context: Ints) -> Ints:
        """Draw (N, B) training examples of one batch, uniformly over them, or over classes and then over their examples."""
        data, index = digits(), np.arange(self.batch_size)
        drawn = keys.uniform(keys.key(Purpose.STREAM, self.keys[:, None], StreamDraw.EXAMPLE, update, index))
        chosen = (drawn * TRAINING).astype(np.int64)
        members = self.members[np.arange(len(self.keys)), context]
        some = np.nonzero(members[:, 0] >= 0)[0]
        if len(some):
            which = keys.uniform(keys.key(Purpose.STREAM, self.keys[some][:, None], StreamDraw.MEMBER, update, index))
            count = (members[some] >= 0).sum(1)
            label = np.take_along_axis(members[some], (which * count[:, None]).astype(np.int64), 1)
            chosen[some] = data.by_class[label, (drawn[some] * data.sizes[label]).astype(np.int64)]
        return chosen

    def _show_in_context(self, x: Tensor, y: Tensor, context: Ints, rows: Ints | None = None) -> tuple[Tensor, Tensor]:
        """Show examples (n, B) as the given contexts (n,) of some streams do."""
        n = torch.arange(len(self.keys)) if rows is None else torch.from_numpy(rows)
        c = torch.from_numpy(context)
        x = x.gather(2, self.pixels[n, c][:, None].expand(x.shape))
        x = torch.where(self.inverted[n, c][:, None, None], digits().inverted - x, x)
        return x, self.labels[n, c].gather(1, y)


def draw_streams(
    stream_keys: Sequence[int], changes: Sequence[Change], *, updates: int = UPDATES, batch_size: int = BATCH
) -> DrawnStreams:
    """Draw a stream for each key and change. Raises InputError if there is no stream, or no update for a segment."""
    if not stream_keys or len(stream_keys) != len(changes):
        raise InputError(
            f"{len(stream_keys)} keys and {len(changes)} changes were given; give at least one key, and one change for each"
        )
    for value, name in ((updates, "updates"), (batch_size, "batch_size")):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError(
                f"{name} is {value!r}, so that a stream has no segments; give a whole number of at least 1"
            )
    segments = tuple(_segments(k, change, updates) for k, change in zip(stream_keys, changes, strict=True))
    count = 2 + max(segment.context for each in segments for segment in each)  # drift fades into one context more
    context = np.zeros((updates, len(segments)), np.int64)
    fade = torch.zeros(updates, len(segments))
    for n, (change, own) in enumerate(zip(changes, segments, strict=True)):
        for start, stop, number in own:
            context[start:stop, n] = number
            if change == Change.DRIFT:
                fade[start:stop, n] = torch.linspace(0, np.pi / 2, stop - start)
    row = np.array(stream_keys, np.int64)
    kinds = np.array([str(change) for change in changes])
    own_pixels, turned = _permuted(row, count, PIXELS, StreamDraw.PIXELS), _views(row, count)
    shared, relabelled = kinds == Change.SHARED, kinds == Change.LABELS
    plain = np.isin(kinds, (Change.LABELS, Change.CLASSES))
    pixels = np.where(plain[:, None, None], np.arange(PIXELS), np.where(shared[:, None, None], turned[0], own_pixels))
    labels = np.where(relabelled[:, None, None], _permuted(row, count, CLASSES, StreamDraw.LABELS), np.arange(CLASSES))
    return DrawnStreams(
        row,
        tuple(changes),
        updates,
        batch_size,
        segments,
        context,
        fade,
        torch.from_numpy(pixels),
        torch.from_numpy(turned[1] & shared[:, None]),
        torch.from_numpy(labels),
        np.where((kinds == Change.CLASSES)[:, None, None], _members(row, count), -1),
    )


def _segments(stream: int, change: Change, updates: int) -> tuple[Segment, ...]:
    """Draw the segments of one stream. A context never follows itself."""

    def once(draw: StreamDraw, *index: int) -> float:
        return float(keys.uniform(keys.key(Purpose.STREAM, stream, draw, *index))[0])

    fewest, most = (3, 4) if change == Change.HALF else (3, 6)
    known = fewest + int(once(StreamDraw.COUNT) * (most - fewest + 1))
    found, start, context, novel = list[Segment](), 0, -1, known
    while start < updates:
        index = len(found)
        length = round(SHORTEST * (LONGEST / SHORTEST) ** once(StreamDraw.LENGTH, index))
        returns = change in (Change.RECURRING, Change.SHARED)
        returns |= change == Change.HALF and once(StreamDraw.RETURNS, index) < 0.5
        if returns:
            others = [k for k in range(known) if k != context]
            context = others[int(once(StreamDraw.CONTEXT, index) * len(others))]
        elif change == Change.HALF:
            context, novel = novel, novel + 1
        else:
            context += 1
        found.append(Segment(start, min(start + length, updates), context))
        start += length
    return tuple(found)


def _permuted(stream: Ints, contexts: int, size: int, draw: StreamDraw) -> Ints:
    """Draw a permutation for each stream and context, (N, contexts, size)."""
    each = keys.key(Purpose.STREAM, stream[:, None], draw, np.arange(contexts))
    order = keys.permutations(each.reshape(-1), np.full(each.size, size), torch.device("cpu"))
    return order.numpy().reshape(*each.shape, size)


def _views(stream: Ints, contexts: int) -> tuple[Ints, NDArray[np.bool_]]:
    """Order the 16 ways to turn, flip and invert, for each stream: pixels (N, contexts, 64) and inversions (N, contexts)."""
    grid = np.arange(PIXELS).reshape(SIDE, SIDE)
    turned = [np.rot90(grid, k) for k in range(4)]
    ways = np.stack([way.reshape(-1) for way in (*turned, *(way[:, ::-1] for way in turned))])
    order = keys.permutations(
        keys.key(Purpose.STREAM, stream, StreamDraw.VIEWS), np.full(len(stream), 2 * len(ways)), torch.device("cpu")
    ).numpy()[:, np.arange(contexts) % (2 * len(ways))]
    return ways[order % len(ways)], order >= len(ways)


def _members(stream: Ints, contexts: int) -> Ints:
    """Draw two or three classes for each context, (N, contexts, 3); -1 in the place of a third class that is missing."""
    some = _permuted(stream, contexts, CLASSES, StreamDraw.CLASSES)[:, :, :3]
    two = keys.uniform(keys.key(Purpose.STREAM, stream[:, None], StreamDraw.COUNT, np.arange(contexts))) < 0.5
    some[:, :, 2] = np.where(two, -1, some[:, :, 2])
    return some
