"""A host factory that returns grown networks, made one that returns hosts."""

from collections.abc import Callable

import torch
from torch import nn

from esper.kasmina.host import SegmentedHost
from esper.kasmina.network import GrownNetwork
from esper.kasmina.regrow import RegrownHost, lost_slots, scaling_of
from esper.leyline.errors import warn
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
        warn(
            f"the {'slot' if len(lost) == 1 else 'slots'} {', '.join(lost)} of the grown network cannot be used again, because "
            "a seed behind it reads the input of the host; the segments up to that seed are one segment now",
            UserWarning,
        )
    return RegrownHost(network), scaling_of(network)
