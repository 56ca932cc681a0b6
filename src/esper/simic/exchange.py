"""Exchange what the workers of a training computed on their shards, so that the results do not depend on who computed what.

A *shard* is a numbered part of the environments, and each worker has some of them. Sums over shards follow a binary tree over
the numbers of the shards. A sum therefore has the same bits for any number of workers, on one kind of machine.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # torch.distributed exports it without its type

_LONGEST = timedelta(minutes=10)
"""Longest wait for another worker in an exchange. A worker whose process ends is noticed at once."""
_LONGEST_PLAYING = timedelta(days=365)
"""Longest wait until all workers have played."""
_POLL = 0.005
"""Time between two looks at whether all workers have come [seconds]."""


class ExchangeError(RuntimeError):
    """Says that the connection to another worker ended, because it was lost or failed."""


class Exchange:
    """Connects one worker with the others of a training; without `group`, the worker is alone."""

    def __init__(self, owners: Sequence[int] = (), rank: int = 0, size: int = 1, group: Any = None) -> None:
        """owners: rank of the worker that has each shard. rank: of this worker, of `size` workers. group: theirs, of gloo."""
        self.rank, self.size = rank, size
        self.at_work: Callable[[], None] = lambda: None  # called now and then while this worker waits for others
        self._owners, self._group = owners, group

    @classmethod
    def joined(cls, store: "Store", owners: Sequence[int], rank: int, size: int, host: str | None = None) -> "Exchange":
        """Connect to all other workers, which do the same; waits for them.

        store: where the workers publish their addresses. host: name of the interface of this machine; None is that of its own
        name. The gradients of a policy are computed on the CPU, so gloo carries them, whatever device the workers play on.
        """
        # A group of its own, and not the default one, which may be that of the caller's program.
        gloo: Any = dist.ProcessGroupGloo  # whose stubs lack these methods
        options = gloo._Options()
        options._devices = [gloo.create_default_device() if host is None else gloo.create_device(hostname=host)]
        options._timeout = _LONGEST
        with _lost():
            return cls(owners, rank, size, gloo(store, rank, size, options))

    def owns(self, shard: int) -> bool:
        """Return whether this worker has a shard."""
        return self._owner(shard) == self.rank

    def meet(self, asked: Callable[[], bool] = lambda: False) -> bool:
        """Wait until all workers have come, or until `asked`. Returns whether they have come."""
        if self._group is not None:
            with _lost():
                options: Any = dist.AllreduceOptions()
                options.timeout = _LONGEST_PLAYING
                work = self._group.allreduce([torch.zeros(1)], options)
                while not work.is_completed():
                    if asked():
                        return False
                    self.at_work()
                    time.sleep(_POLL)
                work.wait()
        return True

    def table(self, rows: Mapping[int, NDArray[np.float64]], count: int) -> NDArray[np.float64]:
        """Return the rows (k,) of all workers as a table (count, k); each of its rows comes from one worker."""
        table = np.zeros((count, len(next(iter(rows.values())))))
        for place, row in rows.items():
            table[place] += row  # added, not assigned, because a sum over workers also turns -0 into 0
        if self._group is not None:
            with _lost():  # the other workers have zeros in these rows, so no order of the sum changes a bit
                self._group.allreduce(torch.from_numpy(table)).wait()
        return table

    def sum(self, parts: Mapping[int, Tensor], shards: Sequence[int], length: int) -> Tensor:
        """Return the sum over `shards` of vectors (length,), of which `parts` are those of this worker.

        The sum over n shards is that over the first 2^k of them, 2^k being the largest power of two below n, plus that over the
        others. Where the shards of each worker follow each other, a worker sends a number of vectors that grows with the
        logarithm of the number of its shards. The first shard's worker sends the sum to all.
        """
        self.at_work()
        total = self._subtree(parts, shards, length)
        if self._group is None:
            assert total is not None, "a worker that is alone has all shards"
            return total
        total = torch.empty(length) if total is None else total
        with _lost():
            self._group.broadcast(total, self._owner(shards[0])).wait()
        return total

    def gather(self, content: bytes) -> list[bytes]:
        """Return the content that each worker gives, by rank."""
        if self._group is None:
            return [content]
        sizes = self._sizes(content)
        own = torch.zeros(max(sizes), dtype=torch.uint8)
        own[: len(content)] = _tensor(content)
        found = [torch.empty_like(own) for _ in sizes]
        with _lost():
            self._group.allgather([found], [own]).wait()
        return [each[:size].numpy().tobytes() for each, size in zip(found, sizes, strict=True)]

    def collect(self, content: bytes) -> list[bytes]:
        """Return the content that each worker gives, by rank, to the first worker; nothing to the others."""
        if self._group is None:
            return [content]
        sizes = self._sizes(content)
        with _lost():
            if self.rank:
                self._group.send([_tensor(content)], 0, 0).wait()
                return []
            others = [torch.empty(size, dtype=torch.uint8) for size in sizes[1:]]
            for rank, other in enumerate(others, 1):
                self._group.recv([other], rank, 0).wait()
        return [content, *(other.numpy().tobytes() for other in others)]

    def close(self) -> None:
        """End the connections to the other workers, which are told by an ExchangeError if they wait for this one."""
        self._group = None

    def _owner(self, shard: int) -> int:
        return self._owners[shard] if self._group is not None else 0

    def _sizes(self, content: bytes) -> list[int]:
        table = self.table({self.rank: np.array([len(content)], np.float64)}, self.size)
        return [int(size) for size in table[:, 0]]

    def _subtree(self, parts: Mapping[int, Tensor], shards: Sequence[int], length: int) -> Tensor | None:
        """Return the sum over shards in the worker of the first of them, and None in the others.

        All workers that have a part in two sums meet them in the same order, so no two of them wait for each other.
        """
        if len(shards) == 1:
            return parts.get(shards[0])
        half = 1 << (len(shards) - 1).bit_length() - 1
        left = self._subtree(parts, shards[:half], length)
        right = self._subtree(parts, shards[half:], length)
        here, there = self._owner(shards[0]), self._owner(shards[half])
        if self._group is not None and here != there:
            with _lost():
                if self.rank == there:
                    assert right is not None
                    self._group.send([right], here, 0).wait()
                elif self.rank == here:
                    right = torch.empty(length)
                    self._group.recv([right], there, 0).wait()
        if self.rank != here:
            return None
        assert left is not None
        assert right is not None
        return left + right


def divide(shards: Sequence[int], size: int) -> list[int]:
    """Return the rank, below `size`, of the worker that has each shard; `shards` are the numbers of shards of each task.

    The shards of a task that a worker has follow each other, and every worker has about as many of each task.
    """
    places = [((shard + 0.5) / count, task) for task, count in enumerate(shards) for shard in range(count)]
    order = sorted(range(len(places)), key=places.__getitem__)
    owners = [0] * len(order)
    for place, shard in enumerate(order):
        owners[shard] = place * size // len(order)
    return owners


def _tensor(content: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(content, np.uint8).copy())


@contextmanager
def _lost() -> Iterator[None]:
    """Raise an error of the connections as ExchangeError."""
    try:
        yield
    except RuntimeError as error:
        raise ExchangeError(str(error)) from None
