"""Parameters that processes hold in parts: a host under `torch.distributed.fsdp.fully_shard`.

A seed of such a host is sharded by itself, over the same processes. `torch.distributed.tensor` takes long to import, so nothing
here imports it: a tensor in parts exists only where the program has done so.
"""

import copy
import sys
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from esper.leyline.errors import InputError

M = TypeVar("M", bound=nn.Module)


def in_parts(tensor: Any) -> bool:
    """Whether a tensor is a DTensor: every process holds a part of it."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_sharded(network: nn.Module) -> bool:
    """Whether `fully_shard` was called on a network, or on a part of it."""
    return next(_sharded_modules(network), None) is not None


def check_sharding(network: nn.Module) -> None:
    """InputError if a sharded network has parameters that no seed could be like."""
    for name, parameter in network.named_parameters():
        if not in_parts(parameter):
            raise InputError(
                f"the model is sharded by FSDP, but its parameter {name!r} is not; call fully_shard on the whole model "
                "too, after its parts"
            )
        mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
        if mesh.ndim != 1:
            raise InputError(
                f"parameter {name!r} is distributed over a mesh of {mesh.ndim} dimensions; a network can grow under "
                "fully_shard over one"
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


def gather(tensor: Tensor) -> Tensor:
    """A tensor as one process would hold it; every process calls this."""
    if not in_parts(tensor):
        return tensor
    gathered: Tensor = tensor.full_tensor()  # type: ignore[attr-defined]
    return gathered


def gather_module(module: M) -> M:
    """A copy of a module with whole parameters; every process calls this."""
    made = copy.deepcopy(module)
    for part in made.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            setattr(part, name, nn.Parameter(gather(parameter.detach()), requires_grad=parameter.requires_grad))
    return made


def like(value: Tensor, tensor: Tensor) -> Tensor:
    """A whole tensor that every process has, in parts where another is; otherwise the value itself."""
    if not in_parts(tensor) or in_parts(value):
        return value
    from torch.distributed.tensor import distribute_tensor

    target: Any = tensor
    made: Tensor = distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)
    return made


@torch.no_grad()
def fill(tensor: Tensor, value: Tensor) -> None:
    """Copy a whole value, or one in the same parts, into a tensor."""
    tensor.copy_(like(value.to(tensor.device), tensor))


def _sharded_modules(network: nn.Module) -> Iterator[Any]:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return (part for part in network.modules() if fsdp is not None and isinstance(part, fsdp.FSDPModule))
