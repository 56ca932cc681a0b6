"""The seats of a network that grows in mode 'reserve', and what becomes of the gradients of those that are idle."""

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from esper.kasmina.arena import Seat
from esper.kasmina.planted import Mode


class Seats:
    """The seats of a network and of its copies.

    A seat that no seed has taken computes too, because the graph of the network never changes; its gradients are dropped.
    """

    def __init__(self, *, shared: bool) -> None:
        """shared: whether several processes train the network, which then average the gradients of all parameters."""
        self.shared = shared
        self._all: list[Seat] = []
        self._handles: list[RemovableHandle] = []
        self._due = False  # whether the gradients of this backward pass are to be dropped at its end

    def add(self, own: Iterable[Seat], copied: Iterable[Seat]) -> None:
        """Take in seats of the network, and those of its copies, which no loss trains."""
        for seat in own:
            self._all.append(seat)
            for parameter in seat.parameters():
                self._handles.append(parameter.register_post_accumulate_grad_hook(partial(self._arrived, seat)))
        self._all += copied

    def clear(self) -> None:
        """Forget all seats."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._all.clear()

    def free(self) -> set[int]:
        """Return the `id` of each parameter and buffer of the seats that no seed has taken."""
        free = (seat for seat in self._all if not seat.taken)
        return {id(tensor) for seat in free for tensor in (*seat.parameters(), *seat.buffers())}

    def idle(self) -> set[int]:
        """Return the `id` of each parameter of the seats that does not learn."""
        learning = {id(parameter) for seat in self._all if seat.learns for parameter in seat.trained()}
        return {id(parameter) for seat in self._all for parameter in seat.parameters()} - learning

    def _arrived(self, seat: Seat, parameter: Tensor) -> None:
        """Drop a gradient that is of no use as soon as it is there."""
        if seat.drops(parameter):
            parameter.grad = None
        if self.shared and not self._due:
            self._due = True
            torch.autograd.Variable._execution_engine.queue_callback(self._queue)

    def _queue(self) -> None:
        """DistributedDataParallel fills in gradients in a callback of its own, which is queued by now: drop them behind it."""
        torch.autograd.Variable._execution_engine.queue_callback(self._drop)

    def _drop(self) -> None:
        self._due = False
        for seat in self._all:
            for parameter in seat.parameters():
                if seat.mode != Mode.ON or seat.drops(parameter):
                    parameter.grad = None
