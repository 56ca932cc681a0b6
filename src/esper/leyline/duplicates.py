"""Digests of examples, by which equal examples are found without comparing every pair. N examples."""

import torch
from torch import Tensor

from esper.leyline.batches import Batch, leaves

_CHUNK = 1 << 17  # words that are hashed at once, which a processor's cache holds [words]


def example_digests(x: Batch, y: Tensor) -> Tensor:
    """x, y (N, ...) -> (N,) int64 on the device of y, equal where the bytes of x and y are equal.

    Two different examples have one digest with a probability of about 2^-64. Nothing is read from the device.

        h = sum_i mix(a_i . w + b_i),     w the words of leaf i (int32, or int16 or bytes where 4 bytes do not fit), modulo 2^64

    A word times an odd 64-bit number keeps the low bits of their product equal for words that differ in high bits alone, so the
    inner product is taken with two vectors a, and both are mixed.
    """
    total = torch.zeros(len(y), dtype=torch.int64, device=y.device)
    for place, leaf in enumerate((*leaves(x), y)):
        words = _words(leaf.detach())
        generator = torch.Generator().manual_seed(place)
        bounds = torch.iinfo(torch.int64)
        factors = torch.randint(bounds.min, bounds.max, (2, words.shape[1] + 1), generator=generator).to(leaf.device)
        step = max(1, _CHUNK // max(1, words.shape[1]))
        parts = []
        for chunk in words.split(step):
            wide = chunk.long()
            one, other = ((wide * each[:-1]).sum(1) + each[-1] for each in factors)
            parts.append(_mixed(_mixed(one) + other))
        total = total + torch.cat(parts).to(total.device) if parts else total
    return total


def _words(leaf: Tensor) -> Tensor:
    """The bytes of each example of a leaf (N, ...), as whole numbers (N, W)."""
    flat = (leaf.flatten(1) if leaf.dim() > 1 else leaf[:, None]).contiguous()
    size = flat.shape[1] * flat.element_size()
    if flat.dtype == torch.bool or size % 2:
        return flat.view(torch.uint8)
    return flat.view(torch.int32 if size % 4 == 0 else torch.int16)


def _mixed(h: Tensor) -> Tensor:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014); the masks drop the sign that a shift repeats."""
    h = (h ^ ((h >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    h = (h ^ ((h >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return h ^ ((h >> 31) & 0x1FFFFFFFF)
