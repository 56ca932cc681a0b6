"""Let all processes that train copies of one network under DistributedDataParallel grow them in the same way."""

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from esper.kasmina.graft.sharding import in_parts
from esper.leyline.messages import InputError

T = TypeVar("T")


def processes() -> int:
    """Return the number of processes of the default group; 1 where there is none."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class Ranks:
    """Exchanges values and gradients between all processes of the default group, or stands for this one alone.

    first: whether this process decides for all of them.
    together: whether all of them measure, of which the first counts, as none can run the network alone.
    """

    def __init__(
        self, shared: bool, *, sharded: bool = False, wrapper: nn.parallel.DistributedDataParallel | None = None
    ) -> None:
        """shared: whether there are others; sharded: whether each has a part of the network.

        wrapper: the DistributedDataParallel of the network, where it is known; its `no_sync` holds for seeds too.

        Every process of the group calls this. InputError if there is no group.
        """
        if shared and not (dist.is_available() and dist.is_initialized()):
            name = "shard" if sharded else "shared"
            raise InputError(
                f"{name + '=True' * (not sharded)} is for several processes, and this program has no group of them; call "
                f"torch.distributed.init_process_group first, or leave {name} out"
            )
        self._group = dist.new_group() if shared else None  # of its own, so that its order with others does not matter
        self.size = dist.get_world_size() if shared else 1
        self.first = not shared or dist.get_rank() == 0
        self.together, self.wrapper = sharded, wrapper
        self._parameters: list[nn.Parameter] = []  # whose gradients are averaged
        self._handles: list[RemovableHandle] = []
        self._due = False

    def from_first(self, value: T | None) -> T:
        """Return the value of the first process to all; those of the others are not read."""
        if self._group is not None:
            box: list[Any] = [value]
            dist.broadcast_object_list(box, 0, group=self._group)
            value = box[0]
        assert value is not None, "the first process has a value"
        return value

    def from_each(self, value: T) -> list[T]:
        """Return the values of all processes, in their order."""
        found: list[Any] = [value] * self.size
        if self._group is not None:
            dist.all_gather_object(found, value, group=self._group)
        return found

    def agreed(self, value: bool) -> bool:
        """Return whether the value of the first process is true, or those of all where they measure together."""
        return all(self.from_each(value)) if self.together else self.from_first(value)

    @torch.no_grad()
    def spread(self, tensors: Iterable[Tensor]) -> None:
        """Give the tensors of the first process to all of them, in place."""
        for tensor in tensors if self._group is not None else ():
            dist.broadcast(tensor, 0, group=self._group)

    @torch.no_grad()
    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors of one dtype by their means over all processes, in one transfer.

        FSDP has averaged those that are in parts.
        """
        tensors = [tensor for tensor in tensors if not in_parts(tensor)]
        if self._group is None or not tensors:
            return
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).div_(self.size)
        dist.all_reduce(flat, group=self._group)
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def share_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Average the gradients of seeds that act and train, from now on, at the end of each backward pass.

        DistributedDataParallel does so for the parameters that it was made with. The order of the parameters is the same in every
        process. The mean of gradients that were averaged already and of new ones is right too, so gradients may accumulate over
        several passes, with `no_sync` or without.
        """
        for handle in self._handles:
            handle.remove()
        self._parameters = [each for each in parameters if self.size > 1 and not in_parts(each)]
        self._handles = [each.register_post_accumulate_grad_hook(self._arrived) for each in self._parameters]

    def _arrived(self, parameter: Tensor) -> None:
        if not self._due:
            self._due = True
            torch.autograd.Variable._execution_engine.queue_callback(self._average_all)

    def _average_all(self) -> None:
        self._due = False
        # As the wrapper does, which decides in its forward pass whether the backward pass synchronises.
        if self.wrapper is not None and not self.wrapper.require_forward_param_sync:
            return
        for parameter in self._parameters:
            if parameter.grad is None:  # another process may have one
                parameter.grad = torch.zeros_like(parameter)
        self.average([parameter.grad for parameter in self._parameters if parameter.grad is not None])
