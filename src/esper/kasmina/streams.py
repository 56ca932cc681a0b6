"""Streams of several rows at once: vectors (n, B, D), or maps (n, B, C, H, W) whose channels lie last in memory.

Convolutions on a CPU run fastest on maps in that layout, and torch's own row operations would undo it: they lay out their
result afresh. Those here move the channels last, which costs nothing, work, and move them back.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from esper.leyline.slots import Kind

DIMENSIONS = {Kind.VECTOR: 3, Kind.MAP: 5}
"""Of a stream of several rows, by kind."""


def width(x: Tensor | None, kind: Kind) -> int:
    """Features of one network's stream (B, D), or channels of (B, C, H, W); 0 of one of another kind."""
    return x.shape[1] if x is not None and x.dim() == DIMENSIONS[kind] - 1 else 0


def rows(stream: Tensor, where: Tensor | None) -> Tensor:
    """Some rows of a stream, or all; a node of its own in the graph either way, so that gradients are summed in one order."""
    if where is None:
        return stream.view_as(stream)
    return _first(_last(stream).index_select(0, where))


def append(stream: Tensor | None, more: Tensor) -> Tensor:
    """Rows behind rows."""
    return more if stream is None else _first(torch.cat([_last(stream), _last(more)]))


def stack(outputs: Sequence[Tensor]) -> Tensor:
    """Rows (B, ...) as one stream; a single row is not copied."""
    if len(outputs) == 1:
        return outputs[0].unsqueeze(0)
    if outputs[0].dim() == DIMENSIONS[Kind.MAP] - 1:
        return _first(torch.stack([output.movedim(1, -1) for output in outputs]))
    return torch.stack(list(outputs))


def laid_out(x: Tensor) -> Tensor:
    """The same stream with the channels of maps last in memory."""
    return _first(_last(x).contiguous()) if x.dim() == DIMENSIONS[Kind.MAP] else x


def as_laid_out(y: Tensor, h: Tensor) -> Tensor:
    """y in the memory layout of h: which kernel runs next, and so its last bit, must not depend on whether a seed grew."""
    same = y.dim() != DIMENSIONS[Kind.MAP] or y.stride() == h.stride()
    return y if same else torch.empty_like(h).copy_(y)


def fitted(u: Tensor, h: Tensor) -> Tensor:
    """u as a slot whose stream is h reads it: a map of another resolution is pooled, each position a mean, to that of h."""
    if u.dim() != DIMENSIONS[Kind.MAP] or u.shape[-2:] == h.shape[-2:]:
        return u
    fit: Tensor = F.adaptive_avg_pool2d(u.flatten(0, 1), tuple(h.shape[-2:])).unflatten(0, u.shape[:2])  # type: ignore[arg-type]
    return fit


def pooled(u: Tensor) -> Tensor:
    """A feature vector of every example: the mean of a map over its positions, and a vector as it is."""
    return u.mean((-2, -1)) if u.dim() == DIMENSIONS[Kind.MAP] else u


def energy(stream: Tensor) -> Tensor:
    """(n,) |h|^2 over examples and features."""
    return stream.square().sum(tuple(range(1, stream.dim())))


def _last(x: Tensor) -> Tensor:
    return x.movedim(2, -1) if x.dim() == DIMENSIONS[Kind.MAP] else x


def _first(x: Tensor) -> Tensor:
    return x.movedim(-1, 2) if x.dim() == DIMENSIONS[Kind.MAP] else x
