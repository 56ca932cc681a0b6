"""Low-rank corrections of damaged linear maps in closed form, from the intact weights: an opponent of seeds.

N examples, O outputs and I inputs of a map. Weights are (O, I), as of torch.nn.Linear. The bias counts as the weight of an input
that is always 1, so a corrected map has I + 1 inputs.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from esper.leyline.batches import Batch, run

NEGLIGIBLE = 1e-9
"""Share of the energy of a map's outputs below which a rank of a correction is rounding."""


class Correction(NamedTuple):
    """The correction of one map, its ranks in the order of what they restore. R ranks.

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
    """Correct the linear layers of a damaged network in place. Returns the parameters that the corrections would store.

    The two networks have layers of the same names and shapes. `x` are inputs of the intact network: the corrections are the best
    ones for what its layers read. The ranks of all layers compete for the budget [parameters], and the one that removes
    the largest share of its layer's error for each parameter comes first.
    """
    layers, inputs = _linear(damaged), _inputs(intact, x)
    found = {name: correction(layers[name], layer, inputs[name]) for name, layer in _linear(intact).items()}
    ranks = sorted(
        ((energy / own.cost, name) for name, own in found.items() for energy in own.energy.tolist()), reverse=True
    )
    taken, spent = dict.fromkeys(found, 0), 0
    for _, name in ranks:
        if spent + found[name].cost <= budget:
            taken[name], spent = taken[name] + 1, spent + found[name].cost
    for name, rank in taken.items():
        change = (found[name].out[:, :rank] @ found[name].into[:rank]).to(layers[name].weight.dtype)
        layers[name].weight.add_(change[:, :-1])
        layers[name].bias.add_(change[:, -1])
    return spent


def correction(damaged: nn.Linear, intact: nn.Linear, x: Tensor) -> Correction:
    """The corrections of a map for the inputs x (N, I), of every rank at once.

        E = [W - W', b - b'],   C = [x, 1]' [x, 1] / N,   E C E' = U S^2 U',   correction of rank r: U_r U_r' E

    Of all matrices D of rank r it has the least mean squared error ||(E - D) C^(1/2)||^2 of the outputs. This is EoRA (Liu and
    others, arXiv 2410.21271, 2024, section 3): there E C^(1/2) = U S V' is computed in the eigenspace of C, and the correction is
    U_r S_r V_r' C^(-1/2), which is U_r U_r' E where C can be inverted. EoRA corrects the weight alone, and counts no bias.
    """
    rows = torch.cat([x.double(), torch.ones(len(x), 1, dtype=torch.float64)], 1)
    error = _affine(intact) - _affine(damaged)
    energy, out = torch.linalg.eigh((error @ rows.T) @ (rows @ error.T) / len(rows))
    share = energy.flip(0) / (rows @ _affine(intact).T).square().sum(1).mean().clamp_min(1e-12)
    kept = int((share > NEGLIGIBLE).sum())
    out = out.flip(1)[:, :kept]
    return Correction(out, out.T @ error, share[:kept])


def _affine(layer: nn.Linear) -> Tensor:
    """(O, I + 1) weight and bias in double precision."""
    return torch.cat([layer.weight.double(), layer.bias.double()[:, None]], 1)


def _linear(network: nn.Module) -> dict[str, nn.Linear]:
    return {name: module for name, module in network.named_modules() if isinstance(module, nn.Linear)}


def _inputs(network: nn.Module, x: Batch) -> dict[str, Tensor]:
    """What each linear layer reads (N, I) when the network computes x."""
    seen: dict[str, Tensor] = {}
    hooks = [
        layer.register_forward_pre_hook(lambda _, given, name=name: seen.update({name: given[0]}))
        for name, layer in _linear(network).items()
    ]
    run(network, x)
    for hook in hooks:
        hook.remove()
    return seen
