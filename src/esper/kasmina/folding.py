"""Fold a seed whose change is linear into the linear layer in front of it."""

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints.vector import Affine, Factored, LinearMap, LowRank, SparseHead, SparseRows
from esper.kasmina.grafted import planted_at
from esper.kasmina.grown import sites_of
from esper.kasmina.sharding import fill, gather, gather_module
from esper.leyline.actions import Blend
from esper.leyline.slots import Tap

LINEAR = (Affine, Factored, LinearMap, LowRank, SparseHead, SparseRows)
"""Modules whose change is W u + b at every position."""


@torch.no_grad()
def fold(network: nn.Module, name: str) -> bool:
    """Fold the seed at a site into the weight and bias of its nn.Linear; return whether that was possible.

        before:  W x + b + alpha (V x + c)            becomes  (W + alpha V) x + b + alpha c
        here:    (W x + b) + alpha (V (W x + b) + c)  becomes  (W + alpha V W) x + b + alpha (V b + c)

    The seed itself is not removed. Nothing is folded if the layer is frozen, shares its weight with another layer or
    lacks a bias that would be needed, or if the seed is not of a linear blueprint blended by ADD.
    """
    site, planted = sites_of(network)[name], planted_at(network, name)
    layer = network.get_submodule(site.after)
    assert planted is not None, "there must be a seed to fold"
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
    delta = gather_module(planted.seed.delta).double()
    reads = layer.in_features if reads_input else layer.out_features
    shift: Tensor = delta(torch.zeros(1, reads, dtype=torch.float64, device=layer.weight.device))[0]
    matrix: Tensor = (delta(torch.eye(reads, dtype=torch.float64, device=layer.weight.device)) - shift).mT
    weight, alpha = gather(layer.weight).double(), planted.alpha.double()
    bias = None if layer.bias is None else gather(layer.bias).double()
    more, moved = (
        (matrix, shift) if reads_input else (matrix @ weight, shift if bias is None else matrix @ bias + shift)
    )
    if bias is None and moved.count_nonzero():
        return False
    fill(layer.weight, (weight + alpha * more).to(layer.weight.dtype))
    if bias is not None:
        fill(layer.bias, (bias + alpha * moved).to(layer.bias.dtype))
    return True


def _plain(network: nn.Module, layer: nn.Module) -> bool:
    """Whether a layer computes W x + b with a weight that no other module uses and that may change."""
    original = getattr(type(layer), "_esper_original", type(layer))
    if not (isinstance(layer, nn.Linear) and original.forward is nn.Linear.forward and "weight" in layer._parameters):
        return False
    owners = sum(value is layer.weight for part in network.modules() for value in part._parameters.values())
    return owners == 1 and layer.weight.requires_grad
