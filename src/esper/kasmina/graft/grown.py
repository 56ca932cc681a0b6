"""Define grown classes: subclasses of a module's class that run a seed after its forward, and can be pickled. B examples.

A grafted submodule keeps its parameters, its name and its place. Its class is replaced by a subclass that calls the
original `forward` and then the seed, which is a child of the submodule. The keys of `state_dict`, `isinstance`,
`copy.deepcopy`, pickling, `torch.compile` and `torch.export` therefore go on working. A forward hook would be ignored
by a network that is compiled already, and a wrapper would rename the parameters.
"""

import copyreg
import functools
import inspect
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree as pytree

from esper.kasmina.graft.planted import Bank, Planted
from esper.kasmina.graft.recording import floats, mapped, replaced, tensors
from esper.kasmina.slot import Straight
from esper.leyline.lifecycle.slots import Site, Tap
from esper.leyline.messages import GrowthWarning, InputError, did_you_mean, warn

CHILD = "esper"
"""Name of the child of a submodule that holds its seed."""
POINT = "_esper_point"
_HERE = Tap.HERE.value


Tape = Callable[[Tensor | None, int | None, Any], None]
"""Takes the first floating tensor that a submodule was given, its version then, and the output, in front of any seed."""

_OUTSIDE, _INSIDE = -1, -2
"""Where a thread is: outside of any pass, or in a forward pass; in a backward pass it is at its number."""


class _Held:
    """Holds what a wire carries in one thread, and where that thread is."""

    def __init__(self) -> None:
        self.place = _OUTSIDE
        self.value: Tensor | None = None


class _ByThread(threading.local):
    """Gives each thread a `_Held`, which dynamo follows; it loses what is written to a `threading.local` itself."""

    def __init__(self) -> None:
        self.held = _Held()


class Wire:
    """Carries the input of one submodule to the seeds that read it, within one forward pass of one thread.

    A pass opens a wire when it enters the submodule that bounds it, and closes it when it leaves, also by an exception
    (`_forward_of`). A pass within a pass has a value of its own. What `torch.utils.checkpoint` computes again in a backward
    pass, outside of any forward pass, is there for that backward pass alone.
    """

    def __init__(self, readers: int = 0) -> None:
        self.readers = readers  # number of seeds that read it
        self.local = _ByThread()

    def __reduce__(self) -> tuple[type["Wire"], tuple[int]]:
        """Return how to copy a wire: the copy has as many readers, and is in no pass."""
        return Wire, (self.readers,)

    def put(self, value: Tensor | None) -> None:
        """Take the input of the submodule; outside of any pass there is nothing to take it for."""
        held = self.local.held
        if not torch.compiler.is_dynamo_compiling() and held.place != _INSIDE:
            held.place = torch._C._current_graph_task_id()
            value = None if held.place == _OUTSIDE else value
        held.value = value

    def get(self) -> Tensor | None:
        """Return the value of this pass; None if there is none."""
        held = self.local.held
        if torch.compiler.is_dynamo_compiling() or held.place in (_INSIDE, torch._C._current_graph_task_id()):
            return held.value
        return None


@dataclass(eq=False)
class Point:
    """Holds the state of a grafted submodule, beside its own."""

    site: str | None = None  # the name of the site behind it
    planted: bool = False  # whether a seed is there
    # with what is read, by the value of its tap, but for those that read the input of the submodule itself
    sources: dict[str, Wire] = field(default_factory=dict)
    records: tuple[Wire, ...] = ()  # those that take its input when it is called
    bounds: tuple[Wire, ...] = ()  # those that hold within one call of it
    sites: Mapping[str, Site] | None = None  # those of the whole network, at the network itself
    tape: Tape | None = None  # observes its calls while the network is measured
    asked: bool | None = None  # the mode it was last set to while it is held in evaluation mode; None if it is not
    anchor: Tensor | None = None  # a leaf () that its outputs depend on if nothing else of them requires a gradient


