"""Derive static networks from a host: the host with identity skips, and the host widened without its bottlenecks.

B examples. A factory is a callable that returns a freshly drawn `SegmentedHost`.
"""

import copy
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints import count, drawn_with
from esper.kasmina.graft.folding import known_axes, put
from esper.kasmina.host import SegmentedHost, drawn_host, dtype_of
from esper.kasmina.stack.layers import Linear, Residual
from esper.leyline.data.batches import Batch, cast, run, stream_of
from esper.leyline.messages import InputError, first_line, kind_of

Factory = Callable[[], nn.Module]

WIDEST = 2**20
"""Largest width of a layer of a widened network; a network that needs a larger one is not built."""


@dataclass(frozen=True)
class Skipped:
    """Makes the hosts of another factory, with the same initial weights and a skip, y = x + f(x), around some segments f."""

    host: Factory
    places: tuple[int, ...]  # indices of the segments

    def __call__(self) -> SegmentedHost:
        host = self.host()
        assert isinstance(host, SegmentedHost)
        segments = [Residual(part) if k in self.places else part for k, part in enumerate(host.segments)]
        made = SegmentedHost(segments, [replace(slot, inner=None) for slot in host.slots])
        made.stacks, made.draws = host.stacks, host.draws
        return made


def skip_places(factory: Factory, x: Batch) -> tuple[int, ...]:
    """Return the segments around which an identity skip fits; x (B, ...) with B >= 2 are examples that the host can run.

    Such a segment has parameters, returns the shape that it reads, and has no path around its parameters yet: with all of
    them at 0, except those of normalisation layers, it returns the same for every example. Raises InputError if there is none.
    """
    with drawn_with(0), torch.no_grad():
        host = factory()
        assert isinstance(host, SegmentedHost)
        x = cast(x, dtype_of(host.eval()))
        places, residual = [], False
        for index, segment in enumerate(host.segments):
            before, x = stream_of(x), run(segment, x)
            if before is None or x.shape != before.shape or not any(True for _ in segment.parameters()):
                continue
            if _goes_around(segment, before):
                residual = True
            else:
                places.append(index)
    if places:
        return tuple(places)
    if residual:
        raise InputError("every segment of the host that keeps its shape has a path around its weights already")
    raise InputError("no segment of the host returns the shape that it reads, so that no identity skip fits")


def _goes_around(segment: nn.Module, x: Tensor) -> bool:
    """Return whether what a segment returns depends on the example when its parameters are 0."""
    silent = copy.deepcopy(segment)
    for module in silent.modules():
        if not isinstance(module, _NORMS):
            for parameter in module.parameters(recurse=False):
                parameter.zero_()
    y = silent(x)
    return not torch.equal(y, y[:1].expand_as(y))


