"""Measure what is missing at sites of a network in a loop: the part of the gradient its layers cannot follow. N positions."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from esper.kasmina.graft.grafted import undisturbed
from esper.kasmina.graft.grown import POINT, Point, first_tensor, sites_of, stream_of
from esper.kasmina.graft.recording import call
from esper.kasmina.graft.sharding import reshard
from esper.leyline.lifecycle.slots import Site

ENOUGH = 4096
"""Positions of a stream that are read; further batches are left out."""


class Read(NamedTuple):
    """Holds what was read at a site, one row for each position of each example."""

    source: Tensor  # what a bypass reads
    inputs: Tensor  # what the last layer that makes the stream reads; of no features where that is another stream
    gradient: Tensor  # of the loss of an example for the stream
    positions: int  # rows of one example


def missing(read: Read) -> Tensor:
    """Return the share () of the gradient's energy that a bypass could explain and the layer in front of the site cannot.

    For the gradient g at a site, with b what the last layer that makes the stream reads and u what a bypass reads,

        R = g - [1 b] P,  P = argmin |g - [1 b] P|^2         what no change of the layer follows
        W = argmin |R - [1 u] W|^2                           the map that new units would begin with
        share = (sum R . [1 u] W)^2 / (sum |[1 u] W|^2 sum |g|^2)

    To first order, a step of new units lowers the loss by the energy of R that they explain more than the layer alone can
    (Verbockhaven et al., "Growing Tiny Networks: Spotting Expressivity Bottlenecks and Fixing Them Optimally", TMLR 2024, arXiv
    2405.19816, proposition 3.3). P and W are fitted on every other example and the share is taken on the rest, in both ways,
    because a map of many features also explains noise; a sum below 0 counts as 0.
    """
    present, bypass, g = with_ones(read.inputs), with_ones(read.source), read.gradient
    odd = torch.arange(len(g), device=g.device) // read.positions % 2 == 1
    shares = []
    for fit, held in ((~odd, odd), (odd, ~odd)):
        p = ridge(present[fit], g[fit], 1e-4 * energy(present[fit]))
        w = ridge(bypass[fit], g[fit] - present[fit] @ p, 1e-2 * energy(bypass[fit]))
        explained = bypass[held] @ w
        along = ((g[held] - present[held] @ p) * explained).sum().clamp_min(0)
        whole = explained.square().sum() * g[held].square().sum()
        shares.append(along.square() / whole.clamp_min(1e-30))
    return torch.stack(shares).mean()


def read_sites(
    network: nn.Module,
    names: Sequence[str],
    batches: Iterable[tuple[Any, Any]],
    mean: Callable[[Any, Any], Tensor],
) -> dict[str, Read]:
    """Run a grafted network forward and backward on batches of (input, target); returns what was read at each named site.

    `mean` is the loss of a batch as one number. Left out are sites that no pass calls, that a bypass cannot read, or whose
    output the loss does not depend on. The network and its gradients are not changed.
    """
    sites = {name: sites_of(network)[name] for name in names}
    read: dict[str, list[Read]] = {name: [] for name in sites}
    with undisturbed(network), frozen(network), torch.enable_grad():
        for x, y in batches:
            with ExitStack() as hooks:
                heard = {name: hooks.enter_context(_listening(network, site)) for name, site in sites.items()}
                loss = mean(call(network, x), y)
                if loss.requires_grad:  # the pass called a site
                    loss.backward()
            for name, site in sites.items():
                if (found := _rows(site, heard[name])) is not None:
                    read[name].append(found)
            if all(sum(len(each.source) for each in parts) >= ENOUGH for parts in read.values()):
                break
    return {name: _joined(parts) for name, parts in read.items() if parts}


def _joined(parts: Sequence[Read]) -> Read:
    """Return the rows of several batches."""
    source, inputs, gradient = (torch.cat(rows) for rows in zip(*(part[:3] for part in parts), strict=True))
    return Read(source, inputs, gradient, parts[0].positions)


@contextmanager
def frozen(network: nn.Module) -> Iterator[None]:
    """Let no gradient reach a parameter. Asking autograd for those of streams alone fails at a reentrant checkpoint."""
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
        reshard(network)  # what is still whole would go on without a gradient


@contextmanager
def _listening(network: nn.Module, site: Site) -> Iterator[dict[str, Tensor]]:
    """Record what flows at a site in a pass: what a bypass reads (`source`), the last layer reads (`inputs`), and `gradient`."""
    heard: dict[str, Tensor] = {}

    def given(what: str, part: nn.Module, args: Any, kwargs: Any) -> None:
        if (tensor := first_tensor(args, kwargs)) is not None:
            heard[what] = tensor.detach().clone()  # a module behind may work in place

    def made(part: nn.Module, args: Any, output: Any) -> None:
        if (stream := stream_of(output)).requires_grad:
            stream.register_hook(lambda gradient: heard.update(gradient=gradient.detach()))

    after, around = network.get_submodule(site.after), network.get_submodule(site.around)
    point: Point = after.__dict__[POINT]
    with ExitStack() as hooks:
        if point.anchor is None:
            point.anchor = torch.zeros((), requires_grad=True)
            hooks.callback(setattr, point, "anchor", None)
        hooks.callback(around.register_forward_pre_hook(partial(given, "source"), with_kwargs=True).remove)
        for part in after.modules():
            if any(parameter.dim() > 1 for parameter in part.parameters(recurse=False)):
                hooks.callback(part.register_forward_pre_hook(partial(given, "inputs"), with_kwargs=True).remove)
        hooks.callback(after.register_forward_hook(made).remove)
        yield heard


def _rows(site: Site, heard: Mapping[str, Tensor]) -> Read | None:
    """Return what was heard at positions of the stream; None where no gradient arrived, or a bypass cannot read it."""
    stream = site.stream
    if "gradient" not in heard:
        return None
    gradient = stream.arranged(heard["gradient"])

    def rows(tensor: Tensor | None) -> Tensor | None:
        if tensor is None or stream.width_at(tensor) == 0:
            return None
        return stream.positions(stream.fitted(stream.arranged(tensor).float(), gradient)[None], gradient[None])[0]

    g = stream.positions(gradient[None].float())[0] * len(gradient)
    source, inputs = rows(heard.get("source")), rows(heard.get("inputs"))
    inputs = g.new_zeros(len(g), 0) if inputs is None else inputs
    return None if source is None else Read(source, inputs, g, len(g) // len(gradient))


def with_ones(features: Tensor) -> Tensor:
    """Put a column of ones in front of features (N, f)."""
    return torch.cat([features.new_ones(len(features), 1), features], 1)


def energy(features: Tensor) -> Tensor:
    """Return the mean over features (N, f) of their squared norm."""
    return features.square().sum() / features.shape[1] + 1e-12


def ridge(x: Tensor, y: Tensor, penalty: Tensor) -> Tensor:
    """Return the map W (K, O) with the least |y - x W|^2 + penalty |W|^2 for x (N, K), by the smaller of two systems."""
    if x.shape[1] <= len(x):
        return torch.linalg.solve(x.T @ x + penalty * torch.eye(x.shape[1]).to(x), x.T @ y)
    return x.T @ torch.linalg.solve(x @ x.T + penalty * torch.eye(len(x)).to(x), y)
