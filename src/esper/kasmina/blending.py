"""Blends: formulas by which a seed changes the stream. n rows, B examples, D features."""

import torch
from torch import Tensor

from esper.leyline.actions import Blend


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), computed as (1 + tanh(x / 2)) / 2.

    torch.sigmoid computes the last elements of a tensor by another code path, so the value of a row would depend on the
    number of rows.
    """
    return (1 + torch.tanh(x / 2)) / 2


def blend_change(
    h: Tensor, delta: Tensor, gate: Tensor | None, alpha: Tensor | float | None, blend: Tensor | Blend | None
) -> Tensor:
    """Compute the change c of a slot, whose output is y = h + c.

        ADD       c = alpha * delta
        GATE      c = alpha * g * delta,           g = sigmoid(gate)
        MULTIPLY  c = alpha * h * tanh(delta)

    h, delta: (B, ...) of one network, with alpha a number and blend a `Blend`; or (n, B, ...) of rows of a population,
    with alpha and blend (n, 1, ...). gate: of a shape that broadcasts over h; None if no row has blend GATE. alpha is
    None if it is 1 in every row, blend is None if every row is ADD. Rows are selected and not multiplied by a mask,
    because 0 times nan is nan.
    """
    change = delta
    if isinstance(blend, Blend):
        if blend == Blend.GATE:
            assert gate is not None
            change = sigmoid(gate) * delta
        elif blend == Blend.MULTIPLY:
            change = h * torch.tanh(delta)
        return change if alpha is None else alpha * change
    if gate is not None:
        assert blend is not None
        change = torch.where(blend.eq(Blend.GATE), sigmoid(gate) * delta, change)
    if blend is not None:
        change = torch.where(blend.eq(Blend.MULTIPLY), h * torch.tanh(delta), change)
    return change if alpha is None else alpha * change


class Straight(torch.autograd.Function):
    """Straight-through incubation: the value is h, bit for bit; the gradient goes unchanged to h and to the change.

    The formula h + (c - c.detach()) is not used, because it passes a nan of the seed on to the host.
    """

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, h: Tensor, change: Tensor, rows: Tensor) -> Tensor:
        """h (E, B, D), change (n, B, D); rows (n,) int64 are the rows of h that the changes belong to."""
        ctx.save_for_backward(rows)
        return h.view_as(h)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the output's gradient for h, and the rows of it that belong to the change."""
        (rows,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return gradients[0], gradients[0].index_select(0, rows), None


class Proximal(torch.autograd.Function):
    """Return the change c, bit for bit, and add the gradient of weight * |c|^2 / |h|^2 to that of c; h gets no gradient."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, change: Tensor, h: Tensor, weight: Tensor) -> Tensor:
        """change, h (B, ...); weight ()."""
        ctx.save_for_backward(change, h, weight)
        return change.view_as(change)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """g + 2 weight c / |h|^2."""
        change, h, weight = ctx.saved_tensors  # type: ignore[attr-defined]
        tiny = torch.finfo(h.dtype).tiny  # |h|^2 is 0 where a stream is 0 everywhere
        return gradients[0] + (2 * weight / h.square().sum().clamp(min=tiny)).to(h.dtype) * change, None, None
