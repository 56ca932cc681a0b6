"""Compute sizes that all rows of a population share: those of the largest host, and of the seeds of a menu at each slot.

S slots, K blueprints of the menu, B examples.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from esper.kasmina.blueprints import Blueprint, count, drawn_with
from esper.kasmina.blueprints.vector import PADDED
from esper.kasmina.host import SegmentedHost, segment_outputs, steps_of, width_read
from esper.kasmina.slot import Seed
from esper.kasmina.stack.plan import Indices
from esper.leyline.data.batches import Batch, on_cpu
from esper.leyline.lifecycle.slots import STREAMS, SlotSpec, Stream, Tap
from esper.leyline.lifecycle.view import Bools, Seeds
from esper.leyline.lifecycle.vocabulary import ADDED, Blend, Stage, among
from esper.leyline.records import from_tree

TAPS = tuple(Tap)
HERE, BEFORE, INPUT, INNER = range(4)
"""Columns of `Widths.taps`."""


class Widths(NamedTuple):
    """Holds the true widths of a host's streams.

    A width is 0 where there is no stream that seeds can read (`kasmina.host.width_read`).
    """

    reads: Indices  # (S, K) the width that each blueprint would read at each slot, 0 where it does not fit
    # (S, 4) at each slot the widths of the stream, what a bypass reads, the host's input, the inner features
    taps: Indices


class Layout:
    """Describes the slots of a population's hosts, its menu, and the groups of seeds that share a stack.

    Seeds of one module class that read the same width at one slot share a *form*. The module of the form is its largest
    member, whose leading corner holds any other member.
    """

    def __init__(self, host: SegmentedHost, menu: Sequence[Blueprint], example: Batch, dtype: torch.dtype) -> None:
        """`host` is the largest one; example (B, ...) is an input of it; dtype is that of all parameters."""
        self.slots: tuple[SlotSpec, ...] = host.slots
        self.menu = tuple(menu)
        self.steps = steps_of(len(host.segments), self.slots)  # of every host
        self.streams: tuple[type[Stream], ...] = tuple(STREAMS[slot.kind] for slot in self.slots)
        self.tap_of = np.array([TAPS.index(entry.tap) for entry in self.menu], np.int64)  # (K,) indices into `TAPS`
        self.dtype = dtype
        self.widest = self.widths(host, example)  # of the largest host
        self.fits: Bools = self.widest.reads > 0  # (S, K) which blueprints of the menu fit a slot
        # the module of each (slot, form), and (S, K) the form of each blueprint, -1 where it does not fit
        self.forms: dict[tuple[int, int], Seed] = {}
        self.form_of: Indices = np.full(self.fits.shape, -1, np.int64)
        for s in range(len(self.slots)):
            groups: dict[tuple[object, int], list[int]] = {}
            largest: dict[int, Seed] = {}  # of each blueprint, at the widths of the largest host
            for k, entry in enumerate(self.menu):
                if reads := int(self.widest.reads[s, k]):
                    largest[k] = self.build(s, k, 0, reads, int(self.widest.taps[s, HERE]))
                    delta = largest[k].delta
                    same = type(delta) if type(delta) in PADDED else entry.name
                    groups.setdefault((same, reads), []).append(k)
            for index, members in enumerate(groups.values()):
                self.forms[s, index] = max((largest[k] for k in members), key=count)
                self.form_of[s, members] = index

    @torch.no_grad()
    def widths(self, host: SegmentedHost, example: Batch) -> Widths:
        """Return the true widths of a host, measured by running it on an input of its own, example (B, ...)."""
        training = host.training
        host = host.to(dtype=self.dtype).eval()
        taps: list[list[int]] = []
        streams = segment_outputs(host.segments, on_cpu(example, self.dtype))
        for slot in self.slots:
            before, here = streams[slot.start], streams[slot.after + 1]
            inner = None
            if slot.inner is not None:
                segment = host.segments[slot.after]
                assert isinstance(segment, nn.Sequential), "inner features must be those of an nn.Sequential"
                inner = segment_outputs(list(segment)[: slot.inner], streams[slot.after])[-1]
            taps.append([width_read(slot, x, here) for x in (here, before, streams[0], inner)])
        host.train(training)
        widths = np.array(taps, np.int64).reshape(len(self.slots), 4)
        known = [entry.fits(slot.kind, causal=slot.causal) for slot in self.slots for entry in self.menu]
        fits = np.array(known, bool).reshape(len(taps), -1)
        return Widths(np.where(fits, widths[:, self.tap_of], 0), widths)

    def build(self, slot: int, blueprint: int, key: int, reads: int, writes: int) -> Seed:
        with drawn_with(key):
            return Seed(self.menu[blueprint].build(reads, writes), reads).to(self.dtype)


class HostTable:
    """Holds sizes of hosts and prices of seeds by row."""

    def __init__(self, rows: int, slots: int, blueprints: Sequence[Blueprint]) -> None:
        self._menu, menu = tuple(blueprints), len(blueprints)
        self.host_params: Indices = np.zeros(rows, np.int64)  # (E,) parameters of the host
        self.outputs: Indices = np.zeros(rows, np.int64)  # (E,) number of its outputs
        self.reads: Indices = np.zeros((rows, slots, menu), np.int64)  # (E, S, K) as in `Widths.reads`
        self.taps: Indices = np.zeros((rows, slots, 4), np.int64)  # (E, S, 4) as in `Widths.taps`
        # (E, S, K) parameters that each blueprint would add
        self.cost: Indices = np.zeros((rows, slots, menu), np.int64)
        self.absorbed: Indices = np.zeros(rows, np.int64)  # (E,) parameters of seeds that are units of layers by now

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
        return int(self.reads[env, slot, blueprint]), int(self.taps[env, slot, HERE])

    def added_params(self, seeds: Seeds, stages: frozenset[Stage] = ADDED) -> Indices:
        """Return (E,) the parameters of the seeds in the given stages; the gate counts for seeds that use it."""
        env, slot = np.nonzero(among(seeds.stage, stages))
        added, blueprint = self.absorbed.copy(), seeds.blueprint[env, slot].astype(np.int64)
        np.add.at(added, env, self.price(env, slot, blueprint, seeds.blend[env, slot]))
        return added

    def price(self, env: Indices, slot: Indices, blueprint: Indices, blend: NDArray[np.integer[Any]]) -> Indices:
        """Return the parameters that seeds add; the gate counts for seeds that use it. The arrays broadcast."""
        gate = np.where(blend == Blend.GATE, self.reads[env, slot, blueprint] + 1, 0)
        return np.asarray(self.cost[env, slot, blueprint] + gate, np.int64)

    def state(self) -> dict[str, Indices]:
        return {name: getattr(self, name) for name in _ARRAYS}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned. Raises ValueError if it has other rows, slots or another menu."""
        for name in _ARRAYS:
            known = getattr(self, name)
            known[...] = from_tree(known, state[name], name)


_ARRAYS = ("host_params", "reads", "taps", "cost", "outputs")
