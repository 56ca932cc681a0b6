"""Measure whether the streams of a network look ahead."""

from collections.abc import Collection, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from esper.kasmina.recording import floats, mapped, run, tensors, untouched
from esper.leyline.errors import InputError

_NOISE = 16
"""Differences of at most this many units in the last place of the largest value count as rounding."""


def causal_paths(module: nn.Module, example: Any, paths: Collection[str]) -> set[str]:
    """Return the submodules among `paths` whose output (B, L, C) follows an input that the network reads causally.

    The last position of each sequence of the example, (B, L) or (B, L, C), is changed, and the module is run again in
    evaluation mode. The network reads that input causally if later positions of the streams or of the output change and
    earlier ones do not. If the module fails on the changed input, nothing is known, and all streams count as causal.
    """
    if not paths:
        return set()
    causal: set[str] = set()
    with untouched(module):
        for each in module.modules():
            each.training = False
        usual = _streams(module, example, paths)
        for length, other in _changed(example):
            try:
                streams = _streams(module, other, paths)
            except InputError:
                return set(paths)
            effects = {path: _effect(x, streams[path], length) for path, x in usual.items() if path in streams}
            if not any(early for early, _ in effects.values()):
                causal.update(path for path in paths if path in effects and effects[path][1])
    return causal


def _streams(module: nn.Module, example: Any, paths: Collection[str]) -> dict[str, Tensor]:
    """Return the sequences that the submodules at `paths` and the module itself, at path "", compute.

    Every call starts from the same random state.
    """
    found: dict[str, Tensor] = {}

    def keep(path: str, output: Any) -> None:
        for index, x in enumerate(floats(output)):
            if x.dim() == 3 and (index == 0 or not path):
                found[path if index == 0 else f"/{index}"] = x.detach().clone()

    hooks = [
        module.get_submodule(path).register_forward_hook(lambda _, __, output, path=path: keep(path, output))
        for path in paths
    ]
    try:
        with untouched(module):
            keep("", run(module, example))
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _effect(usual: Tensor, changed: Tensor, length: int) -> tuple[bool, bool]:
    """Return whether early and whether late positions of a stream change when the last of `length` input positions does.

    A stream may be longer or shorter than the input. Its late positions are those that begin in the last position of
    the input.
    """
    if usual.shape != changed.shape:
        return True, True
    cut = usual.shape[1] * (length - 1) // length
    moved = (usual.float() - changed.float()).abs().amax((0, 2)) > _NOISE * torch.finfo(
        usual.dtype
    ).eps * usual.abs().max()
    return bool(moved[:cut].any()), bool(moved[cut:].any())


def _changed(example: Any) -> Iterator[tuple[int, Any]]:
    """Yield, for each sequence and axis, the example with the last position of the sequence changed, and its length."""
    for x in tensors(example):
        if x.dim() not in (2, 3) or x.dtype == torch.bool:
            continue
        for axis in range(1, x.dim() if x.is_floating_point() else 2):
            if x.shape[axis] >= 2:
                yield x.shape[axis], mapped(example, partial(_swapped, x, _with_other_end(x, axis)))


def _swapped(old: Tensor, new: Tensor, x: Tensor) -> Tensor:
    """Return `new` in place of `old`, and any other x unchanged."""
    return new if x is old else x


def _with_other_end(x: Tensor, axis: int) -> Tensor:
    """Return x with other values at the last position of an axis; integers are replaced by values that x has elsewhere."""
    changed = x.detach().clone()
    last = changed.select(axis, x.shape[axis] - 1)
    if x.is_floating_point():
        last.mul_(-1).add_(1)
        return changed
    known = x.unique()
    if len(known) == 1:
        last.add_(1 if int(known[0]) == 0 else -1)
    else:
        last.copy_(known[(torch.searchsorted(known, last.contiguous()) + 1) % len(known)])
    return changed
