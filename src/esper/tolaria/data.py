"""The data feed: every environment sees the whole train split, in an order of its own. E rows, N examples, B batch."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.leyline.errors import InputError
from esper.leyline.keys import Purpose, key, permutations
from esper.leyline.task import Split


class SharedBatchIterator:
    """Batches for all rows at once, from a train split that is resident on the device.

    A row's order is a permutation keyed by (seed, instance, episode, epoch), so rows of one instance share it, and no row
    depends on how many others there are. Each epoch gives every row the same number of full batches; the examples that
    are left over differ from epoch to epoch. The position is one counter, `batch`: setting it is all a resume needs.
    """

    def __init__(
        self, split: Split, instance: NDArray[np.int64], seed: int, batch_size: int, device: torch.device
    ) -> None:
        """instance (E,) names each row's instance. InputError where the split is smaller than a batch."""
        examples = len(split.y)
        if examples < batch_size:
            raise InputError(
                f"the train split has {examples} examples, fewer than data.batch ({batch_size}); "
                f"set data.batch to {examples} or less, or bring more data"
            )
        self.x, self.y = split.x.to(device), split.y.to(device)
        self.batch_size = batch_size
        self.batches_per_epoch = examples // batch_size
        self.batch = 0
        self._instance, self._seed, self._episode = instance, seed, 0
        self._order: Tensor | None = None
        self._epoch = -1

    def reset(self, episode: int) -> None:
        """Start the order of an episode."""
        self._episode, self.batch, self._epoch = episode, 0, -1

    def __next__(self) -> tuple[Tensor, Tensor]:
        """x (E, B, ...), y (E, B) or (E, B, C)."""
        epoch, position = divmod(self.batch, self.batches_per_epoch)
        if epoch != self._epoch:
            keys = key(self._seed, Purpose.ORDER, self._instance, self._episode, epoch)
            self._order = permutations(keys, len(self.y), self.x.device)
            self._epoch = epoch
        self.batch += 1
        assert self._order is not None
        index = self._order[:, position * self.batch_size : (position + 1) * self.batch_size]
        flat = index.reshape(-1)
        return (
            self.x.index_select(0, flat).view(*index.shape, *self.x.shape[1:]),
            self.y.index_select(0, flat).view(*index.shape, *self.y.shape[1:]),
        )
