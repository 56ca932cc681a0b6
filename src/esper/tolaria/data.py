"""The data of a population: examples resident on the device, and the order in which each row sees them.

E rows, I data sets, N examples of the largest, B batch.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from esper.leyline.errors import InputError
from esper.leyline.keys import Purpose, key, permutations
from esper.leyline.task import Split

Indices = NDArray[np.int64]


class Targets(NamedTuple):
    """What outputs on a split are held against, as in `Examples`."""

    y: Tensor
    size: Tensor
    real: Tensor | None


class Examples(NamedTuple):
    """A split of every row. Rows with fewer examples or narrower inputs than others are padded with 0."""

    x: Tensor  # (E, N, ...)
    y: Tensor  # (E, N) or (E, N, C)
    size: Tensor  # (E, 1) how many examples are real, in the dtype of x
    real: Tensor | None  # (E, N) bool; None when all are

    def targets(self, rows: Tensor) -> Targets:
        """Of some rows, by index (n,)."""
        real = self.real.index_select(0, rows) if self.real is not None else None
        return Targets(self.y.index_select(0, rows), self.size.index_select(0, rows), real)


def stack_splits(splits: Sequence[Split], row: Indices, inputs: tuple[int, ...], device: torch.device) -> Examples:
    """The splits of data sets as the examples of rows; row (E,) names each row's split, inputs the widest input's shape."""
    distinct = {id(split.x): split for split in splits}
    if len(distinct) < len(splits):
        place = {name: index for index, name in enumerate(distinct)}
        row, splits = np.array([place[id(split.x)] for split in splits])[row], list(distinct.values())
    sizes = np.array([len(split.y) for split in splits])
    pooled = _pool(splits, inputs, device)
    if len(splits) == 1:
        x, y = pooled.x[0], pooled.y[0]
        size = torch.full((len(row), 1), len(y), dtype=x.dtype, device=device)
        return Examples(x.expand(len(row), *x.shape), y.expand(len(row), *y.shape), size, None)
    index = torch.from_numpy(row).to(device)
    counts = torch.from_numpy(sizes[row]).to(device)[:, None]
    real = None
    if (sizes < sizes.max()).any():
        real = torch.arange(int(sizes.max()), device=device) < counts
    return Examples(pooled.x.index_select(0, index), pooled.y.index_select(0, index), counts.to(pooled.x.dtype), real)


class SharedBatchIterator:
    """Batches for all rows at once, from train splits that are resident on the device.

    A row's order is a permutation keyed by (seed, instance, episode, epoch), so rows of one instance share it, and no row
    depends on how many others there are. Each epoch gives a row the same number of full batches; the examples that are left
    over differ from epoch to epoch. The position is one counter, `batch`: setting it is all a resume needs.
    """

    def __init__(
        self,
        splits: Sequence[Split],
        row: Indices,
        instance: Indices,
        seed: int,
        batch_size: int,
        inputs: tuple[int, ...],
        device: torch.device,
    ) -> None:
        """row (E,) names each row's split, instance (E,) the key of its order. InputError where a split is under a batch."""
        self.sizes = np.array([len(split.y) for split in splits])[row]
        if self.sizes.min() < batch_size:
            least = int(self.sizes.min())
            raise InputError(
                f"the train split has {least} examples, fewer than data.batch ({batch_size}); "
                f"set data.batch to {least} or less, or bring more data"
            )
        pooled = _pool(splits, inputs, device)
        self.x, self.y = pooled.x.flatten(0, 1), pooled.y.flatten(0, 1)
        self.batch_size = batch_size
        self.batches_per_epoch = self.sizes // batch_size  # (E,)
        self.batch = 0
        self._offset = None
        if len(splits) > 1:
            self._offset = torch.from_numpy(row * pooled.y.shape[1]).to(device)[:, None]
        self._instance, self._seed, self._episode = instance, seed, 0
        self._order = torch.zeros(len(row), int(self.sizes.max()), dtype=torch.int64, device=device)
        self._epoch = np.full(len(row), -1)

    def reset(self, episode: int) -> None:
        """Start the order of an episode."""
        self._episode, self.batch = episode, 0
        self._epoch[:] = -1

    def __next__(self) -> tuple[Tensor, Tensor]:
        """x (E, B, ...), y (E, B) or (E, B, C)."""
        epoch, position = np.divmod(self.batch, self.batches_per_epoch)
        stale = np.flatnonzero(epoch != self._epoch)
        if len(stale):
            self._shuffle(stale, epoch)
        self.batch += 1
        size = self.batch_size
        if (position == position[0]).all():
            index = self._order[:, position[0] * size : (position[0] + 1) * size]
        else:
            place = torch.from_numpy(position[:, None] * size + np.arange(size)).to(
                self._order.device, non_blocking=True
            )
            index = self._order.gather(1, place)
        if self._offset is not None:
            index = index + self._offset
        flat = index.reshape(-1)
        return (
            self.x.index_select(0, flat).view(*index.shape, *self.x.shape[1:]),
            self.y.index_select(0, flat).view(*index.shape, *self.y.shape[1:]),
        )

    def _shuffle(self, rows: Indices, epoch: Indices) -> None:
        """Draw the orders of rows that begin an epoch."""
        keys = key(self._seed, Purpose.ORDER, self._instance[rows], self._episode, epoch[rows])
        drawn = permutations(keys, self.sizes[rows], self._order.device)
        if len(rows) == len(epoch):
            self._order[:, : drawn.shape[1]] = drawn
        else:
            self._order[torch.from_numpy(rows).to(self._order.device), : drawn.shape[1]] = drawn
        self._epoch[rows] = epoch[rows]


def _pool(splits: Sequence[Split], inputs: tuple[int, ...], device: torch.device) -> Split:
    """All data sets as one: x (I, N, *inputs), y (I, N, ...), padded with 0."""
    length = max(len(split.y) for split in splits)
    xs, ys = [], []
    for split in splits:
        missing = [wide - own for wide, own in zip(inputs, split.x.shape[1:], strict=True)]
        after = [pad for extra in reversed(missing) for pad in (0, extra)]
        rows = length - len(split.y)
        xs.append(F.pad(split.x, [*after, 0, rows]))
        ys.append(F.pad(split.y, [0] * 2 * (split.y.dim() - 1) + [0, rows]))
    return Split(torch.stack(xs).to(device), torch.stack(ys).to(device))
