"""Add units to any submodule: seeds that are a narrow copy of it beside it, and then part of it.

    m(x)   becomes   m(x) + alpha B(x)

B is a copy of m that has some of its units: attention heads, gated units, channels. They are drawn anew, and its last layers are
0 at first. Where m only adds up what its units write, B can stand within it: m has more units then, and computes the same.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.kasmina.graft.flow import CONVOLUTIONS
from esper.kasmina.graft.folding import Pass, fixed, is_layer, put, same_outputs
from esper.kasmina.graft.grafted import planted_at, undisturbed
from esper.kasmina.graft.grown import CHILD, called_beside, class_of, first_tensor, sites_of
from esper.kasmina.graft.multiplying import Axis, Multiplication, Variant, is_width, saved_with_configs, whole_numbers
from esper.kasmina.graft.planted import Mode, Planted
from esper.kasmina.graft.recording import floats, learns, replaced, results
from esper.kasmina.graft.stacks import CopySeed, copy_of_block, found_by_calls, own_parameters, silenced
from esper.kasmina.graft.widening import set_counts
from esper.leyline.errors import InputError, in_words
from esper.leyline.lifecycle.actions import Blend
from esper.leyline.lifecycle.slots import Site
from esper.leyline.text import with_article

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
        if beside := [name for name, _ in alone.block.named_parameters() if name not in axes and name not in last]:
            raise InputError(f"{beside[0]} belongs to none of its units")
        of = math.gcd(
            *(tensors[name].shape[each.axis] // each.block for name, own_axes in axes.items() for each in own_axes)
        )
        if of == 0:
            raise InputError(_NO_UNITS)
        counts = {
            path.removeprefix("block").removeprefix("."): {
                name: value for name, value in own_counts.items() if type(value) is int and value % of == 0
            }
            for path, own_counts in found.counts.items()
            if ":" not in path
        }
        read = {tensors[name].shape[each.axis] for name, own_axes in axes.items() for each in own_axes if each.reads}
        further = {path: dict(own) for path, own in counts.items()}
        # such as the width of a query where query, key and value are one layer
        for path, part in alone.block.named_modules():
            if not class_of(part).__module__.startswith("torch."):
                named = {name: value for name, value in whole_numbers(part) if value in read and is_width(name)}
                further[path] = named | further.get(path, {})
        for counted in (counts, further):
            for parts in (False, True):
                yield Units(axes, counted, max(1, of // SHARE), of, parts, tuple(last))


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
            return (
                str(error)
                if within is None
                else f"the seed at {after}.{within.rpartition('.')[0]} is made for its widths"
            )
    return None
