"""Differentiate the passes of a body: by autograd, or by a tape without a graph. n rows, B examples.

Autograd makes a node for every operation, and calls one in Python through several layers of its own. In small networks that
takes as long as the arithmetic.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from esper.kasmina.slot import Straight, blend_change
from esper.kasmina.stack.fused import gradients_of, streams_of
from esper.kasmina.stack.rows import MAPS, Rows, Stack, moved_first, moved_last
from esper.leyline.data.batches import Batch
from esper.leyline.lifecycle.slots import Stream

Caller = Callable[..., Tensor]
"""Calls a stack: takes it and the arguments of `Stack.__call__`."""


class PassOperations:
    """Computes the operations of a pass on streams, each differentiated by autograd."""

    def __init__(self, call: Caller = Stack.__call__) -> None:
        """`call` runs a stack."""
        self.call = call

    def constant(self, x: Any) -> Any:
        """Return a stream through which no gradient flows."""
        return x.detach()

    def select(self, x: Any, where: Tensor | None) -> Any:
        """Select some rows of a stream, or all: a node of its own either way, so that gradients are summed in one order."""
        if where is None:
            return self._note(x.view_as(x), (x, _unchanged))
        y = moved_first(moved_last(x).index_select(0, where))
        return self._note(y, (x, lambda dy: dy.new_zeros(x.shape).index_add_(0, where, dy)))

    def append(self, x: Tensor | None, more: Tensor) -> Tensor:
        """Append rows to rows."""
        if x is None:
            return more
        rows, y = len(x), moved_first(torch.cat([moved_last(x), moved_last(more)]))
        return self._note(y, (x, lambda dy: dy[:rows]), (more, lambda dy: dy[rows:]))

    def fitted(self, stream: type[Stream], u: Tensor, h: Tensor) -> Tensor:
        """Return u at the resolution of the stream h."""
        return stream.fitted(u, h)

    def either(self, mask: Tensor, x: Tensor, other: Tensor) -> Tensor:
        """Take x where the mask is set, and `other` elsewhere."""
        y = torch.where(mask, x, other)
        return self._note(y, (x, lambda dy: dy.where(mask, 0)), (other, lambda dy: dy.where(~mask, 0)))

    def add(self, h: Tensor, change: Tensor, where: Tensor | None) -> Tensor:
        """Add changes (n, ...) to the rows `where` (n,) of h, or to all.

        The result has the memory layout of h: it decides which kernel runs next, and so its last bit, which must not depend on
        whether a seed grew.
        """
        y = h + change if where is None else h.index_add(0, where, change)
        y = y if y.dim() != MAPS or y.stride() == h.stride() else torch.empty_like(h).copy_(y)
        return self._note(y, (h, _unchanged), (change, lambda dy: dy if where is None else dy.index_select(0, where)))

    def straight(self, h: Tensor, change: Tensor, where: Tensor) -> Tensor:
        """Return h, whose gradient is also that of the changes of its rows `where`."""
        return Straight.of(h, change, where)

    def blended(
        self, h: Tensor, delta: Tensor, gate: Tensor | None, alpha: Tensor | None, blend: Tensor | None
    ) -> Tensor:
        """Compute the change of a slot, as `blend_change` defines it."""
        return blend_change(h, delta, gate, alpha, blend)[0]

    def apart(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Compute any function of streams."""
        return function(*inputs)

    def masked(self, x: Tensor, mask: Tensor) -> Tensor:
        """Set the numbers that a mask marks to -inf."""
        return self._note(x.masked_fill(mask, -torch.inf), (x, lambda dy: dy.masked_fill(mask, 0)))

    def _note(self, y: Tensor, *sources: tuple[Any, Callable[[Tensor], Tensor]]) -> Tensor:
        """Note how the gradient of each source follows from that of a result, which autograd knows by itself."""
        return y


def _unchanged(dy: Tensor) -> Tensor:
    """Return the gradient of a result as that of its source."""
    return dy


