"""Make sites in any module: its submodules get classes that run a seed behind them, in place (`graft/grown.py`). B examples."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from esper.kasmina.graft.find_sites import UNKNOWN_STREAM, FoundSites, NoSiteError, find_sites, is_quantised
from esper.kasmina.graft.grown import (
    CHILD,
    POINT,
    Point,
    class_of,
    has_own_files,
    is_grafted,
    restore,
    root_of,
    sites_of,
    stream_of,
    swap,
    wire_between,
)
from esper.kasmina.graft.planted import Bank, Mode, Planted
from esper.leyline.lifecycle.slots import STREAMS, Site, Stream, Tap
from esper.leyline.messages import InputError, did_you_mean, kind_of

M = TypeVar("M", bound=nn.Module)


def graft(
    module: M,
    sites: Literal["auto", "parts"] | Sequence[str] | Mapping[str, Site] = "auto",
    *,
    example: Any = None,
    loss: Callable[[Any], Tensor] | None = None,
) -> M:
    """Give a network sites at which `esper.Growth` can plant seeds; in place, and returns the network.

        esper.graft(model, example=x)
        print(model.sites)

    sites: 'auto' takes those that `esper.find_sites(module, example, loss)` finds, 'parts' those and their `parts`, as attention
    and feed-forwards, a list of names these of both, and a mapping of names to `esper.Site` just these, without an example.

    A seed at a site changes what the submodule `after` returns: the tensor, or the first floating tensor in a structure of
    tuples, lists, mappings and dataclasses. It reads that tensor, or what the submodule `around` was given first, or what the
    network was given first. Without a seed the network computes what it did, bit for bit. A submodule that is called several
    times in a pass has its seed behind every call; one that is not called takes no part in the pass, and neither does its seed.
    Within `torch.utils.checkpoint` a seed can read what was computed within it.

    Raises InputError if a site cannot be: its submodule is not there, is scripted or quantised, or cannot have a seed.
    """
    _check_network(module)
    if not isinstance(sites, Mapping):
        sites = _found(module, sites, example, loss)
    _check_sites(sites)
    paths = dict(module.named_modules(remove_duplicate=False))
    taken: dict[int, str] = {}
    for name, site in sites.items():
        after = _submodule(paths, site.after, name)
        _check_submodule(module, site.after, after, name)
        _check_submodule(module, site.around, _submodule(paths, site.around, name), name)
        if id(after) in taken:
            raise InputError(
                f"sites {taken[id(after)]!r} and {name!r} are both behind {site.after!r}; a submodule can have one site"
            )
        if isinstance(getattr(after, CHILD, None), Planted):
            raise InputError(f"submodule {site.after!r} of site {name!r} holds a seed that was kept; choose another")
        if isinstance(getattr(after, CHILD, None), nn.Module):
            raise InputError(
                f"submodule {site.after!r} of site {name!r} has a child named {CHILD!r} already; choose another"
            )
        taken[id(after)] = name
    root = swap(module)
    root.sites = dict(sites) if type(sites) is dict else sites
    for name, site in sites.items():
        after, around = paths[site.after], paths[site.around]
        point = swap(after)
        point.site = name
        if after is not module:
            point.sources[Tap.INPUT.value] = wire_between(root, root)
        if around is not after:
            encloses = not site.around or site.after.startswith(f"{site.around}.")
            source = swap(around)
            point.sources[Tap.BEFORE.value] = wire_between(source, source if encloses else root)
    for path, part in with_own_files(module):
        if any(site.after == path or site.after.startswith(f"{path}." if path else "") for site in sites.values()):
            swap(part)
    return module


def ungraft(module: M) -> M:
    """Take the sites of a grafted network away, with the seeds at them; in place, and returns the network.

    A seed that an earlier growth kept stays.
    """
    for name in sites_of(module):
        if _at(module, name)[1].planted:
            uproot(module, name)
    trim(module)
    return module


def plant(module: nn.Module, name: str, planted: Planted | Bank) -> None:
    """Put a seed, or the seats of a bank, at a free site."""
    after, point = _at(module, name)
    assert not point.planted, "a site holds one seed"
    setattr(after, CHILD, planted)
    point.planted = True
    _count_readers(point, planted, 1)
    _avoid_fused(module, sites_of(module)[name].after)


def uproot(module: nn.Module, name: str) -> None:
    """Take away what is at a site."""
    after, point = _at(module, name)
    _count_readers(point, getattr(after, CHILD), -1)
    delattr(after, CHILD)
    point.planted = False
    _avoid_fused(module, sites_of(module)[name].after)


def _avoid_fused(module: nn.Module, path: str) -> None:
    """Let the encoder of torch around a submodule call it, with padded tensors, while it has a seed.

    In evaluation mode without gradients nn.TransformerEncoderLayer computes its parts in one kernel, unless one of them has a
    hook, and nn.TransformerEncoder gives its layers nested tensors, which have no shape.
    """
    after = module.get_submodule(path)
    seeds, names = (Planted, Bank), path.split(".")
    hooks = after._forward_pre_hooks
    for key in [key for key, hook in hooks.items() if hook is _changes_nothing]:
        del hooks[key]
    for depth in range(len(names)):
        parent = module.get_submodule(".".join(names[:depth]))
        if isinstance(parent, nn.TransformerEncoder):
            seeded = any(isinstance(part, seeds) for part in parent.modules())
            if seeded and vars(parent).get("use_nested_tensor"):
                vars(parent).update(use_nested_tensor=False, _esper_nested=True)
            elif not seeded and vars(parent).pop("_esper_nested", False):
                parent.use_nested_tensor = True
        elif isinstance(parent, nn.TransformerEncoderLayer) and isinstance(getattr(after, CHILD, None), seeds):
            after.register_forward_pre_hook(_changes_nothing)
            break


def _changes_nothing(part: nn.Module, args: Any) -> None:
    """Do nothing before a submodule runs."""


def planted_at(module: nn.Module, name: str) -> Planted | None:
    """Return the seed at a site; None where it is free."""
    after, point = _at(module, name)
    found: Planted | Bank | None = getattr(after, CHILD) if point.planted else None
    return found.taken() if isinstance(found, Bank) else found


def holders(module: nn.Module) -> dict[str, Planted | Bank]:
    """Return, by the dotted name of a submodule, the seed behind it, or the seats; a submodule may have several names."""
    named = module.named_modules(remove_duplicate=False)
    return {path: held for path, part in named if isinstance(held := getattr(part, CHILD, None), Planted | Bank)}


def acting(module: nn.Module) -> dict[str, Planted]:
    """Return the seeds that change what a network computes, also of earlier growths, by the first name of their submodule."""
    found: dict[str, Planted] = {}
    for path, held in holders(module).items():
        seed = held.taken() if isinstance(held, Bank) else held
        if seed is not None and seed.mode == Mode.ON and not any(seed is other for other in found.values()):
            found[path] = seed
    return found


def bank_at(module: nn.Module, name: str) -> Bank | None:
    """Return the seats at a site; None where there are none."""
    after, point = _at(module, name)
    found = getattr(after, CHILD) if point.planted else None
    return found if isinstance(found, Bank) else None


def _count_readers(point: Point, planted: Planted | Bank, change: int) -> None:
    """Let the wires of a site know how many seeds read them."""
    for each in planted.all() if isinstance(planted, Bank) else (planted,):
        wire = point.sources.get(each.reads)
        if wire is not None:
            wire.readers += change


def trim(module: nn.Module) -> None:
    """Take the free sites of a network away: every submodule without a part in what a seed computes gets its own class again.

    A part that has a `save_pretrained` keeps the grown class while it holds a seed, so that it saves the seed too.
    """
    root_of(module).sites = None
    saving = {
        id(part) for _, part in with_own_files(module) if any(isinstance(inner, Planted) for inner in part.modules())
    }
    for part in list(module.modules()):
        point: Point | None = part.__dict__.get(POINT)
        if point is not None:
            if not point.planted:
                point.site, point.sources = None, {}
            point.records = tuple(wire for wire in point.records if wire.readers)
            point.bounds = tuple(wire for wire in point.bounds if wire.readers)
            if not (point.planted or point.records or point.bounds or id(part) in saving):
                restore(part)


def with_own_files(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the outermost parts of a network that have a `save_pretrained`, by name."""
    found: list[tuple[str, nn.Module]] = []
    for path, part in module.named_modules():
        if has_own_files(type(part)) and not any(path.startswith(f"{outer}." if outer else "") for outer, _ in found):
            found.append((path, part))
    return found


