"""Load trained networks of packages, with examples, losses and errors, and damage them. O outputs, K inputs of a weight."""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from esper.leyline.data import keys
from esper.runs.healing.training import usual_loss
from esper.tolaria.live.probe import Loss
from esper_bench.healing.damage import low_rank, quantised, unstructured
from esper_bench.packaged import letters, pitch, speech


class PackagedNetwork(NamedTuple):
    """Describes a trained network that comes inside a package, and a way to measure it.

    Attributes:
        build (function): returns the network; InputError if the package is not there
        drawn (function): from a first number and a count to examples (x, y); other numbers give other examples
        loss (function): of an output and a target, by which repairs are trained
        error (function): of a network, x and y: what users of the network count
        what (str): what the error is
    """

    build: Callable[[], nn.Module]
    drawn: Callable[[int, int], Any]
    loss: Loss
    error: Callable[[nn.Module, Any, Tensor], float]
    what: str


NETWORKS: Mapping[str, PackagedNetwork] = MappingProxyType(
    {
        "letters": PackagedNetwork(
            letters.network,
            letters.drawn,
            usual_loss,
            lambda model, x, y: letters.phoneme_error(model, x[0], y),
            "phoneme error rate",
        ),
        "pitch": PackagedNetwork(
            pitch.network, pitch.drawn, pitch.pitch_loss, pitch.pitch_error, "tones off by more than 50 cents"
        ),
        "speech": PackagedNetwork(
            speech.network, speech.drawn, usual_loss, speech.speech_error, "chunks taken for the other class"
        ),
    }
)
"""The networks by name."""

Map = nn.Linear | nn.Conv2d


def by_tensor(weight: Tensor, bits: int) -> Tensor:
    """Round a weight (O, K) to 2^bits - 1 evenly spaced values, the same for all outputs."""
    return quantised(weight.reshape(1, -1), bits).view_as(weight)


def structured(weight: Tensor, share: float) -> Tensor:
    """Set a share of the outputs of a weight (O, K), those of the smallest norms, to 0."""
    return weight.index_fill(0, weight.norm(dim=1).argsort()[: round(share * len(weight))], 0.0)


DAMAGES: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "8 bits": partial(by_tensor, bits=8),
        "4 bits": partial(by_tensor, bits=4),
        "4 bits by channel": partial(quantised, bits=4),
        "2 bits": partial(by_tensor, bits=2),
        "structured 75 %": partial(structured, share=0.75),
        "unstructured 50 %": partial(unstructured, share=0.5),
        "unstructured 70 %": partial(unstructured, share=0.7),
        "unstructured 90 %": partial(unstructured, share=0.9),
        "truncated": lambda weight: low_rank(weight, max(min(weight.shape) // 8, 1)),
    }
)
"""From a weight (O, K) to the damaged one, by name; truncated weights have an eighth of the rank."""


@torch.no_grad()
def damaged(intact: nn.Module, kind: str, draw: int) -> nn.Module:
    """Return a copy with half of its layers damaged, which a number draws; the last layer stays.

    Layers are linear ones and convolutions. The bias of an output that is 0 throughout becomes 0 too.
    """
    network = copy.deepcopy(intact)
    layers = [part for part in network.modules() if isinstance(part, Map)][:-1]
    order = keys.uniform(keys.key(keys.Purpose.HEALING, draw, np.arange(len(layers)))).argsort()
    for at in order[: (len(layers) + 1) // 2]:
        layer = layers[at]
        layer.weight.copy_(DAMAGES[kind](layer.weight.flatten(1)).view_as(layer.weight))
        if layer.bias is not None:
            layer.bias.mul_(layer.weight.flatten(1).any(1))
    return network


def quantised_speech() -> nn.Module:
    """Build the network of silero-vad with all layers but the last at 8 bits, with one scale for each layer."""
    return _rounded(speech.network(), 8)


def quantised_letters() -> nn.Module:
    """Build the network of g2p-en with all layers but the last at 3 bits, with one scale for each layer."""
    return _rounded(letters.network(), 3)


@torch.no_grad()
def _rounded(network: nn.Module, bits: int) -> nn.Module:
    """Round all layers of a network but the last in place, and return it."""
    for layer in [part for part in network.modules() if isinstance(part, Map)][:-1]:
        layer.weight.copy_(by_tensor(layer.weight, bits))
    return network
