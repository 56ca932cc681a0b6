"""How streams of several rows lie in memory: vectors (n, B, C) as they come, maps (n, B, C, H, W) with their channels last.

Convolutions on a CPU run fastest on maps in that layout, and torch's own row operations would undo it: they lay out their
result afresh. Those here move the channels last, which costs nothing, work, and move them back. As torch's own
`channels_last` does, they know maps by the number of axes; the values are the same in any layout.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_MAPS = 5  # axes of the maps of several rows


def select_rows(stream: Tensor, where: Tensor | None) -> Tensor:
    """Some rows of a stream, or all; a node of its own in the graph either way, so that gradients are summed in one order."""
    if where is None:
        return stream.view_as(stream)
    return _first(_last(stream).index_select(0, where))


def append_rows(stream: Tensor | None, more: Tensor) -> Tensor:
    """Rows behind rows."""
    return more if stream is None else _first(torch.cat([_last(stream), _last(more)]))


def stack_rows(outputs: Sequence[Tensor]) -> Tensor:
    """Rows (B, ...) as one stream; a single row is not copied."""
    if len(outputs) == 1:
        return outputs[0].unsqueeze(0)
    if outputs[0].dim() == _MAPS - 1:
        return _first(torch.stack([output.movedim(1, -1) for output in outputs]))
    return torch.stack(list(outputs))


def channels_last(x: Tensor) -> Tensor:
    """The same stream with the channels of maps last in memory."""
    return _first(_last(x).contiguous()) if x.dim() == _MAPS else x


def in_layout_of(h: Tensor, y: Tensor) -> Tensor:
    """y in the memory layout of h: which kernel runs next, and so its last bit, must not depend on whether a seed grew."""
    same = y.dim() != _MAPS or y.stride() == h.stride()
    return y if same else torch.empty_like(h).copy_(y)


def energy(stream: Tensor) -> Tensor:
    """(n,) |h|^2 over examples and features."""
    return stream.square().sum(tuple(range(1, stream.dim())))


def _last(x: Tensor) -> Tensor:
    return x.movedim(2, -1) if x.dim() == _MAPS else x


def _first(x: Tensor) -> Tensor:
    return x.movedim(-1, 2) if x.dim() == _MAPS else x
