"""Memory layout of streams of several rows: vectors (n, B, C) contiguous, maps (n, B, C, H, W) with their channels last.

Convolutions on a CPU run fastest on maps in that layout. torch's own row operations would undo it, because they
allocate their result in the default layout. The functions here move the channels last, which copies nothing, operate,
and move them back. They recognise maps by the number of axes, as torch's `channels_last` does. The values are the same
in any layout.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_MAPS = 5  # number of axes of maps with a row axis


def select_rows(stream: Tensor, where: Tensor | None) -> Tensor:
    """Select some rows of a stream, or all.

    The result is a node of its own in the autograd graph either way, so that gradients are summed in one order.
    """
    if where is None:
        return stream.view_as(stream)
    return _first(_last(stream).index_select(0, where))


def append_rows(stream: Tensor | None, more: Tensor) -> Tensor:
    """Append rows to rows."""
    return more if stream is None else _first(torch.cat([_last(stream), _last(more)]))


def stack_rows(outputs: Sequence[Tensor]) -> Tensor:
    """Stack rows (B, ...) into one stream; a single row is not copied."""
    if len(outputs) == 1:
        return outputs[0].unsqueeze(0)
    if outputs[0].dim() == _MAPS - 1:
        return _first(torch.stack([output.movedim(1, -1) for output in outputs]))
    return torch.stack(list(outputs))


def channels_last(x: Tensor) -> Tensor:
    """Return the same stream with the channels of maps last in memory."""
    return _first(_last(x).contiguous()) if x.dim() == _MAPS else x


def in_layout_of(h: Tensor, y: Tensor) -> Tensor:
    """Return y in the memory layout of h.

    The layout decides which kernel runs next, and so its last bit, which must not depend on whether a seed grew.
    """
    same = y.dim() != _MAPS or y.stride() == h.stride()
    return y if same else torch.empty_like(h).copy_(y)


def energy(stream: Tensor) -> Tensor:
    """(n,) |h|^2 over examples and features, in float32 at least."""
    wide = stream.to(torch.promote_types(stream.dtype, torch.float32))
    return wide.square().sum(tuple(range(1, stream.dim())))


def _last(x: Tensor) -> Tensor:
    return x.movedim(2, -1) if x.dim() == _MAPS else x


def _first(x: Tensor) -> Tensor:
    return x.movedim(-1, 2) if x.dim() == _MAPS else x
