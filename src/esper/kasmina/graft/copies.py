"""Add copies of submodules: seeds that are a further block of a stack, or narrow copies beside any submodule, then part of it.

    behind a block that returned h:   h + alpha (B(h) - h)
    beside a submodule m:             m(x) + alpha B(x)

B is a copy of the block, or of m with some of its units (attention heads, gated units, channels), which are drawn anew. Its last
layers are 0 at first, so that it adds nothing. At alpha = 1 the network with a further block is one with one block more, and B
can stand in the stack. Where m only adds up what its units write, B can stand within it: m has more units, and computes the same.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain, groupby, takewhile
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.kasmina.blueprints import Blueprint
from esper.kasmina.graft.flow import CONVOLUTIONS, Flow
from esper.kasmina.graft.folding import Pass, fixed, is_layer, put, same_outputs, same_values
from esper.kasmina.graft.grafted import copied, planted_at, undisturbed
from esper.kasmina.graft.grown import (
    CHILD,
    called_beside,
    called_on,
    class_of,
    first_tensor,
    restore,
    shapes_of,
    sites_of,
    stream_of,
)
from esper.kasmina.graft.multiplying import (
    Axis,
    Multiplication,
    Variant,
    configs,
    is_width,
    saved_with_configs,
    whole_numbers,
)
from esper.kasmina.graft.planted import Bank, Mode, Planted, Recipe
from esper.kasmina.graft.recording import call, floats, learns, mapped, recorded, replaced, results, undone_on_error
from esper.kasmina.graft.units import set_counts
from esper.kasmina.slot import Seed
from esper.leyline.lifecycle.slots import Site
from esper.leyline.lifecycle.vocabulary import Blend
from esper.leyline.messages import InputError, counted, in_words, with_article

T = TypeVar("T")

_DEPTHS = re.compile(r"(layer|depth|block)(?!.*(size|idx|index|id$|norm|drop|width|dim|scale|decay))", re.I)
"""Names of attributes that count blocks."""
_PLACES = re.compile(r"layer_?(idx|index|id|number)$", re.I)
"""Names of attributes of a block that say which one it is."""
_WIDTHS = re.compile(r"size|width|channel|dim|head", re.I)
"""Names of attributes that list a width for each stage."""


class CopySeed(nn.Module):
    """Computes what a copy of the submodule of a site adds to the stream there."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, u: Tensor, run: Callable[[nn.Module, Tensor], Tensor]) -> Tensor:
        """Return the change at u (B, ...); `run` calls the copy as the submodule of the site was called (`grown._run_copy`)."""
        return run(self.block, u)


def copy_of_block(block: nn.Module, zeros: Sequence[str] = ()) -> nn.Module:
    """Return a copy of a block without sites and seeds, with some parameters at 0. It trains, also where the block is frozen."""
    made = copied(block)
    for part in list(made.modules()):
        if isinstance(part._modules.get(CHILD), Planted | Bank):
            delattr(part, CHILD)
        restore(part)
    with torch.no_grad():
        for name in zeros:
            made.get_parameter(name).zero_()
    if not any(parameter.requires_grad for parameter in made.parameters()):
        for parameter in made.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
    return made


IN_BLOCK = "seed.delta.block."
"""First part of the names of the parameters of a block in the seed that it is."""


def seed_of(entry: Blueprint, recipe: Recipe, blend: Blend, block: nn.Module | None = None) -> Planted:
    """Return a seed of a blueprint that is in no network: newly drawn, or this copy of the submodule of its site."""
    reads, stream = recipe.reads, recipe.site.stream
    if block is None:
        made = Seed(entry.built(reads, stream.width, recipe.function), reads)
    else:
        made = Seed(CopySeed(block), reads)
        like = next(parameter for parameter in block.parameters() if parameter.is_floating_point())
        made.gate.to(like.device, like.dtype)
    planted = Planted(made, entry.tap, blend, stream.kind, stream.permutation, again=entry.again, copies=entry.copies)
    parameters = planted.named_parameters()
    planted.fixed = frozenset(name for name, parameter in parameters if not parameter.requires_grad)
    planted.recipe = recipe
    return planted


