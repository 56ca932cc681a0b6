"""Handle parameters that processes hold in parts: a host under `torch.distributed.fsdp.fully_shard`.

A seed of such a host is sharded by itself, over the same processes. `torch.distributed.tensor` takes long to import, so nothing
here imports it: a tensor in parts exists only where the program has done so.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from esper.kasmina.graft.grafted import copied
from esper.leyline.messages import InputError

M = TypeVar("M", bound=nn.Module)


def in_parts(tensor: Any) -> bool:
    """Return whether a tensor is a DTensor: every process holds a part of it."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_sharded(network: nn.Module) -> bool:
    """Return whether `fully_shard` was called on a network, or on a part of it."""
    return next(_sharded_modules(network), None) is not None


def check_sharding(network: nn.Module, processes: int) -> None:
    """Raise InputError if a network has parameters in parts, and some that no seed could be like.

    processes: number of those that grow the network.
    """
    parameters: dict[str, Any] = dict(network.named_parameters())
    sharded = is_sharded(network)
    for name, parameter in parameters.items():
        if in_parts(parameter) and not (sharded and _by_fsdp(parameter.placements)):
            raise InputError(
                f"parameter {name!r} is distributed as {tuple(parameter.placements)}, which is tensor parallelism; a network "
                "can grow under fully_shard alone, as (Shard,) or (Replicate, Shard)"
            )
    for name, parameter in parameters.items() if sharded else ():
        if not in_parts(parameter):
            raise InputError(
                f"the model is sharded by FSDP, but its parameter {name!r} is not; call fully_shard on the whole model "
                "too, after its parts"
            )
        mesh = parameter.device_mesh
        if mesh.size() != processes:
            raise InputError(
                f"parameter {name!r} is distributed over {mesh.size()} of {processes} processes; shard the model over a mesh "
                "of all of them"
            )
        if parameter.device.type != mesh.device_type:
            raise InputError(
                f"parameter {name!r} is kept on the {parameter.device.type} while it is not used; shard the model "
                "without an offload_policy"
            )


def shard_like(module: nn.Module, network: nn.Module) -> None:
    """Shard a new module, whose values are those of every process, over the processes and in the precision of a network."""
    from torch.distributed.fsdp import fully_shard

    like: Any = next(parameter for parameter in network.parameters() if in_parts(parameter))
    state: Any = fully_shard.state(next(_sharded_modules(network)))  # type: ignore[attr-defined]
    fully_shard(module, mesh=like.device_mesh, mp_policy=state._mp_policy)


def reshard(network: nn.Module) -> None:
    """Let every parameter be the part that the optimizer knows: a forward pass without a backward pass leaves some whole."""
    for part in _sharded_modules(network):
        part.reshard()


def own_part(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds: all of it, where it is not in parts."""
    return tensor.to_local() if in_parts(tensor) else tensor  # type: ignore[attr-defined]


def gather(tensor: Tensor) -> Tensor:
    """Return a tensor as one process would hold it; every process calls this."""
    if not in_parts(tensor):
        return tensor
    return tensor.full_tensor()  # type: ignore[attr-defined]


def gather_on_cpu(tensor: Tensor, first: bool) -> Tensor | None:
    """Return a tensor that is in parts as the first process holds it whole, which alone keeps it; any other tensor itself."""
    if not in_parts(tensor):
        return tensor
    whole = gather(tensor)  # every process takes part
    return whole.cpu() if first else None


def gather_module(module: M) -> M:
    """Return a copy of a module with whole parameters; every process calls this."""
    return _with_tensors(module, lambda _, tensor: gather(tensor.detach()).clone(), module)


def hollow(network: M) -> M:
    """Return a copy of a whole network without values: its parameters and buffers are on the device `meta`."""
    return _with_tensors(network, lambda _, tensor: tensor.detach().to("meta"), network)


def gather_into(hollow_copy: M, network: nn.Module) -> M:
    """Return a whole network: a copy of a hollow one with the values of that in parts; every process calls this."""
    own = dict(chain(network.named_parameters(), network.named_buffers()))
    # Of one process, what is gathered is its part itself.
    whole = _with_tensors(hollow_copy, lambda name, _: gather(own[name].detach()).clone(), network)
    for part, its in zip(whole.modules(), network.modules(), strict=True):
        part.training = its.training
    return whole


def like(value: Tensor, tensor: Tensor) -> Tensor:
    """Return a whole tensor that every process has, in parts where another is; otherwise the value itself."""
    if not in_parts(tensor) or in_parts(value):
        return value
    from torch.distributed.tensor import distribute_tensor

    target: Any = tensor
    return distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)


def placed(value: Tensor, tensor: Tensor) -> Tensor:
    """Return a copy of a value on the device of a tensor, in parts where that is; a number stays where it is."""
    if not value.dim():
        return value.detach().clone()
    # distribute_tensor returns a view, which would keep the whole in memory
    return like(value.detach().to(tensor.device), tensor).clone()


@torch.no_grad()
def fill(tensor: Tensor, value: Tensor) -> None:
    """Copy a whole value, or one in the same parts, into a tensor."""
    tensor.copy_(like(value.to(tensor.device), tensor))


def _with_tensors(network: M, made: Callable[[str, Tensor], Tensor], trained_as: nn.Module) -> M:
    """Return a copy of a network with other parameters and buffers, which require gradients as those of another one."""
    # A copy, and not `network.to`, which takes tied parameters apart where their device is of another kind.
    trained, tensors = {name: own.requires_grad for name, own in trained_as.named_parameters()}, dict[int, Tensor]()
    for name, own in network.named_parameters():
        tensors[id(own)] = nn.Parameter(made(name, own), requires_grad=trained[name])
    tensors.update((id(own), made(name, own)) for name, own in network.named_buffers())
    return copied(network, tensors)


def _by_fsdp(placements: Sequence[Any]) -> bool:
    """Return whether a parameter is in parts along the last dimension of its mesh, and copied along every other."""
    *outer, last = placements
    return bool(last.is_shard()) and all(each.is_replicate() for each in outer)


def _sharded_modules(network: nn.Module) -> Iterator[Any]:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    # fully_shard makes the class of a module one of its own; without any, no module needs to be looked at
    if fsdp is None or not fsdp.FSDPModule.__subclasses__():
        return iter(())
    return (part for part in network.modules() if isinstance(part, fsdp.FSDPModule))