# What is refused.


def _found(
    module: nn.Module,
    names: Literal["auto", "parts"] | Sequence[str],
    example: Any,
    loss: Callable[[Any], Tensor] | None,
) -> Mapping[str, Site]:
    """Return the sites of a network that `find_sites` finds, or those of them that are named."""
    if names not in ("auto", "parts") and (isinstance(names, str) or not isinstance(names, Sequence)):
        raise InputError(
            f"sites is {names!r}; give 'auto', 'parts', a list of names, or a mapping of names to esper.Site"
        )
    if example is None:
        raise InputError(
            "sites are found by running the module on an example; give one, as esper.graft(module, example=x), or give each "
            "site as an esper.Site"
        )
    if names in ("auto", "parts"):
        free = free_sites(module, find_sites(module, example, loss))
        free.update(free.parts if names == "parts" else {})
        return free
    found: Mapping[str, Site]
    left_out: Mapping[str, str]
    try:
        sites = find_sites(module, example, loss)
        found, left_out = {**sites, **sites.parts}, sites.left_out
    except NoSiteError as error:
        found, left_out = {}, error.left_out
    for name in names:
        if name not in found:
            reason = left_out.get(name)
            mend = "give it as an esper.Site, or another"
            if reason is None:
                hint = did_you_mean(name, found or left_out, most=3, similarity=0.0)
                raise InputError(
                    f"{name!r} is not a site that find_sites finds; {mend}" + (f": {hint}" if hint else "")
                )
            if reason.startswith(UNKNOWN_STREAM):
                mend = (
                    "give it as an esper.Site whose stream has `order`, or let the submodule return one that is known"
                )
            raise InputError(f"{name!r} is not a site that find_sites finds: {reason}; {mend}")
    return {name: found[name] for name in names}


