"""Seeds whose change is linear, made part of the linear layer that they are behind."""

import copy

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints.vector import Affine, Factored, LinearMap, LowRank
from esper.kasmina.grafted import planted_at
from esper.kasmina.grown import sites_of
from esper.leyline.actions import Blend
from esper.leyline.slots import Tap

LINEAR = (Affine, Factored, LinearMap, LowRank)
"""Modules whose change is W u + b, position by position."""


@torch.no_grad()
def fold(network: nn.Module, name: str) -> bool:
    """Put what the seed at a site changes into the weight and bias of its nn.Linear; returns whether that could be done.

        before:  W x + b + alpha (V x + c)            becomes  (W + alpha V) x + b + alpha c
        here:    (W x + b) + alpha (V (W x + b) + c)  becomes  (W + alpha V W) x + b + alpha (V b + c)

    The seed is not removed. A layer that is frozen, that shares its weight with another, or that lacks a bias where one would be
    needed stays as it is, and so does one with another seed than that of a linear blueprint blended by ADD.
    """
    site, planted = sites_of(network)[name], planted_at(network, name)
    layer = network.get_submodule(site.after)
    assert planted is not None, "there is a seed to fold"
    reads_input = planted.tap == Tap.BEFORE and site.around == site.after
    if not (
        isinstance(planted.seed.delta, LINEAR)
        and planted.blend == Blend.ADD
        and (reads_input or planted.tap == Tap.HERE)
    ):
        return False
    if not _plain(network, layer):
        return False
    assert isinstance(layer, nn.Linear)
    delta = copy.deepcopy(planted.seed.delta).double()
    reads = layer.in_features if reads_input else layer.out_features
    shift: Tensor = delta(torch.zeros(1, reads, dtype=torch.float64, device=layer.weight.device))[0]
    matrix: Tensor = (delta(torch.eye(reads, dtype=torch.float64, device=layer.weight.device)) - shift).mT
    weight, alpha = layer.weight.double(), planted.alpha.double()
    bias = None if layer.bias is None else layer.bias.double()
    more, moved = (
        (matrix, shift) if reads_input else (matrix @ weight, shift if bias is None else matrix @ bias + shift)
    )
    if bias is None and moved.count_nonzero():
        return False
    layer.weight.copy_(weight + alpha * more)
    if bias is not None:
        layer.bias.copy_(bias + alpha * moved)
    return True


def _plain(network: nn.Module, layer: nn.Module) -> bool:
    """Whether a layer computes W x + b with a weight of its own that may change."""
    original = getattr(type(layer), "_esper_original", type(layer))
    if not (isinstance(layer, nn.Linear) and original.forward is nn.Linear.forward and "weight" in layer._parameters):
        return False
    owners = sum(value is layer.weight for part in network.modules() for value in part._parameters.values())
    return owners == 1 and layer.weight.requires_grad
