"""Fuse linear maps and activations of stacked rows into one operation with one backward pass. n rows, B examples, D features.

Autograd keeps a node for each of them, computes the gradients of weights transposed, and is slow to add these to rows of the
gradient column. Together this is a tenth of a training step. The numbers of both ways are equal to rounding.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Needed = Sequence[bool]
"""Whether a layer is asked for the gradient of its input, and of each of its tensors."""


def product(x: Tensor, y: Tensor, offset: Tensor | None = None) -> Tensor:
    """Return x y + offset of each row: x (n, A, B), y (n, B, C), offset (n, 1, C) -> (n, A, C); a row has equal bits for any n.

    On a CPU with one thread, of all batched products only those with a dimension of 1 take another kernel for one row than for
    several (`bench/scripts/study_one_row.py`), on Intel's processors an inner one too. One row is then computed twice, as one
    of two.
    """
    single = len(x) == 1 and 1 in (*x.shape[1:], y.shape[2])
    if single:
        x, y = x.expand(2, -1, -1), y.expand(2, -1, -1)
    z = torch.bmm(x, y) if offset is None else torch.baddbmm(offset, x, y)
    return z[:1] if single else z


def _outer(dy: Tensor, x: Tensor) -> Tensor:
    """Return the gradient (n, O, D) of the weight of a linear map, from that of its output (n, B, O) and its input (n, B, D).

    Its last bit depends on whether the result of a row begins at a multiple of 16 bytes, so on the index of the row. Features of
    zeros behind the last output align every row.
    """
    outputs = dy.shape[2]
    if outputs * x.shape[2] % 4:
        return product(F.pad(dy, (0, -outputs % 4)).mT, x)[:, :outputs]
    return product(dy.mT, x)


class RowMap:
    """Applies a linear map to each row: x (n, B, D), weight (n, O, D), bias (n, O) or None -> (n, B, O)."""

    tensors: ClassVar = ("weight", "bias")

    @staticmethod
    def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return product(x, weight.mT, None if bias is None else bias.unsqueeze(1))

    run_own = run

    @staticmethod
    def back(
        dy: Tensor, x: Tensor, y: Tensor, needed: Needed, weight: Tensor, bias: Tensor | None
    ) -> list[Tensor | None]:
        ahead, own, offset = needed
        return [
            product(dy, weight) if ahead else None,
            _given(weight, _outer(dy, x)) if own else None,
            _given(bias, dy.sum(1)) if offset and bias is not None else None,
        ]


class _Activation(NamedTuple):
    """Applies a function of each feature."""

    run: Callable[[Tensor], Tensor]
    run_own: Callable[[Tensor], Tensor]  # the same in place
    gradient: Callable[[Tensor, Tensor], Tensor]  # of x, from that of the output and the output
    tensors: tuple[str, ...] = ()

    def back(self, dy: Tensor, x: Tensor, y: Tensor, needed: Needed) -> list[Tensor | None]:
        return [self.gradient(dy, y)]


ReLU = _Activation(torch.relu, torch.relu_, lambda dy, y: torch.ops.aten.threshold_backward(dy, y, 0))
Tanh = _Activation(torch.tanh, torch.tanh_, torch.ops.aten.tanh_backward)


class RowFloor:
    """Computes max(x, floor): floor (n, 1, 1)."""

    tensors: ClassVar = ("floor",)

    @staticmethod
    def run(x: Tensor, floor: Tensor) -> Tensor:
        return torch.clamp(x, min=floor)

    run_own = run

    @staticmethod
    def back(dy: Tensor, x: Tensor, y: Tensor, needed: Needed, floor: Tensor) -> list[Tensor | None]:
        """Return the gradient of x, which is that of y where x is at least the floor, as for torch.clamp."""
        # A mask of 1 and 0 of the type of x takes an eighth of the time of one of bools, and a twentieth of that of torch.where.
        return [torch.ge(x, floor, out=torch.empty_like(x)).mul_(dy), None]


class Layers(NamedTuple):
    """Runs layers that follow each other, and knows where their tensors lie in the list that a call is given."""

    kinds: tuple[Any, ...]  # what each layer does: Map, ReLU or Floor
    places: tuple[int | None, ...]  # the index of each tensor of each layer; None for a bias that it does not have

    def __call__(self, x: Tensor, given: Sequence[Tensor], fused: bool = True) -> Tensor:
        """Run the layers over x (n, B, ..., D) with stacked tensors -> (n, B, ..., O).

        The backward pass adds the gradients of parameters that `mark` has marked to their `.grad`. With `fused` False,
        autograd differentiates the layers one by one, so that a graph can be traced.
        """
        if x.dim() > 3:  # one matrix product treats the positions of all examples as rows
            return self(x.flatten(1, -2), given, fused).unflatten(1, x.shape[1:-1])
        tensors = [None if at is None else given[at] for at in self.places]
        if fused and torch.is_grad_enabled() and not torch.is_autocast_enabled(x.device.type):
            return _Fused.apply(self.kinds, x, *tensors)  # type: ignore[no-untyped-call]
        start = 0
        for kind in self.kinds:
            stop = start + len(kind.tensors)
            x, start = kind.run(x, *tensors[start:stop]), stop
        return x


def layers_of(module: nn.Module, names: Sequence[tuple[str, ...]] = ()) -> Layers | None:
    """Return the layers of a module that runs them one after another, or None if it does anything else.

    Such a module is a layer itself, an nn.Sequential, or of a class whose `in_order` names its submodules, and `ReLU`, in the
    order in which it calls them.

    names: of each tensor that calls are given, its names in the module.
    """
    every = [part for _, part in module.named_modules(remove_duplicate=False)]
    if len(set(every)) < len(every):  # a module that runs several times has one name
        return None
    index = {name: at for at, own in enumerate(names) for name in own}
    kinds, places = [], []
    for prefix, kind in _steps("", module):
        if kind is None:
            return None
        kinds.append(kind)
        places += [index.get(prefix + name) for name in kind.tensors]
    return Layers(tuple(kinds), tuple(places)) if kinds else None


def _steps(prefix: str, module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the kinds of a module's layers in their order, each with the prefix of its tensors; None is any other module."""
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        yield prefix, None
    elif type(module) is nn.Sequential:
        for name, child in module.named_children():
            yield from _steps(f"{prefix}{name}.", child)
    elif "in_order" in vars(type(module)):
        for each in vars(type(module))["in_order"]:
            yield from [("", each)] if each is ReLU else _steps(f"{prefix}{each}.", module.get_submodule(each))
    else:
        kind = _KINDS.get(type(module)) or vars(type(module)).get("fused")  # not those of a base class
        yield prefix, kind if kind in (RowMap, ReLU, Tanh, RowFloor) else None


