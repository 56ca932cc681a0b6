"""What can be planted: a table of blueprints, a decorator for users' own, and the checks of a birth."""

import copy
import difflib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints.vector import MLP, Affine, Gated, LinearMap, LowRank
from esper.leyline.errors import InputError
from esper.leyline.slots import Kind, Tap

Build = Callable[[int, int], nn.Module]
Count = Callable[[int, int], int]


@dataclass(frozen=True)
class Blueprint:
    """A kind of seed."""

    name: str
    kind: Kind
    tap: Tap  # what it reads
    build: Build  # (width read, width written) -> module (B, read) -> (B, written) that returns the change
    parameters: Count  # (width read, width written) -> number of parameters
    summary: str


BLUEPRINTS: dict[str, Blueprint] = {}


def blueprint(
    name: str, *, parameters: Count, tap: Tap | str = Tap.HERE, summary: str = ""
) -> Callable[[Build], Build]:
    """Register a builder of vector seeds under a name that tasks and schedules can use.

        @esper.blueprint("wide", tap="before", parameters=lambda r, w: r * w + w)
        def wide(reads, writes): ...

    Raises InputError where the name is taken, the tap is unknown, or the module fails a check of its birth (`check`).
    """

    def register(build: Build) -> Build:
        if name in BLUEPRINTS:
            raise InputError(f"a blueprint named {name!r} is registered already; choose another name")
        if tap not in list(Tap):
            raise InputError(f"blueprint {name!r} reads tap {tap!r}; choose one of {', '.join(Tap)}")
        doc = (build.__doc__ or "").strip().splitlines()
        entry = Blueprint(name, Kind.VECTOR, Tap(tap), build, parameters, summary or (doc[0] if doc else ""))
        check(entry)
        BLUEPRINTS[name] = entry
        return build

    return register


def get_blueprint(name: str) -> Blueprint:
    """A registered blueprint. InputError, with the nearest name, where there is none."""
    if name not in BLUEPRINTS:
        near = difflib.get_close_matches(name, BLUEPRINTS, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(BLUEPRINTS))}"
        raise InputError(f"unknown blueprint {name!r}; {hint}")
    return BLUEPRINTS[name]


def count(module: nn.Module) -> int:
    """Number of parameters of a module."""
    return sum(parameter.numel() for parameter in module.parameters())


