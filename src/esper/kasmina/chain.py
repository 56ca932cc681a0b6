"""Run segments one after the other, with a visit at each site between them."""

from collections.abc import Callable, Collection, Sequence

from torch import nn

from esper.leyline.batches import Batch, run
from esper.leyline.sites import Flow, Taps


class Chain:
    """A network as a chain of segments, with sites between them.

    paths: the dotted path of every segment, in order.
    """

    def __init__(self, segments: int, after: Sequence[int]) -> None:
        """`after` names the segment in front of each site, in order; no two sites may share one."""
        self.paths = tuple(f"segments.{index}" for index in range(segments))
        self._site_after = {segment: site for site, segment in enumerate(after)}

    def run(self, call: Callable[[str, Flow], Flow], batch: Flow, visit: Callable[[int, Taps[Flow]], Flow]) -> Flow:
        """Compute the output of the network for a batch.

        call(path, flow) runs the segment of a path. visit(site, taps) is called after every segment that has a site,
        with the index of the site, and returns the stream that the next segment reads: `taps.here` if nothing grows
        there. `taps.before` is the input of the segment in front of the site.
        """
        flow = batch
        for segment, path in enumerate(self.paths):
            before, flow = flow, call(path, flow)
            site = self._site_after.get(segment)
            if site is not None:
                flow = visit(site, Taps(flow, before, batch))
        return flow

    def merged(self, acting: Collection[int]) -> "Chain":
        """Return the chain that visits only the `acting` sites, and runs all segments between what they read and change as one.

        The path of segments i to j is "segments.i:j"; both are counted.
        """
        found, first = Chain(0, ()), 0
        paths: list[str] = []
        for segment in range(len(self.paths)):
            acts = self._site_after.get(segment) in acting
            next_acts = self._site_after.get(segment + 1) in acting
            if acts or next_acts or segment == len(self.paths) - 1:
                if acts:
                    found._site_after[len(paths)] = self._site_after[segment]
                paths.append(self.paths[segment] if first == segment else f"segments.{first}:{segment}")
                first = segment + 1
        found.paths = tuple(paths)
        return found


def calling(segments: Sequence[nn.Module] | nn.ModuleList) -> Callable[[str, Batch], Batch]:
    """Return a `call` that runs the segments of a plain network: the first on the batch, every other on one tensor."""
    by_path = {f"segments.{index}": segment for index, segment in enumerate(segments)}

    def call(path: str, x: Batch) -> Batch:
        return run(by_path[path], x)

    return call