def _at(module: nn.Module, name: str) -> tuple[nn.Module, Point]:
    """Return the submodule of a site, and its point. InputError if the submodule is not the grafted one any more."""
    path = sites_of(module)[name].after
    try:
        after = module.get_submodule(path)
        point: Point = after.__dict__[POINT]
    except (AttributeError, KeyError):
        raise InputError(
            f"submodule {path!r} of site {name!r} was replaced after the model was grafted; put the grafted submodule back, and "
            "load new weights into it by its load_state_dict"
        ) from None
    return after, point


def _check_sites(sites: Any) -> None:
    """Raise InputError if sites are not a mapping of names to sites."""
    if not isinstance(sites, Mapping) or not sites:
        raise InputError(f"sites is {sites!r}; give at least one, as {{'block': esper.Site('block', ...)}}")
    for name, site in sites.items():
        if not isinstance(site, Site):
            raise InputError(f"site {name!r} is {kind_of(site)}; give an esper.Site")
        if site.name != name:
            raise InputError(f"site {name!r} is named {site.name!r}; give it one name")
        if not isinstance(site.stream, Stream) or type(site.stream) not in STREAMS.values():
            raise InputError(
                f"site {name!r} has stream {site.stream!r}; give esper.Vector(width), esper.Map(width), "
                "esper.Sequence(width) or esper.Volume(width)"
            )


def _check_network(module: nn.Module) -> None:
    """Raise InputError if a network is not a plain module."""
    if not isinstance(module, nn.Module):
        raise InputError(f"graft was given {kind_of(module)}; give an nn.Module")
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
        others = ", ".join(map(repr, sorted(paths, key=len)[1:4]))
        hint = did_you_mean(path, paths, most=3) or f"give a name such as {others}"
        raise InputError(f"site {site!r} names submodule {path!r}, which is not there; {hint}")
    return paths[path]


def _check_submodule(root: nn.Module, path: str, module: nn.Module, site: str) -> None:
    """Raise InputError if a submodule cannot have a grown class, or is not called in every mode."""
    of = f"submodule {path!r} of site {site!r}"
    if isinstance(module, torch.jit.ScriptModule):
        raise InputError(f"{of} is scripted by torch.jit, so that its forward cannot change; choose another")
    if "quantized" in type(module).__module__ or any(map(is_quantised, module.parameters())):
        raise InputError(f"{of} is quantised and cannot train; graft the network before it is quantised")
    if "forward" in module.__dict__:
        raise InputError(
            f"{of} has a forward of its own in place of its class's; remove that first, or choose another submodule"
        )
    if type(module).forward is nn.Module.forward or isinstance(module, nn.ModuleList | nn.ModuleDict):
        raise InputError(f"{of} is {kind_of(module)}, which is never called; name one of its parts")
    if fused := _fused(root, path):
        raise InputError(f"{of} is {fused}")