def widened(factory: Factory, x: Batch, parameters: int) -> "WidenedHosts":
    """Return the factory of a host's plain network: every narrow inner width is raised, then all inner widths are scaled.

    A width is raised to the smaller of the widest layer in front of it and the widest behind it, if it is narrower than
    both. The network is the smallest with at least `parameters` parameters; x (B, ...) are examples that the host can
    run. Raises InputError if a layer with parameters is not an nn.Linear, nn.Conv2d or normalisation in a chain of
    nn.Sequential.
    """
    chain = _chain(drawn_host(factory))
    outs = [_features(layer)[1] for layer in chain if isinstance(layer, _WEIGHTS)]
    if len(outs) < 2:
        raise InputError("the host has a single layer with weights, so there is no inner width to scale")
    inner = without_bottlenecks(outs[:-1])

    def scaled(widest: int) -> tuple[int, ...]:
        return (*(-(-size * widest // max(inner)) for size in inner), outs[-1])

    def size(widest: int) -> int:
        with torch.device("meta"):
            _resize(chain, scaled(widest))
        return sum(map(count, chain))

    width = 1 + bisect_left(range(1, WIDEST + 1), parameters, key=size)
    if width > WIDEST:
        raise InputError(f"no width up to {WIDEST:,} gives the host {parameters:,} parameters")
    made = WidenedHosts(factory, scaled(width))
    try:
        with drawn_with(0), torch.no_grad():
            wide = made().eval()
            run(wide, cast(x, dtype_of(wide)))
    except Exception as error:  # a user's module can raise any error on another width; its first line gives the reason
        raise InputError(f"the host cannot run at other widths: {first_line(error)}") from error
    return made


def without_bottlenecks(widths: Sequence[int]) -> tuple[int, ...]:
    """Return widths of layers in order, each at least the smaller of the widest in front of it and the widest behind it."""
    return tuple(min(max(widths[: k + 1]), max(widths[k:])) for k in range(len(widths)))


@dataclass(frozen=True)
class WidenedHosts:
    """Makes the networks of a host at other widths, initialised as torch initialises layers."""

    host: Factory
    widths: tuple[int, ...]  # outputs of every layer with weights, in order

    def __call__(self) -> SegmentedHost:
        host = self.host()
        assert isinstance(host, SegmentedHost)
        _resize(_chain(host), self.widths)
        behind: list[int] = []  # the width of the stream behind each segment, 0 in front of the first layer
        for segment in host.segments:
            wide = [part for part in segment.modules() if isinstance(part, _WEIGHTS)]
            behind.append(_features(wide[-1])[1] if wide else (behind[-1] if behind else 0))
        host.slots = tuple(replace(slot, width=behind[slot.after] or slot.width) for slot in host.slots)
        return host


_WEIGHTS = (nn.Linear, nn.Conv2d)
_RESIZED = (nn.Linear, Linear, nn.Conv2d, nn.LayerNorm, nn.BatchNorm1d, nn.BatchNorm2d)
_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def _chain(host: SegmentedHost) -> list[nn.Module]:
    """Return the layers with parameters, in the order in which the host runs them. InputError if one cannot be resized."""
    chain: list[nn.Module] = []
    for index, segment in enumerate(host.segments):
        for path, module in segment.named_modules():
            inside = any(True for _ in module.parameters()) or any(True for _ in module.buffers())
            if type(module) is nn.Sequential or not inside:
                continue
            where = f"segment {index}" + (f".{path}" if path else "")
            if type(module) not in _RESIZED or (isinstance(module, nn.Conv2d) and module.groups > 1):
                raise InputError(f"{where} of the host is {kind_of(module)}, whose width cannot be scaled")
            if isinstance(module, nn.LayerNorm) and len(module.normalized_shape) > 1:
                raise InputError(f"{where} of the host normalises over {len(module.normalized_shape)} axes")
            if module in chain:
                raise InputError(f"{where} of the host shares its weights with another layer")
            chain.append(module)
    width = 0  # of the stream
    for module in chain:
        ins, outs = _features(module)
        if width and (ins % width or not ins):
            raise InputError(
                f"a layer of the host reads {ins} features of a stream of {width}, so its width cannot be scaled"
            )
        width = outs if isinstance(module, _WEIGHTS) else width or outs
    return chain


def _features(module: Any) -> tuple[int, int]:
    """Return the numbers of features that a layer reads and returns."""
    if isinstance(module, nn.LayerNorm):
        return module.normalized_shape[0], module.normalized_shape[0]
    axes = known_axes(module)
    return getattr(module, axes.read), getattr(module, axes.written)


def _resize(chain: Sequence[Any], widths: Sequence[int]) -> None:
    """Give the layers of a chain other widths (outputs of those with weights), in place and newly initialised."""
    places, before, width = iter(widths), 0, 0  # the width of the stream as it was, and as it is now
    for part in chain:
        ins, outs = _features(part)
        reads = writes = ins // before * width if width else ins  # of each position of a map that was flattened
        if isinstance(part, _WEIGHTS):
            before, writes = outs, next(places)
            width = writes
        dtype = next((parameter.dtype for parameter in part.parameters()), None)
        for name, own in [*part.named_parameters(), *part.named_buffers()]:
            if own.dim():  # not the number of batches that a BatchNorm has seen
                put(part, name, torch.empty((writes, reads, *own.shape[2:])[: own.dim()]))
        if isinstance(part, nn.LayerNorm):
            part.normalized_shape = (reads,)
        part.reset_parameters()
        part.to(dtype).requires_grad_()  # also where the host has it frozen