def first_tensor(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the first floating tensor among the arguments of a call, positional before named; None if there is none."""
    if args and isinstance(args[0], Tensor) and args[0].is_floating_point():  # as in most calls, in a tenth of the time
        return args[0]
    return next(floats((args, kwargs)), None)


def _forward_of(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make the `forward` of a grown class. It has the argument names of the original."""

    def forward(self: nn.Module, *args: Any, _esper_opened: bool = False, **kwargs: Any) -> Any:
        point: Point = self._esper_point  # type: ignore[assignment]
        if point.bounds and not _esper_opened and any(wire.readers for wire in point.bounds):
            return bounded(self, point, args, kwargs)
        for wire in point.records:
            if wire.readers:
                wire.put(first_tensor(args, kwargs))
        given = None if point.tape is None else first_tensor(args, kwargs)
        version = None if given is None else given._version
        output = original(self, *args, **kwargs)
        if point.tape is not None:
            point.tape(given, version, output)
        if point.planted:
            output = _with_seed(self, point, (args, kwargs), output, functools.partial(original, self))
        if point.anchor is not None and torch.is_grad_enabled():
            output = pytree.tree_map_only(Tensor, functools.partial(_anchored, point.anchor), output)
        return output

    def bounded(self: nn.Module, point: Point, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Apart from `forward`, because dynamo compiles no part of a function that has a `finally`.
        # Its graph must not depend on `place`, which may be the number of a backward pass.
        traced = torch.compiler.is_dynamo_compiling()
        outer: list[tuple[_Held, bool, Tensor | None]] = []
        for held in [wire.local.held for wire in point.bounds if wire.readers]:
            within = traced or held.place == _INSIDE
            outer.append((held, within, held.value if within else None))
            held.value = None
            if not within:
                held.place = _INSIDE
        try:
            return forward(self, *args, _esper_opened=True, **kwargs)
        finally:
            for held, within, value in outer:
                held.value = value
                if not within:
                    held.place = _OUTSIDE

    # torch.compile counts what it compiled by code object, and gives up at a limit that all classes would share.
    for function in (bounded, forward):
        function.__code__ = function.__code__.replace(co_name=f"forward of {original.__qualname__}")
    return functools.update_wrapper(forward, original)


def _with_seed(module: nn.Module, point: Point, given: Any, output: Any, original: Callable[..., Any]) -> Any:
    """Return the output of a submodule, called with arguments, with the change of its seed; `original` is its own forward."""
    planted: Planted | Bank = getattr(module, CHILD)
    own = first_tensor(*given)
    if isinstance(planted, Bank):
        h = grown = stream_of(output)
        for seat in planted.runs():
            grown = seat(grown, h, _read(point, seat.reads, own, h))
        return output if grown is h else replaced(output, h, grown)
    if not planted.runs:
        return output
    h = stream_of(output)
    if planted.again:
        assert own is not None, "what the submodule reads has the shape of what it returns"
        run = functools.partial(called_on, given, own, original, h)
        u = run() if planted.acts else _aside(module, torch.no_grad()(run))
    elif planted.copies:
        return replaced(output, h, planted(h, h, functools.partial(_run_copy, planted, given, own)))
    else:
        u = _read(point, planted.reads, own, h)
    return replaced(output, h, planted(h, u))


def _run_copy(planted: Planted, given: Any, own: Tensor | None, block: nn.Module, h: Tensor) -> Tensor:
    """Run the copy that a seed is, behind or beside the submodule that was called; in evaluation mode while it incubates."""
    attached = planted.acts and planted.attached
    if planted.copies == "beside":
        run = functools.partial(called_beside, given, block, attached=attached)
    else:
        assert own is not None, "what the submodule reads has the shape of what it returns"
        run = functools.partial(called_on, given, own, block, h, attached=attached)
    return run() if planted.acts else _aside(block, run)


def called_on(given: Any, own: Tensor, block: Callable[..., Any], h: Tensor, *, attached: bool = True) -> Tensor:
    """Run a block on a stream h (B, ...) in place of its input: what it adds to it.

    given: the arguments of the call whose stream was `own`; the others stay. A cache of keys and values is left out, as another
    block owns it: this one reads all positions of the stream. attached: whether its gradient reaches the other arguments.
    """
    return called_beside(replaced(given, own, h), block, attached=attached) - h


def called_beside(given: Any, block: Callable[..., Any], *, attached: bool = True) -> Tensor:
    """Run a block with the arguments of the call of another one, without a cache, and return its stream (B, ...)."""
    args, kwargs = given
    if (read := first_tensor(args, kwargs)) is not None:
        args = tuple(_uncached(each, read) for each in args)
        kwargs = {key: _uncached(each, read) for key, each in kwargs.items()}
    written = [] if torch.compiler.is_compiling() else [each for each in (*args, *kwargs.values()) if each is not read]
    before = [_held(each, read) for each in written]
    # In containers of its own, to which the other may append.
    args, kwargs = mapped((args, kwargs), lambda each: each if attached else each.detach())
    output = stream_of(block(*args, **kwargs))
    for other, held in zip(written, before, strict=True):
        now = _held(other, read)
        if len(now) != len(held) or any(a is not b or old != new for (a, old), (b, new) in zip(held, now, strict=True)):
            owner = type(getattr(block, "__self__", block)).__name__
            raise InputError(
                f"{owner} writes to a {type(other).__name__} that it is given, as to a cache of keys and values, and a copy of "
                "it that runs as a seed would write there too; run the network without it, or once growth.finish() has made the "
                "copy part of the network"
            )
    return output


def _held(argument: Any, stream: Tensor | None) -> list[tuple[Tensor, int]]:
    """Return the tensors but the stream that an argument holds, also as attributes of an object, and the version of each.

    Tensors that are made in inference mode do not count what is written to them.
    """
    held = list(tensors(argument)) or (
        [] if isinstance(argument, nn.Module) else list(tensors(getattr(argument, "__dict__", None)))
    )
    return [(each, -1 if each is stream or each.is_inference() else each._version) for each in held]


def _uncached(argument: Any, h: Tensor) -> Any:
    """Return an argument of a block, or None for a cache of Hugging Face. InputError if that holds earlier positions."""
    positions = getattr(argument, "get_seq_length", None)
    if positions is None:
        return argument
    if int(positions()) > h.shape[1]:
        raise InputError(
            "a copy that runs as a seed has no cache of keys and values; generate with use_cache=False, or once growth.finish() "
            "has made it part of the network"
        )
    return None


@_disable_dynamo  # as torch.compiler.disable, which would import dynamo at once: a second that few commands need
def _aside(module: nn.Module, run: Callable[[], Tensor]) -> Tensor:
    """Run a submodule in evaluation mode: no random number is drawn, and no statistic or wire changes."""
    parts = list(module.modules())
    wires = {wire for part in parts if POINT in part.__dict__ for wire in part.__dict__[POINT].records if wire.readers}
    modes, values = [part.training for part in parts], [(wire, wire.get()) for wire in wires]
    try:
        for part in parts:
            part.training = False
        return run()
    finally:
        for part, training in zip(parts, modes, strict=True):
            part.training = training
        for wire, value in values:
            wire.put(value)


def _read(point: Point, tap: str, own: Tensor | None, h: Tensor) -> Tensor:
    """Return what a seed reads at a tap of this value. InputError if the pass has not computed it."""
    if tap == _HERE:
        return h
    wire = point.sources.get(tap)
    read = own if wire is None else wire.get()
    if read is None:
        raise InputError(
            f"the seed at site {point.site!r} reads tap {tap!r}, which this pass has not computed: either the "
            "submodule is called outside the forward pass of the network, or torch.utils.checkpoint computes it anew; let "
            "the site's `around` be within what is checkpointed, or choose blueprints that read 'here'"
        )
    return read


def stream_of(output: Any) -> Any:
    """Return the stream at a site: the output of its submodule, or its first floating tensor at any depth of a structure."""
    return output if isinstance(output, Tensor) else next(floats(output), output)


def is_grafted(module: nn.Module) -> bool:
    """Return whether a network has sites."""
    point = module.__dict__.get(POINT)
    return point is not None and point.sites is not None


def sites_of(module: nn.Module) -> Mapping[str, Site]:
    """Return the sites of a grafted network, by name. Raises InputError if it is not grafted."""
    sites = root_of(module).sites
    assert sites is not None
    return sites


def root_of(module: nn.Module) -> Point:
    """Return the point of a grafted network. Raises InputError if it is not grafted."""
    if not is_grafted(module):
        raise InputError(f"the {type(module).__name__} has no sites; call esper.graft(module, sites) first")
    return module.__dict__[POINT]


def prefix_behind(path: str) -> str:
    """Return the first part of the names of the seed behind a submodule in a `state_dict`."""
    return f"{path}.{CHILD}." if path else f"{CHILD}."


def shapes_of(module: nn.Module) -> dict[str, torch.Size]:
    """Return the shapes of the tensors of a module, without those of seeds in it."""
    state = module.state_dict()
    return {name: own.shape for name, own in state.items() if f".{CHILD}." not in f".{name}"}


def check_tensors(
    saved: Mapping[str, Tensor],
    mine: Mapping[str, Tensor],
    source: str,
    target: str,
    mend: str,
    *,
    dtypes: bool = True,
) -> None:
    """Raise InputError if tensors of a source, in words, have other names, shapes or dtypes than those of a target.

    What a module adds to its state by `get_extra_state`, and is no tensor, is left to it.
    """
    for name in (*saved, *mine):
        theirs, own = saved.get(name), mine.get(name)
        if theirs is None or own is None:
            without, other = (source, target) if theirs is None else (target, source)
            raise InputError(f"{without} has no {name!r}, which {other} has; {mend}")
        if isinstance(theirs, Tensor) or isinstance(own, Tensor):
            shapes, kinds = (tuple(theirs.shape), tuple(own.shape)), (theirs.dtype, own.dtype)
            first, second = shapes if shapes[0] != shapes[1] or not dtypes else kinds
            if first != second:
                raise InputError(f"{source} has {name!r} as {first}, where {target} has {second}; {mend}")


# Frozen networks.


def _anchored(leaf: Tensor, value: Tensor) -> Tensor:
    """Return a tensor (...), bit for bit, that requires a gradient, which reaches the leaf () alone."""
    if value.requires_grad or not value.is_floating_point():
        return value
    # A clone, because a loss may work in place, which the view of a Function does not allow.
    return Straight.of(value, leaf.to(value).expand_as(value), None).clone()


def anchor(module: nn.Module, anchored: bool) -> None:
    """Make the outputs of a grafted network require a gradient, or not, even if nothing in the network does."""
    like = next(module.parameters())
    root_of(module).anchor = torch.zeros((), device=like.device, requires_grad=True) if anchored else None


def _train_of(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make the `train` of a grown class, which only records the mode while the submodule is held."""

    @functools.wraps(original)
    def train(self: nn.Module, mode: bool = True) -> Any:
        returned = original(self, mode)
        point: Point = self._esper_point  # type: ignore[assignment]
        if point.asked is not None:
            point.asked, self.training = mode, False
        return returned

    return train


# Classes.

_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def grown_class(original: type[nn.Module]) -> type[nn.Module]:
    """Return the class of grafted modules of a class; made once for each."""
    if original not in _CLASSES:
        body: dict[str, Any] = {
            "__module__": original.__module__,
            "__doc__": original.__doc__,
            "__reduce_ex__": _reduce,
            "forward": _forward_of(original.forward),
            "train": _train_of(original.train),
            "_esper_original": original,
        }
        if not hasattr(original, "sites"):
            body["sites"] = property(_sites)
        if has_own_files(original):
            body["save_pretrained"] = _save_pretrained_of(original)
        if issubclass(original, nn.Sequential):
            body |= {
                "__iter__": lambda self: iter(_own_children(self).values()),
                "__len__": lambda self: len(_own_children(self)),
                "__getitem__": lambda self, index: nn.Sequential(_own_children(self))[index],
            }
        _CLASSES[original] = type(f"Grown{original.__name__}", (original,), body)
    return _CLASSES[original]


def class_of(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module, grafted or not, as it was written."""
    kind = type(module)
    return getattr(kind, "_esper_original", kind)


def has_own_files(kind: type[nn.Module]) -> bool:
    """Return whether networks of a class write a folder from which the class loads them, as those of Hugging Face do."""
    return hasattr(kind, "save_pretrained")


def _save_pretrained_of(original: type[nn.Module]) -> Callable[..., Any]:
    """Make the `save_pretrained` of a grown class: `from_pretrained` knows no seeds, so they are written beside the host."""
    save: Callable[..., Any] = original.save_pretrained  # type: ignore[attr-defined]

    @functools.wraps(save)
    def save_pretrained(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        from esper.kasmina.network.saving import save_beside  # which imports this module

        given = inspect.signature(save).bind(self, *args, **kwargs).arguments
        if given.get("push_to_hub"):
            raise InputError(
                "save_pretrained(push_to_hub=True) would upload the host without its seeds; call model.push_to_hub, or upload "
                "the folder that save_pretrained has written"
            )
        kind = type(self)
        if kind is grown_class(original):
            self.__class__ = original  # its name is written to the folder
        try:
            returned = save(self, *args, **kwargs)
        finally:
            self.__class__ = kind
        if given.get("is_main_process", True):
            save_beside(self, list(given.values())[1])
        return returned

    return save_pretrained


def _sites(self: nn.Module) -> Mapping[str, Site]:
    """Return the sites of a grafted network. Raises AttributeError on its submodules, as for any attribute that is not there."""
    if not is_grafted(self):
        raise AttributeError("only the grafted network itself has sites")
    return sites_of(self)


def _reduce(self: nn.Module, protocol: Any) -> Any:
    """Return what pickling and copying need: the original class, which can be found by its name, in place of the grown one."""
    original: type[nn.Module] = type(self)._esper_original  # type: ignore[attr-defined]
    grown = grown_class(original)
    reduced: Any = super(grown, self).__reduce_ex__(protocol)
    make, arguments, *rest = reduced
    if make is copyreg.__newobj__ and arguments[0] is grown:  # type: ignore[attr-defined]
        arguments = (original, *arguments[1:])
    return (_remake, (original, make, arguments), *rest)


def _remake(original: type[nn.Module], make: Callable[..., nn.Module], arguments: tuple[Any, ...]) -> nn.Module:
    """Rebuild a module of the grown class from what rebuilds one of the original class."""
    module = make(*arguments)
    module.__class__ = grown_class(original)
    return module


def _own_children(self: nn.Sequential) -> OrderedDict[str, Any]:
    """Return the modules of an nn.Sequential that its forward runs, without the seed, by name."""
    return OrderedDict((name, child) for name, child in self._modules.items() if name != CHILD)


def swap(module: nn.Module) -> Point:
    """Give a module its grown class, if it does not have it; return its point."""
    point: Point | None = module.__dict__.get(POINT)
    if point is None:
        point = module.__dict__[POINT] = Point()
        module.__class__ = grown_class(type(module))
    return point


def restore(module: nn.Module) -> None:
    """Restore the original class of a module."""
    if module.__dict__.pop(POINT, None) is None:
        return
    kind = type(module)
    original: type[nn.Module] | None = getattr(kind, "_esper_original", None)
    if original is None:
        raise InputError(f"a grafted {kind.__name__} was given another class since; ungraft before that")
    module.__class__ = original if kind is grown_class(original) else _without_growth(kind, grown_class(original))


_WITHOUT: dict[type[nn.Module], type[nn.Module]] = {}


def _without_growth(kind: type[nn.Module], grown: type[nn.Module]) -> type[nn.Module]:
    """Return a class that was made from a grown one, as by `fully_shard`, as if made from the original; made once."""
    if grown not in kind.__bases__:
        raise InputError(f"a grafted module was given the class {kind.__name__} since; ungraft before that")
    if kind in _WITHOUT:
        return _WITHOUT[kind]
    original: type[nn.Module] = grown._esper_original  # type: ignore[attr-defined]
    bases = tuple(original if base is grown else base for base in kind.__bases__)
    body = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
    _WITHOUT[kind] = type(kind.__name__.replace(grown.__name__, original.__name__), bases, body)
    return _WITHOUT[kind]


def wire_between(source: Point, until: Point) -> Wire:
    """Return the wire that carries what one submodule is given, for as long as a call of another one (`until`) lasts."""
    for wire in source.records:
        if wire in until.bounds:
            return wire
    wire = Wire()
    source.records += (wire,)
    until.bounds += (wire,)
    return wire


Freeze = Literal["host", "none"] | Sequence[str]


class Frozen:
    """Freezes a part of a network: it does not train until `release`.

    Its parameters require no gradient. Its normalisation layers with running statistics, such as BatchNorm, stay in
    evaluation mode whatever mode the network is set to: in training mode they would update those statistics in every
    pass and normalise by the batch, so the host would change. Other layers, such as Dropout, follow the network's mode.

    If no parameter of the network requires a gradient, its outputs are made to require one that reaches no parameter,
    so that `loss.backward()` in a training loop does not fail while there is no seed.
    """

    def __init__(self, network: nn.Module, freeze: Freeze) -> None:
        """freeze: 'none', 'host', or names of submodules or parameters, with the wildcards of fnmatch.

        Raises InputError if a name matches nothing.
        """
        self.network = network
        matched = _matched(network, freeze)
        every = network.named_parameters(remove_duplicate=False)
        self._before = [(parameter, parameter.requires_grad) for name, parameter in every if name in matched]
        for parameter, _ in self._before:
            parameter.requires_grad_(False)
            parameter.grad = None  # an optimizer moves every parameter that has a gradient
        norms = [(name, part) for name, part in network.named_modules() if isinstance(part, _NormBase)]
        self._held = [part for name, part in norms if name in matched and part.track_running_stats]
        for part in self._held:  # in evaluation mode, whatever mode it is set to until `release`
            point = swap(part)
            point.asked, part.training = part.training, False
        self._buffers = {name: buffer for name, buffer in network.named_buffers() if name in matched}
        self._versions: dict[str, int] = {}
        self._warned = False
        self.note()
        anchor(network, not any(parameter.requires_grad for parameter in network.parameters()))

    def note(self) -> None:
        """Record the present buffers as those that later checks expect."""
        self._versions = {name: buffer._version for name, buffer in self._buffers.items()}

    def check(self) -> None:
        """Warn once if a forward pass has written to a frozen buffer."""
        written = [name for name, buffer in self._buffers.items() if buffer._version != self._versions[name]]
        if written and not self._warned:
            self._warned = True
            warn(
                f"the model is frozen, but its buffer {written[0]!r} was written to since the last decision; put the submodule "
                "that it belongs to into evaluation mode after each model.train()",
                GrowthWarning,
            )

    def release(self) -> None:
        """Make everything trainable that was trainable before."""
        for parameter, trained in self._before:
            parameter.requires_grad_(trained)
        for part in self._held:
            point: Point = part.__dict__[POINT]
            assert point.asked is not None, "the submodule must be held"
            part.training, point.asked = point.asked, None
        anchor(self.network, False)


def _matched(network: nn.Module, freeze: Any) -> set[str]:
    """Return the names of the submodules, parameters and buffers that freeze. InputError if a pattern matches nothing."""
    if freeze == "none":
        return set()
    every = (network.named_modules, network.named_parameters, network.named_buffers)
    known = list(dict.fromkeys(name for named in every for name, _ in named(remove_duplicate=False) if name))
    if freeze == "host":
        return set(known)
    if isinstance(freeze, str) or not isinstance(freeze, list | tuple) or not all(isinstance(n, str) for n in freeze):
        raise InputError(
            f"freeze is {freeze!r}; give 'host', 'none', or a list of names of submodules or parameters, as ['layers.*']"
        )
    trained: dict[str, Tensor] = dict(network.named_parameters(remove_duplicate=False))
    for pattern in freeze:
        if not any(_within(name, [pattern]) for name in trained):
            near = did_you_mean(pattern, known, most=3, similarity=0.4)
            raise InputError(
                f"freeze has {pattern!r}, which matches no submodule with parameters and no parameter; "
                + (near or f"give a name such as {', '.join(map(repr, known[:3]))}")
            )
    return {name for name in known if _within(name, freeze)}


def _within(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a name, or the name of a submodule around it, matches a pattern."""
    parts = name.split(".")
    around = [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
    return any(fnmatchcase(each, pattern) for each in around for pattern in patterns)
