"""Define the contract of a host, segments with named slots between them, and cut plain modules into such. B examples."""

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy

from esper.kasmina.blueprints import drawn_with
from esper.leyline.data.batches import Batch, arguments, cast, first, leaves, map_leaves, run, shapes
from esper.leyline.data.task import Objective
from esper.leyline.lifecycle.slots import STREAMS, Kind, SlotSpec
from esper.leyline.messages import InputError, counted, first_line, in_words, kind_of, typed_line


def steps_of(
    segments: int, slots: Sequence[SlotSpec], acting: Collection[int] | None = None
) -> list[tuple[int, str, int | None]]:
    """Return the index and the dotted path of every segment, in order, and the index of the slot behind it, or None.

    slots: in order; no two lie behind one segment. With `acting`, the other slots are left out, and segments i to j between those
    that are left run as one, whose path is "segments.i:j" and whose index is i.
    """
    sites = {slot.after: site for site, slot in enumerate(slots) if acting is None or site in acting}
    ends = set(range(segments))
    if acting is not None:
        # Seeds may read the input of the segment that they go around, so this one is not joined to those before it.
        starts = {slots[site].start for site in sites.values()}
        ends = {*sites, *(start - 1 for start in starts if start), segments - 1}
    steps, start = [], 0
    for end in sorted(ends):
        path = f"segments.{start}" if start == end else f"segments.{start}:{end}"
        steps.append((start, path, sites.get(end)))
        start = end + 1
    return steps


def segment_outputs(segments: Iterable[nn.Module], x: Batch) -> list[Batch]:
    """Return a batch, and behind it what each of the segments of a plain network returns, one after the other."""
    streams = [x]
    for segment in segments:
        streams.append(run(segment, streams[-1]))
    return streams


def width_read(slot: SlotSpec, x: object, here: object) -> int:
    """Return the width that a seed would read of x at a slot with stream `here` (B, ...), 0 if it cannot read x.

    At a causal slot it cannot read a stream of another length, because fitting it to the slot's length would look ahead.
    """
    width = slot.stream.width_of(x)
    if width and slot.causal:
        assert isinstance(x, Tensor), "a stream must be a tensor to have a width"
        assert isinstance(here, Tensor), "the stream at a slot must be a tensor"
        return width if x.shape[1] == here.shape[1] else 0
    return width


_Part = TypeVar("_Part", nn.Module, SlotSpec)


class SegmentedHost(nn.Module):
    """Runs segments one after the other; slot s changes the stream that segment `slots[s].after` returns.

    The first segment takes the batches of the task: `segment(x)` of one tensor, `segment(*batch)` of a tuple,
    `segment(**batch)` of a mapping. Every other segment takes the one tensor that the segment in front of it returns.
    The floating-point parameters of a host have one dtype, and every floating-point tensor of a batch is cast to it.
    Whole numbers, such as token ids, and truth values are not cast.

    Segments of `nn.Linear`, `nn.ReLU` and `nn.Tanh`, alone or in an `nn.Sequential`, run for all networks of a
    population at once, as fast as hand-written batched arithmetic. A host whose every operation acts on
    trailing axes, each example by itself, may set `stacks = True`. A stack then calls it with parameters that have a
    leading row axis, (E, *shape), and inputs (E, B, ...), just as fast. Any other module, and every one of a host with
    `stacks = False`, is run by vmap or in a loop, with the same numbers. A host that draws no random numbers in
    training mode may set `draws = False`; a loop then does not seed a generator for every call.

    If a slot does not say which modules make the inner features of its segment, `inner_of` decides.
    """

    stacks: bool | None = None
    draws = True

    def __init__(self, segments: Iterable[nn.Module], slots: Sequence[SlotSpec]) -> None:
        """Raise InputError if a segment is not a module or a slot is not a SlotSpec."""
        super().__init__()
        self.segments = nn.ModuleList(_checked(segments, nn.Module, "segments", "[nn.Linear(4, 8), nn.Linear(8, 2)]"))
        checked = _checked(slots, SlotSpec, "slots", "[esper.SlotSpec('middle', after=0, width=8)]")
        self.slots = tuple(
            replace(slot, inner=inner_of(self.segments[slot.after]))
            if slot.inner is None and slot.after < len(self.segments)
            else slot
            for slot in checked
        )

    def forward(self, *batch: Tensor, **named: Tensor) -> Tensor:
        """Return (B, ...) -> (B, ..., C), without any seed."""
        segment, *others = self.segments
        x: Tensor = segment(*batch, **named)
        for segment in others:
            x = segment(x)
        return x


