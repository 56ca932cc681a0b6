"""Repair by opponents of `esper heal` that it does not have: each trains a copy of a damaged network on the same batches."""

import copy
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints import drawn_with
from esper.kasmina.graft.grafted import call
from esper.leyline.data.keys import Purpose, scalar
from esper.runs.healing.training import Case, TrainedNetwork, adapters, trained
from esper_bench.packaged.networks import Map


def maps(network: nn.Module) -> dict[str, Map]:
    """Return the linear layers and convolutions by path."""
    return {path: part for path, part in network.named_modules() if isinstance(part, Map)}


def head(case: Case, rate: float, size: int) -> TrainedNetwork | None:
    """Train the last layer alone, or where it has more than `size` parameters LoRA there, of at most about that size."""
    path, layer = [*maps(case.host).items()][-1]
    if sum(map(Tensor.numel, layer.parameters())) > size:
        return adapters(case, rate, [path], size)
    network = copy.deepcopy(case.host).requires_grad_(False)
    network.get_submodule(path).requires_grad_(True)
    return trained(network, case, rate)


def regrown(case: Case, rate: float, size: int, places: Sequence[str]) -> TrainedNetwork | None:
    """Draw pruned weights anew, and train them alone: dead units at the first places first, then single entries.

    A unit is an output whose weights are all 0; it is drawn as wide as the living ones, with a bias of 0. Where the next layer's
    weights of it are all 0 too, these are trained from 0 on. Of the other entries that are 0, those with the largest gradients
    are trained from 0 on, as RigL regrows them (Evci and others, arXiv 1911.11134, 2020, section 3). At most `size` weights in
    all. None if no weight is 0.
    """
    network, left = copy.deepcopy(case.host).requires_grad_(False), size
    layers = maps(network)
    order = sorted(
        layers, key=lambda path: min((i for i, p in enumerate(places) if path.startswith(p)), default=len(places))
    )
    masks = {path: torch.zeros_like(layer.weight, dtype=torch.bool) for path, layer in layers.items()}
    dead = {path: ~layer.weight.flatten(1).any(1) for path, layer in layers.items()}
    following = dict(itertools.pairwise(layers))
    generator = torch.Generator().manual_seed(scalar(Purpose.BIRTH, case.seed))
    for path in order:
        weight, after = layers[path].weight, following.get(path, path)
        reads = layers[after].weight.transpose(0, 1)  # by input; of the layer itself if it is the last one
        for unit in [] if dead[path].all() else dead[path].nonzero()[:, 0].tolist():
            cut = after != path and len(reads) == len(weight) and not reads[unit].any()
            cost = weight[unit].numel() + (reads[unit].numel() if cut else 0)
            if cost > left:
                break
            drawn = torch.randn(weight.shape[1:], generator=generator)
            weight[unit] = drawn.to(weight) * weight[~dead[path]].std()
            masks[path][unit] = True
            if cut:
                masks[after][:, unit] = True
            left -= cost
    slopes = _gradients(case, network, layers)
    empty = {
        path: slope.abs() * ((layer.weight == 0) & ~masks[path])
        for (path, layer), slope in zip(layers.items(), slopes, strict=True)
    }
    every = torch.cat([each.flatten() for each in empty.values()])
    if left and (found := min(left, int((every > 0).sum()))):
        least = every.topk(found).values[-1]
        for path, each in empty.items():
            masks[path] |= (each > 0) & (each >= least)
    count = sum(int(mask.sum()) for mask in masks.values())
    if not count:
        return None
    for path, mask in masks.items():
        if mask.any():
            weight = layers[path].weight.requires_grad_(True)
            weight.register_hook(lambda slope, mask=mask: slope * mask)  # an entry without a gradient does not move
    return trained(network, case, rate)._replace(learned=count)


def _gradients(case: Case, network: nn.Module, layers: dict[str, Map]) -> list[Tensor]:
    """Gradients of the loss on 256 training examples in the weights of some layers, which are 0 for a weight of no effect."""
    x, y = case.parts.train.at(slice(256))
    for layer in layers.values():
        layer.weight.requires_grad_(True)
    with drawn_with(scalar(Purpose.DROPOUT, case.seed)):
        case.loss(call(network.eval(), x), y).mean().backward()
    found = [
        torch.zeros_like(layer.weight) if layer.weight.grad is None else layer.weight.grad for layer in layers.values()
    ]
    network.requires_grad_(False)
    network.zero_grad()
    return found
