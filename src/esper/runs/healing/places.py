"""Where a damaged network was hurt: its sites, ranked by what its streams lost. N examples."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from esper.kasmina.graft.grafted import call, undisturbed
from esper.kasmina.graft.grown import stream_of
from esper.kasmina.graft.recording import floats
from esper.leyline.errors import InputError, typed_line
from esper.leyline.lifecycle.slots import Site
from esper.leyline.lifecycle.streams import Stream
from esper.tolaria.measure.sensors import participation_ratio

CUT = 0.7
"""Where more than this share of the units within a segment is dead, the segment is taken to be damaged."""


class Place(NamedTuple):
    """A site, and in words what its stream lost there."""

    site: str
    why: str


class _Streams(NamedTuple):
    """What flows at a site: what its segment reads, what it writes, and what its inner layers compute before activation."""

    before: Tensor | None
    here: Tensor
    inner: list[Tensor]


def ranked(network: nn.Module, sites: Mapping[str, Site], x: Any, intact: nn.Module | None) -> list[Place]:
    """Rank sites by the rise of the drift behind each segment, or without an intact network by dead units and lost directions.

    Segments with more than CUT dead units come first. Then come those behind which the share of directions in use falls most, as
    a ratio; a segment that changes the width of its stream comes last, since its shares cannot be compared. On damaged networks
    that were held back, this rule regains 85 % of the lost accuracy, and differences of shares 75 % (the page "Where esper heal
    should plant" of esper-bench).

    x: inputs (N, ...). The drift of a stream h is |h - h0| / |h0|, with h0 in the intact network. Raises InputError if the intact
    network has other submodules or streams of another shape at the sites.
    """
    own, places = _recorded(network, sites, x), list[tuple[tuple[float, ...], Place]]()
    if intact is None:
        for name, (before, here, inner) in own.items():
            kind = type(sites[name].stream)
            there = in_front = directions(here, kind)
            comparable = before is not None and before.dim() == here.dim()
            if before is not None and comparable:
                in_front = directions(before, kind)
                comparable = kind.positions(before[None]).shape[-1] == kind.positions(here[None]).shape[-1]
            dead = max((dead_units(z) for z in inner), default=0.0)
            why = f"the stream uses {there:.0%} of its directions there, and {in_front:.0%} in front"
            if dead > CUT:
                why = f"only {1 - dead:.0%} of the units in front of it are active"
            rank = (-dead if dead > CUT else 0.0, not comparable, there / max(in_front, 1e-9))
            places.append((rank, Place(name, why)))
        return [place for _, place in sorted(places, key=lambda each: each[0])]
    if not isinstance(intact, nn.Module):
        raise InputError(f"intact is a {type(intact).__name__}; give an nn.Module, or leave it out")
    check_weights(intact, "intact")
    other, mend = "intact is of another shape", "give the network before the damage"
    paths = dict(intact.named_modules())
    for path in (path for site in sites.values() for path in (site.after, site.around)):
        if path not in paths:
            raise InputError(f"{other}: it has no submodule {path!r}; {mend}, or leave it out")
    try:
        sound = _recorded(intact, sites, x)
    except Exception as error:  # whatever a person's module raises
        raise InputError(f"intact cannot run on the data: {typed_line(error)}; {mend}") from error
    for name, (before, here, _) in own.items():
        sound_before, sound_here, _ = sound.get(name, (None, None, []))
        if sound_here is None or sound_here.shape != here.shape:
            theirs = None if sound_here is None else tuple(sound_here.shape[1:])
            raise InputError(
                f"{other}: at {name} its stream is {theirs}, and that of the model is {tuple(here.shape[1:])}; {mend}, or leave "
                "it out"
            )
        there, in_front = drift(here, sound_here), 0.0
        if before is not None and sound_before is not None and before.shape == sound_before.shape:
            in_front = drift(before, sound_before)
        why = f"the stream drifts {there:.0%} from the intact network's there, and {in_front:.0%} in front"
        places.append(((in_front - there,), Place(name, why)))
    return [place for _, place in sorted(places, key=lambda each: each[0])]


def check_weights(network: nn.Module, name: str) -> None:
    """Raise InputError if a parameter holds NaN. Infinite ones may be masks."""
    for path, parameter in network.named_parameters():
        if parameter.is_floating_point() and not parameter.is_meta and parameter.isnan().any():
            raise InputError(f"{path} of {name} holds NaN; give a network whose weights are numbers")


@torch.no_grad()
def drift(h: Tensor, intact: Tensor) -> float:
    """|h - h0| / |h0| of features of one shape."""
    return float(torch.linalg.vector_norm(h - intact) / torch.linalg.vector_norm(intact).clamp_min(1e-30))


@torch.no_grad()
def directions(h: Tensor, kind: type[Stream]) -> float:
    """The participation ratio of a stream (N, ...), in [0, 1] (`tolaria/measure/sensors.py::participation_ratio`)."""
    return float(participation_ratio(kind.positions(h[None]))[0])


@torch.no_grad()
def dead_units(z: Tensor) -> float:
    """The share of units that are above 0 on under 1 % of examples and positions; z (N, ...) with channels of maps second."""
    z = z.flatten(2).mT.flatten(0, 1) if z.dim() == 4 else z.flatten(0, -2)
    return float(((z > 0).double().mean(0) < 0.01).double().mean())


@torch.no_grad()
def _recorded(network: nn.Module, sites: Mapping[str, Site], x: Any) -> dict[str, _Streams]:
    """The streams at the sites, in the order in which the network runs them, of the first call of each."""
    before: dict[str, Tensor | None] = {}
    here: dict[str, Tensor] = {}
    inner: dict[str, list[Tensor]] = {}

    def entering(name: str, arguments: Any, named: Any) -> None:
        given = next(floats((arguments, named)), None)
        before.setdefault(name, None if given is None else given.clone().float())

    def leaving(name: str, output: Any) -> None:
        if isinstance(stream := stream_of(output), Tensor):
            here.setdefault(name, stream.clone())

    def computed(output: Tensor) -> None:
        for name in before.keys() - here.keys():
            inner.setdefault(name, []).append(output.float())

    handles = []
    try:
        for part in network.modules():
            if isinstance(part, nn.Linear | nn.Conv1d | nn.Conv2d):
                handles.append(part.register_forward_hook(lambda _, a, output: computed(output)))
        for name, site in sites.items():
            around, after = network.get_submodule(site.around), network.get_submodule(site.after)
            handles += [
                around.register_forward_pre_hook(lambda _, a, k, name=name: entering(name, a, k), with_kwargs=True),
                after.register_forward_hook(lambda _, a, output, name=name: leaving(name, output)),
            ]
        with undisturbed(network):
            call(network, x)
    finally:
        for handle in handles:
            handle.remove()
    # The last layer within a segment computes the stream itself.
    return {name: _Streams(before.get(name), h.float(), inner.get(name, [])[:-1]) for name, h in here.items()}
