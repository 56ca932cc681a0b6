"""Measure what flows at the sites of a grafted network, by one forward pass in evaluation mode. B examples."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from esper.kasmina.grown import CHILD, POINT, Point, sites_of, stream_of
from esper.leyline.errors import InputError
from esper.leyline.sites import Site
from esper.leyline.slots import Tap
from esper.leyline.streams import STREAMS, Stream


class Reading(NamedTuple):
    """The measurements of one site in a pass.

    Attributes:
        calls (int): number of calls of the submodule
        widths (dict): the width that a seed reads at each `Tap`, 0 if it cannot read it
    """

    calls: int
    widths: Mapping[Tap, int]


def call(network: nn.Module, given: Any) -> Any:
    """Return the output of a network for an input: a tuple or list holds its arguments, a mapping its named arguments."""
    if isinstance(given, Mapping):
        return network(**given)
    return network(*given) if isinstance(given, tuple | list) else network(given)


@contextmanager
def undisturbed(*networks: nn.Module) -> Iterator[None]:
    """Set networks to evaluation mode without compilation; modes, buffers and random states are restored on exit.

    torch's fused attention, which skips the submodules of a layer, is off.
    """
    modes = [(part, part.training) for network in networks for part in network.modules()]
    buffers = [(buffer, buffer._version, buffer.clone()) for network in networks for buffer in network.buffers()]
    devices = sorted({weight.device.index for network in networks for weight in network.parameters() if weight.is_cuda})
    fused = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        for network in networks:
            network.eval()
        with torch.random.fork_rng(devices=devices), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        for part, training in modes:
            part.training = training
        with torch.no_grad():
            for buffer, version, value in buffers:
                if buffer._version != version:
                    buffer.copy_(value)


@torch.no_grad()
def survey(module: nn.Module, run: Callable[[], Any]) -> dict[str, Reading]:
    """Return the `Reading` of every site of a grafted network, whose sites are free, by name, for the pass that `run` makes.

    The network is not changed. Raises InputError if no forward pass calls a site, if its stream differs from the
    declared one, or if its submodule runs whatever children it has.
    """
    tapes: dict[nn.Module, _Calls] = {part: _Calls() for part in module.modules() if POINT in part.__dict__}
    for part, tape in tapes.items():
        point: Point = part.__dict__[POINT]
        point.tape = tape
        if point.site is not None and not point.planted:  # a seed of an earlier growth stays where it is
            setattr(part, CHILD, _Tripwire(point.site))
    try:
        with undisturbed(module):
            run()
    finally:
        for part in tapes:
            part.__dict__[POINT].tape = None
            if isinstance(part._modules.get(CHILD), _Tripwire):
                delattr(part, CHILD)
    return {name: _reading(module, site, tapes) for name, site in sites_of(module).items()}


class _Calls:
    """The first input and the output of a submodule, for every call."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []
        self._given: list[tuple[Tensor, int] | None] = []

    def begin(self, given: Tensor | None) -> None:
        self._given.append(None if given is None else (given, given._version))

    def end(self, output: Any) -> None:
        self.outputs.append(output)

    def first(self) -> Tensor | None:
        """The input of the submodule in its first call; None if that is not a floating tensor, or was changed in place."""
        given = self._given[0] if self._given else None
        return given[0] if given is not None and given[0]._version == given[1] else None


class _Tripwire(nn.Module):
    """A probe in the place of a seed, to find submodules whose forward runs all of their children and would run a seed too."""

    def __init__(self, site: str) -> None:
        super().__init__()
        self.site = site

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise InputError(
            f"the submodule of site {self.site!r} runs every child that it has, so it cannot hold a seed; choose another"
        )


def _reading(module: nn.Module, site: Site, tapes: Mapping[nn.Module, _Calls]) -> Reading:
    """Return the reading of a site. Raises InputError if it cannot be a site."""
    tape = tapes[module.get_submodule(site.after)]
    if not tape.outputs:
        raise InputError(
            f"site {site.name!r} is behind {site.after!r}, which no forward pass in evaluation mode calls; choose another"
        )
    here = stream_of(tape.outputs[0])
    stream: type[Stream] = type(site.stream)
    if stream.width_of(here) != site.stream.width:
        found = f"shape {tuple(here.shape)}" if isinstance(here, Tensor) else f"a {type(here).__name__}"
        raise InputError(
            f"site {site.name!r} has a {stream.kind} of width {site.stream.width}, but {site.after!r} returns {found}; "
            f"streams are {', '.join(f'{each.__name__} {1 + each.axes}-D' for each in STREAMS.values())}"
        )
    before = tapes[module.get_submodule(site.around)].first()
    taps = {Tap.HERE: here, Tap.BEFORE: before, Tap.INPUT: tapes[module].first()}
    return Reading(len(tape.outputs), {tap: _width(site, here, given) for tap, given in taps.items()})


def _width(site: Site, here: Tensor, given: Any) -> int:
    """Return the width at which a seed reads a tensor, 0 if it cannot: at a causal site the positions must be the same."""
    stream = type(site.stream)
    width = stream.width_of(given)
    if width and (given.shape[0] != here.shape[0] or (site.causal and given.shape[1] != here.shape[1])):
        return 0
    return width