def own_parameters(block: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a block by name, without those of seeds in it."""
    return {name: own for name, own in block.named_parameters() if f".{CHILD}." not in f".{name}"}


def stack_of(path: str) -> tuple[str, int]:
    """Return the path of the stack of a block, and its place there; -1 where its name is no number."""
    stack, _, place = path.rpartition(".")
    return stack, int(place) if place.isdigit() else -1


def find_blocks(
    network: nn.Module, sites: Sequence[Site], example: Any
) -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
    """Return where a further block can be added: by site the parameters of its block that are 0 in a copy at birth.

    Then for every other site why none can be. A copy is run on a multiple of what its block returned for the example, with the
    other arguments of that call: it must return what it is given, to rounding, and one of its parameters must have a gradient.
    """
    runs, reasons, places = stacks(network), dict[str, str](), list[Site]()
    for site in sites:
        stack, place = stack_of(site.after)
        first, stop = runs.get(stack, (0, 0))
        if first <= place < stop:
            places.append(site)
        else:
            reasons[site.name] = f"{site.after!r} is no block of a stack of equal blocks"
    found, why_not = found_by_calls(network, places, example, _zeros_at_birth)
    return found, {**why_not, **reasons}


def found_by_calls(
    network: nn.Module, sites: Sequence[Site], example: Any, find: Callable[[nn.Module, Any, Tensor | None], T]
) -> tuple[dict[str, T], dict[str, str]]:
    """Return, by site, what a function finds for its submodule; then for every other site why it found nothing.

    find: takes the submodule, the arguments of its first call on the example, and the stream that it returned; InputError is why.
    """
    calls, found, reasons = dict[str, tuple[Any, Tensor | None]](), dict[str, T](), dict[str, str]()

    def note(name: str, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        stream = stream_of(output)
        calls.setdefault(name, ((args, kwargs), stream.detach().clone() if isinstance(stream, Tensor) else None))

    with undisturbed(network):
        with ExitStack() as hooks, torch.no_grad():
            for site in sites:
                block = network.get_submodule(site.after)
                hooks.enter_context(block.register_forward_hook(partial(note, site.name), with_kwargs=True))
            call(network, mapped(example, torch.clone))
        for site in sites:
            try:
                if site.name not in calls:
                    raise InputError("no forward pass calls it")
                found[site.name] = find(network.get_submodule(site.after), *calls[site.name])
            except InputError as error:
                reasons[site.name] = str(error)
    return found, reasons


def _zeros_at_birth(block: nn.Module, given: Any, first: Tensor | None) -> tuple[str, ...]:
    """Return the first set of parameters with which a copy adds nothing, and learns. InputError if there is none.

    given: the arguments of the call of the block that returned `first`.
    """
    own = first_tensor(*given)
    if own is None or first is None or (own.shape, own.dtype) != (first.shape, first.dtype):
        raise InputError("it does not read a stream like the one that it returns")
    blank = [name for name, each in own_parameters(block).items() if each.numel() and not each.any()]
    problem = "no layer of it writes into the residual stream"
    h = 3 * first  # larger than it is, as a norm behind the sum would return the same
    run = partial(called_on, given, own, attached=False)
    sets = silenced(CopySeed(copy_of_block(block)), "block", (h, run))
    # a factor that is 0 may be enough, as in ReZero before training
    for zeros in chain([blank] if blank else [], sets):
        made = copy_of_block(block, zeros)
        with in_words("a copy of it cannot run on what it returns"), torch.enable_grad():
            change = run(made, h.clone())
            eps = torch.finfo(h.dtype).eps
            if not same_values(h, h + change, eps):
                problem = "a copy of it cannot begin as one that changes nothing, as what it returns is not added to its input"
            elif not learns(change, made.parameters()):
                problem = "a copy of it would never learn, because two factors of what it adds are 0"
            else:
                return tuple(zeros)
    raise InputError(problem)


@torch.no_grad()
def add_block(
    networks: Sequence[nn.Module], name: str, passes: Sequence[Pass], share: Callable[[str], str] = str
) -> str | None:
    """Make the seed at a site, which is a block, a member of its stack: in a network and its moving averages, or in none.

    It is a member only if every pass gives what it gave before, to rounding, in evaluation mode. Returns None if so, otherwise
    why not, to be read behind a colon. The seed itself is not removed.

    share: returns the reason of the one of several processes that makes the passes, "" for none; all call this.
    """
    site, planted = sites_of(networks[0])[name], [planted_at(network, name) for network in networks]
    seeds = [seed for seed in planted if seed is not None and isinstance(seed.seed.delta, CopySeed)]
    assert len(seeds) == len(networks), "there must be a block to add, in each network"
    first, (path, place) = seeds[0], stack_of(site.after)
    blocks: list[Any] = [seed.seed.delta.block for seed in seeds]
    if first.blend != Blend.ADD:
        return f"by the blend {first.blend.name} what it adds depends on the stream"
    if float(first.alpha) != 1:
        return f"it acts at dose {float(first.alpha):g}, and a block of a stack at 1"
    if not any(own.requires_grad for own in own_parameters(networks[0].get_submodule(site.after)).values()):
        return "the block that it is behind is frozen"
    count = blocks_of_one_class(networks[0].get_submodule(path), place)
    why_not = ""
    with undisturbed(*networks):
        undo, ran = saved_with_configs(networks), list[bool]()
        try:
            with in_words("the deeper network fails"):
                for network, seed, block in zip(networks, seeds, blocks, strict=True):
                    for run in passes:
                        expected = list(floats(results(run(network))))
                        ran.clear()
                        with block.register_forward_hook(lambda *_: ran.append(True)):
                            seed.mode = Mode.OFF
                            insert(network, path, place + 1, [block], count)
                            found = list(floats(results(run(network))))
                        undo()
                        if not ran:
                            raise InputError(f"the forward pass does not run a further block of {path!r}")
                        if not same_outputs(expected, found):
                            raise InputError(
                                "the outputs would differ, as where the other arguments of each block are its own"
                            )
        except InputError as error:
            undo()
            why_not = str(error)
    if why_not := share(why_not):
        return why_not
    for network, block in zip(networks, blocks, strict=True):
        insert(network, path, place + 1, [block], count)
    return None


@contextmanager
def deeper(model: nn.Module, places: Mapping[str, Sequence[int]]) -> Iterator[None]:
    """Give the stacks of a fresh model the blocks that were added to them, unless the block fails.

    places: of the added blocks in the larger stack, by its path. The values of a new block are those of the block in front.
    """
    with undone_on_error(saved_with_configs([model])):
        for path, added in places.items():
            for place in sorted(added):
                container: Any = dict(model.named_modules()).get(path)
                if not isinstance(container, nn.Sequential | nn.ModuleList) or not 0 < place <= len(container):
                    raise InputError(
                        f"the saved network has a block at {place} of {path!r}, and the model no such stack; give a model that "
                        "is built as the saved one was"
                    )
                count = blocks_of_one_class(container, place - 1)
                insert(model, path, place, [copy_of_block(container[place - 1])], count)
        yield


def shifted(name: str, stack: str, place: int) -> str:
    """Return the dotted name that something has once a stack has a further block at a place."""
    first = f"{stack}." if stack else ""
    index, dot, rest = name.removeprefix(first).partition(".")
    if not name.startswith(first) or not index.isdigit() or int(index) < place:
        return name
    return f"{first}{int(index) + 1}{dot}{rest}"


def moved_site(site: Site, stack: str, place: int) -> Site:
    """Return a site of a network whose stack has a further block at a place."""
    return replace(site, after=shifted(site.after, stack, place), around=shifted(site.around, stack, place))


def stacks(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Return the longest run of equal blocks in each container, or the last of several, from its first to past its last place.

    A single block counts in a ModuleList, and in a Sequential if it is no layer of torch.
    """
    found: dict[str, tuple[int, int]] = {}
    for path, part in model.named_modules():
        if not isinstance(part, nn.Sequential | nn.ModuleList):
            continue
        if [name for name in part._modules if name != CHILD] != [str(place) for place in range(len(part))]:
            continue  # named blocks; those behind a new one would get other names
        kinds = [(class_of(each), shapes_of(each)) for each in part]
        places = [list(group) for _, group in groupby(range(len(kinds)), kinds.__getitem__)]
        runs = []
        for at in places:
            kind, shapes = kinds[at[0]]
            counts = len(at) > 1 or isinstance(part, nn.ModuleList) or not kind.__module__.startswith("torch.")
            if shapes and counts:
                runs.append((at[0], at[-1] + 1))
        if runs:
            found[path] = max(runs, key=lambda run: (run[1] - run[0], run[0]))
    return found


def blocks_of_one_class(container: Any, at: int) -> int:
    """Return how many blocks around a place are of its class: a first one may have further weights, as a bias that all share."""
    own, kinds = class_of(container[at]), [class_of(each) for each in container]
    before, behind = reversed(kinds[:at]), kinds[at:]
    return sum(1 for side in (before, behind) for _ in takewhile(lambda kind: kind is own, side))


def silenced(model: nn.Module, block: str, example: Any) -> Iterator[list[str]]:
    """Yield sets of the parameters of a block, by their names in it, which make its output 0 where they are 0."""
    with recorded(model, example) as recording:
        flow = Flow(recording)
        if (node := flow.node(block)) is None:
            first = next(path for path, part in model.named_modules() if part is model.get_submodule(block))
            if first != block:
                raise InputError(f"{block!r} and {first!r} are one module; blocks of a stack have weights of their own")
            raise InputError(f"{block!r} did not run on the example, or returns nothing that can be learned")
        reach = flow.reach([node], "")
        layers = [layer for layer in reach.layers if f"{layer}.".startswith(f"{block}.")]
        norms = [path for path in flow.parts if path.startswith(f"{block}.") and flow.node(path) in reach.nodes]
        norms = [path for path in norms if flow.parts[path]._parameters]
    for paths in (layers, norms):
        names = []
        for path in paths:
            part = model.get_submodule(path)
            part = part.out_proj if isinstance(part, nn.MultiheadAttention) else part
            own = {id(parameter) for parameter in part.parameters(recurse=False)}
            names += [name for name, each in model.get_submodule(block).named_parameters() if id(each) in own]
        if names:
            yield names


def insert(network: nn.Module, path: str, place: int, made: Sequence[nn.Module], count: int) -> None:
    """Put copies of the block in front of a place there, and count them where blocks are counted.

    count: blocks of the class before.
    """
    container: Any = network.get_submodule(path)
    blocks, seed = len(made), container._modules.get(CHILD)
    for number, block in enumerate(made):
        _move(block, number + 1)
    for behind in list(container)[place:]:
        _move(behind, blocks)
    own = list(container)
    own[place:place] = made
    container._modules.clear()
    container._modules.update({str(index): block for index, block in enumerate(own)})
    if seed is not None:
        container._modules[CHILD] = seed
    whole = {id(holder) for _, holder in configs(network, "")}
    for part in network.modules():
        if class_of(part).__module__.startswith("torch.") or part in made:
            continue
        for _, holder in ((path, part), *configs(part, "")):
            named = [name for name, value in vars(holder).items() if type(value) is int and value == count]
            of_decoder = "dec" in path and id(holder) in whole and any("decoder" in name for name in named)
            for name, value in list(vars(holder).items()):
                other = any(side in name and side[:3] not in path for side in ("encoder", "decoder"))
                if other or (of_decoder and "decoder" not in name):  # the blocks of another stack, as of an encoder
                    continue
                if type(value) is int and value == count and _DEPTHS.search(name) and not _PLACES.search(name):
                    vars(holder)[name] = count + blocks
                elif isinstance(value, list | tuple) and _DEPTHS.search(name):
                    vars(holder)[name] = type(value)(_followed(network, holder, path, name, list(value), count, blocks))


def _move(block: nn.Module, places: int) -> None:
    """Note that a block stands so many places further on."""
    for part in block.modules():
        for name, value in list(vars(part).items()):
            if type(value) is int and _PLACES.search(name):
                vars(part)[name] = value + places


def _followed(
    network: nn.Module, holder: Any, path: str, name: str, value: list[Any], count: int, blocks: int
) -> list[Any]:
    """Return what an attribute lists for the blocks of a stack, or for those of each stage, once a stack has more blocks.

    InputError if the stack is one of stages that have a list of their widths too.
    """
    before, number, behind = re.fullmatch(r"(.*?)(\d*)(\D*)", path, re.DOTALL).groups()  # type: ignore[union-attr]
    stages = dict[int, int]()
    for other, part in network.named_modules():
        same = re.fullmatch(re.escape(before) + r"(\d+)" + re.escape(behind), other)
        if number and same is not None and isinstance(part, nn.Sequential | nn.ModuleList):
            stages[int(same[1])] = len(part) - blocks * (other == path)
    if stages and [stages[each] for each in sorted(stages)] == value:
        return [own + blocks * (stage == int(number)) for own, stage in zip(value, sorted(stages), strict=True)]
    container: Any = network.get_submodule(path)
    as_long = {
        other: list(listed)
        for other, listed in vars(holder).items()
        if isinstance(listed, list | tuple) and len(listed) == len(value) and not _DEPTHS.search(other)
    }
    if len(value) == len(container) - blocks and (wide := next(filter(_WIDTHS.search, as_long), None)):
        raise InputError(
            f"{path!r} has {counted(len(value), 'stage')}, for which {name} is {value} and {wide} is {as_long[wide]}, so that a "
            "network that is built from these would not have another one; give at= the blocks of one stage"
        )
    if len(value) != count:
        return value
    return [*value, *(value[-1:] * blocks)]


# Narrow copies.

SHARE = 4
"""A narrow copy has one in so many of the units of its submodule, and at least one."""

_NO_UNITS = "it has no units of its own, as a single layer; find_sites(model, x).parts has submodules of several layers"


class Units(NamedTuple):
    """Describes which units of a submodule a narrow copy has, and where they stand once they are part of it."""

    axes: Mapping[str, Sequence[Axis]]  # along which units lie, by the names of parameters and buffers in the submodule
    counts: Mapping[str, Mapping[str, int]]  # what counts them there, by the paths of parts of the submodule
    number: int  # units of the copy
    of: int  # units of the submodule
    parts: bool  # whether a layer writes all units several times, one behind the other, as query, key and value
    last: Sequence[str]  # parameters of the last layers, which are 0 at first; those without units stay 0

    def counted(self, units: int) -> dict[str, dict[str, int]]:
        """Return what counts the units in a submodule that has so many of them."""
        return {
            path: {name: value * units // self.of for name, value in own.items()} for path, own in self.counts.items()
        }

    def shape(self, name: str, tensor: Tensor) -> torch.Size:
        """Return the shape that a tensor of the submodule has in the copy."""
        along = {each.axis for each in self.axes.get(name, ())}
        return torch.Size(
            size * self.number // self.of if axis in along else size for axis, size in enumerate(tensor.shape)
        )

    def cost(self, block: nn.Module) -> int:
        """Return the parameters of the copy that learn."""
        own = own_parameters(block)
        named = [name for name in own if name in self.axes or name not in self.last]
        return sum(math.prod(self.shape(name, own[name])) for name in named)

    def chosen(self, name: str, tensor: Tensor) -> Tensor:
        """Return the elements of a tensor of the submodule that belong to its first units, as many as the copy has."""
        for axis in self.axes[name]:
            size = tensor.shape[axis.axis]
            parts = size // axis.block // self.of if self.parts else 1
            grouped = tensor.unflatten(axis.axis, (parts, -1))
            taken = grouped.narrow(axis.axis + 1, 0, size // parts * self.number // self.of)
            tensor = taken.flatten(axis.axis, axis.axis + 1)
        return tensor.clone()

    def joined(self, name: str, own: Tensor, more: Tensor) -> Tensor:
        """Return a tensor of the submodule with the elements of the copy behind its own in each part, and 0 where they meet."""
        more = more.to(own)
        for axis in self.axes[name]:
            at = axis.axis + 1
            parts = own.shape[axis.axis] // axis.block // self.of if self.parts else 1
            own, more = (each.unflatten(axis.axis, (parts, -1)) for each in (own, more))
            sizes, further = (own.shape[at], more.shape[at]), [0, 0] * (own.dim() - 1 - at)
            own, more = F.pad(own, [*further, 0, sizes[1]]), F.pad(more, [*further, sizes[0], 0])
            own, more = own.flatten(axis.axis, at), more.flatten(axis.axis, at)
        return own + more


def narrow_copy(block: nn.Module, units: Units, key: int) -> nn.Module:
    """Return a copy of a submodule with fewer units, drawn by a key: matrices as wide as those of the submodule are spread."""
    made, generator = copy_of_block(block), torch.Generator().manual_seed(key)
    parts, tensors = dict(made.named_modules()), {**own_parameters(block), **dict(block.named_buffers())}
    with torch.no_grad():
        for name in units.axes:
            path, _, entry = name.rpartition(".")
            own = tensors[name].detach()
            value = units.chosen(name, own)
            if name in units.last:
                value.zero_()
            elif value.dim() > 1:
                value = (float(own.double().std(correction=0)) * torch.randn(value.shape, generator=generator)).to(own)
            put(parts[path], entry, value)
        for name in units.last:
            if name not in units.axes:
                made.get_parameter(name).requires_grad_(False).zero_()
    set_counts(made, units.counted(units.number))
    for part in made.modules():  # a person's, who looks at the submodule itself
        for hooks in (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks):
            hooks.clear()
    return made


def find_units(network: nn.Module, sites: Sequence[Site], example: Any) -> tuple[dict[str, Units], dict[str, str]]:
    """Return the units that a narrow copy can add at each site, by its name; then for every other site why there are none.

    A copy is run as the submodule was on the example: it must return 0 while its last layers are 0, one of its parameters must
    have a gradient, and the submodule must compute the sum of both with the units of the copy among its own.
    """
    found, reasons = found_by_calls(network, sites, example, _units_of)
    reasons = {site: re.sub(r"\bblock\.", "", reason, count=1) for site, reason in reasons.items()}  # as in `CopySeed`
    taken = dict[int, str]()  # by the ids of parameters along which units lie: the outermost place that adds such units
    after = {site.name: site.after for site in sites}
    for name in sorted(found, key=lambda each: len(after[each])):
        own = dict(network.get_submodule(after[name]).named_parameters())
        ids = {id(own[each]) for each in found[name].axes if each in own}
        if inside := [taken[each] for each in ids if each in taken]:
            del found[name]
            reasons[name] = f"its units are those of {inside[0]!r}"
        else:
            taken |= dict.fromkeys(ids, name)
    return found, dict(sorted(reasons.items(), key=lambda item: item[1] == _NO_UNITS))  # the more telling ones first


def _units_of(block: nn.Module, given: Any, _: Tensor | None) -> Units:
    """Return the units of a submodule that was called with arguments. InputError if a copy with fewer cannot be part of it."""
    own = first_tensor(*given)
    if isinstance(block, nn.MultiheadAttention):
        raise InputError("the heads of an nn.MultiheadAttention are as wide together as its stream")
    if own is None:
        raise InputError("it reads no floating-point tensor")
    alone = CopySeed(copy_of_block(block))
    with in_words("it cannot be called by itself on what it was given"), torch.no_grad():
        called_beside(given, alone.block, attached=False)
    example = own, lambda each, x: called_beside(replaced(given, own, x), each, attached=False)
    last = next(silenced(alone, "block", example), None)
    if last is None:
        raise InputError("no layer of it writes what it returns")
    problem = ""
    for units in _candidates(alone, example, last):
        try:
            _try(block, given, units)
        except InputError as error:
            problem = problem or str(error)
        else:
            return units
    raise InputError(problem)


def _candidates(alone: CopySeed, example: Any, last: Sequence[str]) -> Iterator[Units]:
    """Yield the ways in which units may lie in a submodule. InputError if they cannot be found, or added to."""
    variants: tuple[Variant, ...] = ("plain", "by head")
    for variant in variants:
        found = Multiplication(alone, example, variant=variant)
        axes = {name.removeprefix("block."): each for name, each in found.axes.items()}
        if any(each.stream for own_axes in axes.values() for each in own_axes):
            raise InputError("a norm runs over all of its units")
        tensors = {**dict(alone.block.named_parameters()), **dict(alone.block.named_buffers())}
        for name in axes:
            path = name.rpartition(".")[0]
            part = alone.block.get_submodule(path)
            norm = isinstance(part, nn.modules.batchnorm._BatchNorm)
            if not (norm or is_layer(part)) or (isinstance(part, CONVOLUTIONS) and part.groups > 1):
                raise InputError(f"{path!r} is {with_article(type(part).__name__)}, to which no units are added")
        if other := [name for name, _ in alone.block.named_parameters() if name not in axes and name not in last]:
            raise InputError(f"{other[0]} belongs to none of its units")
        of = math.gcd(
            *(tensors[name].shape[each.axis] // each.block for name, own_axes in axes.items() for each in own_axes)
        )
        if of == 0:
            raise InputError(_NO_UNITS)
        counts = dict[str, dict[str, int]]()
        for path, own in found.counts.items():
            if ":" not in path:
                whole = {name: value for name, value in own.items() if type(value) is int and value % of == 0}
                counts[path.removeprefix("block").removeprefix(".")] = whole
        read = {tensors[name].shape[each.axis] for name, own_axes in axes.items() for each in own_axes if each.reads}
        further = {path: dict(own) for path, own in counts.items()}
        # such as the width of a query where query, key and value are one layer
        for path, part in alone.block.named_modules():
            if not class_of(part).__module__.startswith("torch."):
                named = {name: value for name, value in whole_numbers(part) if value in read and is_width(name)}
                further[path] = named | further.get(path, {})
        for counting in (counts, further):
            for parts in (False, True):
                yield Units(axes, counting, max(1, of // SHARE), of, parts, tuple(last))


def _try(block: nn.Module, given: Any, units: Units) -> None:
    """Raise InputError if a narrow copy of a submodule cannot run, begin without effect, learn, and become part of it."""
    made = narrow_copy(block, units, 0)
    with (
        in_words("a narrow copy of it fails, as where it divides the width of its stream by the number of heads"),
        torch.enable_grad(),
    ):
        output = called_beside(given, made, attached=False)
        if bool(output.any()):
            raise InputError(
                "a narrow copy of it cannot begin as one that adds nothing: it returns more than its last layers write"
            )
        if not learns(output, made.parameters()):
            raise InputError("a narrow copy of it would never learn")
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name in units.last:
                if name in units.axes:
                    value = made.get_parameter(name)
                    value.copy_(torch.randn(value.shape, generator=generator) / math.sqrt(value.shape[-1]))
            wider = copy_of_block(block)
            expected = called_beside(given, wider, attached=False) + called_beside(given, made, attached=False)
            _join(wider, made, units, 1.0)
    with in_words("it fails with more units"), torch.no_grad():
        found = called_beside(given, wider, attached=False)
    if not same_outputs([expected], [found], wider.parameters()):
        raise InputError("with more units it does not compute the sum, as where it depends on their number")


@torch.no_grad()
def _join(block: nn.Module, made: nn.Module, units: Units, dose: float) -> None:
    """Let the units of a narrow copy, at a dose, be units of a submodule."""
    more = {**dict(made.named_parameters()), **dict(made.named_buffers())}
    for name in units.axes:
        path, _, entry = name.rpartition(".")
        part = block.get_submodule(path)
        held = getattr(part, entry).detach()
        put(part, entry, units.joined(name, held, more[name].detach() * (dose if name in units.last else 1)))
    set_counts(block, units.counted(units.of + units.number))


@torch.no_grad()
def join_units(networks: Sequence[nn.Module], name: str, units: Units, passes: Sequence[Pass]) -> str | None:
    """Make the seed at a site, a narrow copy, units of its submodule: in a network and its moving averages, or in none.

    They are only if every pass gives what it gave before, to rounding, in evaluation mode. Returns None if so, otherwise why not,
    to be read behind a colon. The seed itself is not removed.
    """
    after = sites_of(networks[0])[name].after
    seeds = [seed for network in networks if (seed := planted_at(network, name)) is not None]
    if seeds[0].blend != Blend.ADD:
        return f"by the blend {seeds[0].blend.name} what it adds depends on the stream"
    host, delta = networks[0].get_submodule(after), seeds[0].seed.delta
    assert isinstance(delta, CopySeed), "the seed is a copy"
    # Its own number of units: the submodule may have become wider since.
    held, more = ({**dict(each.named_parameters()), **dict(each.named_buffers())} for each in (host, delta.block))
    first, (along, *_) = next(iter(units.axes.items()))
    units = units._replace(number=units.of * more[first].shape[along.axis] // held[first].shape[along.axis])
    if any(units.shape(each, held[each]) != more[each].shape for each in units.axes):
        return "its submodule has other widths than when it was planted"
    own = dict(host.named_parameters())
    for each in units.axes:
        if each in own and (why_fixed := fixed(networks[0], own[each])):
            return f"{after}.{each}, which it would change, {why_fixed}"
    with undisturbed(*networks):
        undo = saved_with_configs(networks)
        try:
            expected = [
                [value.clone() for value in floats(results(run(network)))] for network in networks for run in passes
            ]
            for network, seed in zip(networks, seeds, strict=True):
                made: Any = seed.seed.delta
                _join(network.get_submodule(after), made.block, units, float(seed.alpha))
                seed.mode = Mode.OFF
            with in_words("the wider network fails"):
                found = [list(floats(results(run(network)))) for network in networks for run in passes]
            if not all(same_outputs(*pair, own.values()) for pair in zip(expected, found, strict=True)):
                raise InputError("the outputs would differ, as where the network depends on their number")
        except InputError as error:
            undo()
            seeds_within = (path for path, part in host.named_modules() if isinstance(part, Planted) and path != CHILD)
            within = next((path for path in seeds_within if not path.startswith(f"{CHILD}.")), None)
            if within is not None:
                return f"the seed at {after}.{within.rpartition('.')[0]} is made for its widths"
            return str(error)
    return None