def drawn_host(factory: Callable[[], nn.Module], key: int = 0) -> SegmentedHost:
    """Return a host that a factory makes, with weights drawn by a key; torch's own generators are not used."""
    with drawn_with(key):
        host = factory()
    assert isinstance(host, SegmentedHost)
    return host


def dtype_of(module: nn.Module) -> torch.dtype:
    """Return the dtype of a module's first floating-point parameter, or torch's default dtype if it has none."""
    floating = (parameter.dtype for parameter in module.parameters() if parameter.is_floating_point())
    return next(floating, torch.get_default_dtype())


BESIDE_LAYERS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.PReLU)
"""Modules with parameters that keep the number of features."""


def inner_of(segment: nn.Module) -> int | None:
    """Return how many modules of a segment make its inner features, or None if that is not clear.

    It is clear for an nn.Sequential of two layers of one kind, nn.Linear or convolutions, with activations,
    normalisations and other modules without parameters beside them. The inner features are what the second layer reads.
    """
    if not isinstance(segment, nn.Sequential) or type(segment).forward is not nn.Sequential.forward:
        return None
    layers = [
        (place, module)
        for place, module in enumerate(segment)
        if any(True for _ in module.parameters()) and not isinstance(module, BESIDE_LAYERS)
    ]
    if len(layers) != 2:
        return None
    (_, first), (place, second) = layers
    same = any(isinstance(first, kind) and isinstance(second, kind) for kind in (nn.Linear, nn.modules.conv._ConvNd))
    return place if same else None


def _checked(values: Iterable[_Part], kind: type[_Part], name: str, example: str) -> list[_Part]:
    """Return the segments or slots of a host. Raises InputError if one is not of the class that it must have."""
    if not isinstance(values, Iterable):
        raise InputError(f"{name} of a SegmentedHost is {kind_of(values)}; give a list, as in {example}")
    listed = list(values)
    for index, value in enumerate(listed):
        if not isinstance(value, kind):
            what = f"the class {value.__name__}" if isinstance(value, type) else kind_of(value)
            of_segments = "give an nn.Module, whose forward computes the segment"
            mend = "give an esper.SlotSpec" if name == "slots" else of_segments
            raise InputError(f"{name}[{index}] of a SegmentedHost is {what}; {mend}")
    return listed


@torch.no_grad()
def check_host(
    host: nn.Module,
    x: Batch,
    outputs: int,
    wanted: str = "",
    objective: Objective | None = None,
    y: Tensor | None = None,
) -> Tensor:
    """Run a host on a few examples x (B, ...) of its task and compare it with what it declares; return its outputs.

    `wanted` says in words why the host must have that many outputs. Raises InputError if the host is not a SegmentedHost,
    if the place or width of a slot is not as declared, or if the outputs are neither (B, outputs) nor of another shape
    that the objective takes with y.
    """
    if not isinstance(host, SegmentedHost):
        raise InputError(f"the host factory returned {kind_of(host)}; return an nn.Module")
    _check_declared(host)
    if host.slots[0].kind == Kind.MAP and isinstance(x, Tensor) and x.is_floating_point() and x.dim() != 4:
        raise InputError(
            f"the host reads images, but an example of the task has shape {tuple(x.shape[1:])}; give x as (N, C, H, W)"
        )
    _check_takes(host.segments[0], x)
    training = host.training
    host.eval()
    streams = [x]
    for index, segment in enumerate(host.segments):
        streams.append(_checked_run(segment, index, streams[-1]))
    for slot in host.slots:
        here = first(streams[slot.after + 1])
        if slot.stream.width_of(here) != slot.width:
            raise InputError(
                f"slot {slot.name!r} declares width {slot.width} and kind {str(slot.kind)!r}, but the stream there has shape "
                f"{tuple(here.shape[1:])}; declare the width of the segment's output, and kind 'map' for (C, H, W) or "
                "'sequence' for (L, C)"
            )
        if slot.around is not None and not width_read(slot, streams[slot.around], here):
            reads = f"a {slot.kind} of floating-point numbers{' and of the same length' * slot.causal}"
            raise InputError(
                f"slot {slot.name!r} is around segment {slot.around}, whose input has shape {shapes(streams[slot.around])}, but "
                f"its seeds read {reads}; name another segment, or leave around out"
            )
    _check_causal(host, streams)
    whole, by_segments = run(host, x), streams[-1]
    host.train(training)
    if (
        not isinstance(whole, Tensor)
        or not isinstance(by_segments, Tensor)
        or whole.shape != by_segments.shape
        or not torch.allclose(whole, by_segments, equal_nan=True)
    ):
        raise InputError("the host's forward is not its segments one after the other; put everything into segments")
    _check_output(whole, outputs, wanted, objective, y)
    return whole