_KINDS: dict[type[nn.Module], Any] = {nn.Linear: RowMap, nn.ReLU: ReLU, nn.Tanh: Tanh}
"""Modules of torch that are layers. GELU, SiLU and Sigmoid are not, as their last bits depend on where a row lies in memory."""


def mark(leaf: Tensor) -> None:
    """Mark a parameter that has a `.grad`, to which the backward pass of fused layers may add its gradients."""
    leaf.adds = True  # type: ignore[attr-defined]


def _given(parameter: Tensor, gradient: Tensor) -> Tensor | None:
    """Add a gradient to that of a parameter that was marked, or return it to autograd."""
    if not hasattr(parameter, "adds"):
        return gradient
    assert parameter.grad is not None
    parameter.grad.add_(gradient)
    return None


def mapped(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the linear map of each row by itself: x (n, B, ..., D), weight (n, O, D), bias (n, O) or None -> (n, B, ..., O)."""
    return _PRODUCT(x, (weight,)) if bias is None else _MAP(x, (weight, bias))


_MAP, _PRODUCT = Layers((RowMap,), (0, 1)), Layers((RowMap,), (0, None))


def streams_of(kinds: Sequence[Any], x: Tensor, tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """Run layers over x (n, B, D), and return what each of them read, and the output."""
    streams, start, own = [x], 0, False
    for kind in kinds:
        stop = start + len(kind.tensors)
        # Behind the first layer, a stream belongs to nobody else and may be overwritten, but by what follows a layer whose
        # gradient is one of its output. That of ReLU stays the same.
        x = (kind.run_own if own else kind.run)(x, *tensors[start:stop])
        streams.append(x)
        start, own = stop, kind is not Tanh
    return streams


def gradients_of(
    kinds: Sequence[Any], streams: Sequence[Tensor], tensors: Sequence[Tensor | None], dy: Tensor, needed: Needed
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Return the gradients of x and of the tensors from that of the output; `needed` says which are wanted, x first.

    A parameter that `mark` has marked has its gradient added to its `.grad`, and None here.
    """
    stop, dx = len(tensors), dy
    found: list[Tensor | None] = []
    for index in range(len(kinds) - 1, -1, -1):
        start = stop - len(kinds[index].tensors)
        asked = (index > 0 or needed[0], *needed[start + 1 : stop + 1])
        dx, *own = kinds[index].back(dx, streams[index], streams[index + 1], asked, *tensors[start:stop])
        found, stop = own + found, start
    return dx, found


class _Fused(torch.autograd.Function):
    """Runs the layers as one node of the graph. Parameters are inputs, so that it is made for inputs without a gradient too."""

    @staticmethod
    def forward(ctx: Any, kinds: tuple[Any, ...], x: Tensor, *tensors: Tensor | None) -> Tensor:
        streams = streams_of(kinds, x, tensors)
        ctx.kinds = kinds
        ctx.save_for_backward(*streams, *tensors)
        return streams[-1]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        first, saved = len(ctx.kinds) + 1, ctx.saved_tensors
        dx, found = gradients_of(ctx.kinds, saved[:first], saved[first:], dy, ctx.needs_input_grad[1:])
        return None, dx, *found
