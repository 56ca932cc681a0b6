"""What torch.compile does while a network grows: how often it compiles, and when it would give up."""

import sys
from typing import Any

import torch
from torch import nn

from esper.leyline.errors import GrowthWarning, warn


class Compilations:
    """Counts the graphs that torch compiles, and empties its caches before it gives up on a network that changes too often.

    torch runs a function uncompiled for good once it has compiled it `torch._dynamo.config.recompile_limit` times. Graphs of a
    network as it was before a change of its seeds are of no use, so the caches are emptied ahead of that.

    changes: changes of the graph by growing. emptied: how often the caches were emptied.
    """

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self.changes, self.emptied = 0, 0
        self._first = self._last = graphs()
        self._usual = 2  # graphs between two changes, as one for training and one for evaluation
        self._since = 0  # graphs since the caches were emptied
        self._warned = False

    @property
    def graphs(self) -> int:
        """Graphs that this process has compiled since this object was made, of this network and of others."""
        return graphs() - self._first

    def changed(self) -> None:
        """The graph of the network is another one from now on."""
        self.changes += 1
        new, self._last = graphs() - self._last, graphs()
        if not new:
            return
        self._since += new
        self._usual = max(self._usual, new)
        self._check()
        if self._since + self._usual >= _limit():
            torch.compiler.reset()
            self.emptied, self._since = self.emptied + 1, 0

    def _check(self) -> None:
        """Warn once where torch has compiled the forward pass of the network itself as often as it ever does."""
        if not self._warned and _entries(self.network) >= _limit():
            self._warned = True
            warn(
                f"torch.compile reached its limit of {_limit()} graphs for the forward pass of the {type(self.network).__name__} "
                "between two changes of its seeds, and runs other ones uncompiled; make Growth with mode='reserve', or raise "
                "torch._dynamo.config.recompile_limit",
                GrowthWarning,
            )


def graphs() -> int:
    """Graphs that torch.compile has made in this process; 0 where it was never loaded."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])


def _limit() -> int:
    """Graphs of one function that torch keeps."""
    config: Any = sys.modules["torch._dynamo.config"]
    return int(config.recompile_limit)


def _entries(network: nn.Module) -> int:
    """Compiled graphs of the forward pass of a network."""
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    forward: Any = type(network).forward
    return len(_debug_get_cache_entry_list(forward.__code__))
