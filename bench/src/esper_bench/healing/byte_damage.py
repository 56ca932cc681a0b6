"""Damage the trained transformers of the task `heal-bytes`, and the text that they read.

Kinds, severities and places are drawn as in `damage`: segment 0 is the embedding, 1 to K are the layers, and K + 1 is the head,
which shares its weights with the embedding. A layer is damaged in its attention, in its hidden layer, or in both.
"""

from collections.abc import Iterator, Sequence
from enum import StrEnum

import numpy as np
import torch
from torch import Tensor

from esper.kasmina.host import SegmentedHost
from esper.leyline.data.task import Split
from esper.tasks.hosts import TransformerBlock
from esper_bench.healing.damage import Damage, DamageDraw, DamageKind, weight_change
from esper_bench.healing.open_transformer import TokenMap

COMMON = 48
"""Symbols are exchanged among this many, the most frequent ones."""


class Half(StrEnum):
    """Names the halves of a layer, and both."""

    ATTENTION = "attention"
    HIDDEN = "hidden"
    BOTH = "both"


def half_of(damage: Damage, segment: int) -> Half:
    """Draw the half of a layer that is damaged; each half and both are equally probable."""
    return list(Half)[int(3 * damage.uniform(DamageDraw.HALVES, segment)[0])]


@torch.no_grad()
def damage_transformer(host: SegmentedHost, damage: Damage) -> None:
    """Damage the weights of an `OpenTransformer` in place. A removed half of a layer adds nothing to the stream."""
    kind = damage.kind
    if kind in (DamageKind.INPUT, DamageKind.LABELS, DamageKind.NONE):
        return
    layers = len(host.segments) - 4
    every = range(layers + 1) if kind == DamageKind.MIXED else dict.fromkeys(s % (layers + 1) for s in damage.segments)
    for index in every:
        segment = host.segments[index + 1]
        if isinstance(segment, TokenMap):
            segment.tokens.copy_(weight_change(damage, 0)(segment.tokens, 0))
            continue
        assert isinstance(segment, TransformerBlock), type(segment)
        half = half_of(damage, index)
        if kind == DamageKind.PRUNED:
            prune_layer(segment, half, damage, index)
        elif kind == DamageKind.REMOVED:
            for last in _last_maps(segment, half):
                last.weight.zero_()
                last.bias.zero_()
        else:
            change = weight_change(damage, index)
            for number, weight in _weights(segment, Half.BOTH if kind == DamageKind.MIXED else half):
                weight.copy_(change(weight, number))


@torch.no_grad()
def prune_layer(layer: TransformerBlock, half: Half, damage: Damage, index: int) -> None:
    """Cut units off a layer: what the attention mixes, or what the hidden layer returns, no longer reaches the stream."""
    for number, last in enumerate(_last_maps(layer, half)):
        units = last.weight.shape[1]
        order = damage.uniform(DamageDraw.UNITS, index, number, np.arange(units)).argsort()
        last.weight[:, order[: max(1, int(damage.severity * units))].tolist()] = 0


def damage_text(split: Split, damage: Damage, common: Sequence[int]) -> Split:
    """Return windows x and the symbols behind y, both (N, L), in the damaged world; the split itself where the text is sound.

    Damage of the input changes x alone, and damage of the labels y alone.
    """
    if damage.kind not in (DamageKind.INPUT, DamageKind.LABELS):
        return split
    place = torch.tensor(symbol_map(damage, common))
    assert isinstance(split.x, Tensor)
    return split._replace(x=place[split.x]) if damage.kind == DamageKind.INPUT else split._replace(y=place[split.y])


def symbol_map(damage: Damage, common: Sequence[int]) -> list[int]:
    """Draw the symbol that takes the place of each. `common` are all symbols, the most frequent first.

    In the input, 4 to 16 of the COMMON symbols move around a ring; in the output, 1 to 4 pairs of them are exchanged.
    """
    u, *_ = damage.uniform(DamageDraw.SYMBOLS, 0)
    order = damage.uniform(DamageDraw.SYMBOLS, 1, np.arange(COMMON)).argsort()
    chosen = [common[place] for place in order]
    symbols = list(range(len(common)))
    if damage.kind == DamageKind.INPUT:
        ring = chosen[: 4 + int(13 * u)]
        for symbol, other in zip(ring, [*ring[1:], ring[0]], strict=True):
            symbols[symbol] = other
    else:
        for pair in range(1 + int(4 * u)):
            a, b = chosen[2 * pair : 2 * pair + 2]
            symbols[a], symbols[b] = b, a
    return symbols


def _last_maps(layer: TransformerBlock, half: Half) -> list[torch.nn.Linear]:
    """List the maps through which a half of a layer, or both halves, return to the stream."""
    return [part for name, part in ((Half.HIDDEN, layer.attention.out), (Half.ATTENTION, layer.out)) if half != name]


def _weights(layer: TransformerBlock, half: Half) -> Iterator[tuple[int, Tensor]]:
    """Yield the weights of a half of a layer, or of both, with numbers that tell them apart."""
    if half != Half.HIDDEN:
        yield from ((0, layer.attention.read.weight), (1, layer.attention.out.weight))
    if half != Half.ATTENTION:
        yield from ((2, layer.inner.weight), (3, layer.out.weight))
