"""The streams of intact networks, from which the sensor `drift` measures a damaged host. R rows, N examples."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.kasmina.body import Body
from esper.kasmina.chain import calling
from esper.kasmina.host import SegmentedHost
from esper.kasmina.layout import BEFORE, HERE
from esper.leyline.batches import Batch, picked
from esper.leyline.sites import Taps
from esper.leyline.source import SENSED
from esper.leyline.streams import Kind
from esper.tolaria.resident import ResidentData
from esper.tolaria.sensors import Taught


@torch.no_grad()
def taught_streams(data: ResidentData, body: Body) -> list[Taught]:
    """Run the intact network of every row on the examples that the sensors are fitted on; one entry per slot.

    Empty where no instance has an intact network, and on hosts whose streams or inputs are not vectors.
    """
    vectors = all(stream.kind == Kind.VECTOR for stream in body.layout.streams)
    if not vectors or all(problem.intact is None for problem in data.problems):
        return []
    length = data.fit.y.shape[1]
    _, which = np.unique(data.instance, return_inverse=True)
    row = np.array(data.problem_of)[which]
    widest = body.layout.widest.taps
    found = []
    for problem in data.problems:
        if problem.intact is None:
            streams = [(torch.full((0, 0), torch.nan),) * 2 for _ in body.slots]
        else:
            host, x = problem.intact()
            streams = _streams(host, picked(problem.read(x, data.dtype), slice(SENSED)))
        found.append(
            [
                tuple(
                    _padded(part, length, int(widest[slot, tap]))
                    for part, tap in zip(pair, (HERE, BEFORE), strict=True)
                )
                for slot, pair in enumerate(streams)
            ]
        )
    return [
        Taught(
            *(torch.stack([found[index][slot][part] for index in row]).to(data.device, data.dtype) for part in (0, 1))
        )
        for slot in range(len(body.slots))
    ]


def _streams(host: nn.Module, x: Batch) -> list[tuple[Tensor, Tensor]]:
    """The stream and the segment's input at every slot of a host, (N, D) each."""
    assert isinstance(host, SegmentedHost), type(host)
    seen: list[tuple[Tensor, Tensor]] = []

    def visit(_: int, taps: Taps[Batch]) -> Batch:
        assert isinstance(taps.here, Tensor), "the streams are vectors"
        assert isinstance(taps.before, Tensor), "the inputs are vectors"
        seen.append((taps.here, taps.before))
        return taps.here

    host.eval()
    host.chain.run(calling(host.segments), x, visit)
    return seen


def _padded(values: Tensor, length: int, width: int) -> Tensor:
    """(N, D) -> (length, width) with 0 added; nan everywhere where there are no values."""
    if not values.numel():
        return torch.full((length, width), torch.nan)
    return F.pad(values, (0, width - values.shape[1], 0, length - values.shape[0]))
