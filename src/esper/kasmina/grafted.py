"""Sites in any module: its submodules get classes that run a seed behind them, in place. B examples.

A grafted submodule keeps its parameters, its name and its place; only its class changes, to a subclass that calls the
original `forward` and then the seed, which is kept in one child. So the keys of `state_dict`, `isinstance`, `copy.deepcopy`,
pickling, `torch.compile` and `torch.export` go on working. A forward hook would be ignored by a network that is compiled
already, and a wrapper would rename the parameters. The file is long because a class swap is one subject: the subclass, its
pickling, what it records and how it is undone know each other.
"""

import copy
import copyreg
import difflib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn

from esper.kasmina.find_sites import FoundSites, find_sites
from esper.kasmina.planted import Mode, Planted
from esper.leyline.errors import InputError
from esper.leyline.sites import Site
from esper.leyline.slots import Tap
from esper.leyline.streams import STREAMS, Stream

CHILD = "esper"
"""Name of the child of a submodule that holds its seed."""
POINT = "_esper_point"

M = TypeVar("M", bound=nn.Module)


class Tape(Protocol):
    """Watches the calls of a submodule."""

    def begin(self, given: Tensor | None) -> None:
        """It is called; `given` is its first floating tensor."""

    def end(self, output: Any) -> None:
        """It has returned its output, in front of any seed."""


class Wire:
    """Carries what one submodule was given to the site that reads it, within one forward pass."""

    def __init__(self) -> None:
        self.value: Tensor | None = None
        self.readers = 0  # seeds that read it


class Point:
    """What a grafted submodule does beside its own computation.

    site: the name of the site behind it, or None. planted: whether a seed is there. before: brings what `Tap.BEFORE` reads;
    None for its own input. input: brings the network's input; None at the network itself. records, clears: the wires that take
    its input when it is called, and that are empty when it has returned. sites: of the whole network, at the network itself.
    tape: watches its calls while the network is measured.
    """

    def __init__(self) -> None:
        self.site: str | None = None
        self.planted = False
        self.before: Wire | None = None
        self.input: Wire | None = None
        self.records: tuple[Wire, ...] = ()
        self.clears: tuple[Wire, ...] = ()
        self.sites: Mapping[str, Site] | None = None
        self.tape: Tape | None = None


def graft(
    module: M,
    sites: Literal["auto"] | Sequence[str] | Mapping[str, Site] = "auto",
    *,
    example: Any = None,
    loss: Callable[[Any], Tensor] | None = None,
) -> M:
    """Give a network sites at which `esper.Growth` can plant seeds; in place, and returns the network.

        esper.graft(model, example=x)
        print(model.sites)

    sites: 'auto' takes those that `esper.find_sites(module, example, loss)` finds, a list of names those of them, and a mapping
    of names to `esper.Site` just these, without an example.

    A seed at a site changes what the submodule `after` returns: the tensor, or the first floating tensor of the tuple, list or
    mapping. It reads that tensor, or what the submodule `around` was given first, or what the network was given first. Without
    a seed the network computes what it did, bit for bit. A submodule that is called several times in a pass has its seed behind
    every call; one that is not called takes no part in the pass, and neither does its seed. Within `torch.utils.checkpoint` a
    seed can read what was computed within it.

    Raises InputError where a site cannot be: its submodule is not there, is scripted or quantised, or cannot have a seed.
    """
    _check_network(module)
    if not isinstance(sites, Mapping):
        sites = _found(module, sites, example, loss)
    _check_sites(sites)
    paths = dict(module.named_modules())
    taken: dict[int, str] = {}
    for name, site in sites.items():
        after = _submodule(paths, site.after, name)
        _check_submodule(module, site.after, after, name)
        _check_submodule(module, site.around, _submodule(paths, site.around, name), name)
        if id(after) in taken:
            raise InputError(
                f"sites {taken[id(after)]!r} and {name!r} are both behind {site.after!r}; a submodule can have one site"
            )
        if isinstance(getattr(after, CHILD, None), nn.Module):
            raise InputError(
                f"submodule {site.after!r} of site {name!r} has a child named {CHILD!r} already; choose another"
            )
        taken[id(after)] = name
    root = _swap(module)
    root.sites = dict(sites) if type(sites) is dict else sites
    for name, site in sites.items():
        after, around = paths[site.after], paths[site.around]
        point = _swap(after)
        point.site = name
        if after is not module:
            point.input = _wire(root, root)
        if around is not after:
            encloses = not site.around or site.after.startswith(f"{site.around}.")
            source = _swap(around)
            point.before = _wire(source, source if encloses else root)
    return module