def free_sites(module: nn.Module, found: FoundSites) -> FoundSites:
    """Return the sites that `find_sites` found, without those that `graft` refuses. Raises NoSiteError if none is left."""
    refused = {name: reason for name, site in found.items() if (reason := _not_now(module, site.after))}
    kept = [site for name, site in found.items() if name not in refused]
    if not kept:
        reasons = "; ".join(f"{name} ({reason})" for name, reason in refused.items())
        raise NoSiteError(f"no free site found in {type(module).__name__}: {reasons}", found.left_out | refused)
    spans = {ends: span for ends, span in found.spans.items() if not _not_now(module, span.site.after)}
    parts = {name: site for name, site in found.parts.items() if not _not_now(module, site.after)}
    return FoundSites(type(module).__name__, kept, found.why, found.left_out | refused, found.reads, spans, parts)


def _not_now(root: nn.Module, path: str) -> str:
    """Return why a submodule cannot be a site although its stream is one; empty if it can."""
    if isinstance(getattr(root.get_submodule(path), CHILD, None), Planted):
        return "holds a seed that was kept"
    return _fused(root, path)


def _fused(root: nn.Module, path: str) -> str:
    """Return why a submodule is not called, although its parameters are used; empty where it is."""
    name = path.rpartition(".")[0]
    if path and isinstance(root.get_submodule(name), nn.MultiheadAttention):
        return f"within an nn.MultiheadAttention, which does not call its parts; use {name!r} itself"
    return ""


class Reading(NamedTuple):
    """Holds the measurements of one site in a pass."""

    calls: int  # number of calls of the submodule
    widths: Mapping[Tap, int]  # the width that a seed reads at each `Tap`, 0 if it cannot read it
    # whether the submodule reads a tensor like the one that it returns, so that it can run on its own output
    again: bool


_OF_TORCH = ("_parameters", "_modules")


def copied(network: M, tensors: Mapping[int, Tensor] | None = None) -> M:
    """Return a deep copy of a network, also where modules hold what they computed in a pass, such as attention maps.

    torch copies no tensor with a gradient function; in the copy these are without one.

    tensors: what the copy has in the places of tensors, by their ids.
    """
    own = [value for part in network.modules() for name, value in vars(part).items() if name not in _OF_TORCH]
    held = (each for each in pytree.tree_leaves(own) if isinstance(each, Tensor) and not each.is_leaf)
    return copy.deepcopy(network, {**{id(each): each.detach().clone() for each in held}, **(tensors or {})})


@contextmanager
def undisturbed(*networks: nn.Module) -> Iterator[None]:
    """Set networks to evaluation mode without compilation; modes, buffers and random states are restored on exit.

    torch's fused attention, which skips the submodules of a layer, is off.
    """
    # One walk: `buffers`, `parameters` and `eval` take one each, which costs a small network more than its pass.
    modes = [(part, part.training) for network in networks for part in network.modules()]
    held = {id(own): own for part, _ in modes for own in part._buffers.values() if own is not None}
    buffers = [(buffer, buffer._version, buffer.clone()) for buffer in held.values()]
    weights = (own for part, _ in modes for own in part._parameters.values() if own is not None)
    devices = sorted({weight.device.index for weight in weights if weight.is_cuda})
    fused = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        if any(training for _, training in modes):
            # part by part, unless a class has a `train` of its own, which must be called; a grown class only records the mode
            if all(class_of(part).train is nn.Module.train for part, _ in modes):
                for part, _ in modes:
                    _set_training(part, False)
            else:
                for network in networks:
                    network.eval()
        with torch.random.fork_rng(devices=devices), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        for part, training in modes:
            if part.training != training:
                _set_training(part, training)
        with torch.no_grad():
            for buffer, version, value in buffers:
                if buffer._version != version:
                    buffer.copy_(value)


def _set_training(part: nn.Module, training: bool) -> None:
    """Set `part.training`, around the checks of `nn.Module.__setattr__` where that is what runs: they take most of the time."""
    if type(part).__setattr__ is nn.Module.__setattr__:
        vars(part)["training"] = training
    else:
        part.training = training