class PassTape(PassOperations):
    """Records the operations of a pass one after another; a backward pass takes them in reverse.

    A stream's gradients are summed in the order in which autograd would sum them, so all numbers are equal to those of
    `PassOperations`, bit for bit. Autograd differentiates what is neither a fused layer nor an operation of a slot, by itself.
    """

    def __init__(self) -> None:
        # each result, and what passes its gradient on
        self._steps = list[tuple[Tensor, Callable[[Tensor], object]]]()
        self._wanted: set[int] = set()  # ids of the results, whose gradients are asked for; `_steps` keeps them alive
        self._gradients: dict[int, Tensor] = {}

    def call(
        self, stack: Stack, x: Batch, rows: Rows, *, part: str = "", frozen: bool = False, keys: Any = None
    ) -> Tensor:
        """Run a stack, as `Stack.__call__`."""
        layers = stack.layers_of(part)
        if layers is None or not isinstance(x, Tensor):
            return self.apart(lambda x: stack(x, rows, part=part, frozen=frozen, keys=keys), x)
        given, index = stack.given(part, rows, frozen)
        leaves = [None if at is None else given[at] for at in layers.places]
        tensors = [leaf if leaf is None or index is None else leaf.index_select(0, index) for leaf in leaves]
        ahead, wanted = self.wants(x), [leaf is not None and leaf.requires_grad for leaf in leaves]
        examples, positions, alone = x.shape[1], x.shape[1:-1], len(x) == 1 and x.device.type != "cpu"
        more = -examples % 4  # as in Stack._direct
        u = torch.cat([x, x[:, :1].expand(-1, more, *x.shape[2:])], 1) if more else x
        padded = u.shape[1:-1]
        u = u.flatten(1, -2)
        if alone:  # beside a ghost, as in Stack.__call__, which is a view here
            u = u.expand(2, -1, -1)
            tensors = [None if each is None else each.expand(2, *each.shape[1:]) for each in tensors]
        streams = streams_of(layers.kinds, u, tensors)
        y = streams[-1][:1] if alone else streams[-1]
        if len(positions) > 1:
            y = y.unflatten(1, padded)
        y = y[:, :examples] if more else y
        if not ahead and not any(wanted):
            return y

        def back(dy: Tensor) -> None:
            if more:
                dy = torch.cat([dy, dy.new_zeros(len(dy), more, *dy.shape[2:])], 1)
            dy = dy.flatten(1, -2)
            if alone:
                dy = torch.cat([dy, torch.zeros_like(dy)])
            dx, found = gradients_of(layers.kinds, streams, tensors, dy, (ahead, *wanted))
            for leaf, gradient in zip(leaves, found, strict=True):
                if gradient is None:
                    continue
                assert leaf is not None
                assert leaf.grad is not None
                if index is None:
                    leaf.grad.add_(gradient[: len(leaf)])
                else:
                    leaf.grad.index_add_(0, index, gradient[: len(index)])
            if ahead:
                assert dx is not None
                dx = dx[:1] if alone else dx
                dx = dx.unflatten(1, padded) if len(positions) > 1 else dx
                self._add(x, dx[:, :examples] if more else dx)

        return self._record(y, back)

    def fitted(self, stream: type[Stream], u: Tensor, h: Tensor) -> Tensor:
        same = stream.fitted(u, h) is u
        return u if same else self.apart(lambda u: stream.fitted(u, h), u)

    def straight(self, h: Tensor, change: Tensor, where: Tensor) -> Tensor:
        return self._note(h.view_as(h), (h, _unchanged), (change, lambda dy: dy.index_select(0, where)))

    def blended(
        self, h: Tensor, delta: Tensor, gate: Tensor | None, alpha: Tensor | None, blend: Tensor | None
    ) -> Tensor:
        change, backward = blend_change(h, delta, gate, alpha, blend)
        sources = [h, delta, gate]
        if change is delta or not any(map(self.wants, sources)):
            return change

        def back(dy: Tensor) -> None:
            for source, gradient in zip(sources, backward(dy), strict=True):
                if source is not None and gradient is not None:
                    self._add(source, gradient)

        return self._record(change, back)

    def apart(self, function: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """Compute any function of streams; autograd differentiates it when its gradient is known."""
        wanted = [self.wants(x) for x in inputs]
        own = [x.detach().requires_grad_() if asked else x for x, asked in zip(inputs, wanted, strict=True)]
        with torch.enable_grad():
            result = function(*own)
        y = result.detach()
        if not result.requires_grad:
            return y

        def back(dy: Tensor) -> None:
            result.backward(dy)
            for x, leaf, asked in zip(inputs, own, wanted, strict=True):
                if asked and leaf.grad is not None:
                    self._add(x, leaf.grad)

        return self._record(y, back)

    @torch.no_grad()
    def backward(self, results: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Add the gradients of all parameters to their `.grad`, from results and their gradients; it forgets the pass."""
        for y, gradient in results:
            self._add(y, gradient)
        while self._steps:
            y, back = self._steps.pop()
            if id(y) in self._gradients:
                back(self._gradients.pop(id(y)))

    def wants(self, x: Any) -> bool:
        """Return whether the backward pass asks for the gradient of a result."""
        return id(x) in self._wanted

    def _note(self, y: Tensor, *sources: tuple[Any, Callable[[Tensor], Tensor]]) -> Tensor:
        """Record a result if a gradient is asked for of one of its sources."""
        asked = [source for source in sources if self.wants(source[0])]

        def back(dy: Tensor) -> None:
            for x, own in asked:
                self._add(x, own(dy))

        return self._record(y, back) if asked else y

    def _record(self, y: Tensor, back: Callable[[Tensor], object]) -> Tensor:
        self._steps.append((y, back))
        self._wanted.add(id(y))
        return y

    def _add(self, x: Tensor, gradient: Tensor) -> None:
        if self.wants(x):
            known = self._gradients.get(id(x))
            self._gradients[id(x)] = gradient if known is None else known + gradient  # others may hold what is known