def ungraft(module: M) -> M:
    """Take the sites of a grafted network away, with the seeds that are there; in place, and returns the network."""
    _root(module)
    for name in sites_of(module):
        if planted_at(module, name) is not None:
            uproot(module, name)
    for part in list(module.modules()):
        _restore(part)
    return module


def is_grafted(module: nn.Module) -> bool:
    """Whether a network has sites."""
    point = module.__dict__.get(POINT)
    return point is not None and point.sites is not None


def sites_of(module: nn.Module) -> Mapping[str, Site]:
    """The sites of a grafted network, by name. InputError where it is not grafted."""
    sites = _root(module).sites
    assert sites is not None
    return sites


def plant(module: nn.Module, name: str, planted: Planted) -> None:
    """Put a seed at a free site."""
    after, point = _at(module, name)
    assert not point.planted, "a site holds one seed"
    setattr(after, CHILD, planted)
    point.planted = True
    wire = _source(point, planted.tap)
    if wire is not None:
        wire.readers += 1


def uproot(module: nn.Module, name: str) -> None:
    """Take the seed of a site away."""
    after, point = _at(module, name)
    wire = _source(point, getattr(after, CHILD).tap)
    if wire is not None:
        wire.readers -= 1
    delattr(after, CHILD)
    point.planted = False


def planted_at(module: nn.Module, name: str) -> Planted | None:
    """The seed at a site; None where it is free."""
    after, point = _at(module, name)
    found: Planted | None = getattr(after, CHILD) if point.planted else None
    return found


def prefix(module: nn.Module, name: str) -> str:
    """The first part of the names of a site's seed in the network's `state_dict`."""
    after = sites_of(module)[name].after
    return f"{after}.{CHILD}." if after else f"{CHILD}."


def trim(module: nn.Module) -> None:
    """Give every submodule of a grafted network its own class again that takes no part in what a seed computes."""
    for part in list(module.modules()):
        point: Point | None = part.__dict__.get(POINT)
        if point is not None:
            point.records = tuple(wire for wire in point.records if wire.readers)
            point.clears = tuple(wire for wire in point.clears if wire.readers)
            if not (point.planted or point.records or point.clears):
                _restore(part)