@torch.no_grad()
def survey(module: nn.Module, run: Callable[[], Any], *, wider: bool = False) -> dict[str, Reading]:
    """Return the `Reading` of every site of a grafted network, by name, for the pass that `run` makes.

    wider: whether layers have become wider since the network was grafted. Its sites then get streams of the widths that flow.

    Otherwise the network is not changed. Raises InputError if no forward pass calls a site, if its stream differs from the
    declared one, or if its submodule runs whatever children it has.
    """
    calls: dict[nn.Module, list[_Call]] = {part: [] for part in module.modules() if POINT in part.__dict__}
    for part, own in calls.items():
        point: Point = part.__dict__[POINT]
        point.tape = lambda *each, own=own: own.append(_Call(*each))
        if point.site is not None and not point.planted:  # a seed of an earlier growth stays where it is
            setattr(part, CHILD, _Tripwire(point.site))
    try:
        with undisturbed(module):
            run()
    finally:
        for part in calls:
            part.__dict__[POINT].tape = None
            if isinstance(part._modules.get(CHILD), _Tripwire):
                delattr(part, CHILD)
    if wider:
        found = {}
        for name, site in sites_of(module).items():
            own = calls[module.get_submodule(site.after)]
            width = site.stream.width_at(stream_of(own[0].output)) if own else site.stream.width
            found[name] = replace(site, stream=replace(site.stream, width=width))
        root_of(module).sites = found
    return {name: _reading(module, site, calls) for name, site in sites_of(module).items()}


class _Call(NamedTuple):
    """Records one call of a submodule."""

    given: Tensor | None  # its first floating tensor
    version: int | None  # that of this tensor before the call
    output: Any  # in front of any seed


def _first_input(calls: Sequence[_Call]) -> Tensor | None:
    """Return the input of a submodule in its first call; None if that is not a floating tensor, or was changed in place."""
    given = calls[0].given if calls else None
    return given if given is not None and given._version == calls[0].version else None


class _Tripwire(nn.Module):
    """Finds submodules whose forward runs all of their children and would run a seed too: it stands in for a seed and raises."""

    def __init__(self, site: str) -> None:
        super().__init__()
        self.site = site

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise InputError(
            f"the submodule of site {self.site!r} runs every child that it has, so it cannot hold a seed; choose another"
        )


def _reading(module: nn.Module, site: Site, calls: Mapping[nn.Module, Sequence[_Call]]) -> Reading:
    """Return the reading of a site. Raises InputError if it cannot be a site."""
    own = calls[module.get_submodule(site.after)]
    if not own:
        raise InputError(
            f"site {site.name!r} is behind {site.after!r}, which no forward pass in evaluation mode calls; choose another"
        )
    here = stream_of(own[0].output)
    if site.stream.width_at(here) != site.stream.width:
        found = f"shape {tuple(here.shape)}" if isinstance(here, Tensor) else kind_of(here)
        axes = f" ({', '.join(site.stream.order)})" if site.stream.permutation else ""
        raise InputError(
            f"site {site.name!r} has a {site.stream.kind}{axes} of width {site.stream.width}, but {site.after!r} returns "
            f"{found}; streams are {', '.join(f'{each.__name__} {1 + each.axes}-D' for each in STREAMS.values())}"
        )
    before = _first_input(calls[module.get_submodule(site.around)])
    taps = {Tap.HERE: here, Tap.BEFORE: before, Tap.INPUT: _first_input(calls[module])}
    widths = {tap: _width(site, here, given) for tap, given in taps.items()}
    if site.stream.permutation:  # nobody knows in which order the axes of the network's input are
        widths[Tap.INPUT] = 0
    read = _first_input(own)
    again = read is not None and (read.shape, read.dtype) == (here.shape, here.dtype)
    return Reading(len(own), widths, again)


def _width(site: Site, here: Tensor, given: Any) -> int:
    """Return the width at which a seed reads a tensor, 0 if it cannot: at a causal site the positions must be the same."""
    width = site.stream.width_at(given)
    if not width:
        return 0
    given, here = site.stream.arranged(given), site.stream.arranged(here)
    if given.shape[0] != here.shape[0] or (site.causal and given.shape[1] != here.shape[1]):
        return 0
    return width
