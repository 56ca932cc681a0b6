"""Where a damaged network was hurt: its sites, ranked by what its streams lost. N examples."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from esper.kasmina.grown import stream_of
from esper.kasmina.recording import floats
from esper.kasmina.survey import call, undisturbed
from esper.leyline.errors import InputError, typed_line
from esper.leyline.sites import Site
from esper.leyline.streams import Stream
from esper.tolaria.sensors import participation_ratio


class Place(NamedTuple):
    """A site with its rank: the larger the score, the more its stream lost there."""

    site: str
    score: float
    why: str


class _Streams(NamedTuple):
    before: Tensor | None  # what the site's segment reads
    here: Tensor  # what it writes


def ranked(network: nn.Module, sites: Mapping[str, Site], x: Any, intact: nn.Module | None) -> list[Place]:
    """Rank sites by the rise of the drift behind each segment, or without an intact network by the fall of its directions.

    x: inputs (N, ...). The drift of a stream h is |h - h0| / |h0|, with h0 in the intact network. Raises InputError if the intact
    network has other submodules or streams of another shape at the sites.
    """
    own = _recorded(network, sites, x)
    if intact is None:
        places = [_by_directions(name, sites[name], streams) for name, streams in own.items()]
    else:
        if not isinstance(intact, nn.Module):
            raise InputError(f"intact is a {type(intact).__name__}; give an nn.Module, or leave it out")
        check_weights(intact, "intact")
        _check_shape(intact, sites)
        try:
            before = _recorded(intact, sites, x)
        except Exception as error:  # whatever a person's module raises
            raise InputError(
                f"intact cannot run on the data: {typed_line(error)}; give the network before the damage"
            ) from error
        places = [_by_drift(name, streams, before.get(name)) for name, streams in own.items()]
    return sorted(places, key=lambda place: -place.score)


def check_weights(network: nn.Module, name: str) -> None:
    """Raise InputError if a parameter holds NaN. Infinite ones may be masks."""
    for path, parameter in network.named_parameters():
        if parameter.is_floating_point() and not parameter.is_meta and parameter.isnan().any():
            raise InputError(f"{path} of {name} holds NaN; give a network whose weights are numbers")


def _check_shape(intact: nn.Module, sites: Mapping[str, Site]) -> None:
    paths = dict(intact.named_modules())
    for site in sites.values():
        for path in (site.after, site.around):
            if path not in paths:
                raise InputError(
                    f"intact is of another shape: it has no submodule {path!r}; give the network before the damage, or leave it "
                    "out"
                )


def _by_drift(name: str, streams: _Streams, intact: _Streams | None) -> Place:
    if intact is None or intact.here.shape != streams.here.shape:
        theirs = None if intact is None else tuple(intact.here.shape[1:])
        raise InputError(
            f"intact is of another shape: at {name} its stream is {theirs}, and that of the model is "
            f"{tuple(streams.here.shape[1:])}; give the network before the damage, or leave it out"
        )
    here, before = drift(streams.here, intact.here), 0.0
    if streams.before is not None and intact.before is not None and streams.before.shape == intact.before.shape:
        before = drift(streams.before, intact.before)
    return Place(
        name, here - before, f"the stream drifts {here:.0%} from the intact network's there, and {before:.0%} in front"
    )


def _by_directions(name: str, site: Site, streams: _Streams) -> Place:
    kind = type(site.stream)
    here = directions(streams.here, kind)
    before = here
    if streams.before is not None and streams.before.dim() == streams.here.dim():
        before = directions(streams.before, kind)
    return Place(name, before - here, f"the stream uses {here:.0%} of its directions there, and {before:.0%} in front")


@torch.no_grad()
def drift(h: Tensor, intact: Tensor) -> float:
    """|h - h0| / |h0| of features of one shape."""
    return float(torch.linalg.vector_norm(h - intact) / torch.linalg.vector_norm(intact).clamp_min(1e-30))


@torch.no_grad()
def directions(h: Tensor, kind: type[Stream]) -> float:
    """The participation ratio of a stream (N, ...), in [0, 1] (`tolaria/sensors.py::participation_ratio`)."""
    return float(participation_ratio(kind.positions(h[None]))[0])


@torch.no_grad()
def _recorded(network: nn.Module, sites: Mapping[str, Site], x: Any) -> dict[str, _Streams]:
    """The streams at the sites, in the order in which the network runs them, of the first call of each."""
    before: dict[str, Tensor | None] = {}
    here: dict[str, Tensor] = {}

    def entering(name: str, arguments: Any, named: Any) -> None:
        given = next(floats((arguments, named)), None)
        before.setdefault(name, None if given is None else given.clone().float())

    def leaving(name: str, output: Any) -> None:
        if isinstance(stream := stream_of(output), Tensor):
            here.setdefault(name, stream.clone())

    with undisturbed(network), _hooked(network, sites, entering, leaving):
        call(network, x)
    return {name: _Streams(before.get(name), stream.float()) for name, stream in here.items()}


@contextmanager
def _hooked(network: nn.Module, sites: Mapping[str, Site], entering: Any, leaving: Any) -> Iterator[None]:
    handles = []
    for name, site in sites.items():
        around, after = network.get_submodule(site.around), network.get_submodule(site.after)
        handles.append(
            around.register_forward_pre_hook(lambda _, a, k, name=name: entering(name, a, k), with_kwargs=True)
        )
        handles.append(after.register_forward_hook(lambda _, a, output, name=name: leaving(name, output)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
