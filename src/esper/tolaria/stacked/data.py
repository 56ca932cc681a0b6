"""Hold the data of a population: examples on the device, and the order in which each row sees them.

E rows, n of them in a part, I data sets, N examples of the largest, B batch. Images (C, H, W) are stored with their
channels last in memory, and as bytes if they were given as bytes.
"""

import sys
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from esper.leyline.data.batches import Batch, Shape, Shapes, cast, leaves, map_leaves, picked
from esper.leyline.data.keys import Purpose, key, mix, permutations, permuted
from esper.leyline.data.task import Pixels, Scaling, Source, Split, nonfinite, one_tensor
from esper.leyline.messages import InputError, counted
from esper.tolaria.stacked.reading import BatchReader

Indices = NDArray[np.int64]

AHEAD = 16
"""Batches for which the orders of a row are drawn at once where they fit several epochs: hashing and sorting many short
orders together takes a fraction of the time of one order after another."""
LISTED = 2**16
"""Most examples whose order of an epoch is drawn as a whole, which takes 8 bytes for each example and row."""


class Format(NamedTuple):
    """Says how examples are held on a device, and how hosts read them."""

    inputs: Shapes  # the shape of the widest input
    device: torch.device
    dtype: torch.dtype = torch.float32  # of the hosts, to which floating-point features and targets are cast
    pixels: Pixels | None = None
    scaling: Scaling | None = None  # of features, which are scaled once, here


class RowExamples(NamedTuple):
    """Holds a split of every row. Rows with fewer examples or narrower inputs than others are padded with 0."""

    x: Batch  # leaves (E, N, ...)
    y: Tensor  # (E, N, ...)
    size: Tensor  # (E, 1) number of real examples, floating point
    real: Tensor | None  # (E, N) bool; None if all examples are real
    pixels: Pixels | None = None

    def targets(self, rows: Tensor) -> "RowExamples":
        """Return the targets of some rows, by index (n,), without their inputs."""
        real = self.real.index_select(0, rows) if self.real is not None else None
        return RowExamples((), self.y.index_select(0, rows), self.size.index_select(0, rows), real)

    def read(self, piece: slice) -> Batch:
        """Return some examples of every row as hosts read them: leaves (E, piece, ...); computed once if all rows share them."""
        if not isinstance(self.x, Tensor):
            return picked(self.x, (slice(None), piece))
        shared = self.x.stride(0) == 0
        x = self.x[:1, piece] if shared else self.x[:, piece]
        return (x if self.pixels is None else self.pixels.read(x, self.size.dtype)).expand(len(self.x), *x.shape[1:])


def stack_splits(splits: Sequence[Split], row: Indices, format: Format, length: int | None = None) -> RowExamples:
    """Stack the splits of data sets as the examples of rows.

    row (E,) names the split of each row. With `length`, every row is padded to that many examples and `real` is always given, so
    that the numbers of a row do not depend on the other splits. Without it, rows are as long as the longest split. Raises
    InputError if a split is longer than `length`.
    """
    splits, places = distinct_splits(splits)
    row = places[row]
    sizes = np.array([len(split.y) for split in splits])
    longest = int(sizes.max())
    if length is not None and longest > length:
        raise InputError(
            f"a split has {longest:,} examples, more than the {length:,} that every row of the mixture has room for; "
            "give it fewer, or raise the lengths of the mixture's room"
        )
    device, dtype, pixels = format.device, format.dtype, format.pixels
    pooled = _pool(splits, length or longest, format)
    if len(splits) == 1 and length is None:
        x, y = map_leaves(lambda leaf: leaf[0].expand(len(row), *leaf.shape[1:]), pooled.x), pooled.y[0]
        size = torch.full((len(row), 1), len(y), dtype=dtype, device=device)
        return RowExamples(x, y.expand(len(row), *y.shape), size, None, pixels)
    index = torch.from_numpy(row).to(device)
    counts = torch.from_numpy(sizes[row]).to(device)[:, None]
    real = None
    if length is not None or (sizes < longest).any():
        real = torch.arange(length or longest, device=device) < counts
    x = map_leaves(lambda leaf: leaf.index_select(0, index), pooled.x)
    return RowExamples(x, pooled.y.index_select(0, index), counts.to(dtype), real, pixels)


