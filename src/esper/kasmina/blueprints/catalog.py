"""Keep the table of blueprints: a decorator adds a user's own, and every blueprint must pass the checks here."""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints import map as maps
from esper.kasmina.blueprints import sequence as sequences
from esper.kasmina.blueprints.functions import RELU, Pointwise
from esper.kasmina.blueprints.vector import (
    Affine,
    Factored,
    Gated,
    LearnedScale,
    LinearMap,
    LowRank,
    MLPSeed,
    SparseHead,
    SparseRows,
)
from esper.leyline.lifecycle.slots import STREAMS, Kind, Tap
from esper.leyline.lifecycle.view import BlueprintInfo
from esper.leyline.messages import InputError, did_you_mean, first_line, kind_of

Build = Callable[[int, int], nn.Module]
Count = Callable[[int, int], int]
Copies = Literal["", "behind", "beside"]
"""Where a copy of a submodule runs: on what the submodule returned, or, with fewer units, on what it read."""


@dataclass(frozen=True)
class Blueprint:
    """Describes a kind of seed, and builds its modules."""

    name: str  # name in menus and schedules
    kind: Kind  # kind of the streams that it changes
    tap: Tap  # what it reads
    build: Build  # (width read, width written) -> module that returns the change, of the shape of the stream
    parameters: Count  # (width read, width written) -> number of parameters
    summary: str  # one line for `esper blueprints`
    causal: bool = True  # False for a blueprint of sequences whose change at a position depends on later positions
    linear: bool = False  # whether the change is a linear map of what it reads
    again: bool = False  # whether it reads what the submodule of its site would add to the stream if it ran again
    # where a copy of the submodule of its site runs, which gives its parameters; `build` makes none
    copies: Copies = ""

    @property
    def info(self) -> BlueprintInfo:
        """What a controller knows of it. The sensors are those of its tap, and of a linear map or of a hidden layer."""
        how = "linear" if self.linear and self.tap != Tap.INPUT else "relu"
        of = f"{self.tap}_{how}"
        sensors = f"heldout_{of}", f"explained_{of}", f"map_gradient_{self.tap}"
        return BlueprintInfo(self.name, self.tap.value, sensors, self.copies == "behind")

    def built(self, reads: int, writes: int, function: Pointwise = RELU) -> nn.Module:
        """Build a seed; the one hidden layer of a bypass gets a function, that of the layers which it spans."""
        made = self.build(reads, writes)
        if self.tap == Tap.BEFORE and function != RELU:
            for part in made.modules():
                if isinstance(part, MLPSeed):
                    part.function = function
                elif isinstance(part, maps.Convolutions) and len(part) == 3:
                    part[1] = maps.Activation(function)
        return made

    def fits(self, kind: Kind, *, causal: bool) -> bool:
        """Return whether a stream can have it: it is of the stream's kind, and does not look ahead if the stream is causal."""
        return self.kind == kind and (self.causal or not causal)


BLUEPRINTS: dict[tuple[Kind, str], Blueprint] = {}
"""Blueprints by kind of stream and name. Two kinds may share a name; a name in a menu means the one of the slot's kind."""


LIVE_BLUEPRINTS: dict[tuple[Kind, str], Blueprint] = {}
"""Those that need the submodule of a site, and so grow in networks of a person's own alone."""


