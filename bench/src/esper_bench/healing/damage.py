"""Damage trained networks, and the data that they read: what the task `heal` heals.

A weight is (outputs, inputs), as of torch.nn.Linear; that of a convolution is flattened to it. The
segments of a host are numbered as in `SegmentedHost`: 0 is the embedding, 1 to K are the blocks, K + 1 is the last layer.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from esper.kasmina.host import SegmentedHost
from esper.leyline.data import keys
from esper.leyline.data.task import Split, one_tensor
from esper_bench.healing.bridged import Bridged


class DamageKind(StrEnum):
    """Names what can be wrong."""

    PRUNED = "pruned"  # hidden units of a block are cut off
    LOW_RANK = "low-rank"  # weights are replaced by their best approximation of a low rank
    NOISE = "noise"  # normal noise is added to weights
    QUANTISED = "quantised"  # weights are rounded to 2 or 3 bits
    TERNARY = "ternary"  # weights are rounded to a negative, a zero and a positive value for each output
    REMOVED = "removed"  # a block is left out
    INPUT = "input"  # a group of inputs is dead, flipped or rescaled
    LABELS = "labels"  # two classes are exchanged, or two pairs of classes
    MIXED = "mixed"  # every layer is rounded to 3, 4 or 5 bits, and those of the named segments to ternary values
    NONE = "none"
    INT4 = "4 bits"  # weights are rounded to 4 bits, with a scale for each output
    SPARSE = "unstructured"  # the smallest weights are 0
    SHUFFLED = "shuffled"  # the outputs of each layer are in another order
    OFFSET = "offset"  # normal noise is added to biases
    FLIPPED = "flipped"  # weights have the other sign
    GAIN = "gain"  # each output of a layer is multiplied by a factor of its own


PROBABILITIES: Mapping[DamageKind, float] = MappingProxyType(
    {
        DamageKind.PRUNED: 0.2,
        DamageKind.LOW_RANK: 0.16,
        DamageKind.NOISE: 0.08,
        DamageKind.QUANTISED: 0.06,
        DamageKind.TERNARY: 0.06,
        DamageKind.REMOVED: 0.08,
        DamageKind.INPUT: 0.1,
        DamageKind.LABELS: 0.1,
        DamageKind.MIXED: 0.08,
        DamageKind.NONE: 0.08,
    }
)
OTHER_PROBABILITIES: Mapping[DamageKind, float] = MappingProxyType(
    {
        DamageKind.INT4: 1 / 6,
        DamageKind.SPARSE: 1 / 6,
        DamageKind.SHUFFLED: 1 / 6,
        DamageKind.OFFSET: 1 / 6,
        DamageKind.FLIPPED: 1 / 6,
        DamageKind.GAIN: 1 / 6,
    }
)
"""Kinds of damage that no rule, bound or tree was chosen on: those of the keys `OTHER` of `data`."""
TWO_SITES = 0.2
"""Probability that a damage of weights is at two segments in place of one."""
OUTER = 0.25
"""Probability that quantised, ternary or noisy weights are those of the first or the last layer, in place of a block."""
INPUT_FACTORS = (0.0, -1.0, -1.0, 0.1, 4.0)
"""Factors of a group of inputs, each as probable as the others."""
TERNARY_THRESHOLD = 0.7
"""Weights below this share of the mean magnitude become 0 (Li, Zhang and Liu, "Ternary Weight Networks", 2016, equation 6)."""

_WEIGHTS = (
    DamageKind.LOW_RANK,
    DamageKind.NOISE,
    DamageKind.QUANTISED,
    DamageKind.TERNARY,
    DamageKind.MIXED,
    DamageKind.INT4,
    DamageKind.SPARSE,
    DamageKind.SHUFFLED,
    DamageKind.FLIPPED,
    DamageKind.GAIN,
)
_OUTSIDE_BLOCKS = (DamageKind.NOISE, DamageKind.QUANTISED, DamageKind.TERNARY)


class DamageDraw(StrEnum):
    """Names the draws of a damage. Their order is part of keys."""

    KIND = "kind"
    COUNT = "count"
    PLACE = "place"
    OUTER = "outer"
    SEVERITY = "severity"
    UNITS = "units"
    WEIGHT_NOISE = "weight noise"
    BITS = "bits"
    GROUP = "group"
    CLASSES = "classes"
    HALVES = "halves"
    SYMBOLS = "symbols"


_CODES = {draw: code for code, draw in enumerate(DamageDraw)}


@dataclass(frozen=True)
class Damage:
    """Describes a damage, from which every weight and example that it changes follows.

    Attributes:
        kind (DamageKind): what is wrong
        segments (ints): the damaged segments, in order; empty for a damage of the data, and for none
        severity (float): share of the hidden units for PRUNED, rank for LOW_RANK, standard deviation of the noise in standard
            deviations of the weights for NOISE, bits for QUANTISED, smallest bits for MIXED, factor for INPUT, share of the
            weights for SPARSE and FLIPPED, standard deviation of the added biases for OFFSET and of the logarithms of the factors
            for GAIN, else 0
        key (int): key of the draws: which units, which inputs, which classes, which noise
    """

    kind: DamageKind
    segments: tuple[int, ...]
    severity: float
    key: int

    def uniform(self, draw: "DamageDraw", *indices: int | NDArray[np.int64]) -> NDArray[np.float64]:
        """Draw numbers in [0, 1) for this damage; integer arrays broadcast."""
        return _uniform(self.key, draw, *indices)


def draw_damage(
    key: int,
    blocks: int,
    two_sites: float = TWO_SITES,
    probabilities: Mapping[DamageKind, float] = PROBABILITIES,
) -> Damage:
    """Draw the damage of a key, for a host of `blocks` blocks. `two_sites` is the probability of two damaged segments."""

    def once(draw: DamageDraw) -> float:
        return float(_uniform(key, draw)[0])

    names = list(probabilities)
    bounds = np.cumsum(list(probabilities.values()))
    kind = names[min(int(np.searchsorted(bounds, once(DamageDraw.KIND), side="right")), len(names) - 1)]
    u = once(DamageDraw.SEVERITY)
    severity = {
        DamageKind.PRUNED: 0.8 + 0.2 * u,
        DamageKind.LOW_RANK: 1.0 + int(2 * u),
        DamageKind.NOISE: 1.0 + u,
        DamageKind.QUANTISED: 2.0 if u < 0.7 else 3.0,
        DamageKind.MIXED: 3.0 + int(2 * u),
        DamageKind.INPUT: INPUT_FACTORS[int(u * len(INPUT_FACTORS))],
        DamageKind.SPARSE: 0.5 + 0.4 * u,
        DamageKind.OFFSET: 0.5 + u,
        DamageKind.FLIPPED: 0.1 + 0.3 * u,
        DamageKind.GAIN: 0.5 + u,
    }.get(kind, 0.0)
    if kind in (DamageKind.INPUT, DamageKind.LABELS, DamageKind.NONE):
        return Damage(kind, (), severity, key)
    order = (1 + _uniform(key, DamageDraw.PLACE, np.arange(blocks)).argsort()).tolist()
    segments = order[: 2 if once(DamageDraw.COUNT) < two_sites and blocks > 1 else 1]
    outer = once(DamageDraw.OUTER)
    if kind in _OUTSIDE_BLOCKS and outer < OUTER:
        segments[-1] = 0 if outer < OUTER / 2 else blocks + 1
    return Damage(kind, tuple(sorted(segments)), severity, key)


@torch.no_grad()
def damage_host(host: SegmentedHost, damage: Damage) -> None:
    """Damage the weights of a host in place. Its blocks are `bridged.Bridged`.

    A removed block becomes y = x, which is the network without it.
    """
    kind = damage.kind
    if kind == DamageKind.PRUNED:
        for index, block in _blocks(host, damage.segments):
            units = len(_layers(block)[0].weight)
            order = damage.uniform(DamageDraw.UNITS, index, np.arange(units)).argsort()
            prune_units(block, order[: max(1, int(damage.severity * units))].tolist())
    elif kind == DamageKind.REMOVED:
        for _, block in _blocks(host, damage.segments):
            remove_block(block)
    elif kind == DamageKind.OFFSET:
        for index, block in _blocks(host, damage.segments):
            for number, layer in enumerate(_layers(block)):
                assert layer.bias is not None, "the layers of a block have biases"
                layer.bias.add_(damage.severity * _normal(damage, index, number, layer.bias))
    elif kind in _WEIGHTS:
        every = range(len(host.segments)) if kind == DamageKind.MIXED else damage.segments
        for index in every:
            change = weight_change(damage, index)
            for number, layer in enumerate(_layers(host.segments[index])):
                layer.weight.copy_(change(layer.weight.flatten(1), number).view_as(layer.weight))


def damage_split(split: Split, damage: Damage, classes: int) -> Split:
    """Damage the examples and labels y (N,) of a split; return the split itself where the data are sound.

    Examples are features x (N, D), or images (N, C, H, W), of which the lines of pixels H are damaged as features are.
    """
    if damage.kind == DamageKind.INPUT:
        x = one_tensor(split.x, "input damage")
        lines = -2 if x.dim() == 4 else -1
        factor = torch.ones(x.shape[lines], dtype=x.dtype)
        factor[input_group(damage, len(factor))] = damage.severity
        return Split(x * factor.view(-1, *(1,) * (-1 - lines)), split.y)
    if damage.kind == DamageKind.LABELS:
        return Split(split.x, torch.tensor(label_map(damage, classes))[split.y])
    return split


def input_group(damage: Damage, inputs: int) -> list[int]:
    """Draw the inputs, or the lines of an image, that are dead, flipped or rescaled: 15 to 50 % of them, in order."""
    share = 0.15 + 0.35 * float(damage.uniform(DamageDraw.GROUP, 0)[0])
    order = damage.uniform(DamageDraw.GROUP, 1, np.arange(inputs)).argsort()
    return sorted(order[: max(1, int(share * inputs))].tolist())


def label_map(damage: Damage, classes: int) -> list[int]:
    """Draw the label that takes the place of each class: one pair of classes is exchanged, or in half of the draws two pairs."""
    order = damage.uniform(DamageDraw.CLASSES, 0, np.arange(classes)).argsort().tolist()
    pairs = 2 if classes >= 4 and damage.uniform(DamageDraw.CLASSES, 1)[0] < 0.5 else 1
    labels = list(range(classes))
    for pair in range(pairs if classes > 1 else 0):
        a, b = order[2 * pair : 2 * pair + 2]
        labels[a], labels[b] = b, a
    return labels


@torch.no_grad()
def prune_units(block: nn.Module, units: Sequence[int]) -> None:
    """Cut hidden units, or channels, off a block of two layers: their incoming and outgoing weights and biases become 0."""
    first, last = _layers(block)
    assert first.bias is not None, "the layers of a block have biases"
    chosen = list(units)
    first.weight[chosen] = 0
    first.bias[chosen] = 0
    last.weight[:, chosen] = 0


@torch.no_grad()
def remove_block(block: nn.Module) -> None:
    """Make a block the identity: its skip becomes 1, and its last layer becomes 0."""
    assert isinstance(block, Bridged), type(block)
    last = _layers(block)[-1]
    assert last.bias is not None, "the layers of a block have biases"
    block.skip.fill_(1.0)
    last.weight.zero_()
    last.bias.zero_()


def low_rank(weight: Tensor, rank: int) -> Tensor:
    """Return the matrix of a rank that is nearest to a weight (O, I) in squared error (Eckart and Young, 1936)."""
    u, s, v = torch.linalg.svd(weight.double(), full_matrices=False)
    nearest: Tensor = (u[:, :rank] * s[:rank]) @ v[:rank]
    return nearest.to(weight.dtype)


def quantised(weight: Tensor, bits: int) -> Tensor:
    """Round a weight (O, I) to 2^bits - 1 evenly spaced values for each output, symmetric around 0, the largest one kept."""
    levels = 2 ** (bits - 1) - 1
    step = weight.abs().amax(1, keepdim=True).clamp_min(1e-8) / levels
    rounded: Tensor = (weight / step).round().clamp(-levels, levels) * step
    return rounded


def unstructured(weight: Tensor, share: float) -> Tensor:
    """Set a share of the entries of a weight (O, I), the smallest ones, to 0."""
    smallest = weight.abs().flatten().argsort()[: round(share * weight.numel())]
    return weight.flatten().index_fill(0, smallest, 0.0).view_as(weight)


def ternary(weight: Tensor) -> Tensor:
    """Round a weight (O, I) to -s, 0 and s, with one s for each output: the mean magnitude of the weights that stay.

    Weights of exactly 0 are not counted in the threshold, because padding and pruned units are 0.
    """
    magnitude = weight.abs()
    mean = magnitude.sum(1, keepdim=True) / (weight != 0).sum(1, keepdim=True).clamp_min(1)
    stays = magnitude > TERNARY_THRESHOLD * mean
    scale = (magnitude * stays).sum(1, keepdim=True) / stays.sum(1, keepdim=True).clamp_min(1)
    rounded: Tensor = weight.sign() * stays * scale
    return rounded


def weight_change(damage: Damage, index: int) -> Callable[[Tensor, int], Tensor]:
    """Return the function of a weight (O, I) of a segment and its number there that damages it, for kinds that change weights."""
    match damage.kind:
        case DamageKind.LOW_RANK:
            return lambda weight, _: low_rank(weight, int(damage.severity))
        case DamageKind.QUANTISED:
            return lambda weight, _: quantised(weight, int(damage.severity))
        case DamageKind.TERNARY:
            return lambda weight, _: ternary(weight)
        case DamageKind.MIXED if index in damage.segments:
            return lambda weight, _: ternary(weight)
        case DamageKind.MIXED:
            bits = int(damage.severity) + int(2 * damage.uniform(DamageDraw.BITS, index)[0])
            return lambda weight, _: quantised(weight, bits)
        case DamageKind.INT4:
            return lambda weight, _: quantised(weight, 4)
        case DamageKind.SPARSE:
            return lambda weight, _: unstructured(weight, damage.severity)
        case DamageKind.SHUFFLED:
            return lambda weight, number: weight[
                damage.uniform(DamageDraw.UNITS, index, number, np.arange(len(weight))).argsort()
            ]
        case DamageKind.FLIPPED:
            return lambda weight, number: torch.where(
                torch.from_numpy(
                    damage.uniform(DamageDraw.UNITS, index, number, np.arange(weight.numel()).reshape(weight.shape))
                    < damage.severity
                ),
                -weight,
                weight,
            )
        case DamageKind.GAIN:
            return lambda weight, number: (
                weight * (damage.severity * _normal(damage, index, number, weight[:, :1])).exp()
            )
    return lambda weight, number: weight + damage.severity * weight.std() * _normal(damage, index, number, weight)


def _normal(damage: Damage, index: int, number: int, like: Tensor) -> Tensor:
    """Draw standard normal numbers of a shape: sqrt(-2 ln(1 - u)) cos(2 pi v), after Box and Muller, 1958."""
    place = np.arange(like.numel()).reshape(like.shape)
    u, v = (damage.uniform(DamageDraw.WEIGHT_NOISE, index, number, part, place) for part in (0, 1))
    return torch.from_numpy(np.sqrt(-2 * np.log1p(-u)) * np.cos(2 * math.pi * v)).to(like.dtype)


def _blocks(host: SegmentedHost, segments: Sequence[int]) -> Iterator[tuple[int, nn.Module]]:
    for index in segments:
        yield index, host.segments[index]


def _layers(segment: nn.Module) -> list[nn.Linear | nn.Conv2d]:
    return [part for part in segment.modules() if isinstance(part, nn.Linear | nn.Conv2d)]


def _uniform(key: int, draw: DamageDraw, *indices: int | NDArray[np.int64]) -> NDArray[np.float64]:
    return keys.uniform(keys.key(keys.Purpose.HEALING, key, _CODES[draw], *indices))
