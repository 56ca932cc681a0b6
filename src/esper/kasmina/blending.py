"""How a seed's change enters the stream. n rows, B examples, D features."""

import torch
from torch import Tensor

from esper.leyline.actions import Blend


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), written (1 + tanh(x / 2)) / 2: torch's own takes another code path for the last elements of a
    tensor, so that a row's value would depend on how many rows there are.
    """
    return (1 + torch.tanh(x / 2)) / 2


def blend_change(
    h: Tensor, delta: Tensor, gate: Tensor | None, alpha: Tensor | float | None, blend: Tensor | Blend | None
) -> Tensor:
    """The change c of a slot, whose output is y = h + c.

        ADD       c = alpha * delta
        GATE      c = alpha * g * delta,           g = sigmoid(gate)
        MULTIPLY  c = alpha * h * tanh(delta)

    h, delta: (B, ...) of one network, alpha a number and blend a `Blend`; or (n, B, ...) of rows of a population, alpha and
    blend (n, 1, ...). gate: of a shape that broadcasts over h, None when no row gates; alpha None when it is 1 in every row,
    blend None when every row is ADD. Rows are selected, never multiplied by a mask: 0 times nan is nan.
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

    Never h + (c - c.detach()), which passes a nan of the seed on to the host.
    """

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, h: Tensor, change: Tensor, rows: Tensor) -> Tensor:
        """h (E, B, D), change (n, B, D), rows (n,) int64: which rows of h the changes belong to."""
        ctx.save_for_backward(rows)
        return h.view_as(h)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        """The gradient of the output, whole for h and its rows for the change."""
        (rows,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return gradients[0], gradients[0].index_select(0, rows), None


class Proximal(torch.autograd.Function):
    """The change c, bit for bit, whose gradient gets that of weight * |c|^2 / |h|^2 added; h gets none."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, change: Tensor, h: Tensor, weight: Tensor) -> Tensor:
        """change, h (B, ...); weight ()."""
        ctx.save_for_backward(change, h, weight)
        return change.view_as(change)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """g + 2 weight c / |h|^2."""
        change, h, weight = ctx.saved_tensors  # type: ignore[attr-defined]
        tiny = torch.finfo(h.dtype).tiny  # a dead stream is all 0
        return gradients[0] + (2 * weight / h.square().sum().clamp(min=tiny)).to(h.dtype) * change, None, None
