"""Fold a seed whose change is linear into the linear layer in front of it."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints.vector import Affine, Factored, LinearMap, LowRank, SparseHead, SparseRows
from esper.kasmina.graft.grafted import planted_at, undisturbed
from esper.kasmina.graft.grown import sites_of
from esper.kasmina.graft.planted import Mode, Planted, Seat
from esper.kasmina.graft.recording import floats
from esper.kasmina.graft.sharding import fill, gather, gather_module, reshard
from esper.leyline.lifecycle.actions import Blend
from esper.leyline.lifecycle.slots import Tap

LINEAR = (Affine, Factored, LinearMap, LowRank, SparseHead, SparseRows)
"""Modules whose change is W u + b at every position."""

Pass = Callable[[nn.Module], Any]
"""A forward pass of a network on a batch; returns the output."""


@torch.no_grad()
def fold(
    networks: Sequence[nn.Module], name: str, passes: Sequence[Pass], agree: Callable[[bool], bool] = bool
) -> bool:
    """Fold the seed at a site into the weight and bias of its nn.Linear: in a network and its moving averages, or in none.

        before:  W x + b + alpha (V x + c)            becomes  (W + alpha V) x + b + alpha c
        here:    (W x + b) + alpha (V (W x + b) + c)  becomes  (W + alpha V W) x + b + alpha (V b + c)

    The seed is folded only if every pass gives what it gave before, to rounding (`_same_output`). So a weight that is also
    used elsewhere, or is computed from other parameters before each pass, is found by what the network computes. Otherwise
    every parameter has its bits again. A parameter of the network that requires no gradient, or that a second
    module holds, is never written.

    networks: the network, then its moving averages. agree: makes one decision of those of several processes, which all
    call this. Returns whether the seed was folded. The seed itself is not removed.
    """
    changes = []
    with undisturbed(*networks):
        for network in networks:
            reshard(network)
            changed = _changes(network, name)
            if changed is None:
                return False
            changes.append(changed)
        holders = [parameter for part in networks[0].modules() for parameter in part._parameters.values()]
        for parameter, _ in changes[0]:
            if not parameter.requires_grad or sum(each is parameter for each in holders) > 1:
                return False
        # every process makes every pass, because those of a sharded network wait for each other
        same = [
            _same_output(network, name, changed, run)
            for network, changed in zip(networks, changes, strict=True)
            for run in passes
        ]
    if not agree(all(same)):
        return False
    for changed in changes:
        for parameter, value in changed:
            fill(parameter, value)
    return True


def _changes(network: nn.Module, name: str) -> list[tuple[Tensor, Tensor]] | None:
    """The weight of a site's layer, and its bias where that changes, each with its folded value; None if there is none."""
    site, planted = sites_of(network)[name], planted_at(network, name)
    layer = network.get_submodule(site.after)
    assert planted is not None, "there must be a seed to fold"
    reads_input = planted.tap == Tap.BEFORE and site.around == site.after
    if not (
        isinstance(layer, nn.Linear)
        and isinstance(planted.seed.delta, LINEAR)
        and planted.blend == Blend.ADD
        and (reads_input or planted.tap == Tap.HERE)
    ):
        return None
    delta = gather_module(planted.seed.delta).double()
    reads = layer.in_features if reads_input else layer.out_features
    shift: Tensor = delta(torch.zeros(1, reads, dtype=torch.float64, device=layer.weight.device))[0]
    matrix: Tensor = (delta(torch.eye(reads, dtype=torch.float64, device=layer.weight.device)) - shift).mT
    weight, alpha = gather(layer.weight).double(), planted.alpha.double()
    bias = None if layer.bias is None else gather(layer.bias).double()
    more, moved = (
        (matrix, shift) if reads_input else (matrix @ weight, shift if bias is None else matrix @ bias + shift)
    )
    changed: list[tuple[Tensor, Tensor]] = [(layer.weight, (weight + alpha * more).to(layer.weight.dtype))]
    if moved.count_nonzero():
        if bias is None:
            return None
        changed.append((layer.bias, (bias + alpha * moved).to(layer.bias.dtype)))
    return changed


def _same_output(network: nn.Module, name: str, changes: Sequence[tuple[Tensor, Tensor]], run: Pass) -> bool:
    """Whether a pass gives the same with the folded layer as with the seed; parameters and seed are restored, bit for bit.

    Equal are values that differ by at most sqrt(eps) of the largest one in the tensor, which is half of its digits, for the
    eps of the coarsest floating type that takes part. The output of the site itself must be so too, and may differ by at
    most a tenth of what the seed changes there, in the root mean square: a change smaller than the rounding of a weight
    would be lost.
    """
    layer, planted = network.get_submodule(sites_of(network)[name].after), planted_at(network, name)
    assert planted is not None, "there must be a seed to fold"
    with _streams(layer, planted) as (front, behind):
        expected = list(floats(run(network)))
    reshard(network)
    mode, before = planted.mode, [(parameter, parameter.detach().clone()) for parameter, _ in changes]
    try:
        planted.mode = Mode.OFF
        for parameter, value in changes:
            fill(parameter, value)
        with _streams(layer, planted) as (_, folded):
            found = list(floats(run(network)))
    finally:
        reshard(network)
        planted.mode = mode
        for parameter, value in before:
            fill(parameter, value)
    pairs = [*zip(expected, found, strict=False), *zip(behind, folded, strict=False)]
    if (len(expected), len(behind)) != (len(found), len(folded)):
        return False
    eps = max(_eps(each) for each in (changes[0][0], *expected, *behind))
    if not all(same_values(one, other, eps) for one, other in pairs):
        return False
    lost, seed = (
        sum(float((one - other).double().square().sum()) for one, other in zip(behind, others, strict=False))
        for others in (folded, front)
    )
    return lost <= seed / 100


@contextmanager
def _streams(layer: nn.Module, planted: Planted | Seat) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """What flows at a site in front of the seed, if it acts, and behind it; copies, as a module behind may work in place."""
    front: list[Tensor] = []
    behind: list[Tensor] = []
    handles = [
        planted.register_forward_hook(lambda _, given, output: front.append(given[0].clone())),
        layer.register_forward_hook(lambda _, given, output: behind.append(output.clone())),
    ]
    try:
        yield front, behind
    finally:
        for handle in handles:
            handle.remove()


def _eps(tensor: Tensor) -> float:
    """The distance from 1 to the next number that products of tensors of this type tell apart."""
    if tensor.is_cuda and tensor.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32":
        return 2.0**-10
    return torch.finfo(tensor.dtype).eps


def same_values(one: Tensor, other: Tensor, eps: float) -> bool:
    """Whether two tensors are equal to half of the digits of the largest finite value; equal infinities and nans are."""
    if one.is_nested or one.layout != torch.strided or one.shape != other.shape:
        return False
    if not one.numel():
        return True
    exact = torch.promote_types(one.dtype, torch.float32)
    one, other = one.to(exact), other.to(exact)
    largest = float(one.abs().where(one.isfinite(), 0.0).max())
    return bool(torch.isclose(other, one, rtol=0.0, atol=math.sqrt(eps) * largest, equal_nan=True).all())
