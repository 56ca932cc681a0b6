"""Run a planned pass over a body. n rows, S slots, B examples, X branches."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from esper.kasmina.blending import Straight
from esper.kasmina.chain import Chain
from esper.kasmina.layout import BEFORE, INPUT
from esper.kasmina.memory import append_rows, channels_last, energy, in_layout_of, select_rows
from esper.kasmina.plan import CallDoses, CallPlan, Doses, Indices, Plan, Route, Run
from esper.kasmina.slot import slot_change
from esper.kasmina.stack import Rows, Stack
from esper.leyline.batches import Batch, map_leaves
from esper.leyline.keys import key
from esper.leyline.sites import Taps
from esper.leyline.slots import Tap
from esper.leyline.streams import Stream

if TYPE_CHECKING:
    from esper.kasmina.body import Body

Kept = Literal["none", "here", "all"]
Caller = Callable[..., Tensor]
"""Calls a stack: takes it and the arguments of `Stack.__call__`."""


class Streams(NamedTuple):
    """What one slot reads in a pass.

    Attributes:
        here ((n, B, ...) tensor): the stream in front of any seed
        before ((n, B, ...) tensor, or a batch with such leaves): the input of the segment in front of the slot
        inner ((n, B, ...) tensor or None): the features inside that segment, if the host offers them and they were asked for
    """

    here: Tensor
    before: Any
    inner: Tensor | None


class Pass(NamedTuple):
    """The result of a forward pass.

    Attributes:
        output ((n, B, ...) tensor): outputs of the environments
        branches ((X, B, ...) tensor or None): outputs of the branches, in their order
        streams (S Streams): one for each slot, if asked for
        proximal ((n,) tensor or None): the sum over the straight-through seeds of each environment of |c|^2 / |h|^2
    """

    output: Tensor
    branches: Tensor | None
    streams: tuple[Streams, ...]
    proximal: Tensor | None


class _Flow(NamedTuple):
    """The stream of the rows of a pass, and that of the branches that have left them so far."""

    base: Any  # (n, B, ...) tensor; before the first segment a batch with leaves (n, B, ...)
    extra: Tensor | None  # (m, B, ...)


class _Rows(NamedTuple):
    """Rows of a stack of seeds, which compute as one seed."""

    stack: Stack
    rows: Rows
    frozen: bool
    keys: Indices | None
    run: Caller

    def delta(self, u: Tensor) -> Tensor:
        return self.run(self.stack, u, self.rows, part="delta", frozen=self.frozen, keys=self.keys)

    def gate(self, u: Tensor) -> Tensor:
        return self.stack(u, self.rows, part="gate", frozen=self.frozen)


class Step:
    """Compute a plan: a function of a body's columns, the doses of the plan, and a batch."""

    def __init__(self, body: "Body", plan: Plan) -> None:
        self.body, self.plan = body, plan
        self.segment_of = {path: index for index, path in enumerate(body.layout.chain.paths)}
        self.merged = self._merged()

    def __call__(self, x: Batch, doses: Doses, kept: Kept, keys: Indices | None) -> Pass:
        """Run the plan over a batch of its part, leaves x (n, B, ...); the arguments are those of `Body.run`."""
        body, plan = self.body, self.plan
        x = map_leaves(channels_last, x)
        if body.by_row and plan.bare and kept == "none" and not body.host.draws and body.recomputed is None:
            # A host that runs in a loop saves one call per segment here; the kernels are the same.
            return body.masked(Pass(body.host(x, slice(*plan.part)), None, (), None), Route(plan, doses))
        running = _Running(self, doses, kept, keys)
        chain = body.layout.chain if kept != "none" or self.merged is None else self.merged
        flow = chain.run(running.call, _Flow(x, None), running.visit)
        result = Pass(flow.base, flow.extra, tuple(running.streams), running.proximal)
        return body.masked(result, Route(plan, doses))

    def _merged(self) -> Chain | None:
        """Return the chain in which segments between which nothing happens are one, or None if it saves no call.

        Fused layers save time with every call; of other segments, nothing is gained.
        """
        body, plan = self.body, self.plan
        if plan.joins or body.recomputed is not None:
            return None
        chain = body.layout.chain.merged([slot for slot, calls in enumerate(plan.base) if calls])
        parts = [body.host.part(path) for path in chain.paths]
        fused = all(part.way == "direct" and part.layers is not None for part in parts)
        return chain if fused and len(parts) < len(self.segment_of) else None