def first_tensor(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The first floating tensor among the arguments of a call, those without a name first; None where there is none."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.is_floating_point():
            return value
    return None


def _forward_of(original: Callable[..., Any]) -> Callable[..., Any]:
    """The `forward` of a grown class. The names of the arguments stay those of the original."""

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        point: Point = self._esper_point  # type: ignore[assignment]
        for wire in point.records:
            if wire.readers:
                wire.value = first_tensor(args, kwargs)
        if point.tape is not None:
            point.tape.begin(first_tensor(args, kwargs))
        output = original(self, *args, **kwargs)
        if point.tape is not None:
            point.tape.end(output)
        if point.planted:
            output = _grown(self, point, first_tensor(args, kwargs), output)
        for wire in point.clears:
            wire.value = None
        return output

    return forward


def _grown(module: nn.Module, point: Point, own: Tensor | None, output: Any) -> Any:
    """The output of a submodule with what its seed changes."""
    planted: Planted = getattr(module, CHILD)
    if planted.mode == Mode.OFF:
        return output
    h = stream_of(output)
    if planted.tap == Tap.HERE:
        read = h
    else:
        wire = _source(point, planted.tap)
        read = own if wire is None else wire.value
        if read is None:
            raise InputError(
                f"the seed at site {point.site!r} reads tap {planted.tap.value!r}, which this pass has not computed: either the "
                "submodule is called outside the forward pass of the network, or torch.utils.checkpoint computes it anew; let "
                "the site's `around` be within what is checkpointed, or choose blueprints that read 'here'"
            )
    return _replaced(output, h, planted(h, read))


def stream_of(output: Any) -> Any:
    """The stream at a site: what its submodule returns, or the first floating tensor of a tuple, a list or a mapping."""
    if isinstance(output, Tensor):
        return output
    entries = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else ()
    return next((entry for entry in entries if isinstance(entry, Tensor) and entry.is_floating_point()), output)


def _replaced(output: Any, h: Tensor, grown: Tensor) -> Any:
    """The output of a submodule with another stream."""
    if isinstance(output, Tensor):
        return grown
    if isinstance(output, Mapping):
        changed: Any = copy.copy(output)
        changed[next(name for name, entry in output.items() if entry is h)] = grown
        return changed
    entries = [grown if entry is h else entry for entry in output]
    return type(output)(*entries) if hasattr(output, "_fields") else type(output)(entries)


def _source(point: Point, tap: Tap) -> Wire | None:
    """Where a tap comes from; None where it comes from the call of the submodule itself."""
    if tap == Tap.BEFORE:
        return point.before
    return point.input if tap == Tap.INPUT else None


# Classes.

_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def grown_class(original: type[nn.Module]) -> type[nn.Module]:
    """The class of grafted modules of a class: one for each, made once."""
    if original not in _CLASSES:
        body: dict[str, Any] = {
            "__module__": original.__module__,
            "__doc__": original.__doc__,
            "__reduce_ex__": _reduce,
            "forward": _forward_of(original.forward),
            "_esper_original": original,
        }
        if not hasattr(original, "sites"):
            body["sites"] = property(sites_of)
        if issubclass(original, nn.Sequential):
            body |= {"__iter__": _own_children, "__len__": _count_children, "__getitem__": _child}
        _CLASSES[original] = type(f"Grown{original.__name__}", (original,), body)
    return _CLASSES[original]


def _reduce(self: nn.Module, protocol: Any) -> Any:
    """What pickling and copying need: the original class, which can be found by its name, in place of the grown one."""
    grown = type(self)
    original: type[nn.Module] = grown._esper_original  # type: ignore[attr-defined]
    reduced: Any = super(grown, self).__reduce_ex__(protocol)
    make, arguments, *rest = reduced
    if make is copyreg.__newobj__ and arguments[0] is grown:  # type: ignore[attr-defined]
        arguments = (original, *arguments[1:])
    return (_remake, (original, make, arguments), *rest)


def _remake(original: type[nn.Module], make: Callable[..., nn.Module], arguments: tuple[Any, ...]) -> nn.Module:
    """A module of the grown class, from what makes one of the original class."""
    module = make(*arguments)
    module.__class__ = grown_class(original)
    return module


def _own_children(self: nn.Sequential) -> Iterator[nn.Module]:
    """The modules of an nn.Sequential, which its forward runs, without the seed."""
    return iter([child for name, child in self._modules.items() if name != CHILD])


def _count_children(self: nn.Sequential) -> int:
    return len(self._modules) - (CHILD in self._modules)


def _child(self: nn.Sequential, index: Any) -> Any:
    """An entry of an nn.Sequential, or a slice of it, without the seed."""
    if isinstance(index, slice):
        named = [(name, child) for name, child in self._modules.items() if name != CHILD]
        part = nn.Sequential()
        for name, child in named[index]:
            part.add_module(name, child)
        return part
    return list(self)[index]


def _swap(module: nn.Module) -> Point:
    """Give a module its grown class, if it has not got it; returns its point."""
    point: Point | None = module.__dict__.get(POINT)
    if point is None:
        point = module.__dict__[POINT] = Point()
        module.__class__ = grown_class(type(module))
    return point


def _restore(module: nn.Module) -> None:
    """Give a module its own class again."""
    if module.__dict__.pop(POINT, None) is None:
        return
    original = getattr(type(module), "_esper_original", None)
    if original is None or type(module) is not grown_class(original):
        raise InputError(
            f"a grafted {type(module).__name__} was given another class since, as fully_shard does; ungraft before that"
        )
    module.__class__ = original


def _wire(source: Point, until: Point) -> Wire:
    """The wire from a point, which is emptied when the point `until` has returned; one for each pair."""
    for wire in source.records:
        if wire in until.clears:
            return wire
    wire = Wire()
    source.records += (wire,)
    until.clears += (wire,)
    return wire


# What is refused.


def _found(
    module: nn.Module, names: Literal["auto"] | Sequence[str], example: Any, loss: Callable[[Any], Tensor] | None
) -> Mapping[str, Site]:
    """The sites of a network that `find_sites` finds, or those of them that are named."""
    if names != "auto" and (isinstance(names, str) or not isinstance(names, Sequence)):
        raise InputError(f"sites is {names!r}; give 'auto', a list of names, or a mapping of names to esper.Site")
    if example is None:
        raise InputError(
            "sites are found by running the module on an example; give one, as esper.graft(module, example=x), or give each "
            "site as an esper.Site"
        )
    found = find_sites(module, example, loss)
    if names == "auto":
        refused = {name: reason for name, site in found.items() if (reason := _fused(module, site.after))}
        kept = [site for name, site in found.items() if name not in refused]
        return FoundSites(type(module).__name__, kept, found.why, found.left_out | refused)
    for name in names:
        if name not in found:
            reason = found.left_out.get(name, f"there are {', '.join(found)}")
            raise InputError(
                f"{name!r} is no site that find_sites finds: {reason}; give it as an esper.Site, or another"
            )
    return {name: found[name] for name in names}


def _root(module: nn.Module) -> Point:
    if not is_grafted(module):
        raise InputError(f"the {type(module).__name__} has no sites; call esper.graft(module, sites) first")
    point: Point = module.__dict__[POINT]
    return point


def _at(module: nn.Module, name: str) -> tuple[nn.Module, Point]:
    """The submodule of a site, and its point."""
    after = module.get_submodule(sites_of(module)[name].after)
    return after, after.__dict__[POINT]


def _check_sites(sites: Any) -> None:
    """InputError where sites are no mapping of names to sites."""
    if not isinstance(sites, Mapping) or not sites:
        raise InputError(f"sites is {sites!r}; give at least one, as {{'block': esper.Site('block', ...)}}")
    for name, site in sites.items():
        if not isinstance(site, Site):
            raise InputError(f"site {name!r} is a {type(site).__name__}; give an esper.Site")
        if site.name != name:
            raise InputError(f"site {name!r} is named {site.name!r}; give it one name")
        if not isinstance(site.stream, Stream) or type(site.stream) not in STREAMS.values():
            raise InputError(
                f"site {name!r} has stream {site.stream!r}; give esper.Vector(width), esper.Map(width) or esper.Sequence(width)"
            )


def _check_network(module: nn.Module) -> None:
    """InputError where a network is no plain module."""
    if not isinstance(module, nn.Module):
        raise InputError(f"graft was given a {type(module).__name__}; give an nn.Module")
    name = type(module).__name__
    if is_grafted(module):
        raise InputError(f"the {name} is grafted already; call esper.ungraft(module) first")
    if isinstance(module, torch.jit.ScriptModule):
        raise InputError(f"the {name} is scripted by torch.jit; graft the module that it was made from")
    if name == "OptimizedModule":
        raise InputError("the module is compiled; graft the module itself, and then call torch.compile(module)")
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise InputError(f"the module is wrapped in {name}; graft the module itself, before it is wrapped")


def _submodule(paths: Mapping[str, nn.Module], path: str, site: str) -> nn.Module:
    if path not in paths:
        near = difflib.get_close_matches(path, paths, 3) or sorted(paths, key=len)[1:4]
        raise InputError(
            f"site {site!r} names submodule {path!r}, which is not there; the nearest are {', '.join(map(repr, near))}"
        )
    return paths[path]


def _check_submodule(root: nn.Module, path: str, module: nn.Module, site: str) -> None:
    """InputError where a submodule cannot have a grown class, or is not called in every mode."""
    of = f"submodule {path!r} of site {site!r}"
    if isinstance(module, torch.jit.ScriptModule):
        raise InputError(f"{of} is scripted by torch.jit, so that its forward cannot change; choose another")
    if "quantized" in type(module).__module__ or any(tensor.is_quantized for tensor in module.parameters()):
        raise InputError(f"{of} is quantised and cannot train; graft the network before it is quantised")
    if "forward" in module.__dict__:
        raise InputError(
            f"{of} has a forward of its own in place of its class's; remove that first, or choose another submodule"
        )
    if type(module).forward is nn.Module.forward or isinstance(module, nn.ModuleList | nn.ModuleDict):
        raise InputError(f"{of} is a {type(module).__name__}, which is never called; name one of its parts")
    if fused := _fused(root, path):
        raise InputError(f"{of} is {fused}")


def _fused(root: nn.Module, path: str) -> str:
    """Why a submodule is not called in evaluation mode, although it is in training mode; empty where it is."""
    parts = path.split(".")
    for depth in range(1, len(parts)):
        parent = root.get_submodule(".".join(parts[:depth]))
        if isinstance(parent, nn.TransformerEncoderLayer | nn.MultiheadAttention):
            name = ".".join(parts[:depth])
            return (
                f"within an nn.{type(parent).__name__}, which skips its parts in evaluation mode; use {name!r} itself"
            )
    return ""
