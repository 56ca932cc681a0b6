"""What a probe finds of one live network. S slots, X branches, N examples."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from esper.kasmina.grown import POINT, stream_of
from esper.kasmina.sharding import gather
from esper.leyline.sites import Site
from esper.leyline.view import Seeds
from esper.tolaria.population import Asked, Figures, TrainedFigures
from esper.tolaria.runtime import read_packet
from esper.tolaria.sensors import participation_ratio
from esper.tolaria.training import doses

if TYPE_CHECKING:
    from esper.tolaria.live import LivePopulation


@torch.no_grad()
def measure_live(live: "LivePopulation", seeds: Seeds, asked: Asked, norms: Mapping[str, Tensor] | None) -> Figures:
    """Every figure that was asked for, in one read of the device. The network is in evaluation mode.

    The metric is minus the loss. `norms` are those of the seeds that incubate, by site; None leaves the training out.
    """
    assert not asked.sensors, "a live network has no growth sensors"
    assert not asked.validation, "a live network has no validation split"
    live.grafts.doses(doses(seeds)[0])
    with _listening(live.network, live.sites) as heard:
        own = live.probe_batches.see(live.network)
    means, pairs = [own.losses.mean()], []
    for dose in asked.coalitions.branches.dose:
        live.grafts.doses(dose)
        losses = live.probe_batches.see(live.network).losses
        means.append(losses.mean())
        pairs.append(_paired(losses - own.losses))
    rise = torch.stack(pairs) if pairs else own.losses.new_zeros(0, 2)
    total = torch.stack([gather(p.sum(dtype=torch.float32)).double() for p in live.network.parameters()]).sum()
    signs = torch.stack([_paired(own.losses)[1], own.spread.to(own.losses), total.to(own.losses)])
    trained = norms or {}
    packet = read_packet(
        [torch.stack(means), rise, torch.stack([_width(each, own.losses) for each in heard]), signs, *trained.values()]
    )
    loss, risen, participation, sign = packet[:4]
    slot_of = {site.name: slot for slot, site in enumerate(live.sites)}
    figures = TrainedFigures(
        loss=loss[:1],
        gradient_norm=None,
        seed_norms=[norm.reshape(1) for norm in packet[4:]],
        seed_owners=tuple((slot_of[name], np.zeros(1, np.int64)) for name in trained),
    )
    return Figures(
        loss=loss[:1],
        metric=-loss[:1],
        branch_loss=loss[1:],
        branch_metric=-loss[1:],
        loss_rise=risen,
        metric_fall=risen,
        participation=participation[None],
        signs=sign[None],
        finite=np.ones(1, bool) if asked.finite else None,
        trained=None if norms is None else figures,
    )


class _Heard:
    """The features of a stream at positions of every example of every batch."""

    def __init__(self, site: Site) -> None:
        self.stream = type(site.stream)
        self.features: list[Tensor] = []

    def begin(self, given: Tensor | None) -> None:
        """Nothing: only the output is listened to."""

    def end(self, output: Any) -> None:
        """Keep the output at its positions; a copy, as a module behind it may work in place."""
        h = stream_of(output).detach()
        self.features.append(self.stream.positions(h[None].float()).clone())


@contextmanager
def _listening(network: nn.Module, sites: tuple[Site, ...]) -> Iterator[list[_Heard]]:
    """What flows at each site, in front of any seed, while the network runs."""
    points = [network.get_submodule(site.after).__dict__[POINT] for site in sites]
    heard = [_Heard(site) for site in sites]
    for point, each in zip(points, heard, strict=True):
        point.tape = each
    try:
        yield heard
    finally:
        for point in points:
            point.tape = None


def _width(heard: _Heard, like: Tensor) -> Tensor:
    """() participation ratio of a stream / its width; nan where nothing flowed."""
    if not heard.features:
        return like.new_full((), torch.nan)
    return participation_ratio(torch.cat(heard.features, 1))[0].to(like)


def _paired(differences: Tensor) -> Tensor:
    """(N,) -> (2,) mean and its standard error."""
    return torch.stack([differences.mean(), differences.std() / len(differences) ** 0.5])
