"""Compute the output of a slot, for one network and for populations alike."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from esper.kasmina.stack.layers import zero_linear
from esper.leyline.lifecycle.slots import Stream
from esper.leyline.lifecycle.vocabulary import Blend


def sigmoid(x: Tensor) -> Tensor:
    """Compute 1 / (1 + exp(-x)) as (1 + tanh(x / 2)) / 2.

    torch.sigmoid computes the last elements of a tensor by another code path, so the value of a row would depend on the
    number of rows.
    """
    return (1 + torch.tanh(x / 2)) / 2


Blended = tuple[Tensor, Callable[[Tensor], tuple[Tensor | None, Tensor, Tensor | None]]]
"""A change (n, B, ...), and a function from its gradient to those of h (None where it is 0), delta and gate."""


def blend_change(h: Tensor, delta: Tensor, gate: Tensor | None, alpha: Tensor | None, blend: Tensor | None) -> Blended:
    """Compute the change c of a slot, whose output is y = h + c, for rows of a population, and how it is differentiated.

        ADD       c = alpha * delta
        GATE      c = alpha * g * delta,           g = sigmoid(gate)
        MULTIPLY  c = alpha * h * tanh(delta)

    h, delta: (n, B, ...); alpha, blend: (n, 1, ...). gate: of a shape that broadcasts over h; None if no row has blend GATE.
    alpha is None if it is 1 in every row, blend is None if every row is ADD. Rows are selected and not multiplied by a mask,
    because 0 times nan is nan. The function rounds and sums as autograd does, which can differentiate the change as well.
    """
    if blend is None:
        change = delta if alpha is None else alpha * delta
        return change, lambda dc: (None, dc if alpha is None else dc * alpha, None)
    tanh_backward = torch.ops.aten.tanh_backward
    change, gated, bent, passed = delta, delta, delta, delta
    if gate is not None:
        gated, bent = blend.eq(Blend.GATE), torch.tanh(gate / 2)
        passed = (1 + bent) / 2
        change = torch.where(gated, passed * delta, change)
    multiplied, slope = blend.eq(Blend.MULTIPLY), torch.tanh(delta)
    change = torch.where(multiplied, h * slope, change)

    def back(dc: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None]:
        d = dc if alpha is None else dc * alpha
        own, d = d.where(multiplied, 0), d.where(~multiplied, 0)
        dh, ddelta = own * slope, tanh_backward(own * h, slope)
        if gate is None:
            return dh, ddelta + d, None
        own, d = d.where(gated, 0), d.where(~gated, 0)
        dgate = tanh_backward((own * delta).sum(-1, keepdim=True) / 2, bent) / 2
        return dh, ddelta + d + own * passed, dgate

    return change if alpha is None else alpha * change, back


class DifferentiableFunction(torch.autograd.Function):
    """Defines a function with gradients of its own, which `torch.func` can transform.

    Subclasses define forward, setup_context and backward of torch, and `tangent`, which computes the tangent of the output from
    those of the inputs (None for one that has none).
    """

    generate_vmap_rule = True
    tangent: ClassVar[Callable[..., Tensor | None]]

    @classmethod
    def of(cls, *inputs: Any) -> Tensor:
        # torch.compile cannot trace a function that has a `jvp`
        rule = cls if torch.compiler.is_dynamo_compiling() else _with_jvp(cls)
        return rule.apply(*inputs)  # type: ignore[no-untyped-call]


@functools.cache
def _with_jvp(rule: type[DifferentiableFunction]) -> type[DifferentiableFunction]:
    """Return the same function under forward-mode differentiation too."""
    # torch asks for it in every call
    rule.forward.__signature__ = inspect.signature(rule.forward)  # type: ignore[attr-defined]
    return type(rule.__name__, (rule,), {"jvp": staticmethod(rule.tangent)})


class Straight(DifferentiableFunction):
    """Incubates a seed straight-through: the value is h, bit for bit; the gradient goes unchanged to h and to the change.

    The formula h + (c - c.detach()) is not used, because it passes a nan of the seed on to the host.
    """

    @staticmethod
    def forward(h: Tensor, change: Tensor, rows: Tensor | None) -> Tensor:
        """Return h (E, B, D), to whose `rows` (n,) int64 the change (n, B, D) belongs; to all of them where `rows` is None."""
        return h.view_as(h)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])
        ctx.save_for_forward(inputs[2])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the output's gradient for h, and the rows of it that belong to the change."""
        (gradient,), (rows,) = gradients, ctx.saved_tensors
        return gradient, gradient if rows is None else gradient.index_select(0, rows), None

    @staticmethod
    def tangent(ctx: Any, h: Tensor, change: Tensor, rows: None) -> Tensor:
        """Return the tangent of h plus that of the change in its rows: the transpose of `backward`."""
        (rows,) = ctx.saved_tensors
        return h + change if rows is None else h.index_add(0, rows, change)


class Proximal(DifferentiableFunction):
    """Returns the change c, bit for bit, and adds the gradient of weight * |c|^2 / |h|^2 to that of c; h gets no gradient."""

    @staticmethod
    def forward(change: Tensor, h: Tensor, weight: Tensor) -> Tensor:
        """Return the change; change, h (B, ...); weight ()."""
        return change.view_as(change)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Compute g + 2 weight c / |h|^2."""
        saved: tuple[Tensor, ...] = ctx.saved_tensors
        change, h, weight = saved
        tiny = torch.finfo(h.dtype).tiny  # |h|^2 is 0 where a stream is 0 everywhere
        pull = (2 * weight / h.square().sum().clamp(min=tiny)).to(h.dtype) * change
        return gradients[0] + pull, None, None

    @staticmethod
    def tangent(ctx: Any, change: Tensor, h: Tensor, weight: Tensor) -> Tensor:
        """Return the tangent of the change: what `backward` adds is the gradient of a term of the objective, not the output."""
        return change.view_as(change)


class Seed(nn.Module):
    """Holds the content of a slot: the change of a blueprint, and the map of the GATE blend, which starts at g = 1/2."""

    def __init__(self, delta: nn.Module, reads: int) -> None:
        super().__init__()
        self.delta = delta
        self.gate = zero_linear(reads, 1)
        self.draws = getattr(delta, "draws", True)


def slot_change(
    stream: type[Stream], h: Tensor, u: Tensor, seed: Seed, alpha: Tensor | float | None, blend: Blend, *further: Any
) -> Tensor:
    """Compute the change c of a slot of one network, as `blend_change` defines it for rows.

    h: the stream (B, ...) at the slot; u: what the seed reads, of the same kind and resolution. alpha: a number, or a tensor
    (); None for 1. further: other arguments of the seed.
    """
    change: Tensor = seed.delta(u, *further)
    if blend == Blend.GATE:
        change = sigmoid(stream.spread(seed.gate(stream.gated(u)))) * change
    elif blend == Blend.MULTIPLY:
        change = h * torch.tanh(change)
    return change if alpha is None else alpha * change


def slot_output(stream: type[Stream], h: Tensor, u: Tensor, seed: Seed, alpha: Tensor | float, blend: Blend) -> Tensor:
    """Compute y = h + c for one network: h (B, ...), and u, fitted to the resolution of h; alpha is a number, or a tensor ()."""
    u = stream.fitted(u, h)
    return h + slot_change(stream, h, u, seed, alpha, blend)
