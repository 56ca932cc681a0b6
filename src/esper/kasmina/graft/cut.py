"""Cut a plain module into the segments of a host, where one tensor leads from a layer to the next. B examples."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from esper.kasmina.blueprints import drawn_with
from esper.kasmina.host import BESIDE_LAYERS, SegmentedHost, dtype_of, segment_outputs, width_read
from esper.leyline.data.batches import Batch, cast, first, map_leaves, run, shapes
from esper.leyline.errors import InputError, in_words, typed_line
from esper.leyline.lifecycle.slots import SlotSpec
from esper.leyline.lifecycle.streams import STREAMS, Kind
from esper.leyline.text import kind_of


class CutHost:
    """Makes hosts: a module that a factory makes is cut into segments, with a slot behind each but the last.

    An `nn.Sequential` is cut between its modules, and any other module between the operations that torch.fx records of its
    forward. A segment begins at a layer, and ends where one tensor leads to the next layer. A slot is named after the last layer
    in front of it. If its segment widens a narrow place, its bypasses go around that place. Where the segments are cut is decided
    once, for random numbers in the shapes of `example` (B, ...).

    Raises InputError if there is no place for a slot, or the segments do not compute what the module does.
    """

    def __init__(self, factory: Callable[[], nn.Module], example: Batch) -> None:
        with drawn_with(0):
            module = factory()
        self.factory, kind = factory, kind_of(module)
        mend = (
            "give an nn.Sequential or an esper.SegmentedHost, or grow it in a loop of your own with esper.Growth "
            "(`esper docs growth`)"
        )
        x = cast(_drawn(example), dtype_of(module))
        module.eval()
        failure = f"the host, {kind}, cannot run on examples of shape {shapes(x)}"
        with in_words(failure, "make the two fit"), torch.no_grad():
            whole = run(module, x)
        try:
            steps = _steps(module)
        except Exception as error:  # torch.fx raises errors of many kinds
            raise InputError(
                f"the host, {kind}, cannot be cut into segments, as torch.fx cannot trace it ({typed_line(error)}); {mend}"
            ) from None
        outputs: list[Any] = []
        with torch.no_grad():
            for step in range(len(steps.layers)):
                part = steps.segment(step, step)
                outputs.append(part(outputs[-1]) if outputs else run(part, x))
        self._ends, self._slots = _cut(steps, outputs, len(whole) if isinstance(whole, Tensor) else 0)
        if not self._slots:
            raise InputError(
                f"the host, {kind}, has no place for a slot: nowhere does one tensor of shape (B, C), (B, C, H, W) or "
                f"(B, L, C) lead from one of its layers to the next; {mend}"
            )
        host = self._host(module)
        with torch.no_grad():
            if not isinstance(whole, Tensor) or not torch.allclose(run(host.eval(), x), whole, equal_nan=True):
                raise InputError(f"the host, {kind}, computes something else when it is cut into segments; {mend}")
            streams, changed = segment_outputs(host.segments, x), None
            middle = x.shape[1] // 2 if isinstance(x, Tensor) and x.dim() > 1 else 0
            if middle and any(slot.kind == Kind.SEQUENCE for slot in self._slots):
                earlier, later = first(x)[:, :middle], first(x)[:, middle:]
                later = later + 1 if later.is_floating_point() else 1 - later
                changed = segment_outputs(host.segments, torch.cat([earlier, later], 1))
        for index, slot in enumerate(self._slots):
            causal = False  # whether no position of the stream depends on later positions of x (B, L, ...)
            if slot.kind == Kind.SEQUENCE and changed is not None:
                one, two = (first(each[slot.after + 1]) for each in (streams, changed))
                causal = one.shape[1] == first(x).shape[1] and torch.allclose(
                    one[:, :middle], two[:, :middle], atol=1e-6
                )
            slot = replace(slot, causal=causal)
            self._slots[index] = replace(slot, around=_around(slot, streams))

    def __call__(self) -> SegmentedHost:
        """Make a host with weights of its own."""
        return self._host(self.factory())

    def _host(self, module: nn.Module) -> SegmentedHost:
        steps = _steps(module)
        starts = [0, *(end + 1 for end in self._ends[:-1])]
        return SegmentedHost([steps.segment(*each) for each in zip(starts, self._ends, strict=True)], self._slots)


class _Layer(NamedTuple):
    path: str
    module: nn.Module


class _Sequence:
    """Splits an nn.Sequential into its modules as steps; those of an nn.Sequential inside it are steps too."""

    def __init__(self, module: nn.Sequential) -> None:
        self._modules = list(_flat(module, ""))
        self.layers = [[each] if _is_layer(each.module) else [] for each in self._modules]

    def segment(self, first: int, last: int) -> nn.Module:
        """Return the steps from `first` to `last`, both counted, as one module."""
        modules = [module for _, module in self._modules[first : last + 1]]
        return modules[0] if len(modules) == 1 else nn.Sequential(*modules)


class _Graph:
    """Splits the operations of a module into steps, which end where the operations behind need one value alone."""

    def __init__(self, module: nn.Module) -> None:
        was, modes = module.training, []
        for training in (True, False):
            modes.append(fx.symbolic_trace(module.train(training)))
            modes[-1].graph.eliminate_dead_code()
            modes[-1].recompile()
        if modes[0].code != modes[1].code:
            raise ValueError(
                "its forward does other things in training than in evaluation; use modules such as nn.Dropout"
            )
        self._module = modes[1].train(was)
        module.train(was)
        self._nodes = [
            node for node in self._module.graph.nodes if node.op not in ("placeholder", "get_attr", "output")
        ]
        place = {node: index for index, node in enumerate(self._nodes)}
        self._inputs = [node for node in self._module.graph.nodes if node.op == "placeholder"]
        (result,) = (node.args[0] for node in self._module.graph.nodes if node.op == "output")
        if not isinstance(result, fx.Node) or result not in place:
            raise ValueError("its forward returns more than one tensor")
        needed = {
            node: max((place.get(user, len(self._nodes)) for user in node.users), default=-1)
            for node in (*self._inputs, *place)
        }
        self._ends = [
            index
            for index, node in enumerate(self._nodes)
            if node is result
            or [each for each in (*self._inputs, *self._nodes[: index + 1]) if needed[each] > index] == [node]
        ]
        modules = dict(self._module.named_modules())
        starts = [0, *(end + 1 for end in self._ends[:-1])]
        self.layers = [
            [
                _Layer(str(node.target), modules[str(node.target)])
                for node in self._nodes[start : end + 1]
                if node.op == "call_module" and _is_layer(modules[str(node.target)])
            ]
            for start, end in zip(starts, self._ends, strict=True)
        ]

    def segment(self, first: int, last: int) -> nn.Module:
        """Return the steps from `first` to `last`, both counted, as one module."""
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        start = self._ends[first - 1] + 1 if first else 0
        if first:
            copies[self._nodes[start - 1]] = graph.placeholder("x")
        else:
            copies |= {node: graph.node_copy(node) for node in self._inputs}

        def copied(node: fx.Node) -> fx.Node:
            if node not in copies:  # an attribute of the module
                copies[node] = graph.node_copy(node, copied)
            return copies[node]

        for node in self._nodes[start : self._ends[last] + 1]:
            copies[node] = graph.node_copy(node, copied)
        graph.output(copies[self._nodes[self._ends[last]]])
        return fx.GraphModule(self._module, graph)


def _steps(module: nn.Module) -> _Sequence | _Graph:
    plain = isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
    return _Sequence(module) if isinstance(module, nn.Sequential) and plain else _Graph(module)


def _flat(module: nn.Sequential, prefix: str) -> Iterator[_Layer]:
    for name, each in module._modules.items():  # named_children leaves out a module that is there twice
        assert each is not None, "an nn.Sequential holds modules"
        if isinstance(each, nn.Sequential) and type(each).forward is nn.Sequential.forward:
            yield from _flat(each, f"{prefix}{name}.")
        else:
            yield _Layer(f"{prefix}{name}", each)


def _is_layer(module: nn.Module) -> bool:
    return not isinstance(module, BESIDE_LAYERS) and next(module.parameters(), None) is not None


def _cut(steps: _Sequence | _Graph, outputs: Sequence[Any], examples: int) -> tuple[list[int], list[SlotSpec]]:
    """Return the last step of every segment, and the slots between segments.

    A segment holds one step with layers, and the steps behind it that keep the axes of its stream. Steps that share a parameter
    are in one segment, because a population holds the parameters of each segment apart.
    """
    ends: list[int] = []
    begun = 0  # steps with layers in the present segment
    for step, layers in enumerate(steps.layers):
        reshapes = begun and not layers and _axes(outputs[step]) != _axes(outputs[step - 1])
        if begun and (layers or reshapes) and isinstance(outputs[step - 1], Tensor):
            ends.append(step - 1)
            begun = 0
        begun += bool(layers)
    held = [{id(value) for layer in layers for value in layer.module.parameters()} for layers in steps.layers]
    ends = [end for end in ends if not set().union(*held[: end + 1]) & set().union(*held[end + 1 :])]
    slots, starts = [], [0, *(end + 1 for end in ends)]
    ends.append(len(outputs) - 1)
    for after, (start, end) in enumerate(zip(starts[:-1], ends[:-1], strict=True)):
        layers = [layer for each in steps.layers[start : end + 1] for layer in each]
        kind = _kind(outputs[end], layers, examples)
        if kind is not None and any(steps.layers[end + 1 :]):
            slots.append(SlotSpec(layers[-1].path, after, STREAMS[kind].width_of(outputs[end]), kind))
    return ends, slots


def _around(slot: SlotSpec, streams: Sequence[Batch]) -> int | None:
    """Return the segment that a slot's bypasses go around a narrow place from, or None where its own segment does not widen one.

    streams: what enters each segment. A place is narrow if it has fewer features than the slot and than what is read in front of
    it; of several places in a row, the widest input is read.
    """
    here = streams[slot.after + 1]
    read = [width_read(slot, x, here) for x in streams[: slot.after + 1]]
    start = best = slot.after
    while start and 0 < read[start] < slot.width:
        start -= 1
        if read[start] > read[best]:
            best = start
    return best if best < slot.after else None


def _axes(value: Any) -> int:
    return value.dim() if isinstance(value, Tensor) else 0


def _kind(value: Any, layers: Sequence[_Layer], examples: int) -> Kind | None:
    """Return the kind of the stream in a tensor (B, ...) behind layers; None if no seed can grow on it."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or not layers or len(value) != examples:
        return None
    inner = [each for layer in layers for each in layer.module.modules()]
    convolutions = any(isinstance(each, nn.modules.conv._ConvNd) for each in inner)
    others = any(isinstance(each, nn.Linear | nn.Embedding | nn.RNNBase | nn.MultiheadAttention) for each in inner)
    return {
        2: Kind.VECTOR,
        3: None if convolutions and not others else Kind.SEQUENCE,  # (B, C, L) behind nn.Conv1d
        4: Kind.MAP if convolutions else None,  # (B, H, W, C) behind nn.Linear
    }.get(value.dim())


def _drawn(example: Batch) -> Batch:
    """Return random numbers in the shapes of examples; 0 and 1 for whole numbers, which every table of ids has."""
    generator = torch.Generator().manual_seed(0)

    def draw(leaf: Tensor) -> Tensor:
        if leaf.is_floating_point():
            return torch.randn(leaf.shape, generator=generator)
        return torch.randint(0, 2, leaf.shape, generator=generator).to(leaf.dtype)

    return map_leaves(draw, example)