def blueprint(
    name: str,
    *,
    parameters: Count,
    tap: Tap | str = Tap.HERE,
    kind: Kind | str = Kind.VECTOR,
    summary: str = "",
    causal: bool = True,
) -> Callable[[Build], Build]:
    """Register a builder of seeds, for vectors, maps, sequences or volumes, under a name that tasks and schedules can use.

        @esper.blueprint("wide", tap="before", parameters=lambda r, w: r * w + w)
        def wide(reads, writes): ...

    parameters: number of parameters of a module that reads width r and writes width w.
    tap: what the module reads: 'here', 'before' or 'input'.
    kind: kind of the stream, whose tensors are (B, C) for 'vector', (B, C, H, W) for 'map', (B, L, C) for 'sequence' and
    (B, C, D, H, W) for 'volume'. A network of a person's own that has the axes in another order is transposed around the seed.
    summary: one line for `esper blueprints`; if empty, the first line of the builder's docstring.
    causal: for a sequence, whether the change at a position depends only on this and earlier positions, which is checked.
    False registers a blueprint that looks ahead, and no causal slot takes it. It is ignored for other kinds of stream.

    Raises InputError if the name is taken, the tap or kind is unknown, or the module fails a check (`check`).
    """

    def register(build: Build) -> Build:
        if kind not in list(Kind):
            raise InputError(f"blueprint {name!r} is of kind {kind!r}; choose one of {', '.join(Kind)}")
        if (Kind(kind), name) in BLUEPRINTS | LIVE_BLUEPRINTS:
            raise InputError(f"a blueprint named {name!r} is registered already; choose another name")
        if tap not in list(Tap):
            raise InputError(f"blueprint {name!r} reads tap {tap!r}; choose one of {', '.join(Tap)}")
        doc = (build.__doc__ or "").strip().splitlines()
        described = summary or (doc[0] if doc else "")
        entry = Blueprint(name, Kind(kind), Tap(tap), build, parameters, described, bool(causal))
        check(entry)
        BLUEPRINTS[entry.kind, name] = entry
        return build

    return register


def get_blueprint(name: str, kind: Kind | None = None, *, live: bool = False) -> Blueprint:
    """Return a registered blueprint of a kind, or of the first kind that has the name. InputError if there is none.

    live: whether it may be one of `LIVE_BLUEPRINTS`.
    """
    offered = BLUEPRINTS | LIVE_BLUEPRINTS if live else BLUEPRINTS
    for found, entry in offered.items():
        if found[1] == name and kind in (None, found[0]):
            return entry
    own = next((entry for (_, known), entry in LIVE_BLUEPRINTS.items() if name == known), None)
    if own is not None:
        does = "copies the submodule of a site" if own.copies else "runs the block of a site again"
        raise InputError(f"blueprint {name!r} {does}, which no population has; leave it out, or use esper.Growth")
    other = [found.value for found, known in offered if known == name]
    if other:
        raise InputError(
            f"blueprint {name!r} is for {other[0]} streams; {_names(offered, kind)} are for {kind} streams"
        )
    hint = did_you_mean(name, [known for _, known in offered]) or f"there are {_names(offered, kind)}"
    raise InputError(f"unknown blueprint {name!r}; {hint}")


def _names(offered: Iterable[tuple[Kind, str]], kind: Kind | None) -> str:
    return ", ".join(sorted({name for found, name in offered if kind in (None, found)}))


def count(module: nn.Module) -> int:
    """Return the number of parameters of a module."""
    return sum(parameter.numel() for parameter in module.parameters())


@contextmanager
def drawn_with(key: int) -> Iterator[None]:
    """Seed torch's global generators with a key inside the block, and restore them afterwards."""
    # torch.manual_seed formats the stack for each kind of device that is not in use yet, a millisecond in a deep stack, and seeds
    # that device when it begins, so that a user's own loop would draw from there.
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=gpus):
        for generator in (torch.default_generator, *(torch.cuda.default_generators[gpu] for gpu in gpus)):
            generator.manual_seed(key)
        yield


def check(entry: Blueprint) -> None:
    """Check a blueprint at two sizes: two widths, and for maps two resolutions, for sequences two lengths.

    The change must have the shape of the stream and be exactly 0 at initialisation. Some gradient must differ from 0.
    Twice the first step must make twice the change. Every parameter must move within five optimizer steps. The declared
    number of parameters must be right. A change at a position of a sequence must not depend on later positions, unless
    the blueprint says that it looks ahead. Raises InputError, in one sentence, on the first check that fails.
    """
    # A bypass of maps or sequences can cross a segment that changes the number of features; one of vectors does not.
    differ = entry.tap == Tap.INPUT or (entry.kind != Kind.VECTOR and entry.tap == Tap.BEFORE)
    sizes = ((5, 8), (9, 5)) if differ else ((5, 5), (8, 8))
    for (reads, writes), shape in zip(sizes, _POSITIONS[entry.kind], strict=True):
        with drawn_with(reads):
            try:
                module = entry.build(reads, writes)
            except Exception as error:  # a user's builder can raise any error; its first line gives the reason
                raise InputError(
                    f"blueprint {entry.name!r} cannot be built for widths ({reads}, {writes}): {first_line(error)}; "
                    "take the width read and the width written"
                ) from None
            if not isinstance(module, nn.Module):
                raise InputError(f"blueprint {entry.name!r} builds {kind_of(module)}; return an nn.Module")
            features = STREAMS[entry.kind].features
            u, pull = (torch.randn(16, *shape, width).movedim(-1, features) for width in (reads, writes))
            _check_size(entry, module, u.contiguous(), pull.contiguous())


