"""Find modules whose numbers for a row depend on the other rows, in stacks of one to five rows.

N rows, B examples, D features. A kernel may treat the last elements of a tensor, or a single row, in another way, which
changes the last bit. The trajectory of an environment is the same in any population only if no module of it does that.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from esper.kasmina.blueprints import Blueprint, drawn_with
from esper.kasmina.host import SegmentedHost, dtype_of
from esper.kasmina.slot import Seed, slot_output
from esper.kasmina.stack.rows import Stack
from esper.leyline.data.batches import Batch, first, leaves, map_leaves, picked
from esper.leyline.lifecycle.slots import STREAMS, Kind, Stream
from esper.leyline.lifecycle.vocabulary import Blend
from esper.leyline.messages import counted

ROWS = 5
BATCHES = (3, 7, 32)


Sizes = tuple[tuple[int, ...], tuple[int, ...]]
"""Examples of a batch, and rows of the smaller stacks, from the first rows and from the last, that are compared with all rows."""
EVERY_SIZE: Sizes = BATCHES, tuple(range(1, ROWS))
FEW_SIZES: Sizes = (7,), (1,)
"""A row alone at an odd batch, where a kernel that treats the last elements in another way nearly always shows."""
POSITIONS: dict[Kind, tuple[int, ...]] = {
    Kind.VECTOR: (),
    Kind.MAP: (5, 6),
    Kind.SEQUENCE: (13,),
    Kind.VOLUME: (3, 4, 5),
}
"""Positions of an example of each kind of stream."""
JOLT = 0.3
"""Standard deviation of the noise added to the parameters; without noise, the change of a new seed is 0 for any kernel."""


class Blended(nn.Module):
    """Runs a slot that reads its own stream: y = h + c, with the change c of a seed at alpha 1/2 under one blend."""

    def __init__(self, stream: type[Stream], seed: Seed, blend: Blend) -> None:
        super().__init__()
        self.stream, self.seed, self.blend = stream, seed, blend
        self.stacks = bool(getattr(seed.delta, "stacks", False))

    def forward(self, h: Tensor) -> Tensor:
        return slot_output(self.stream, h, h, self.seed, 0.5, self.blend)


def segments_that_vary(factory: Callable[[], nn.Module], x: Batch, sizes: Sizes = EVERY_SIZE) -> dict[str, str]:
    """Return the segments of a host, run on x (B, ...), whose numbers for a row depend on other rows, and where that shows."""
    hosts = [_jolted(factory, row) for row in range(ROWS)]
    assert isinstance(hosts[0], SegmentedHost)
    return _vary(hosts, x, [f"segments.{index}" for index in range(len(hosts[0].segments))], sizes)


def blends_that_vary(entry: Blueprint, width: int, sizes: Sizes = EVERY_SIZE) -> dict[str, str]:
    """Return the blends under which a blueprint's numbers for a row depend on the other rows, on a stream of `width` features."""
    stream = STREAMS[entry.kind]
    with drawn_with(width):
        x = torch.randn(max(BATCHES), *POSITIONS[entry.kind], width).movedim(-1, stream.features)

    def build(blend: Blend) -> nn.Module:
        return Blended(stream, Seed(entry.build(width, width), width), blend)

    vary = {
        blend.name: _vary([_jolted(partial(build, blend), row) for row in range(ROWS)], x, [""], sizes)
        for blend in Blend
    }
    return {name: where[""] for name, where in vary.items() if where}


def _vary(modules: Sequence[nn.Module], x: Batch, parts: Sequence[str], sizes: Sizes) -> dict[str, str]:
    """Compare smaller stacks of the first and of the last rows with a stack of all rows, part by part."""
    found: dict[str, str] = {}
    batches, counts = sizes
    ends = [rows for count in counts for rows in (slice(0, count), slice(ROWS - count, ROWS))]
    dtype = dtype_of(modules[0])
    whole, *smaller = [Stack(modules[0], len(modules[rows]), dtype=dtype) for rows in (slice(0, ROWS), *ends)]
    for rows, stack in zip((slice(0, ROWS), *ends), (whole, *smaller), strict=True):
        _write(stack, modules[rows])
    for batch in batches:
        example = (np.arange(batch) + 5 * np.arange(ROWS)[:, None]) % len(first(x))
        h = picked(x, torch.from_numpy(example))
        for part in parts:
            y, *expected = _run(whole, modules, h, part, 0)
            for rows, stack in zip(ends, smaller, strict=True):
                got = _run(stack, modules[rows], picked(h, rows), part, rows.start)
                pairs = zip(got, (y, *expected), strict=True)
                if not all(torch.equal(a.nan_to_num(), b[rows].nan_to_num()) for a, b in pairs):
                    stacks = f"a stack of {counted(stack.capacity, 'row')} differs from the same rows in one of {ROWS}"
                    found.setdefault(part, f"{stacks}, at batches of {batch}")
            h = y
    return found


def _write(stack: Stack, modules: Sequence[nn.Module]) -> None:
    for row, module in enumerate(modules):
        stack.write(row, module)


def _run(stack: Stack, modules: Sequence[nn.Module], h: Batch, part: str, start: int) -> list[Tensor]:
    """Return output, gradients of the input and the parameters, and buffers, of the modules as they were built, by row."""
    if stack.buffers:  # which an earlier call may have changed
        _write(stack, modules)
    h = map_leaves(lambda leaf: leaf.detach().clone().requires_grad_(leaf.is_floating_point()), h)
    stack.columns["gradient"].zero_()
    stack.train(True)
    rows = len(first(h))
    y = stack(h, slice(0, rows), part=part, keys=np.arange(start, start + rows))
    if y.requires_grad:
        pull = torch.linspace(-1, 1, y[0].numel(), dtype=y.dtype).view(1, *y.shape[1:])
        (y * pull).sum().backward()
    gradients = [leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in leaves(h)]
    return [y.detach(), *gradients, *(stack.columns[name].clone() for name in ("gradient", *stack.buffers))]


@torch.no_grad()
def _jolted(factory: Callable[[], nn.Module], key: int) -> nn.Module:
    with drawn_with(key):
        module = factory()
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape).to(parameter.dtype), alpha=JOLT)
    return module