@contextmanager
def drawn_with(key: int) -> Iterator[None]:
    """Initialise modules from a key: torch's global generator is seeded inside and restored after."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(key)
        yield


def check(entry: Blueprint) -> None:
    """Hold a blueprint against the rules of a birth at two sizes.

    The shape is kept; the change is exactly 0 at birth; some gradient is not 0; every parameter moves within five optimizer
    steps; the declared number of parameters is true; a module that says `pads` keeps padded units at exactly 0. Raises
    InputError, in one sentence, on the first that fails.
    """
    for reads, writes in ((5, 5), (8, 8)) if entry.tap != Tap.INPUT else ((5, 8), (9, 5)):
        with drawn_with(reads):
            try:
                module = entry.build(reads, writes)
            except Exception as error:  # whatever a person's builder raises, its first line says why
                raise InputError(
                    f"blueprint {entry.name!r} cannot be built for widths ({reads}, {writes}): {_reason(error)}; "
                    "take the width read and the width written"
                ) from None
            if not isinstance(module, nn.Module):
                raise InputError(f"blueprint {entry.name!r} builds a {type(module).__name__}; return an nn.Module")
            _check_size(entry, module, torch.randn(16, reads), torch.randn(16, writes))


def _check_size(entry: Blueprint, module: nn.Module, u: Tensor, pull: Tensor) -> None:
    def refuse(what: str, mend: str) -> InputError:
        return InputError(f"blueprint {entry.name!r} {what}; {mend}")

    reads, writes = u.shape[1], pull.shape[1]
    if any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in module.modules()):
        raise refuse("normalises over the batch", "normalise each example by itself, as LayerNorm does")
    declared = entry.parameters(reads, writes)
    if count(module) != declared:
        raise refuse(
            f"has {count(module)} parameters at widths ({reads}, {writes}), but declares {declared}",
            "correct `parameters`",
        )
    given = u.clone()
    try:
        delta = module(u)
    except Exception as error:  # likewise
        raise refuse(
            f"cannot run on {tuple(u.shape)}: {_reason(error)}", "build it for the widths it is given"
        ) from None
    if not isinstance(delta, Tensor):
        raise refuse(f"returns a {type(delta).__name__}", "return one tensor, the change")
    if not torch.equal(u, given):
        raise refuse("changes what it reads in place", "leave the stream as it is; use inplace=False")
    if delta.shape != pull.shape:
        raise refuse(
            f"returns {tuple(delta.shape)} where the stream is {tuple(pull.shape)}",
            "return a change of the stream's shape",
        )
    if delta.count_nonzero():
        raise refuse("changes the stream at birth", "end it in a zero-initialised linear map")
    dead = refuse("is dead at birth: every gradient is 0", "let nothing after its last linear map stop the gradient")
    if not delta.requires_grad:
        raise dead

    before = copy.deepcopy(module.state_dict())
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(5):
        optimizer.zero_grad()
        ((module(u) - pull) ** 2).mean().backward()
        if not any(p.grad is not None and p.grad.count_nonzero() for p in module.parameters()):
            raise dead
        optimizer.step()
    still = [name for name, p in module.named_parameters() if torch.equal(p, before[name])]
    if still:
        raise refuse(f"never moves {', '.join(still)}", "leave out parameters whose gradient is always 0")
    if getattr(module, "pads", False):
        _check_padding(entry, u, pull)


def _reason(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _check_padding(entry: Blueprint, u: Tensor, pull: Tensor) -> None:
    """A module in the leading corner of a larger one keeps the rest at exactly 0."""
    small = entry.build(u.shape[1], pull.shape[1])
    hidden = max((p.shape[0] for n, p in small.named_parameters() if n.startswith("inner")), default=0)
    try:
        wide = type(small)(u.shape[1], pull.shape[1], hidden + 3)
        write_corner(wide, small)
    except (TypeError, RuntimeError):
        made = f"{type(small).__name__}(reads, writes, hidden)"
        raise InputError(
            f"blueprint {entry.name!r} says it pads, but {made} makes no wider one; remove `pads`"
        ) from None
    optimizer = torch.optim.AdamW(wide.parameters(), lr=1e-2, weight_decay=1e-2)
    for _ in range(5):
        optimizer.zero_grad()
        ((wide(u) - pull) ** 2).mean().backward()
        optimizer.step()
    sizes = dict(small.named_parameters())
    for name, parameter in wide.named_parameters():
        rest = parameter.detach().clone()
        rest[tuple(slice(0, k) for k in sizes[name].shape)] = 0
        if rest.count_nonzero():
            raise InputError(f"blueprint {entry.name!r} says it pads, but padded units of {name} move; remove `pads`")


@torch.no_grad()
def write_corner(target: nn.Module, source: nn.Module) -> None:
    """Put the parameters of a smaller module into the leading corner of a larger one, and 0 elsewhere."""
    parts = dict(source.named_parameters())
    for name, parameter in target.named_parameters():
        parameter.zero_()
        parameter[tuple(slice(0, k) for k in parts[name].shape)] = parts[name]


def _built_in(name: str, tap: Tap, build: Build, parameters: Count, summary: str) -> None:
    BLUEPRINTS[name] = Blueprint(name, Kind.VECTOR, tap, build, parameters, summary)


def _mlp(hidden: int) -> dict[str, Any]:
    return {"build": lambda r, w: MLP(r, w, hidden), "parameters": lambda r, w: hidden * (r + 1) + w * (hidden + 1)}


_built_in("affine", Tap.HERE, lambda r, w: Affine(w), lambda r, w: 2 * w, "scale and shift of every feature")
_built_in("low-rank", Tap.HERE, lambda r, w: LowRank(r, w, 2), lambda r, w: 2 * (r + w) + w, "linear map of rank 2")
_built_in("mlp-small", Tap.HERE, **_mlp(6), summary="one hidden layer of 6 units: depth")
_built_in("mlp-large", Tap.HERE, **_mlp(24), summary="one hidden layer of 24 units: depth")
_built_in("gated", Tap.HERE, Gated, lambda r, w: 2 * (r * w + w), "linear map under a learned gate per feature")
_built_in("bypass-linear", Tap.BEFORE, LinearMap, lambda r, w: r * w + w, "linear map around the segment: width")
_built_in("bypass-mlp", Tap.BEFORE, **_mlp(16), summary="hidden layer of 16 units around the segment: width")
_built_in("skip-mlp", Tap.INPUT, **_mlp(8), summary="hidden layer of 8 units from the host's input")
