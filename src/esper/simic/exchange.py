"""Exchange what the workers of a training computed on their shards, so that the results do not depend on who computed what.

A *shard* is a numbered part of the environments, and each worker has some of them. Sums over shards follow a binary tree over
the numbers of the shards. A sum therefore has the same bits for any number of workers, on one kind of machine.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store  # torch.distributed exports them without their types

from esper.store.tensors import Tree, pack, unpack

_LONGEST = timedelta(minutes=10)
"""Longest wait for another worker in an exchange. A worker whose process ends is noticed at once."""
_LONGEST_PLAYING = timedelta(days=365)
"""Longest wait until all workers have played."""
_POLL = 0.005
"""Time between two looks at whether all workers have come [seconds]."""
_LONGEST_SUM = 60.0
"""Longest time that a sum takes on its way through NCCL, which notices no lost worker [seconds]."""


class ExchangeError(RuntimeError):
    """Says that the connection to another worker ended, because it was lost or failed."""


class Exchange:
    """Connects one worker with the others of a training; without `group`, the worker is alone."""

    device = torch.device("cpu")
    """where the vectors are that are summed"""

    def __init__(
        self, owners: Sequence[int] = (), rank: int = 0, size: int = 1, group: Any = None, carrier: Any = None
    ) -> None:
        """owners: rank of the worker that has each shard. rank: of this worker, of `size` workers.

        group: theirs, of gloo. carrier: the group that carries what is summed, of NCCL, if it is another.
        """
        self.rank, self.size = rank, size
        self.at_work: Callable[[], bool] = lambda: False  # called now and then by a worker that waits or plays
        self._owners, self._group, self._carrier = owners, group, carrier

    @classmethod
    def joined(
        cls,
        store: Store,
        owners: Sequence[int],
        rank: int,
        size: int,
        host: str | None = None,
        gpu: torch.device | None = None,
    ) -> "Exchange":
        """Connect to all other workers, which do the same; waits for them.

        store: where the workers publish their addresses. host: name of the interface of this machine; None is that of its own
        name. gpu: of this worker alone; vectors are summed there and carried by NCCL. None sums them on the CPU, by gloo.
        """
        # A group of its own, and not the default one, which may be that of the caller's program.
        gloo: Any = dist.ProcessGroupGloo  # whose stubs lack these methods
        options = gloo._Options()
        options._devices = [gloo.create_default_device() if host is None else gloo.create_device(hostname=host)]
        options._timeout = _LONGEST
        with _lost():
            exchange = cls(owners, rank, size, gloo(store, rank, size, options))
            if gpu is not None:
                # A wait that lasts too long is ended by `_delivered`. The watchdog of NCCL would end the process.
                os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
                torch.cuda.set_device(gpu)
                exchange.device, nccl = gpu, dist.ProcessGroupNCCL
                exchange._carrier = nccl(PrefixStore("nccl", store), rank, size, nccl.Options())
                exchange._carrier.eager_connect_single_device(gpu)  # one communicator, also for messages between two
            return exchange

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

    def sum(self, parts: Mapping[int, Tensor], shards: Sequence[int], length: int) -> Tensor:
        """Return the sum over `shards` of vectors (length,) on `device`, of which `parts` are those of this worker.

        The sum over n shards is that over the first 2^k of them, 2^k being the largest power of two below n, plus that over the
        others. Where the shards of each worker follow each other, a worker sends a number of vectors that grows with the
        logarithm of the number of its shards. The first shard's worker sends the sum to all. It is returned on the CPU.
        """
        self.at_work()
        with _lost():
            if self._carrier is not None:
                self._group.allreduce([torch.zeros(1)]).wait()  # by gloo, which notices a worker that is lost
            total = self._subtree(parts, shards, length)
            if self._group is None:
                assert total is not None, "a worker that is alone has all shards"
                return total
            total = torch.empty(length, device=self.device) if total is None else total
            self._delivered((self._carrier or self._group).broadcast(total, self._owner(shards[0])))
        return total.cpu()

    def gather(self, tree: Tree) -> list[Any]:
        """Return the tree that each worker gives, by rank; tuples of others have become lists."""
        if self._group is None:
            return [tree]
        content = torch.from_numpy(np.frombuffer(pack(tree), np.uint8).copy())
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        with _lost():
            self._group.allgather([sizes], [torch.tensor([len(content)])]).wait()
            found = [content.new_empty(int(max(sizes))) for _ in sizes]
            self._group.allgather([found], [F.pad(content, (0, len(found[0]) - len(content)))]).wait()
        return [unpack(each[: int(size)].numpy().tobytes()) for each, size in zip(found, sizes, strict=True)]

    def close(self) -> None:
        """End the connections to the other workers, which are told by an ExchangeError if they wait for this one."""
        if self._carrier is not None:
            self._carrier.abort()  # its kernels may wait for a worker that is lost
        self._group = self._carrier = None

    def _owner(self, shard: int) -> int:
        return self._owners[shard] if self._group is not None else 0

    def _subtree(self, parts: Mapping[int, Tensor], shards: Sequence[int], length: int) -> Tensor | None:
        """Return the sum over shards in the worker of the first of them, and None in the others.

        All workers that have a part in two sums meet them in the same order, so no two of them wait for each other.
        """
        carrier = self._carrier or self._group
        if len(shards) == 1:
            return parts.get(shards[0])
        half = 1 << (len(shards) - 1).bit_length() - 1
        left = self._subtree(parts, shards[:half], length)
        right = self._subtree(parts, shards[half:], length)
        here, there = self._owner(shards[0]), self._owner(shards[half])
        if carrier is not None and here != there:
            if self.rank == there:
                assert right is not None
                carrier.send([right], here, 0).wait()
            elif self.rank == here:
                right = torch.empty(length, device=self.device)
                carrier.recv([right], there, 0).wait()
        if self.rank != here:
            return None
        assert left is not None
        assert right is not None
        return left + right

    def _delivered(self, work: Any) -> None:
        """Wait until the last message of a sum has come. Raises ExchangeError where NCCL takes too long."""
        work.wait()  # through gloo until it has come; through NCCL it makes the stream of the device wait
        if self._carrier is not None:
            latest = time.monotonic() + _LONGEST_SUM
            while not work.is_completed():
                if time.monotonic() > latest:
                    raise ExchangeError(f"a sum has not come through NCCL for {_LONGEST_SUM:.0f} s")


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


@contextmanager
def _lost() -> Iterator[None]:
    """Raise an error of the connections as ExchangeError."""
    try:
        yield
    except RuntimeError as error:
        raise ExchangeError(str(error)) from None