def _check_output(output: Tensor, outputs: int, wanted: str, objective: Objective | None, y: Tensor | None) -> None:
    """Raise InputError if outputs are neither (B, outputs) nor of another shape that the objective takes with y (B, ...)."""
    # Each example has a label, a target or a row of targets.
    flat = y is None or y.dim() == 1 or (y.is_floating_point() and y.dim() == 2)
    shape = tuple(output.shape[1:])
    if objective is None or (flat and output.dim() == 2):
        if shape == (outputs,):
            return
        returned = counted(shape[0], "number") if len(shape) == 1 else f"an output of shape {shape}"
        raise InputError(
            f"the host returns {returned} per example, but {wanted or f'the task has {outputs} outputs'}; give the host "
            f"{counted(outputs, 'output')}"
        )
    assert y is not None, "an objective needs targets"
    whole, own = output, () if y.is_floating_point() else (outputs,)
    if shape and shape[-1] == outputs:  # as a population pads the outputs of a smaller host
        whole = F.pad(output, (0, max(objective.outputs - outputs, 0)), value=-torch.inf)
    for what, function in (("loss", objective.loss), ("score", objective.score)):
        returns, reason = _tried(function, whole, y)
        if returns != (1, len(output)):
            raise InputError(
                f"the host returns an output of shape {shape} per example, which the {what} of the objective does not take "
                f"with a target of shape {tuple(y.shape[1:])} and {counted(outputs, 'output')}{reason}; give the "
                f"host outputs of shape {(*y.shape[1:], *own)}, or the task a loss that takes these"
            )


def _tried(
    function: Callable[[Tensor, Tensor], object], output: Tensor, y: Tensor
) -> tuple[tuple[int, ...] | None, str]:
    """Return the shape of what a loss or a score returns, and in words what is wrong with it; no shape if it raises."""
    try:
        result = function(output[None], y[None])
    except AssertionError:
        return None, ""
    except Exception as error:  # an objective can raise any error; its first line gives the reason
        return None, f" ({first_line(error)})"
    if not isinstance(result, Tensor):
        return None, f", for which it returns {kind_of(result)}"
    return tuple(result.shape), f", for which it returns shape {tuple(result.shape)} instead of {(1, len(output))}"


def _check_takes(segment: nn.Module, x: Batch) -> None:
    """Raise InputError if the first segment of a host cannot be called with the tensors of a batch."""
    if isinstance(x, Tensor):
        return
    positional, named = arguments(x)
    signature = inspect.signature(segment.forward)
    try:
        signature.bind(*positional, **named)
    except TypeError as error:
        given = f"the tensors {', '.join(map(repr, named))}" if named else counted(len(positional), "tensor")
        raise InputError(
            f"an example of the task holds {given}, but segment 0 of the host has forward{signature}, which does not take "
            f"them: {error}; make the two fit"
        ) from None


def _check_declared(host: SegmentedHost) -> None:
    """Raise InputError if slots are not between the segments, or a slot or a module leaves open what it must say."""
    for name, value in [*host.named_parameters(), *host.named_buffers()]:
        if is_lazy(value):  # rows of a stack are allocated before the first input comes
            owner = type(host.get_submodule(name.rpartition(".")[0])).__name__
            raise InputError(
                f"the host's {name} is not initialised, because {owner} takes its size from its first input; "
                "give the sizes, as in nn.Linear(4, 8)"
            )
    if len(host.segments) < 2:
        raise InputError(
            f"the host has {len(host.segments) or 'no'} segment{'s' * (not host.segments)}; give at least two, because a slot "
            "lies between two segments"
        )
    names = [slot.name for slot in host.slots]
    places = [slot.after for slot in host.slots]
    if len(set(names)) < len(names) or not all(names):
        raise InputError(f"the host's slots are named {names}; give every slot a name of its own")
    if places != sorted(set(places)) or any(not 0 <= place < len(host.segments) - 1 for place in places):
        raise InputError(
            f"the host's slots sit after segments {places}; give increasing indices from 0 to {len(host.segments) - 2}, "
            "one slot a place and none after the last segment"
        )
    if not host.slots:
        raise InputError("the host has no slots; give it at least one, or there is nothing to grow")
    heads = [slot.head for slot in host.slots]
    if heads != sorted(heads):
        raise InputError(
            f"slot {names[heads.index(True)]!r} of the host says that it lies behind the last layer (head=True), and slot "
            f"{names[-1]!r} behind it does not; set head for the last slots only"
        )
    for slot in host.slots:
        segment = host.segments[slot.after]
        modules = len(segment) if isinstance(segment, nn.Sequential) else 0
        if slot.inner is not None and slot.inner > modules:
            what = f"has {modules} modules" if modules else f"is {kind_of(segment)}"
            raise InputError(
                f"inner of slot {slot.name!r} is {slot.inner}, but segment {slot.after} of the host {what}; give how many "
                "modules of an nn.Sequential make its inner features, or leave inner out"
            )


