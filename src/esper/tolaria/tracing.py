"""Passes over a body as graphs of tensors. n rows of a stack, P parameters of one of its rows."""

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from esper.kasmina.body import Body
from esper.kasmina.stack import Stack

_TENSOR = object()
"""Stands for a tensor among what else a pass takes."""


class Inputs(NamedTuple):
    """What a pass over some stacks takes, as a list of tensors and what puts them together again.

    Attributes:
        tensors: values and buffers of the stacks, outputs that rows do not have, then the tensors of the arguments
        tree: the structure of all
        rest: for every leaf of the structure, the leaf if it is no tensor
        state: how many of the tensors come from the body
    """

    tensors: list[Tensor]
    tree: pytree.TreeSpec
    rest: tuple[Any, ...]
    state: int

    @classmethod
    def of(cls, body: Body, stacks: Sequence[Stack], *arguments: Any) -> "Inputs":
        """Flatten the arguments of a pass. Arrays among them become tensors on the device."""
        columns = [{name: stack.columns[name] for name in ("value", *stack.buffers)} for stack in stacks]
        state = columns, body.real_outputs
        leaves, tree = pytree.tree_flatten((state, arguments))
        leaves = [
            torch.from_numpy(leaf).to(body.device, non_blocking=True) if isinstance(leaf, np.ndarray) else leaf
            for leaf in leaves
        ]
        rest = tuple(_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        own = sum(map(len, columns)) + (body.real_outputs is not None)
        return cls([leaf for leaf in leaves if isinstance(leaf, Tensor)], tree, rest, own)

    @property
    def shapes(self) -> tuple[Any, ...]:
        """Shapes, strides and types of the tensors."""
        return tuple((tuple(t.shape), t.stride(), t.dtype) for t in self.tensors)

    def merged(self, tensors: Sequence[Tensor]) -> Any:
        """Return what `of` flattened, with other tensors: the columns and the real outputs of the body, and the arguments."""
        given = iter(tensors)
        return pytree.tree_unflatten([next(given) if leaf is _TENSOR else leaf for leaf in self.rest], self.tree)

    def copies(self) -> list[Tensor]:
        """Return the tensors, with copies of those of the body."""
        return [t.clone() for t in self.tensors[: self.state]] + self.tensors[self.state :]


@contextmanager
def bound(body: Body, stacks: Sequence[Stack], columns: Sequence[dict[str, Tensor]], outputs: Any) -> Iterator[None]:
    """Let passes read and write other tensors than those of the body within the context."""
    own, real = [stack.bind(of) for stack, of in zip(stacks, columns, strict=True)], body.real_outputs
    body.real_outputs = outputs
    try:
        yield
    finally:
        body.real_outputs = real
        for stack, its in zip(stacks, own, strict=True):
            stack.unbind(its)


def traced(
    body: Body, stacks: Sequence[Stack], inputs: Inputs, run: Callable[..., Sequence[Tensor]]
) -> torch.fx.GraphModule:
    """Return the graph of a pass, with all of its operations, as a function of the tensors of its inputs.

    run: takes the arguments of the inputs. The backward passes in it are part of the graph.
    """
    from torch.fx.experimental.proxy_tensor import make_fx  # takes a second to load

    def call(*tensors: Tensor) -> list[Tensor]:
        (columns, outputs), arguments = inputs.merged(tensors)
        with bound(body, stacks, columns, outputs):
            return list(run(*arguments))

    with torch.autograd.set_multithreading_enabled(False):
        graph: torch.fx.GraphModule = make_fx(call)(*inputs.copies())
    for node in graph.graph.nodes:
        node.meta.pop("val", None)  # tensors of a mode of their own, which the compiler does not mix with its own
        node.meta.pop("tensor_meta", None)
    _products_of_transposes(graph)
    return graph


def _products_of_transposes(graph: torch.fx.GraphModule) -> None:
    """Rewrite (a b)^T as b^T a^T, which is contiguous: gradients of weights then need no strided copy."""
    aten = torch.ops.aten
    for node in list(graph.graph.nodes):
        if node.target is not aten.transpose.int or node.args[0].target is not aten.bmm.default:
            continue
        if {axis % 3 for axis in node.args[1:]} == {1, 2}:
            with graph.graph.inserting_before(node):
                a, b = (graph.graph.call_function(aten.transpose.int, (x, 1, 2)) for x in node.args[0].args)
                node.replace_all_uses_with(graph.graph.call_function(aten.bmm.default, (b, a)))
    graph.graph.eliminate_dead_code()
    graph.recompile()


class Run(NamedTuple):
    """Neighbouring columns of some rows of a stack."""

    stack: int
    rows: slice
    columns: slice


def gradients(stacks: Sequence[Stack], total: Tensor) -> tuple[list[Run], list[Tensor]]:
    """Return the gradients of a number for the leaves that it was computed from: (n, p) for each run of columns.

    A graph that returns them is fast: one that added them to views of the gradients of the stacks would write the whole column
    once for each view.
    """
    leaves = [(at, *leaf) for at, stack in enumerate(stacks) for leaf in stack.leaves if leaf[0].requires_grad]
    found = torch.autograd.grad(total, [leaf for _, leaf, _, _ in leaves], allow_unused=True)
    parts = [
        (Run(at, rows, slice(place.start, place.stop)), place.flat(gradient))
        for (at, _, rows, place), gradient in zip(leaves, found, strict=True)
        if gradient is not None
    ]
    if not parts:
        return [], []
    parts.sort(key=lambda part: (part[0].stack, part[0].rows.start, part[0].rows.stop, part[0].columns.start))
    ends = [0, *(i + 1 for i, ((a, _), (b, _)) in enumerate(pairwise(parts)) if not _adjoins(a, b)), len(parts)]
    groups = [parts[start:stop] for start, stop in pairwise(ends)]
    runs = [
        group[0][0]._replace(columns=slice(group[0][0].columns.start, group[-1][0].columns.stop)) for group in groups
    ]
    return runs, [torch.cat([gradient for _, gradient in group], 1) for group in groups]


def _adjoins(one: Run, other: Run) -> bool:
    return (one.stack, one.rows, one.columns.stop) == (other.stack, other.rows, other.columns.start)


Playback = tuple[Callable[[], None], Sequence[Tensor]]
"""What repeats a recorded call, and the tensors into which it writes its results."""


def recorded(run: Callable[..., Sequence[Tensor]], tensors: Sequence[Tensor], pool: Any) -> Playback:
    """Record a call in a CUDA graph, whose kernels are then launched together; `pool` is the memory that graphs share.

    The call must have run before, because what is made in a first call cannot be recorded.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        results = run(*tensors)
    return graph.replay, results


class Recorded:
    """A compiled pass that is recorded at its first call and played back at every other.

    Tensors of the body are read and written where they are, and the pass is recorded anew if one of them has moved. Those of a
    batch are copied to where the record reads them. Results are overwritten by the next call, but for the first, the losses.
    """

    def __init__(
        self,
        run: Callable[..., Sequence[Tensor]],
        state: int,
        record: Callable[..., Playback] = recorded,
        pool: Any = None,
    ) -> None:
        """state: how many of the tensors come from the body. pool: as for `torch.cuda.graph`."""
        self.run, self.state, self.record, self.pool = run, state, record, pool
        self.records = 0
        self._places: list[int] = []
        self._batch: list[Tensor] = []
        self._playback: Playback

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        """Return the results of the pass for these tensors."""
        own, batch = tensors[: self.state], tensors[self.state :]
        places = [tensor.data_ptr() for tensor in own]
        if not self.records or places != self._places:
            self._batch = [tensor.clone() for tensor in batch]
            self.run(*(tensor.clone() for tensor in own), *self._batch)
            self._playback = self.record(self.run, [*own, *self._batch], self.pool)
            self._places, self.records = places, self.records + 1
        for kept, given in zip(self._batch, batch, strict=True):
            kept.copy_(given, non_blocking=True)
        play, (losses, *others) = self._playback
        play()
        return [losses.clone(), *others]


def compiled(graph: torch.fx.GraphModule, tensors: Sequence[Tensor]) -> Callable[..., Sequence[Tensor]]:
    """Compile a graph as a whole, for the shapes of these tensors.

    Inductor is called without Dynamo, whose guards would be checked at each call; the caller looks after the shapes.
    """
    import torch._inductor as inductor  # takes seconds to load

    with shielded():
        found: Callable[..., Sequence[Tensor]] = inductor.compile(graph, list(tensors))
    return found


@contextmanager
def shielded() -> Iterator[None]:
    """Keep Ctrl-C from processes that are started within the context; it takes effect here, behind the context.

    A terminal sends SIGINT to all processes that it runs. A C++ compiler that is ended by it would make the run fail, where it
    is to be interrupted. Processes and threads inherit the signals that are blocked.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
