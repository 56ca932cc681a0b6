"""A host factory that returns grown networks, made one that returns hosts."""

import warnings
from collections.abc import Callable

import torch
from torch import nn

from esper.kasmina.host import SegmentedHost
from esper.kasmina.network import GrownNetwork
from esper.kasmina.regrow import RegrownHost, lost_slots, scaling_of
from esper.leyline.task import Scaling


def host_factory(factory: Callable[[], SegmentedHost]) -> tuple[Callable[[], SegmentedHost], Scaling | None]:
    """The factory, and no scaling, where it does not return a grown network, as `lambda: esper.load(folder)` does.

    Else a factory of hosts with the weights and the seeds of that network, and the scaling by which it standardizes features.
    Slots that have no place in such a host are named in a UserWarning.
    """
    with torch.random.fork_rng(devices=[]):  # the caller's random state stays as it was
        network: nn.Module = factory()
    if not isinstance(network, GrownNetwork):
        return factory, None
    if lost := lost_slots(network):
        plural = "s" * (len(lost) > 1)
        warnings.warn(
            f"the slot{plural} {', '.join(lost)} of the grown network cannot be used again, as a seed further on reads the "
            "input; the segments up to there are one",
            stacklevel=3,
        )
    return RegrownHost(network), scaling_of(network)