class Orders:
    """Draws the order in which each row sees its examples, batch by batch.

    The order is a permutation keyed by (seed, instance, episode, epoch). Rows of one instance share it, and it does not
    depend on the number of rows. Each epoch gives a row the same number of full batches; the examples that are left over differ
    from epoch to epoch. More than `LISTED` examples have an order that is computed for each batch and not held.
    """

    def __init__(
        self,
        sizes: Indices,
        instance: Indices,
        seed: int,
        batch_size: int,
        place: torch.device,
        offset: Tensor | None = None,
        episode: int = 0,
    ) -> None:
        """sizes (E,): examples of each row. instance (E,): key of its order. place: the device that receives the orders.

        offset (E, 1, 1): what `at` adds to the examples of each row; None for nothing.
        """
        self.sizes, self._instance, self._seed, self._batch_size = sizes, instance, seed, batch_size
        self._offset, self._episode = offset, episode
        self.batches_per_epoch = sizes // batch_size  # (E,)
        epochs = np.maximum(AHEAD // self.batches_per_epoch, 1)
        # (E,) batches whose order is drawn at once: a period
        self._batches = np.where(sizes > LISTED, AHEAD, epochs * self.batches_per_epoch)
        self._alike = bool((self._batches == self._batches[0]).all())
        # The batches of a period, row by row.
        self._order = torch.zeros(len(sizes), int(self._batches.max()), batch_size, dtype=torch.int64, device=place)
        self._place = self._order.device
        self._first = np.arange(len(sizes)) * self._order.shape[1]  # (E,) the index of the first batch of each row
        self._period = np.full(len(sizes), -1)
        self._known = range(0)  # the batches of which every row has its order

    def at(self, batch: int) -> Tensor:
        """Return the examples (E, B) of every row in a batch; they are overwritten when the next period is drawn."""
        if batch not in self._known:
            period = batch // self._batches
            stale = np.flatnonzero(period != self._period)
            for size in np.unique(self.sizes[stale]).tolist():  # the orders of one size at once
                own = stale[self.sizes[stale] == size]
                length = int(self._batches[own[0]])
                orders = self.of(own, period[own, None] * length + np.arange(length))
                at = torch.from_numpy(own).to(self._place, non_blocking=True)
                self._order[at, :length] = orders if self._offset is None else orders + self._offset[at]
            self._period[stale] = period[stale]
            self._known = range(batch, int(((period + 1) * self._batches).min()))
        if self._alike:
            return self._order[:, batch % int(self._batches[0])]
        place = torch.from_numpy(self._first + batch % self._batches).to(self._place, non_blocking=True)
        return self._order.flatten(0, 1).index_select(0, place)

    def of(self, rows: Indices, batches: Indices) -> Tensor:
        """Return the examples (n, k, B) of some rows (n,) of one size, in batches (n, k) of their own."""
        size, per_epoch = int(self.sizes[rows[0]]), int(self.batches_per_epoch[rows[0]])
        epoch, position = np.divmod(batches, per_epoch)
        if size > LISTED:
            keys = self._keys(rows, epoch)[:, :, None]
            place = position[:, :, None] * self._batch_size + np.arange(self._batch_size)
            return torch.from_numpy(permuted(keys, size, place)).to(self._place, non_blocking=True)
        first, last = int(epoch.min()), int(epoch.max())
        keys = self._keys(rows, np.arange(first, last + 1)[None]).reshape(-1)
        drawn = permutations(keys, np.full(len(keys), size), self._place)[:, : per_epoch * self._batch_size]
        orders = drawn.reshape(len(rows), -1, self._batch_size)  # of whole epochs
        index = torch.from_numpy(batches - first * per_epoch).to(self._place, non_blocking=True)
        return orders.gather(1, index[:, :, None].expand(-1, -1, self._batch_size))

    def _keys(self, rows: Indices, epoch: Indices) -> Indices:
        return key(self._seed, Purpose.ORDER, self._instance[rows, None], self._episode, epoch)


class SharedBatchIterator:
    """Yields batches for all rows at once, from train splits on the device, or from a source of which each batch is read.

    `Orders` says which examples a row has in a batch. The position is one counter, `batch`; a resume only sets this counter.
    """

    x: Batch  # leaves (I N, ...) of all data sets
    y: Tensor  # (I N, ...)

    def __init__(
        self,
        splits: Sequence[Split],
        row: Indices,
        instance: Indices,
        seed: int,
        batch_size: int,
        format: Format,
        weights: Sequence[Tensor] | None = None,
        source: Source | None = None,
        read_ahead: int = 0,
        batches: int = sys.maxsize,
    ) -> None:
        """row (E,) names the split of each row, instance (E,) the key of its order.

        With a `source`, each batch is read from it, up to `read_ahead` batches before it is needed and none after the `batches`
        of an episode, and the one split holds only its first examples. Raises InputError if a split has fewer examples than a
        batch.
        """
        splits, places = distinct_splits(splits)
        row = places[row]
        assert source is None or len(splits) == 1, "rows whose examples are read by batch share their train split"
        sizes = np.array([len(split.y) if source is None else len(source) for split in splits])[row]
        if sizes.min() < batch_size:
            least = int(sizes.min())
            raise InputError(
                f"the train split has {counted(least, 'example')}, fewer than data.batch_size ({batch_size}); "
                f"set data.batch_size to {least} or less, or bring more data"
            )
        self._format, device = format, format.device
        longest = max(len(split.y) for split in splits)
        self.x, self.y = _flat(_pool(splits, longest, format))
        self._types, self._type = map_leaves(lambda leaf: leaf.dtype, self.x), self.y.dtype
        self.reader = None
        if source is None:
            # Whole numbers of 64 bits, such as tokens, are held in 32 bits where they fit; batches have 64.
            self.x, self.y = map_leaves(_narrowed, self.x), _narrowed(self.y)
        else:
            self.reader = BatchReader(
                source,
                partial(_laid_out, format._replace(device=torch.device("cpu"))),
                ahead=read_ahead,
                batches=batches,
                pinned=device.type == "cuda",
            )
        self._weights = None
        if weights is not None:
            assert source is None, "examples that are read by batch have no weights"
            padded = torch.cat([F.pad(each, (0, longest - len(each))) for each in weights])
            self._weights = padded.to(device, format.dtype)
        self.pixels = format.pixels
        if self.pixels is not None:
            self._canvas = torch.tensor(self.pixels.mean).round().to(torch.uint8).to(device)  # (C,) the border
        self._set, self._sets = row, len(splits)
        offset = torch.from_numpy(row * longest).to(device)[:, None, None] if len(splits) > 1 else None
        self._instance, self._seed = instance, seed
        self.batch_size = batch_size
        # The order of a source is on the CPU, where the examples of a batch are read.
        place = device if source is None else torch.device("cpu")
        self._orders = partial(Orders, sizes, instance, seed, batch_size, place, offset)
        self._offset = offset
        self.reset(0)

    def reset(self, episode: int) -> None:
        if self.reader is not None:
            self.reader.forget()
        self._episode, self.batch = episode, 0
        self.orders = self._orders(episode=episode)

    def close(self) -> None:
        """End the thread and the workers that read; no batch can be taken any more."""
        if self.reader is not None:
            self.reader.close()

    def __next__(self) -> tuple[Batch, Tensor]:
        """Return the next batch of every row: leaves x (E, B, ...), y (E, B, ...)."""
        self.advance()
        return self.of(slice(0, len(self._set)))

    def advance(self) -> None:
        """Go on to the next batch, which `of` then returns."""
        if self.reader is None:
            self._index = self.orders.at(self.batch)
        else:  # the examples in memory become those of this batch
            self.x, self.y, self._index = (
                map_leaves(self._sent, each) for each in self.reader.take(self.batch, self.orders.at)
            )
        if self.pixels is not None and self.pixels.varies:
            keys = key(self._seed, Purpose.AUGMENT, self._instance, self._episode, self.batch)
            self._drawn = draws(keys, self.batch_size, self._format.device)
        self.batch += 1

    def _sent(self, read: Tensor) -> Tensor:
        """Return what was read, on the device; the copy does not block if its memory is pinned."""
        return read.to(self._format.device, non_blocking=True)

    def of(self, part: slice) -> tuple[Batch, Tensor]:
        """Return the present batch of some rows: leaves x (n, B, ...), y (n, B, ...)."""
        index = self._index[part]
        flat = index.reshape(-1)
        y = self.y.index_select(0, flat).view(*index.shape, *self.y.shape[1:]).to(self._type)
        if not isinstance(self.x, Tensor) or self.x.dim() != 4:
            x = map_leaves(lambda leaf: _taken(leaf, flat).unflatten(0, index.shape), self.x)
            return map_leaves(Tensor.to, x, self._types), y
        images = self.x.movedim(1, -1).index_select(0, flat)  # (n B, H, W, C), the order in memory
        if self.pixels is not None and self.pixels.varies:
            images = varied(images, self._drawn[part].reshape(-1), self.pixels, self._canvas)
        x = images.unflatten(0, index.shape).movedim(-1, 2)
        return x if self.pixels is None else self.pixels.read(x, self._format.dtype), y

    def weights_of(self, part: slice) -> Tensor | None:
        """Return (n, B) weights of the examples of the present batch of some rows; None if all have the same weight."""
        if self._weights is None:
            return None
        index = self._index[part]
        return self._weights.index_select(0, index.reshape(-1)).view(index.shape)

    def finite(self) -> Tensor:
        """Return (E,) bool, on the device: whether all resident data of each row are finite. Those of a source always are."""
        sound = torch.ones(self._sets, dtype=torch.bool, device=self._format.device)
        for resident in (*leaves(self.x), self.y):
            if self.reader is None and resident.is_floating_point():
                sound &= resident.reshape(self._sets, -1).isfinite().all(1)
        return sound.index_select(0, torch.from_numpy(self._set).to(sound.device, non_blocking=True))

    def nonfinite(self, rows: Indices, batches: int) -> list[tuple[int, Indices]]:
        """Return the rows (n,) whose last `batches` batches held examples that are not finite, and the indices of these examples.

        Resident data were finite when they were loaded, and a source is checked batch by batch. This method reads the
        device, and is called only for rows that failed.
        """
        if self.reader is not None:
            return []
        found = []
        numbers = np.arange(max(self.batch - batches, 0), self.batch)
        for row in rows.tolist() if len(numbers) else ():
            shown = self.orders.of(np.array([row]), numbers[None]).unique()
            index = shown if self._offset is None else shown + self._offset[row].view(())
            there: Batch = map_leaves(lambda leaf, index=index: leaf.index_select(0, index), self.x)
            bad = shown[nonfinite(Split(there, self.y.index_select(0, index)))]
            if len(bad):
                found.append((row, bad.cpu().numpy()))
        return found


def draws(keys: Indices, count: int, device: torch.device) -> Tensor:
    """Map (n,) keys -> (n, count) int64 draws: hashes of (key, index), computed on the device without copies to the host."""
    return mix(torch.from_numpy(keys).to(device, non_blocking=True)[:, None] ^ mix(torch.arange(count, device=device)))


def varied(images: Tensor, drawn: Tensor, pixels: Pixels, around: Tensor) -> Tensor:
    """Shift and mirror images (B, H, W, C) uint8 as a draw (B,) says, with `around` (C,) as the border.

    Bits 32 to 42 of a draw give the shift of the rows, 43 to 53 that of the columns, and 54 the mirroring, counted from 0.
    """
    count, height, width, channels = images.shape
    pad, places = pixels.pad, 2 * pixels.pad + 1
    canvas = around.expand(count, height + 2 * pad, width + 2 * pad, channels).contiguous()
    canvas[:, pad : pad + height, pad : pad + width] = images
    down, right = ((drawn >> bits & 0x7FF) % places for bits in (32, 43))
    row = torch.arange(height, device=images.device) + down[:, None]  # (B, H)
    column = torch.arange(width, device=images.device).expand(count, width)
    if pixels.flip:
        column = torch.where((drawn >> 54 & 1).bool()[:, None], column.flip(1), column)
    column = column + right[:, None]  # (B, W)
    image = torch.arange(count, device=images.device)[:, None, None] * canvas[0, ..., 0].numel()
    place = image + row[:, :, None] * canvas.shape[2] + column[:, None, :]
    return canvas.view(-1, channels).index_select(0, place.view(-1)).view(images.shape)


def distinct_splits(splits: Sequence[Split]) -> tuple[list[Split], Indices]:
    """Return the splits without repeats of the same tensors, and the place of each split among them."""
    distinct = {(id(split.x), id(split.y)): split for split in splits}
    place = {name: index for index, name in enumerate(distinct)}
    return list(distinct.values()), np.array([place[id(split.x), id(split.y)] for split in splits])


def _pool(splits: Sequence[Split], length: int, format: Format) -> Split:
    """Stack all data sets: leaves x (I, N, *shape), scaled, and y (I, N, ...) for a length N, padded with 0."""
    inputs, device, dtype, _, scaling = format
    xs, ys = [], []
    for split in splits:
        read = split.x if scaling is None else scaling.read(one_tensor(split.x, "scaling"))
        rows = length - len(split.y)

        def laid_out(x: Tensor, shape: Shape, rows: int = rows) -> Tensor:
            missing = [wide - own for wide, own in zip(shape, x.shape[1:], strict=True)]
            x = F.pad(x, [*(pad for extra in reversed(missing) for pad in (0, extra)), 0, rows])
            return x.movedim(1, -1).contiguous() if x.dim() == 4 else x  # the channels of images last

        xs.append(map_leaves(laid_out, cast(read, dtype), inputs))
        y = split.y.to(dtype) if split.y.is_floating_point() else split.y
        ys.append(F.pad(y, [0] * 2 * (y.dim() - 1) + [0, rows]))

    def stacked(*leaf: Tensor) -> Tensor:
        """Return (I, N, ...) with the axes of its shape; in memory the channels of images stay last."""
        x = torch.stack(leaf).to(device)
        return x.movedim(-1, 2) if x.dim() == 5 else x

    return Split(map_leaves(stacked, *xs), torch.stack(ys).to(device))


def _laid_out(format: Format, split: Split) -> Split:
    """Return examples that were read (n, ...) as the device receives them. Workers call it, so it can be pickled."""
    return _flat(_pool([split], len(split.y), format))


def _flat(pooled: Split) -> Split:
    """Return (I, N, ...) -> (I N, ...)."""
    return Split(map_leaves(lambda leaf: leaf.flatten(0, 1), pooled.x), pooled.y.flatten(0, 1))


def _narrowed(x: Tensor) -> Tensor:
    """Return int64 values as int32 if all fit, and anything else as it is."""
    if x.dtype != torch.int64 or not x.numel():
        return x
    least, most = x.aminmax()
    limits = torch.iinfo(torch.int32)
    return x.to(torch.int32) if limits.min <= int(least) and int(most) <= limits.max else x


def _taken(x: Tensor, index: Tensor) -> Tensor:
    """Select examples of a resident leaf (I N, ...) without changing the order of images in memory."""
    return x.movedim(1, -1).index_select(0, index).movedim(-1, 1) if x.dim() == 4 else x.index_select(0, index)
