"""What a network is wrapped in when it is given to `esper.Growth`, and what that asks for."""

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from esper.kasmina.freezing import Freeze
from esper.kasmina.grown import is_grafted
from esper.kasmina.sharding import check_sharding, is_sharded, reshard
from esper.leyline.errors import InputError
from esper.tolaria.ranks import Ranks, processes


def unwrap(model: Any) -> tuple[nn.Module, DistributedDataParallel | None]:
    """The module that grows, and the DistributedDataParallel around it, if there is one. InputError if none can grow."""
    if not isinstance(model, nn.Module):
        raise InputError(f"the model is a {type(model).__name__}; give an nn.Module")
    network, wrapper = model, None
    while (inner := _inside(network)) is not None:
        wrapper = network if isinstance(network, DistributedDataParallel) else wrapper
        network = inner
    if isinstance(network, nn.DataParallel):
        raise InputError(
            "the model is wrapped in DataParallel, whose copies would not see what the seeds gather; use DistributedDataParallel"
        )
    if any(type(part).__name__ == "FullyShardedDataParallel" for part in network.modules()):
        raise InputError(
            "the model is wrapped in FullyShardedDataParallel, which flattens the parameters; use "
            "torch.distributed.fsdp.fully_shard or DistributedDataParallel"
        )
    reshard(network)
    check_sharding(network, processes())
    if is_sharded(network) and not is_grafted(network):
        raise InputError(
            "the model is sharded and has no sites, which are found on a whole model; call esper.graft(model, example=x) "
            "before fully_shard"
        )
    return network, wrapper


def check_frozen(wrapper: DistributedDataParallel | None, freeze: Freeze) -> None:
    """InputError if DistributedDataParallel would wait for gradients that do not come any more."""
    if wrapper is not None and freeze != "none" and not wrapper.find_unused_parameters:
        raise InputError(
            f"freeze={freeze!r} takes gradients away for which DistributedDataParallel waits; make it with "
            "find_unused_parameters=True"
        )


def check_probes(ranks: Ranks, batches: int) -> None:
    """InputError, in every process, where those that measure together would wait for each other."""
    found = ranks.from_each(batches) if ranks.together else []
    if len(set(found)) > 1:
        raise InputError(
            f"probe has {', '.join(map(str, found))} batches in the processes, which run the model together; give each as many"
        )


def _inside(model: nn.Module) -> nn.Module | None:
    """The module inside of a compiled or wrapped one; None where it is neither."""
    if isinstance(model, DistributedDataParallel):
        inner: nn.Module = model.module
        return inner
    compiled = getattr(model, "_orig_mod", None)
    return compiled if isinstance(compiled, nn.Module) else None
