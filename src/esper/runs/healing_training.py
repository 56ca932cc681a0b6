"""The networks that a healing compares: the same batches for each, and their losses on the examples that were held back."""

import copy
import math
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils import parametrize

from esper.kasmina.blueprints import drawn_with
from esper.kasmina.survey import call, undisturbed
from esper.leyline.errors import InputError
from esper.leyline.keys import Purpose, scalar
from esper.leyline.sites import Site
from esper.runs.healed import Contender, half_width
from esper.runs.healing_data import Examples, Parts
from esper.tolaria.live_probe import Loss, Probe, Way

WEIGHTS = ("weight", "weight_orig", "in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
"""Names of the weights that LoRA adapts: of layers, of pruned layers in an exported graph, and of nn.MultiheadAttention."""


PIECES = 20
"""Batches that are measured if a loss does not know examples; fewer where there are fewer examples."""


class Case(NamedTuple):
    """What all networks of a healing have in common.

    Attributes:
        host (nn.Module): the damaged network, in evaluation mode
        masks (tensors by name): masks of pruned parameters
        parts (Parts): the examples
        loss (callable): of an output and a target
        steps (int): steps of the optimizer
        batch (int): examples in a step
        seed (int): seed of batches and weights
        way (str): how the loss of an example is had, as in `tolaria/live_probe.py::Probe`
    """

    host: nn.Module
    masks: Mapping[str, Tensor]
    parts: Parts
    loss: Loss
    steps: int
    batch: int
    seed: int
    way: Way = "given"

    def batches(self, examples: Examples) -> list[tuple[Any, Any]]:
        """Batches to measure on: `PIECES` where only batches have a loss, so that an interval has enough of them."""
        return examples.batches(PIECES if self.way == "whole" else 2)


class Trained(NamedTuple):
    """A network after its training: its loss on the probe, its trained parameters, its learning rate, and the seconds it took."""

    network: nn.Module
    probe: float
    learned: int
    rate: float
    seconds: float


def train(
    network: nn.Module, optimizer: torch.optim.Optimizer, case: Case, behind: Callable[[Any, Any], Any], *, still: bool
) -> None:
    """Train on the batches that every network gets, in the same order; `behind` is called after each step.

    still: keep normalisation layers with running statistics in evaluation mode, as those of a frozen network are.
    """
    network.train()
    for part in network.modules():
        if still and isinstance(part, _NormBase) and part.track_running_stats:
            part.eval()
    generator = torch.Generator().manual_seed(scalar(Purpose.ORDER, case.seed))
    with drawn_with(scalar(Purpose.DROPOUT, case.seed)):
        for _ in range(case.steps):
            x, y = case.parts.train.at(torch.randint(len(case.parts.train), (case.batch,), generator=generator))
            case.loss(call(network, x), y).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            behind(x, y)
    network.eval()


def all_weights(case: Case, rate: float) -> Trained:
    """A copy of which every weight is trained; what was pruned stays 0."""
    network = copy.deepcopy(case.host)
    for parameter in network.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    masks = [(parameter, case.masks[name]) for name, parameter in network.named_parameters() if name in case.masks]

    @torch.no_grad()
    def behind(x: Any, y: Any) -> None:
        for parameter, mask in masks:
            parameter.mul_(mask)

    return _trained(network, case, rate, behind, still=False)


def uniform_adapters(case: Case, rate: float, sites: Collection[Site], size: int) -> Trained | None:
    """A frozen copy with LoRA of one rank, at least 1, at every layer at or in a site, of about `size` parameters in all.

    No rank is larger than its matrix.

    None if no layer there has a weight that can be adapted.
    """
    network = copy.deepcopy(case.host).requires_grad_(False)
    inside = {id(part): part for site in sites for part in network.get_submodule(site.after).modules()}
    weights = [(part, name, weight) for part in inside.values() for name, weight in _matrices(part)]
    if not weights:
        return None
    each = sum(len(weight) + weight[0].numel() for _, _, weight in weights)
    with drawn_with(scalar(Purpose.BIRTH, case.seed)):
        for part, name, weight in weights:
            most = min(len(weight), weight[0].numel())  # a higher rank computes nothing more
            parametrize.register_parametrization(part, name, _LowRank(weight, min(max(round(size / each), 1), most)))
    return _trained(network, case, rate, lambda x, y: None, still=True)


def settled(case: Case) -> Case:
    """The case with the way in which the loss of an example is had. InputError if the damaged network has no finite loss."""
    probe = _probe(case.host, case.parts.probe.batches(), case.loss)
    with undisturbed(case.host):
        probe.settle(case.host)
    assert probe.way is not None
    return case._replace(way=probe.way)


def check_losses(case: Case) -> None:
    """Raise InputError if the damaged network has a loss that is not finite."""
    losses = np.concatenate([losses_of(case.host, part, case) for part in case.parts])
    if wrong := int((~np.isfinite(losses)).sum()):
        what = "batches" if case.way == "whole" else "examples"
        raise InputError(
            f"the loss of the model is not finite on {wrong} of {len(losses)} {what}; leave out the examples with infinite "
            "inputs, or give a model whose outputs are finite"
        )


def losses_of(network: nn.Module, examples: Examples, case: Case) -> NDArray[np.float64]:
    """(N,) the loss of each example, or of each batch if the loss does not know examples."""
    probe = _probe(network, case.batches(examples), case.loss)
    probe.way = case.way
    with undisturbed(network):
        losses: NDArray[np.float64] = probe.see(network).losses.cpu().numpy()
    return losses


def rank(trained: Trained) -> float:
    """The loss on the probe, which chooses among rates; one that is not finite comes last."""
    return trained.probe if math.isfinite(trained.probe) else math.inf


def table(case: Case, networks: Mapping[str, Trained]) -> tuple[tuple[Contender, ...], dict[str, NDArray[np.float64]]]:
    """Every network on the examples that were held back, and its losses there. The first network is the damaged one."""
    held = case.parts.held
    losses = {name: losses_of(each.network, held, case) for name, each in networks.items()}
    first = next(iter(losses.values()))
    rows = []
    for name, each in networks.items():
        less = first - losses[name]
        measured = float(losses[name].mean()), float(less.mean()), half_width(less), _accuracy(each.network, held)
        rows.append(Contender(name, *measured, each.learned, each.rate or None, round(each.seconds, 2)))
    return tuple(rows), losses


class _LowRank(nn.Module):
    """LoRA (arXiv 2106.09685, section 4.1): W + B A, with B zero at first; of a kernel, each output channel is a row of W."""

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        reads = weight[0].numel()
        self.a = nn.Parameter(torch.randn(rank, reads).to(weight) / reads**0.5)
        self.b = nn.Parameter(torch.zeros(len(weight), rank).to(weight))

    def forward(self, weight: Tensor) -> Tensor:
        """(out, ...) -> (out, ...)."""
        return weight + (self.b @ self.a).view_as(weight)


def _matrices(part: nn.Module) -> list[tuple[str, Tensor]]:
    """The weights that a layer multiplies by, with their names; none for other modules."""
    named = [(name, weight) for name in WEIGHTS if (weight := part._parameters.get(name)) is not None]
    return [] if isinstance(part, nn.Embedding) else [(name, weight) for name, weight in named if weight.dim() > 1]


def _probe(network: nn.Module, batches: list[tuple[Any, Any]], loss: Loss) -> Probe:
    return Probe(batches, loss, next((parameter.device for parameter in network.parameters()), torch.device("cpu")))


def _trained(network: nn.Module, case: Case, rate: float, behind: Callable[[Any, Any], Any], *, still: bool) -> Trained:
    begin = time.perf_counter()
    learning = [parameter for parameter in network.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=rate, weight_decay=0.0)
    train(network, optimizer, case, behind, still=still)
    score = float(losses_of(network, case.parts.probe, case).mean())
    return Trained(network, score, sum(map(Tensor.numel, learning)), rate, time.perf_counter() - begin)


@torch.no_grad()
def _accuracy(network: nn.Module, examples: Examples) -> float | None:
    """Share of right labels; None if targets are no labels."""
    right = []
    with undisturbed(network):
        for x, y in examples.batches():
            output = call(network, x)
            if not isinstance(output, Tensor) or not isinstance(y, Tensor):
                return None
            if y.is_floating_point() or output.shape[:-1] != y.shape:
                return None
            right.append((output.argmax(-1) == y).double().flatten())
    return float(torch.cat(right).mean())