_POSITIONS = {
    Kind.VECTOR: ((), ()),
    Kind.MAP: ((4, 4), (7, 6)),
    Kind.SEQUENCE: ((6,), (9,)),
    Kind.VOLUME: ((4, 4, 4), (3, 5, 4)),
}
"""Shape of the positions of an example at each of the two sizes of a check."""


def _check_size(entry: Blueprint, module: nn.Module, u: Tensor, pull: Tensor) -> None:
    def refuse(what: str, mend: str) -> InputError:
        return InputError(f"blueprint {entry.name!r} {what}; {mend}")

    reads, writes = (x.shape[STREAMS[entry.kind].features] for x in (u, pull))
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
    except Exception as error:  # a user's module can raise any error, too
        raise refuse(
            f"cannot run on {tuple(u.shape)}: {first_line(error)}", "build it for the widths it is given"
        ) from None
    if not isinstance(delta, Tensor):
        raise refuse(f"returns {kind_of(delta)}", "return one tensor, the change")
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

    once, twice = (_after_a_step(module, u, pull, rate) for rate in (1e-3, 2e-3))
    if not torch.allclose(twice, 2 * once, rtol=0.05, atol=float(once.abs().max()) / 20):
        raise refuse(
            "does not change in proportion to its first step",
            "end it in a zero-initialised linear map, with no normalisation behind it",
        )

    before = copy.deepcopy(module.state_dict())
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(5):
        _step(optimizer, module, u, pull)
        if not any(p.grad is not None and p.grad.count_nonzero() for p in module.parameters()):
            raise dead
    still = [name for name, p in module.named_parameters() if torch.equal(p, before[name])]
    if still:
        raise refuse(f"never moves {', '.join(still)}", "leave out parameters whose gradient is always 0")
    if entry.kind == Kind.SEQUENCE and entry.causal:
        _check_causal(entry, module, u)


@torch.no_grad()
def _check_causal(entry: Blueprint, module: nn.Module, u: Tensor) -> None:
    """Raise InputError if a trained module's change depends on the values of u (B, L, C) at later positions."""
    for parameter in module.parameters():  # away from its initial weights, at which every change is 0
        parameter.add_(torch.randn(parameter.shape).to(parameter.dtype), alpha=0.3)
    delta = module(u)
    for first in range(1, u.shape[1]):
        other = u.clone()
        other[:, first:] = torch.randn(other[:, first:].shape)
        seen = (module(other)[:, :first] != delta[:, :first]).any(2).any(0).nonzero()
        if len(seen):
            raise InputError(
                f"blueprint {entry.name!r} looks ahead: its change at position {int(seen[0])} of {u.shape[1]} depends on "
                f"positions from {first} on; mask later positions, or register it with causal=False for slots that are not causal"
            )


def _step(optimizer: torch.optim.Optimizer, module: nn.Module, u: Tensor, pull: Tensor) -> None:
    """Move what a module returns for u towards `pull`."""
    optimizer.zero_grad()
    ((module(u) - pull) ** 2).mean().backward()
    optimizer.step()


def _after_a_step(module: nn.Module, u: Tensor, pull: Tensor, rate: float) -> Tensor:
    moved = copy.deepcopy(module)
    _step(torch.optim.SGD(moved.parameters(), lr=rate), moved, u, pull)
    return moved(u).detach()


LINEAR = ("affine", "low-rank", "bypass-linear", "bypass-rank-", "bypass-conv-", "full-head", "sparse-", "repeat")
"""How the names of built-in blueprints begin whose change is a linear map of what they read."""


