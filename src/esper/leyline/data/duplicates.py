"""Digest examples, so that equal examples are found without comparing every pair. N examples."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from esper.leyline.data.keys import mix

_CHUNK = 1 << 16  # words that are hashed at once, which a processor's cache holds [words]


def example_digests(*trees: Any) -> Tensor:
    """Digest trees of tensors (N, ...), as inputs and targets are -> (N,) int64, equal where two examples have equal bytes.

    Two different examples have one digest with a probability of about 2^-64. Nothing is read from the device.

        h = sum over leaves i of mix(mix(a_i . w_i) + b_i . w_i),     modulo 2^64

    w_i: the bytes of an example in leaf i as whole numbers of 32 bits, or of 16 or 8 where 32 do not fit. a_i, b_i: vectors of
    random numbers of 64 bits. One inner product alone would collide for examples that differ in high bits, such as signs. Trees
    with a tensor that is not dense have no digests: (0,).
    """
    tensors = [leaf.detach() for leaf in pytree.tree_leaves(trees) if isinstance(leaf, Tensor)]
    leaves = [leaf for leaf in tensors if leaf.dim()]
    if not leaves or not all(map(is_dense, tensors)):
        return torch.zeros(0, dtype=torch.int64)
    products = []  # (2, N) of each leaf
    for place, leaf in enumerate(each for each in leaves if len(each) == len(leaves[0])):
        words = _words(leaf)
        factors = _factors(place, words.shape[1] + 1, leaf.device)[:, None]
        chunks = words.split(max(1, _CHUNK // max(1, words.shape[1])))
        sums = [(chunk.long() * factors[..., :-1]).sum(2) + factors[..., -1] for chunk in chunks]
        products.append(torch.cat(sums, 1).to(leaves[0].device))
    one, other = torch.stack(products, 1)
    return mix(mix(one) + other).sum(0)


@functools.lru_cache(maxsize=8)
def _factors(place: int, length: int, device: torch.device) -> Tensor:
    """Draw (2, length) int64, the random numbers a and b of the leaf at a place."""
    bounds, generator = torch.iinfo(torch.int64), torch.Generator().manual_seed(place)
    return torch.randint(bounds.min, bounds.max, (2, length), generator=generator).to(device)


def is_dense(tensor: Tensor) -> bool:
    """Return whether every element has bytes of its own: the tensor is not sparse, nested, quantized, or on the meta device."""
    odd = tensor.is_meta or tensor.is_quantized or tensor.is_nested
    return tensor.layout == torch.strided and not odd


def repeated(sets: Sequence[Tensor]) -> list[int]:
    """Count, for each set of digests (N,) but the first, its examples that are also in an earlier set."""
    seen, found = sets[0], []
    for digests in sets[1:]:
        found.append(int(torch.isin(digests, seen).sum()))
        seen = torch.cat([seen, digests])
    return found


class Overlap:
    """Counts the examples of fixed batches, `examples` in number, that are also in batches that are shown later."""

    def __init__(self, batches: Iterable[Any]) -> None:
        digests = torch.cat([example_digests(batch) for batch in batches])
        self.examples = len(digests)
        self._known, self._copies = digests.unique(return_counts=True)  # sorted
        self._shown = torch.zeros_like(self._known)  # how often

    def show(self, batch: Any) -> None:
        """Look for the examples of a batch. Nothing is read from the device."""
        if self.examples:
            digests = example_digests(batch).to(self._known.device)
            place = torch.searchsorted(self._known, digests).clamp_(max=len(self._known) - 1)
            self._shown.index_add_(0, place, (self._known[place] == digests).long())

    def count(self) -> int:
        """Return the number of examples of the fixed batches that were shown; reads the device."""
        return int(self._copies[self._shown > 0].sum())


def _words(leaf: Tensor) -> Tensor:
    """Return the bytes of each example of a leaf (N, ...), as whole numbers (N, W)."""
    flat = (leaf.flatten(1) if leaf.dim() > 1 else leaf[:, None]).contiguous()
    size = flat.shape[1] * flat.element_size()
    if flat.dtype == torch.bool or size % 2:
        return flat.view(torch.uint8)
    return flat.view(torch.int32 if size % 4 == 0 else torch.int16)
