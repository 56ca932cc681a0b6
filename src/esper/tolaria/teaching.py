"""The streams of intact networks, from which the sensor `drift` measures a damaged host. R rows, N examples."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from esper.kasmina.body import Body
from esper.kasmina.chain import calling
from esper.kasmina.host import SegmentedHost
from esper.kasmina.layout import BEFORE, HERE
from esper.leyline.batches import Batch, picked
from esper.leyline.sites import Taps
from esper.leyline.source import SENSED
from esper.leyline.task import Instance
from esper.tolaria.resident import ResidentData
from esper.tolaria.sensors import Taught


@torch.no_grad()
def taught_streams(data: ResidentData, body: Body) -> list[Taught]:
    """Run the intact network of every row on the examples that the sensors are fitted on; one entry per slot.

    A stream of several positions is read at those that the sensors read, as one example each. Empty where no instance has an
    intact network.
    """
    if all(problem.intact is None for problem in data.problems):
        return []
    _, which = np.unique(data.instance, return_inverse=True)
    streams = [_streams(problem, data, body) for problem in data.problems]
    row, most = np.array(data.problem_of)[which].tolist(), data.fit.y.shape[1]
    found = []
    for slot in range(len(body.slots)):
        widths = (int(body.layout.widest.taps[slot, tap]) for tap in (HERE, BEFORE))
        pair = [
            _padded([None if each is None else each[slot][part] for each in streams], most, width)
            for part, width in enumerate(widths)
        ]
        found.append(
            Taught(*(torch.stack([part[index] for index in row]).to(data.device, data.dtype) for part in pair))
        )
    return found


def _streams(problem: Instance, data: ResidentData, body: Body) -> list[tuple[Tensor, Tensor]] | None:
    """The stream and the segment's input at every slot of an intact network, (N, P, C) each at P positions; None without one."""
    if problem.intact is None:
        return None
    host, x = problem.intact()
    assert isinstance(host, SegmentedHost), type(host)
    seen: list[tuple[Tensor, Tensor]] = []

    def visit(slot: int, taps: Taps[Batch]) -> Batch:
        kind, here = body.layout.streams[slot], taps.here
        assert isinstance(here, Tensor), "a segment must return one tensor"
        stream = kind.positions(here[None])[0]
        before = torch.full_like(stream[:, :1], torch.nan)
        if body.layout.widest.taps[slot, BEFORE]:
            assert isinstance(taps.before, Tensor), "what has a width is one tensor"
            before = kind.positions(kind.fitted(taps.before, here)[None])[0]
        seen.append((stream.unflatten(0, (len(here), -1)), before.unflatten(0, (len(here), -1))))
        return here

    host.eval()
    host.chain.run(calling(host.segments), picked(problem.read(x, data.dtype), slice(SENSED)), visit)
    return seen


def _padded(parts: Sequence[Tensor | None], most: int, width: int) -> list[Tensor]:
    """Streams (N, P, C) of several networks -> (most * P, width) each, with 0 added; nan everywhere for None."""
    positions = next(part.shape[1] for part in parts if part is not None)
    width = max(width, 1)
    return [
        torch.full((most * positions, width), torch.nan)
        if part is None
        else F.pad(part, (0, width - part.shape[2], 0, 0, 0, most - len(part))).flatten(0, 1)
        for part in parts
    ]