def _built_in(
    name: str, tap: Tap, build: Build, parameters: Count, summary: str, kind: Kind = Kind.VECTOR, **live: Any
) -> None:
    entry = Blueprint(name, kind, tap, build, parameters, summary, linear=name.startswith(LINEAR), **live)
    (LIVE_BLUEPRINTS if live else BLUEPRINTS)[kind, name] = entry


def _mlp(hidden: int) -> tuple[Build, Count]:
    return lambda r, w: MLPSeed(r, w, hidden), lambda r, w: hidden * (r + 1) + w * (hidden + 1)


def _rank(rank: int) -> tuple[Build, Count]:
    return lambda r, w: Factored(r, w, rank), lambda r, w: rank * (r + w)


_built_in("affine", Tap.HERE, lambda r, w: Affine(w), lambda r, w: 2 * w, "scale and shift of every feature")
_built_in("low-rank", Tap.HERE, lambda r, w: LowRank(r, w, 2), lambda r, w: 2 * (r + w) + w, "linear map of rank 2")
_built_in("mlp-small", Tap.HERE, *_mlp(6), "one hidden layer of 6 units: depth")
_built_in("mlp-large", Tap.HERE, *_mlp(24), "one hidden layer of 24 units: depth")
_built_in("gated", Tap.HERE, Gated, lambda r, w: 2 * (r * w + w), "linear map under a learned gate per feature")
_built_in("bypass-linear", Tap.BEFORE, LinearMap, lambda r, w: r * w + w, "linear map around the segment: width")
_built_in("bypass-mlp", Tap.BEFORE, *_mlp(16), "hidden layer of 16 units around the segment: width")
_built_in("bypass-mlp-small", Tap.BEFORE, *_mlp(4), "hidden layer of 4 units around the segment: width")
for _k in (1, 2, 4, 8):
    for _kind, _at in ((Kind.VECTOR, ""), (Kind.SEQUENCE, " at each position")):
        _about = f"linear map of rank {_k}{_at} around the segment: width"
        _built_in(f"bypass-rank-{_k}", Tap.BEFORE, *_rank(_k), _about, _kind)
_built_in("skip-mlp", Tap.INPUT, *_mlp(8), "hidden layer of 8 units from the host's input")
for _k in (2, 8):
    _built_in(f"bypass-mlp-{_k}", Tap.BEFORE, *_mlp(_k), f"hidden layer of {_k} units around the segment: width")


def _ends(kind: Kind, full: Build, what: str, sparse: Callable[[int, int, int], nn.Module]) -> None:
    most, rows = "8 rows of %s, those with the largest gradient", 8
    for name, build, parameters, summary in (
        ("full-head", full, lambda r, w: r * w + w, what),
        ("sparse-rows", lambda r, w: SparseRows(r, w, rows), lambda r, w: min(rows, r) * w, most % "an embedding"),
        ("sparse-head", lambda r, w: sparse(r, w, rows), lambda r, w: min(rows, w) * (r + 1), most % "a last layer"),
    ):
        _built_in(name, Tap.BEFORE, build, parameters, summary, kind)


_ends(Kind.VECTOR, LinearMap, "linear map around a last layer", SparseHead)


