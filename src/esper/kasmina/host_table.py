"""Sizes of the host in each row of a population. E rows, S slots, K blueprints of the menu."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from esper.kasmina.blueprints import count
from esper.kasmina.layout import HERE, Layout, Widths
from esper.kasmina.plan import Indices
from esper.leyline.actions import Blend
from esper.leyline.stages import ADDED, Stage, among
from esper.leyline.view import Seeds


class HostTable:
    """Sizes of hosts and prices of seeds by row.

    host_params (E,): parameters of the host. outputs (E,): number of its outputs. reads (E, S, K): the width that each
    blueprint would read at each slot, 0 where it does not fit. taps (E, S, 4): widths as in `layout.Widths.taps`. cost
    (E, S, K): parameters that each blueprint would add.
    """

    def __init__(self, rows: int, layout: Layout) -> None:
        self._menu = layout.menu
        slots, menu = layout.fits.shape
        self.host_params: Indices = np.zeros(rows, np.int64)
        self.outputs: Indices = np.zeros(rows, np.int64)
        self.reads: Indices = np.zeros((rows, slots, menu), np.int64)
        self.taps: Indices = np.zeros((rows, slots, 4), np.int64)
        self.cost: Indices = np.zeros((rows, slots, menu), np.int64)

    def plant(self, rows: Sequence[int], module: nn.Module, widths: Widths, outputs: int) -> None:
        """Record the sizes of a host that is written into some rows."""
        cost = [
            [entry.parameters(r, w) if r else 0 for entry, r in zip(self._menu, reads, strict=True)]
            for reads, w in zip(widths.reads.tolist(), widths.taps[:, HERE].tolist(), strict=True)
        ]
        at = list(rows)
        self.reads[at], self.taps[at] = widths.reads, widths.taps
        self.cost[at] = np.reshape(cost, widths.reads.shape)
        self.host_params[at], self.outputs[at] = count(module), outputs

    def widths_of(self, env: int, slot: int, blueprint: int) -> tuple[int, int]:
        """Return the widths that a seed of a blueprint reads and writes."""
        return int(self.reads[env, slot, blueprint]), int(self.taps[env, slot, HERE])

    def added_params(self, seeds: Seeds, stages: frozenset[Stage] = ADDED) -> Indices:
        """Return (E,) the parameters of the seeds in the given stages; the gate counts for seeds that use it."""
        env, slot = (np.arange(size) for size in seeds.stage.shape)
        price = self.price(env[:, None], slot, np.maximum(seeds.blueprint, 0), seeds.blend)
        return np.asarray(np.where(among(seeds.stage, stages), price, 0).sum(1), np.int64)

    def price(self, env: Indices, slot: Indices, blueprint: Indices, blend: NDArray[np.integer[Any]]) -> Indices:
        """Return the parameters that seeds add; the gate counts for seeds that use it. The arrays broadcast."""
        gate = np.where(blend == Blend.GATE, self.reads[env, slot, blueprint] + 1, 0)
        return np.asarray(self.cost[env, slot, blueprint] + gate, np.int64)

    def state(self) -> dict[str, Indices]:
        """Return the arrays by name; they share memory with the table."""
        return {name: getattr(self, name) for name in _ARRAYS}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned. Raises ValueError if it has other rows, slots or another menu."""
        for name in _ARRAYS:
            given, known = state[name], getattr(self, name)
            if given.shape != known.shape or given.dtype != known.dtype:
                raise ValueError(
                    f"{name} is {given.shape} {given.dtype}, where {known.shape} {known.dtype} was expected"
                )
            known[...] = given


_ARRAYS = ("host_params", "reads", "taps", "cost", "outputs")
