"""Correct damaged linear maps at low rank in closed form, from the intact weights: an opponent of seeds.

N examples, O outputs and I inputs of a map. Weights are (O, I), as of torch.nn.Linear; the weight of a convolution is flattened
to it, and each patch that it reads is an example. A bias counts as the weight of an input that is always 1, so a map with a bias
has I + 1 inputs here. A weight that two modules share is left as it is.
"""

from collections import Counter
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.leyline.data.batches import Batch, run

Map = nn.Linear | nn.Conv2d

NEGLIGIBLE = 1e-9
"""Share of the energy of a map's outputs below which a rank of a correction is rounding."""


class Correction(NamedTuple):
    """Holds the correction of one map, its ranks in the order of what they restore. R ranks.

    Attributes:
        out ((O, R) tensor): orthonormal directions of the outputs
        into ((R, I + 1) tensor): the correction of rank r adds out[:, :r] @ into[:r] to the weight and the bias
        energy ((R,) tensor): mean squared error of the outputs that each rank removes, as a share of their mean square
    """

    out: Tensor
    into: Tensor
    energy: Tensor

    @property
    def cost(self) -> int:
        """Parameters of one rank."""
        return len(self.out) + self.into.shape[1]


@torch.no_grad()
def correct(damaged: nn.Module, intact: nn.Module, x: Batch, budget: int) -> int:
    """Correct the linear layers and convolutions of a damaged network in place. Returns the parameters of the corrections.

    The two networks have layers of the same names and shapes. `x` are inputs of the intact network: the corrections are the best
    ones for what its layers read. The ranks of all layers compete for the budget [parameters], and the one that removes
    the largest share of its layer's error for each parameter comes first.
    """
    layers, inputs = _maps(damaged), _inputs(intact, x)
    found = {name: correction(layers[name], layer, inputs[name]) for name, layer in _maps(intact).items()}
    ranks = sorted(
        ((energy / own.cost, name) for name, own in found.items() for energy in own.energy.tolist()), reverse=True
    )
    taken, spent = dict.fromkeys(found, 0), 0
    for _, name in ranks:
        if spent + found[name].cost <= budget:
            taken[name], spent = taken[name] + 1, spent + found[name].cost
    for name, rank in taken.items():
        change = (found[name].out[:, :rank] @ found[name].into[:rank]).to(layers[name].weight.dtype)
        weight, bias = layers[name].weight, layers[name].bias
        weight.add_(change[:, : weight[0].numel()].view_as(weight))
        if bias is not None:
            bias.add_(change[:, -1])
    return spent


def correction(damaged: Map, intact: Map, x: Tensor) -> Correction:
    """Compute the corrections of a map for the inputs x (N, I), of every rank at once.

        E = [W - W', b - b'],   C = [x, 1]' [x, 1] / N,   E C E' = U S^2 U',   correction of rank r: U_r U_r' E

    Of all matrices D of rank r it has the least mean squared error ||(E - D) C^(1/2)||^2 of the outputs. This is EoRA (Liu and
    others, arXiv 2410.21271, 2024, section 3): there E C^(1/2) = U S V' is computed in the eigenspace of C, and the correction is
    U_r S_r V_r' C^(-1/2), which is U_r U_r' E where C can be inverted. EoRA corrects the weight alone, and counts no bias.
    """
    rows = x.double() if intact.bias is None else F.pad(x.double(), (0, 1), value=1.0)
    error = _affine(intact) - _affine(damaged)
    energy, out = torch.linalg.eigh((error @ rows.T) @ (rows @ error.T) / len(rows))
    share = energy.flip(0) / (rows @ _affine(intact).T).square().sum(1).mean().clamp_min(1e-12)
    kept = int((share > NEGLIGIBLE).sum())
    out = out.flip(1)[:, :kept]
    return Correction(out, out.T @ error, share[:kept])


def _affine(layer: Map) -> Tensor:
    """Join weight and bias in double precision, (O, I + 1); (O, I) without a bias."""
    weight = layer.weight.double().flatten(1)
    return weight if layer.bias is None else torch.cat([weight, layer.bias.double()[:, None]], 1)


def _maps(network: nn.Module) -> dict[str, Map]:
    owners = Counter(id(parameter) for _, parameter in network.named_parameters(remove_duplicate=False))
    return {
        name: module
        for name, module in network.named_modules()
        if isinstance(module, Map) and owners[id(module.weight)] == 1
    }


def _rows(layer: Map, x: Tensor) -> Tensor:
    """Return what a layer multiplies by its weight, (N, I): features of every position, or patches of every map."""
    if isinstance(layer, nn.Linear):
        return x.flatten(0, -2)
    assert layer.groups == 1, layer
    assert not isinstance(layer.padding, str), layer
    patches = F.unfold(x, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
    rows: Tensor = patches.mT.flatten(0, 1)
    return rows


def _inputs(network: nn.Module, x: Batch) -> dict[str, Tensor]:
    """Record what each map reads, (N, I), when the network computes x."""
    seen: dict[str, Tensor] = {}
    hooks = [
        layer.register_forward_pre_hook(lambda own, given, name=name: seen.update({name: _rows(own, given[0])}))
        for name, layer in _maps(network).items()
    ]
    run(network, x)
    for hook in hooks:
        hook.remove()
    return seen
