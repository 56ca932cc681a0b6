"""Correct damaged layers in closed form, from what those of the intact network return. N rows, K inputs, O outputs."""

import copy
import time
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from esper.kasmina.graft.grafted import undisturbed
from esper.kasmina.graft.recording import call
from esper.runs.healing.training import Case, LowRankAdapter, TrainedNetwork, probe_loss
from esper.tolaria.live.missing import ridge

Map = nn.Linear | nn.Conv2d

EXAMPLES, PASS = 256, 16
"""Examples of the training part that are read, and those in one pass, so that the patches of a convolution fit in memory."""
ROWS = 128
"""Most inputs of a layer that one call of it leaves."""
RIDGE = 0.01
"""Ridge, as a share of the mean squared singular value of the inputs."""


@torch.no_grad()
def refit(case: Case, intact: nn.Module, size: int) -> TrainedNetwork | None:
    """Correct linear layers and convolutions by adding low-rank matrices of at most `size` parameters in all.

        E = Y0 - X W',   M = (X'X + RIDGE I)^-1 X'E,   correction of rank r: M U_r U_r',   with (X M)'(X M) = U S U'

    Y0 (N, O) are the outputs of the intact layer, W' the damaged weight, and X (N, K) what the layer reads in the damaged network
    once the layers in front are corrected: reduced-rank ridge regression (Mukherjee and Zhu, 2011, section 2). Ranks go to the
    layers where they remove the largest share of the squared error for each parameter, with the inputs of the intact network.
    Returns None if no layer can be corrected within `size`.
    """
    begin = time.perf_counter()
    network = copy.deepcopy(case.host).requires_grad_(False)
    theirs, part = _maps(intact), case.parts.train.at(slice(EXAMPLES))
    layers = {name: own for name, own in _maps(network).items() if name in theirs}
    layers = {name: own for name, own in layers.items() if own.weight.shape == theirs[name].weight.shape}
    batches = [part.at(slice(at, at + PASS)).x for at in range(0, len(part), PASS)]
    inputs = _inputs(intact, {name: theirs[name] for name in layers}, batches)
    gains = []
    for name, x in inputs.items():
        own, other = _affine(layers[name]), _affine(theirs[name])
        error = _read(x, other) - _read(x, own)
        energy = torch.linalg.eigvalsh(error.T @ error).flip(0).clamp_min(0) / _read(x, other).square().sum()
        cost = len(own) + own.shape[1] - 1
        gains += [(float(each) / cost, cost, name) for each in energy[: own.shape[1] - 1] if each > 1e-9]
    ranks, left = dict.fromkeys(inputs, 0), size
    for _, cost, name in sorted(gains, reverse=True):
        if cost <= left:
            ranks[name], left = ranks[name] + 1, left - cost
    if left == size:
        return None
    for name in (name for name, rank in ranks.items() if rank):  # in the order in which the network runs them
        layer, x = layers[name], _inputs(network, {name: layers[name]}, batches)[name]
        error = _read(inputs[name], _affine(theirs[name])) - _read(x, _affine(layer))
        fitted = ridge(x, error, RIDGE * x.square().sum() / min(x.shape))
        directions = torch.linalg.eigh((x @ fitted).T @ (x @ fitted))[1].flip(1)[:, : ranks[name]]
        added = LowRankAdapter(layer.weight, ranks[name])
        added.b.copy_(directions)
        added.a.copy_((fitted @ directions).T)
        parametrize.register_parametrization(layer, "weight", added)
    return TrainedNetwork(network.eval(), probe_loss(network, case), size - left, 0.0, time.perf_counter() - begin)


def _affine(layer: Map) -> Tensor:
    """Return (O, K + 1) weight and bias."""
    weight = layer.weight.flatten(1).double()
    return F.pad(weight, (0, 1)) if layer.bias is None else torch.cat([weight, layer.bias[:, None].double()], 1)


def _read(x: Tensor, affine: Tensor) -> Tensor:
    """Return (N, O) what a layer returns for the inputs x (N, K)."""
    return x @ affine[:, :-1].T + affine[:, -1]


def _maps(network: nn.Module) -> dict[str, Map]:
    return {
        name: part
        for name, part in network.named_modules()
        if isinstance(part, nn.Linear)
        or (
            isinstance(part, nn.Conv2d) and part.groups == 1 and part.padding_mode == "zeros" and part.padding != "same"
        )
    }


def _inputs(network: nn.Module, layers: Mapping[str, Map], batches: list[object]) -> dict[str, Tensor]:
    """Return (N, K) what each layer reads, in double precision and in the order of the calls; at most `ROWS` of each call.

    The rows depend on the number of them alone, so that two networks leave those of the same examples and positions.
    """
    found: dict[str, list[Tensor]] = {}

    def reading(name: str, layer: nn.Module, given: tuple[Tensor]) -> None:
        x = given[0]
        if isinstance(layer, nn.Conv2d):
            padding = (0, 0) if isinstance(layer.padding, str) else layer.padding
            x = F.unfold(x, layer.kernel_size, layer.dilation, padding, layer.stride).mT
        rows = x.flatten(0, -2)
        kept = torch.randperm(len(rows), generator=torch.Generator().manual_seed(len(rows)))[:ROWS]
        found.setdefault(name, []).append(rows[kept].double())

    with ExitStack() as hooks, undisturbed(network):
        for name, layer in layers.items():
            hooks.enter_context(layer.register_forward_pre_hook(partial(reading, name)))
        for x in batches:
            call(network, x)
    return {name: torch.cat(rows) for name, rows in found.items()}