def _checked_run(segment: nn.Module, index: int, x: Batch) -> Tensor:
    """Return what a segment returns. Raises InputError if it fails or does what it must not do."""
    given = map_leaves(Tensor.clone, x)
    try:
        y = run(segment, x)
    except Exception as error:  # a user's module can raise any error; its first line gives the reason
        if (misfit := _misfit(segment, x)) is not None:
            unit, has, takes = misfit
            source = "an example of x has" if index == 0 else f"segment {index - 1} of the host returns"
            raise InputError(
                f"{source} {has} {unit}{'s' * (has != 1)}, but segment {index} of the host takes {takes}; "
                "make the two the same"
            ) from error
        raise InputError(
            f"segment {index} of the host cannot run on its input: {first_line(error)}; correct the segment"
        ) from error
    if not isinstance(y, Tensor):
        raise InputError(f"segment {index} of the host returns {kind_of(y)}; return one tensor")
    if not all(torch.equal(now, then) for now, then in zip(leaves(x), leaves(given), strict=True)):
        raise InputError(
            f"segment {index} of the host changes its input in place, but a seed may read it; return a new tensor"
        )
    return y


def _check_causal(host: SegmentedHost, streams: Sequence[Batch]) -> None:
    """Raise InputError if a causal slot's stream changes when the later positions of the input (B, L, ...) are swapped."""
    x, causal = streams[0], [slot for slot in host.slots if slot.causal]
    if not causal or not isinstance(x, Tensor) or x.dim() < 2 or x.shape[1] < 2:
        return
    middle = x.shape[1] // 2
    swapped = segment_outputs(host.segments, torch.cat([x[:, :middle], x[:, middle:].flip(0, 1)], 1))
    for slot in causal:
        here, changed = first(streams[slot.after + 1]), first(swapped[slot.after + 1])
        same = torch.allclose(here[:, :middle], changed[:, :middle], rtol=1e-4, atol=1e-5)
        if here.shape[1] == x.shape[1] and not same:
            raise InputError(
                f"slot {slot.name!r} is causal, but its stream depends on later positions of the input; mask them in the host, "
                "or leave causal out of the slot"
            )


def _misfit(segment: nn.Module, x: Batch) -> tuple[str, int, int] | None:
    """Find whether the first layer takes another width than x (B, ...) has: the unit, what x has, and what the layer takes."""
    called: list[tuple[str, int, int]] = []
    if not isinstance(x, Tensor):
        return None

    def look(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        if called or not arguments or arguments[0] is not x:
            return
        if isinstance(module, nn.Linear):
            called.append(("feature", x.shape[-1], module.in_features))
        elif isinstance(module, nn.Conv2d) and x.dim() == 4:
            called.append(("channel", x.shape[1], module.in_channels))

    with ExitStack() as hooks, suppress(Exception):  # a segment can raise any error on an input of another size
        for module in segment.modules():
            hooks.enter_context(module.register_forward_pre_hook(look))
        segment(x)
        return None
    return called[0] if called and called[0][1] != called[0][2] else None


# Plain modules.


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
                same = torch.allclose(one[:, :middle], two[:, :middle], atol=1e-6)
                causal = same and one.shape[1] == first(x).shape[1]
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
        self.layers = list[list[_Layer]]()
        for start, end in zip(starts, self._ends, strict=True):
            called = [str(node.target) for node in self._nodes[start : end + 1] if node.op == "call_module"]
            self.layers.append([_Layer(path, modules[path]) for path in called if _is_layer(modules[path])])

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