class _Running:
    """The state of one run of a plan, with the `call` and `visit` that its chain takes."""

    def __init__(self, step: Step, doses: Doses, kept: Kept, keys: Indices | None) -> None:
        self.step, self.doses, self.kept, self.keys = step, doses, kept, keys
        self.body, self.plan = step.body, step.plan
        self.part = slice(*step.plan.part)
        self.frozen = kept == "all"
        again = step.body.recomputed
        self.run: Caller = again if again is not None and kept == "none" and torch.is_grad_enabled() else _called
        self.origin: Tensor | None = None  # the network's input for each branch that has left already
        self.streams: list[Streams] = []
        self.proximal: Tensor | None = None

    def call(self, path: str, flow: _Flow) -> _Flow:
        """Run a segment of the hosts."""
        host = self.body.host
        segment = self.step.segment_of.get(path, 0)  # merged segments draw nothing and have no branches
        base = self.run(host, flow.base, self.part, part=path, frozen=self.frozen, keys=_of(self.keys, segment))
        extra = flow.extra
        if extra is not None:
            rows = _rows(self.plan.joins[segment].run, self.doses.joins[segment].rows)
            extra = self.run(host, extra, rows, part=path, frozen=True)
        return _Flow(base, extra)

    def visit(self, slot: int, taps: Taps[_Flow]) -> _Flow:
        """Let branches leave, keep the streams that were asked for, and add the changes of the seeds of a slot."""
        (h, extra), before, x = taps.here, taps.before.base, taps.input.base
        layout = self.body.layout
        segment, place = layout.slots[slot].after, len(self.step.segment_of) + slot
        extra_before = taps.before.extra
        env = self.doses.joins[segment].env if self.plan.joins else None
        if env is not None:
            extra = append_rows(extra, select_rows(h.detach(), env))
            if layout.widest.taps[slot, BEFORE]:
                extra_before = append_rows(extra_before, select_rows(before.detach(), env))
            if layout.reads_input and layout.widest.taps[:, INPUT].any():
                self.origin = append_rows(self.origin, select_rows(x, env))
        if self.frozen and not h.requires_grad:
            h = h.detach().requires_grad_()
        if self.kept != "none":
            inner = self._inner(slot, before) if self.frozen else None
            self.streams.append(Streams(h, before, inner))
        for plan, doses in zip(self.plan.base[slot], self.doses.base[slot], strict=True):
            h = self._grown(plan, doses, {Tap.HERE: h, Tap.BEFORE: before, Tap.INPUT: x}, _of(self.keys, place))
        if extra is not None:
            keys = None if self.keys is None else _of(self.keys[self.doses.owners[: len(extra)]], place)
            for plan, doses in zip(self.plan.branch[slot], self.doses.branch[slot], strict=True):
                sources = {Tap.HERE: extra, Tap.BEFORE: extra_before, Tap.INPUT: self.origin}
                extra = self._grown(plan, doses, sources, keys)
        return _Flow(h, extra)

    def _inner(self, slot: int, before: Batch) -> Tensor | None:
        """Return the inner features of the segment in front of a slot, computed again; None if the host does not offer them."""
        spec, z = self.body.slots[slot], map_leaves(Tensor.detach, before)
        for index in range(spec.inner or 0):
            z = self.body.host(z, self.part, part=f"segments.{spec.after}.{index}", frozen=True)
        return z if spec.inner else None

    def _grown(self, plan: CallPlan, doses: CallDoses, sources: dict[Tap, Any], keys: Indices | None) -> Tensor:
        """Return the stream behind the seeds of one call."""
        stream, h = self.body.layout.streams[plan.slot], sources[Tap.HERE]
        u = _read(plan, doses, sources, stream)
        acts_on = select_rows(h, doses.where) if plan.blended or plan.straight else h
        if plan.straight:
            u, acts_on = u.detach(), acts_on.detach()
        elif doses.attached is not None:
            u = torch.where(doses.attached, u, u.detach())
        drawn = keys[doses.places] if keys is not None else None
        stack = self.body.stacks[plan.slot, plan.form]
        seed = _Rows(stack, _rows(plan.run, doses.rows), plan.frozen, drawn, self.run)
        change = slot_change(stream, acts_on, u, seed, doses.alpha, doses.blend, gated=plan.gated).to(h.dtype)
        if plan.straight:
            where = doses.where if doses.where is not None else torch.arange(len(h), device=h.device)
            size = energy(acts_on)
            tiny = torch.finfo(size.dtype).tiny  # |h|^2 is 0 where a stream is 0 everywhere
            if self.proximal is None:
                self.proximal = size.new_zeros(len(h))
            self.proximal = self.proximal.index_add(0, where, energy(change) / size.clamp(min=tiny))
            return Straight.of(h, change, where)
        grown = h + change if doses.where is None else h.index_add(0, doses.where, change)
        return in_layout_of(h, grown)


def _read(plan: CallPlan, doses: CallDoses, sources: dict[Tap, Any], stream: type[Stream]) -> Tensor:
    """Return what the rows of a call read, each by its own tap, at the resolution of the stream."""
    first, *others = plan.taps
    h = sources[Tap.HERE]
    u = stream.fitted(select_rows(sources[first], doses.where), h)
    for tap in others:
        u = torch.where(doses.tap[tap], stream.fitted(select_rows(sources[tap], doses.where), h), u)
    return u


def _rows(run: Run, gathered: Indices | None) -> Rows:
    if isinstance(run, tuple):
        return slice(*run)
    assert gathered is not None, "the doses must be those of the plan"
    assert len(gathered) == run, "the doses must be those of the plan"
    return gathered


def _called(stack: Stack, *arguments: Any, **options: Any) -> Tensor:
    return stack(*arguments, **options)


def _of(keys: Indices | None, place: int) -> Indices | None:
    """Derive the keys of one place of the network, so that no two places draw the same numbers."""
    return None if keys is None else key(keys, place)
