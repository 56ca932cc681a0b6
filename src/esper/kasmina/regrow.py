"""Turn a grown network into a host again: its seeds become part of the host, and its slots are free. B examples."""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor, nn

from esper.kasmina.host import SegmentedHost
from esper.kasmina.network import Graft, GrownNetwork, Restore, Standardize, run_segments
from esper.leyline.batches import batch_of
from esper.leyline.slots import SlotSpec, Tap
from esper.leyline.task import Scaling


class GraftedSegments(nn.Module):
    """Segments of a grown network with the seeds behind them, as one segment: leaves (B, ...) -> (B, ...)."""

    def __init__(self, segments: Sequence[nn.Module], seeds: Sequence[nn.Module], grafts: Sequence[Graft]) -> None:
        super().__init__()
        self.segments = nn.ModuleList(segments)
        self.seeds = nn.ModuleList(seeds)
        self.grafts = tuple(grafts)

    def forward(self, x: Tensor | None = None, /, *others: Tensor, **named: Tensor) -> Tensor:
        """Leaves (B, ...) -> (B, ...)."""
        batch = batch_of(() if x is None else (x, *others), named)
        return run_segments(batch, self.segments, self.seeds, self.grafts)


class RegrownHost:
    """A factory of hosts that are copies of one grown network.

    The network is loaded once, so that a run does not need the files of an earlier run until its end.
    """

    def __init__(self, network: GrownNetwork) -> None:
        self._host = as_host(network)
        self.original = network.original
        self._ungrown = Ungrown(network)
        self.scaling = _scaling(network.standardize)  # of the features that the host reads; None if it takes them raw
        self.target_scaling = _scaling(network.restore)  # of the targets that the host returns; None if they are raw

    def __call__(self) -> SegmentedHost:
        """Make a host with weights of its own, equal to those of the network."""
        return copy.deepcopy(self._host)

    @property
    def ungrown(self) -> Callable[[], nn.Module]:
        """A factory of the host that was grown first, without any seed: the named factory, or one of the segments."""
        return self.original or self._ungrown


class Ungrown:
    """A factory of copies of the host that a network grew from, without any seed of this run or of earlier ones."""

    def __init__(self, network: GrownNetwork) -> None:
        parts = [_flat(segment) for segment in network.segments]
        last = np.cumsum([len(part) for part in parts]) - 1  # index of the last segment of each part
        slots = [replace(slot, after=int(last[slot.after])) for slot in network.slots]
        self._host = SegmentedHost([segment for part in parts for segment in part], slots)
        self._host.stacks, self._host.draws = network.stacks, network.draws

    def __call__(self) -> SegmentedHost:
        """Make a host with weights of its own, equal to the weights that the host had when its growth ended."""
        return copy.deepcopy(self._host)


def _flat(segment: nn.Module) -> list[nn.Module]:
    """Return the segments of the first host that are inside a segment of a regrown one, in order."""
    if isinstance(segment, GraftedSegments):
        return [part for inner in segment.segments for part in _flat(inner)]
    return [segment]


def as_host(network: GrownNetwork) -> SegmentedHost:
    """Return the network as a host with free slots, which reads and returns standardized values if the network does.

    A seed becomes part of the segment that it was grafted behind. A seed that reads the input needs everything that
    enters the first segment, so all segments up to it become one; the slots between them are gone (`lost_slots`).
    """
    merged = _merged(network)
    segments = []
    for first, last in _groups(network):
        chosen = [
            (seed, graft._replace(after=graft.after - first))
            for seed, graft in zip(network.seeds, network.grafts, strict=True)
            if first <= graft.after <= last
        ]
        if first == last and not chosen:
            segments.append(network.segments[first])
        else:
            seeds, grafts = [seed for seed, _ in chosen], [graft for _, graft in chosen]
            segments.append(GraftedSegments(list(network.segments[first : last + 1]), seeds, grafts))
    host = SegmentedHost(segments, [_moved(slot, network, merged) for slot in network.slots if slot.after >= merged])
    host.stacks = network.stacks and all(
        getattr(seed.get_submodule("delta"), "stacks", False) for seed in network.seeds
    )
    host.draws = network.draws or any(getattr(seed, "draws", True) for seed in network.seeds)
    return host


def _scaling(module: Standardize | Restore | None) -> Scaling | None:
    return None if module is None else Scaling(*(values.clone() for values in module.scaling))


def lost_slots(network: GrownNetwork) -> list[str]:
    """Return the names of the slots that `as_host` has no place for."""
    return [slot.name for slot in network.slots if slot.after < _merged(network)]


def _merged(network: GrownNetwork) -> int:
    """Return the index of the last segment that becomes part of the first one."""
    return max((graft.after for graft in network.grafts if graft.tap == Tap.INPUT), default=0)


def _groups(network: GrownNetwork) -> Iterator[tuple[int, int]]:
    """Yield the first and the last segment of each segment of the host."""
    merged = _merged(network)
    yield 0, merged
    for index in range(merged + 1, len(network.segments)):
        yield index, index


def _moved(slot: SlotSpec, network: GrownNetwork, merged: int) -> SlotSpec:
    """Return a slot of the network at its place in the host; a segment with grafted seeds offers no inner features."""
    grafted = merged > 0 and slot.after == merged
    grafted = grafted or any(graft.after == slot.after for graft in network.grafts)
    return replace(slot, after=slot.after - merged, inner=None if grafted else slot.inner)
