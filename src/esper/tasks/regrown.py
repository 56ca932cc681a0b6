"""Grown networks as hosts."""

from collections.abc import Callable

import torch
from torch import nn

from esper.kasmina.host import SegmentedHost
from esper.kasmina.network import GrownNetwork
from esper.kasmina.regrow import RegrownHost, lost_slots
from esper.leyline.errors import warn


def host_factory(factory: Callable[[], SegmentedHost]) -> Callable[[], SegmentedHost]:
    """The factory itself, or a `RegrownHost` where it returns a grown network, as `lambda: esper.load(folder)` does.

    A UserWarning names the slots of the grown network that the new host does not have.
    """
    with torch.random.fork_rng(devices=[]):  # keeps the caller's random state
        network: nn.Module = factory()
    if not isinstance(network, GrownNetwork):
        return factory
    if lost := lost_slots(network):
        warn(
            f"the {'slot' if len(lost) == 1 else 'slots'} {', '.join(lost)} of the grown network cannot be used again, because "
            "a later seed reads the input of the host; the segments up to that seed are one segment now",
            UserWarning,
        )
    return RegrownHost(network)