def _convolutional(kind: Kind) -> None:
    """Register the blueprints of a kind of stream with channels at positions of 2 or 3 sides."""
    sides = STREAMS[kind].axes - 1
    area, one, three = 3**sides, "x".join("1" * sides), "x".join("3" * sides)
    here, before = Tap.HERE, Tap.BEFORE

    def convs(*sizes: int, hidden: tuple[int, ...] = ()) -> tuple[Build, Count]:
        def parameters(r: int, w: int) -> int:
            each = zip((r, *hidden), (*hidden, w), sizes, strict=True)
            return sum(after * (size**sides * before + 1) for before, after, size in each)

        return partial(maps.convolutions, sizes=sizes, hidden=hidden, sides=sides), parameters

    add = partial(_built_in, kind=kind)
    add("norm", here, lambda r, w: maps.Norm(w, sides), lambda r, w: 2 * w, "each example normalised")
    about = "a factor for every channel from the means of all"
    add("squeeze-excite", here, lambda r, w: maps.SqueezeExcite(w, 4), lambda r, w: 4 * (r + 1) + 5 * w, about)
    about, separable = f"{three} within each channel, then {one} across them", maps.depthwise_separable
    add("depthwise-separable", here, partial(separable, sides=sides), lambda r, w: (area + 1) * r + r * w + w, about)
    add("bottleneck", here, *convs(1, 3, 1, hidden=(4, 4)), f"{one} to 4 channels, {three}, {one} back: depth")
    add("conv-light", here, *convs(3, 1, hidden=(4,)), f"{three} to 4 channels, then {one}: depth")
    add("conv-heavy", here, *convs(3, 3, hidden=(16,)), f"{three} to 16 channels, then {three}: depth")
    add(f"bypass-conv-{one}", before, *convs(1), f"{one} around the segment: width")
    add(f"bypass-conv-{three}", before, *convs(3), f"{three} around the segment: width")
    about = f"{three} to 8 channels, then {three}, around the segment: width"
    add(f"bypass-mlp-{three}", before, *convs(3, 3, hidden=(8,)), about)
    add("skip-conv", Tap.INPUT, *convs(3, 1, hidden=(8,)), f"{three} to 8 channels from the host's input, then {one}")
    for name in ("low-rank", "mlp-small", *(f"bypass-rank-{k}" for k in (1, 2, 4, 8)), "bypass-mlp-small"):
        entry = BLUEPRINTS[Kind.VECTOR, name]
        of_vectors = partial(maps.Channelwise, entry.build, sides=sides)
        add(name, entry.tap, of_vectors, entry.parameters, f"{entry.summary}, at each position")


_convolutional(Kind.MAP)
_add = partial(_built_in, kind=Kind.SEQUENCE)
_add("norm", Tap.HERE, lambda r, w: sequences.NormSeed(w), lambda r, w: 2 * w, "each position normalised")
_about = "linear map of rank 4 at each position"
_add("low-rank", Tap.HERE, lambda r, w: LowRank(r, w, 4), lambda r, w: 4 * (r + w) + w, _about)
_add("mlp-small", Tap.HERE, *_mlp(8), "one hidden layer of 8 units at each position: depth")
_add("mlp-large", Tap.HERE, *_mlp(32), "one hidden layer of 32 units at each position: depth")
_about = "linear map at each position under a learned gate per feature"
_add("gated", Tap.HERE, Gated, lambda r, w: 2 * (r * w + w), _about)
_about = "weighted sum of the last 4 positions, feature by feature"
_add("causal-conv", Tap.HERE, lambda r, w: sequences.CausalConv(w, 4), lambda r, w: 5 * w, _about)
_about = "one causal head of 8 features"
_add("attention", Tap.HERE, lambda r, w: sequences.Attention(r, w, 8), lambda r, w: 24 * r + 9 * w, _about)
_about = "linear map at each position around the segment: width"
_add("bypass-linear", Tap.BEFORE, LinearMap, lambda r, w: r * w + w, _about)
for _name, _units in (("bypass-mlp", 16), ("bypass-mlp-small", 4)):
    _about = f"hidden layer of {_units} units at each position around the segment: width"
    _add(_name, Tap.BEFORE, *_mlp(_units), _about)
_about = "linear map of the normalised features around a last layer"
_ends(Kind.SEQUENCE, sequences.FullHead, _about, sequences.NormedSparseHead)
_convolutional(Kind.VOLUME)


def _copy_only(*_: int) -> NoReturn:
    raise InputError(
        "a blueprint that copies the submodule of a site has no widths of its own; esper.Growth makes the copy"
    )


for _kind in Kind:
    _about = "the block of the site again, with its own weights, by a learned number: depth (esper.Growth alone)"
    _built_in("repeat", Tap.HERE, lambda r, w: LearnedScale(), lambda r, w: 1, _about, _kind, again=True)
    _about = "a further block like that of the site, faded in behind it: depth (esper.Growth alone)"
    _built_in("block", Tap.HERE, _copy_only, _copy_only, _about, _kind, copies="behind")
    _about = "a quarter of the heads, gated units or channels of the submodule again: width (esper.Growth alone)"
    _built_in("narrow-copy", Tap.HERE, _copy_only, _copy_only, _about, _kind, copies="beside")
