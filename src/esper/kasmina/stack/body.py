"""Hold the hosts and seeds of a population as stacks, plan forward passes at any doses, and run them.

E environments, S slots, K blueprints of the menu, n rows of a pass, B examples, X branches.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from esper.kasmina.blueprints import Blueprint
from esper.kasmina.host import SegmentedHost, drawn_host, dtype_of, steps_of
from esper.kasmina.lifecycle import Edits
from esper.kasmina.slot import Seed
from esper.kasmina.stack.layout import TAPS, HostTable, Layout
from esper.kasmina.stack.plan import Branches, Indices, Join, Route, SeedCall
from esper.kasmina.stack.rows import (
    RowMapping,
    Rows,
    Stack,
    channels_last,
    convolves,
    energy,
)
from esper.kasmina.stack.tape import PassOperations, PassTape
from esper.leyline.data.batches import Batch, map_leaves, on_cpu, run
from esper.leyline.data.keys import key
from esper.leyline.lifecycle.slots import CONVOLVED, Kind, SlotSpec, Tap
from esper.leyline.lifecycle.view import Seeds
from esper.leyline.lifecycle.vocabulary import ADDED, IN_BUDGET, Blend, Stage, among

APART: dict[Kind, int] = {Kind.VECTOR: 2**20, Kind.SEQUENCE: 2**18}
"""Parameters of a host, by the kind of its streams, from which on a CPU runs the rows one after another. It then takes about as
long for several rows as at all at once, and half as long for one (`scripts/benchmark_rows.py`)."""

Kept = Literal["none", "here", "all"]
Steps = list[tuple[int, str, int | None]]
"""What a pass runs, as `kasmina.host.steps_of` returns it."""


class Streams(NamedTuple):
    """Holds what one slot reads in a pass."""

    here: Tensor  # (n, B, ...) the stream in front of any seed
    before: Any  # (n, B, ...) what a bypass reads
    inner: Tensor | None  # (n, B, ...) the features inside the segment in front, if it has them and they were asked for


class Pass(NamedTuple):
    """Holds the result of a forward pass."""

    output: Tensor  # (n, B, ...) outputs of the environments
    branches: Tensor | None  # (X, B, ...) outputs of the branches, in their order
    streams: tuple[Streams, ...]  # one for each slot, if asked for
    proximal: Tensor | None  # (n,) the sum over the straight-through seeds of each environment of |c|^2 / |h|^2


class Body:
    """Holds and runs all hosts and seeds of a population.

    `host` is one stack of all hosts, run segment by segment; its optimizer step is one operation for any number of
    segments. `stacks[slot, form]` holds the seeds of one form at one slot, and `envs[slot, form]` the environment of
    each of its rows. Rows are sorted by group, then by environment. The groups are: seeds that train with the host,
    doomed seeds, incubating seeds, and seeds that have not run yet. Every pass therefore reads a contiguous run of
    rows. `layout` describes what all rows share, and `table` holds the sizes of the host of each row.
    """

    def __init__(
        self,
        factory: Callable[[], nn.Module],
        menu: Sequence[Blueprint],
        rows: int,
        example: Batch,
        *,
        mapping: RowMapping = "auto",
        isolated: bool = False,
        moments: Sequence[str] = (),
        device: torch.device | str = "cpu",
        recomputed: bool = False,
        compiled: bool = False,
    ) -> None:
        """Make room for `rows` hosts, all zero until `plant_host`; `factory` makes the largest of them.

        example (B, ...) is an input of that host; `moments` names the columns that an optimizer keeps beside every
        value. All parameters have the dtype of the host. With `recomputed`, the backward pass of training computes the
        activations inside of segments and seeds again. `compiled` says that passes may be compiled.
        """
        host = drawn_host(factory)
        self.isolated, self.recomputed = isolated, Recomputed() if recomputed else None
        self.device = torch.device(device)
        self.dtype = dtype_of(host)
        self._moments = tuple(moments)
        self.by_row = runs_by_row(host, self.device, mapping, compiled=compiled)
        large = self.by_row and not convolves(host)
        self._options: dict[str, Any] = {
            "mapping": "loop" if large else mapping, "aligned": large, "moments": self._moments, "device": device,
            "dtype": self.dtype,
        }  # fmt: skip
        self.host = Stack(host, rows, **self._options)
        self.layout = Layout(host, menu, example, self.dtype)
        self.slots: tuple[SlotSpec, ...] = self.layout.slots
        self.table = HostTable(rows, len(self.slots), self.layout.menu)
        with torch.no_grad():
            output = run(host.eval(), on_cpu(example, self.dtype))
        self._output_axes = max(output.dim() - 1, 1)  # number of axes of the outputs of one example
        self._widest_output = output.shape[-1] if output.dim() > 1 else 1
        self.real_outputs: Tensor | None = None  # (E, 1, ..., C) bool, where some row has fewer outputs than others
        self.stacks: dict[tuple[int, int], Stack] = {}
        self.envs: dict[tuple[int, int], Indices] = {}
        self._steps: dict[tuple[int, ...], Steps] = {}  # by the sites at which something happens

    # Surgery.

    def plant_host(self, rows: Sequence[int], module: nn.Module, example: Batch, outputs: int) -> None:
        """Write a newly initialised host into rows; example (B, ...) is an input of that host, at its true width."""
        assert isinstance(module, SegmentedHost)
        self.table.plant(rows, module, self.layout.widths(module, example), outputs)
        for row in rows:
            self.host.write(row, module)

    def mask_outputs(self) -> None:
        """Note which outputs a row does not have, so that `run` sets them to -inf; called after every host is planted."""
        self.real_outputs = None
        outputs = self.table.outputs
        if (outputs < self._widest_output).any():
            real = np.arange(self._widest_output) < outputs[:, None]
            spread = real.reshape(len(real), *(1,) * self._output_axes, self._widest_output)
            self.real_outputs = torch.from_numpy(spread).to(self.device)

    def edit(self, edits: Edits, seeds: Seeds, birth_key: Callable[[int, int], int]) -> None:
        """Make and free seed modules as the edits say, and sort the rows; `birth_key(env, slot)` seeds new weights."""
        for (slot, form), envs in self.envs.items():
            gone = edits.freed[edits.freed[:, 1] == slot, 0]
            kept = np.flatnonzero(~np.isin(envs, gone))
            self.stacks[slot, form].arrange(kept)
            self.envs[slot, form] = envs[kept]
        for env, slot in edits.born.tolist():
            blueprint = int(seeds.blueprint[env, slot])
            at = slot, int(self.layout.form_of[slot, blueprint])
            stack, envs, key_of_birth = self.room(*at), self.envs[at], birth_key(env, slot)
            stack.reserve(len(envs) + 1)
            widths = self.table.widths_of(env, slot, blueprint)
            stack.write(len(envs), self.layout.build(slot, blueprint, key_of_birth, *widths))
            self.envs[at] = np.append(envs, env)
        self.arrange(seeds)

    def arrange(self, seeds: Seeds) -> None:
        """Sort the rows of every stack by the groups of their stages."""
        for (slot, form), envs in self.envs.items():
            order = np.lexsort((envs, _rank(seeds, envs, slot)))
            self.stacks[slot, form].arrange(order)
            self.envs[slot, form] = envs[order]

    def room(self, slot: int, form: int, capacity: int = 2) -> Stack:
        """Return the stack of a form at a slot, made with a capacity where there was none."""
        at = slot, form
        if at not in self.stacks:
            by_row = self.by_row and self.slots[slot].kind in CONVOLVED
            options = {**self._options, "mapping": "loop"} if by_row else self._options
            self.stacks[at] = Stack(self.layout.forms[at], capacity, **options)
            self.envs[at] = np.zeros(0, np.int64)
        return self.stacks[at]

    def clear(self) -> None:
        self.envs = {at: np.zeros(0, np.int64) for at in self.envs}

    def state(self) -> dict[str, Any]:
        """Return everything that later passes and edits depend on, as a tree of arrays that share memory with the body."""
        return {
            "host": self.host.state(),
            "widths": self.table.state(),
            "starts": [slot.start for slot in self.slots],
            "seeds": [
                {"slot": slot, "form": form, "envs": self.envs[slot, form], "stack": stack.state()}
                for (slot, form), stack in self.stacks.items()
            ],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned. Raises ValueError if it came from a body of other hosts or another menu."""
        starts = [slot.start for slot in self.slots]
        if (known := state.get("starts", [slot.after for slot in self.slots])) != starts:
            raise ValueError(f"its bypasses go around the segments from {known} on, where {starts} was expected")
        self.host.load_state(state["host"])
        self.table.load_state(state["widths"])
        self.mask_outputs()
        self.stacks, self.envs = {}, {}
        for entry in state["seeds"]:
            at = entry["slot"], entry["form"]
            if at not in self.layout.forms:
                raise ValueError(f"there is no form {at[1]} at slot {at[0]}")
            self.room(*at, len(entry["stack"]["steps"])).load_state(entry["stack"])
            self.envs[at] = entry["envs"]

    def trainable(self, seeds: Seeds) -> dict[tuple[int, int], list[slice]]:
        """Return the rows of each seed stack that an optimizer moves now: those that train with the host, and incubating ones."""
        chosen = {}
        for (slot, form), envs in self.envs.items():
            ends = np.searchsorted(_rank(seeds, envs, slot), range(_IDLE + 1))  # the rows are sorted by group
            chosen[slot, form] = [slice(*ends[_WITH_HOST : _DOOMED + 1].tolist()), slice(*ends[_INCUBATING:].tolist())]
        return chosen

    def growth(self, slot: Indices, blueprint: Indices) -> int:
        """Return the bytes that stacks need to grow by for further seeds (n,); 0 if they have room."""
        needed = 0
        forms, counts = np.unique(np.stack([slot, self.layout.form_of[slot, blueprint]], 1), axis=0, return_counts=True)
        for (s, form), more in zip(forms.tolist(), counts.tolist(), strict=True):
            stack, rows = self.stacks.get((s, form)), more + len(self.envs.get((s, form), ()))
            capacity = stack.capacity if stack is not None else 0
            if rows > capacity:
                row = sum(p.nbytes for p in self.layout.forms[s, form].parameters()) * (2 + len(self._moments))
                needed += max(rows, 2 * capacity) * row
        return needed

    def finite(self) -> Tensor:
        """Return (E,) sums of all parameters of every host and its seeds; a sum is not finite if a parameter is not."""
        total = self.host.columns["value"].sum(1)
        for at, envs in self.envs.items():
            if len(envs):
                total = total.index_add(0, self._send(envs), self.stacks[at].columns["value"][: len(envs)].sum(1))
        return total

    def seed_module(self, seeds: Seeds, env: int, slot: int) -> Seed:
        """Return a copy of a seed as a module of its own, at its true widths."""
        blueprint = int(seeds.blueprint[env, slot])
        at = slot, int(self.layout.form_of[slot, blueprint])
        row = int(np.flatnonzero(self.envs[at] == env)[0])
        seed = self.layout.build(slot, blueprint, 0, *self.table.widths_of(env, slot, blueprint))
        self.stacks[at].read(row, seed)
        return seed

    # The forward pass.

    def route(
        self,
        dose: NDArray[np.float32],
        seeds: Seeds,
        branches: Branches | None = None,
        *,
        part: slice | None = None,
        train: bool = False,
        straight: bool = False,
        frozen: bool = False,
    ) -> Route:
        """Plan a pass over a part of the rows, or all, at doses (E, S). A seed at dose 0 is not run.

        `branches` are those of the part alone (`Branches.within`). With `train`, a branch is a shadow: only the one
        seed that it adds at its slot learns, and everything else is constant. With `straight`, incubating seeds run
        behind the host in the pass itself. With `frozen`, the parameters of seeds get no gradients.
        """
        part = part or slice(0, len(dose))
        envs, one, none = np.arange(part.start, part.stop), np.float32(1), np.float32(0)
        base: list[tuple[SeedCall, ...]] = []
        for slot in range(len(self.slots)):
            calls = self._calls(seeds, slot, envs, dose[envs, slot], frozen=frozen)
            if straight:
                incubating = np.where(seeds.stage[envs, slot] == Stage.TRAINING, one, none)
                calls += self._calls(seeds, slot, envs, incubating, frozen=False, straight=True)
            base.append(calls)
        if branches is None or not len(branches.env):
            return Route(part, tuple(base))
        branch: list[tuple[SeedCall, ...]] = []
        for slot in range(len(self.slots)):
            # Those that run through the slot, and those that join there if a seed acts on one of them.
            through, there = np.searchsorted(branches.slot, [slot, slot + 1])
            there = there if (branches.dose[through:there, slot] > 0).any() else through
            owners, doses = branches.env[:there], branches.dose[:there, slot]
            learns = train & (branches.slot[:there] == slot)
            calls = self._calls(seeds, slot, owners, np.where(learns, none, doses), frozen=True)
            if train:
                calls += self._calls(seeds, slot, owners, np.where(learns, doses, none), frozen=False)
            branch.append(calls)
        joins = tuple(self._join(segment, branches, branch, envs) for segment in range(len(self.layout.steps)))
        owners = branches.env - part.start
        return Route(part, tuple(base), tuple(branch), joins, self._send(owners), owners)

    def run(
        self,
        x: Batch,
        route: Route,
        *,
        streams: Kept = "none",
        keys: Indices | None = None,
        tape: PassTape | None = None,
    ) -> Pass:
        """Run a route over a batch of its part: leaves x (n, B, ...) -> outputs (n, B, ..., C).

        An output that a row does not have is -inf. `keys` (n,) seeds dropout in training mode. With streams "here", the
        stream at each slot and what a bypass reads there are kept. With "all", inner features are kept too, parameters are
        constants, and the streams are part of a graph that begins at the first slot. A `tape` notes the pass, which then has
        no graph. The only state that changes is the buffers of modules in training mode.
        """
        alone = self.by_row and not self.host.draws and self.recomputed is None
        alone = alone and streams == "none" and not any(route.base) and not route.joins
        x = map_leaves(channels_last, x)
        ops: PassOperations = tape or PassOperations()
        if alone:
            # A host that runs in a loop saves one call per segment here; the kernels are the same.
            result = Pass(self.host(x, route.part), None, (), None)
        else:
            if streams == "none" and torch.is_grad_enabled() and self.recomputed is not None:
                ops = PassOperations(self.recomputed)
            running = _Running(self, route, streams, keys, ops)
            flow = running.run(x, self._merged(route) if streams == "none" else self.layout.steps)
            result = Pass(flow.base, flow.extra, tuple(running.streams), running.proximal)
        if self.real_outputs is None:
            return result
        padded, ends = ~self.real_outputs[route.part], result.branches
        if ends is not None:
            assert route.origin is not None
            ends = ops.masked(ends, padded.index_select(0, route.origin))
        return result._replace(output=ops.masked(result.output, padded), branches=ends)

    def tape(self) -> PassTape | None:
        """Return a tape for a pass of training, or None where autograd has to differentiate it.

        That is where it is traced, computed again, or in another type, and for maps, as the layout of gradients chooses kernels.
        """
        maps = any(slot.kind == Kind.MAP for slot in self.slots)
        apart = maps or self.by_row or self.recomputed is not None or self.host.traced
        return None if apart or torch.is_autocast_enabled(self.device.type) else PassTape()

    @property
    def draws(self) -> bool:
        """Whether a module may draw in training mode, in a loop or where vmap may turn out not to map it, which needs keys."""
        stacks = [(self.host, path) for _, path, _ in self.layout.steps]
        stacks += [(stack, "delta") for stack in self.stacks.values()]
        return any(stack.draws and stack.part(path).way != "direct" for stack, path in stacks)

    @property
    def parts(self) -> list[slice]:
        """The parts that passes run one after another: all rows at once, or each row alone with `by_row`.

        The activations of one network then stay in the processor's cache from its forward to its backward pass.
        """
        capacity = self.host.capacity
        if not self.by_row:
            return [slice(0, capacity)]
        return [slice(row, row + 1) for row in range(capacity)]

    def train(self, mode: bool) -> None:
        self.host.train(mode)
        for stack in self.stacks.values():
            stack.train(mode)

    # Inside.

    def _join(self, segment: int, branches: Branches, calls: Sequence[tuple[SeedCall, ...]], envs: Indices) -> Join:
        """Plan the branches at a segment in a pass over `envs` (n,): those that run through it, and that join behind it.

        calls: of each slot for branches.
        """
        first = sum(slot.after < segment for slot in self.slots)  # the first slot behind the segment
        owners = branches.env[: np.searchsorted(branches.slot, first)]
        here = first < len(self.slots) and self.slots[first].after == segment
        joining = branches.env[branches.slot == first] - envs[0] if here else np.zeros(0, np.int64)
        whole = np.array_equal(joining, np.arange(len(envs)))
        env = self._send(joining) if len(joining) and not whole else None
        seeded = here and any(call.places.max() >= len(owners) for call in calls[first])
        rows = slice(int(envs[0]), int(envs[-1]) + 1) if np.array_equal(owners, envs) else owners
        return Join(rows, len(joining), seeded, env)

    def _calls(
        self, seeds: Seeds, slot: int, envs: Indices, dose: NDArray[np.float32], *, frozen: bool, straight: bool = False
    ) -> tuple[SeedCall, ...]:
        """Plan the forms that run at a slot, over rows of a pass whose environments are `envs` (n,) and doses `dose` (n,)."""

        def column(values: NDArray[np.generic]) -> Tensor:  # (n,) numbers on the CPU as (n, 1, ...) on the device
            return self.layout.streams[slot].column(self._send(values))

        calls = []
        for (at, form), owners in self.envs.items():
            if at != slot or not len(owners):
                continue
            row_of = np.full(len(seeds.stage), -1, np.int64)
            row_of[owners] = np.arange(len(owners))
            where = np.flatnonzero((dose > 0) & (row_of[envs] >= 0))
            if not len(where):
                continue
            # In the order of the stack's rows, so that a pass over the environments reads them in one contiguous run.
            where = where[np.argsort(row_of[envs[where]], kind="stable")]
            rows, env = row_of[envs[where]], envs[where]
            run = slice(int(rows[0]), int(rows[0]) + len(rows))
            blend, taps = seeds.blend[env, slot], self.layout.tap_of[seeds.blueprint[env, slot]]
            used = np.unique(taps).tolist()
            alpha, detached = dose[where].astype(np.float64), seeds.stage[env, slot] != Stage.FOSSILIZED
            calls.append(
                SeedCall(
                    slot,
                    form,
                    tuple(TAPS[tap] for tap in used),
                    gated=bool((blend == Blend.GATE).any()),
                    frozen=frozen,
                    straight=straight,
                    rows=run if np.array_equal(rows, np.arange(run.start, run.stop)) else rows,
                    where=None if np.array_equal(where, np.arange(len(envs))) else self._send(where),
                    places=where,
                    reads=tuple(column(taps == tap) for tap in used[1:]),
                    alpha=column(alpha).to(self.dtype) if (alpha < 1).any() else None,
                    blend=column(blend.astype(np.int64)) if blend.any() else None,
                    attached=column(~detached) if self.isolated and detached.any() else None,
                )
            )
        return tuple(calls)

    def _send(self, rows: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(rows)).to(self.device, non_blocking=True)

    def _merged(self, route: Route) -> Steps:
        """Return the steps in which fused segments between which nothing happens are one; other segments would gain nothing."""
        own = self.layout.steps
        if self.recomputed is not None:
            return own
        joined = [bool(route.joins) and route.joins[slot.after].joining > 0 for slot in self.slots]
        acting = itertools.zip_longest(route.base, route.branch, joined, fillvalue=())
        sites = tuple(slot for slot, happens in enumerate(acting) if any(happens))
        if sites not in self._steps:
            steps = steps_of(len(own), self.slots, sites)
            parts = [self.host.part(path) for _, path, _ in steps]
            fused = all(part.way == "direct" and part.layers is not None for part in parts)
            self._steps[sites] = steps if fused and len(steps) < len(own) else own
        return self._steps[sites]


def runs_by_row(host: SegmentedHost, device: torch.device, mapping: RowMapping, *, compiled: bool) -> bool:
    """Return whether the rows of a population run one after another, each by itself, and not all at once.

    So run hosts with convolutions, and large ones (`APART`) unless passes may be compiled, on a CPU. The numbers of a row then
    do not depend on how many rows there are, and the activations of one network stay in the cache. The rule must not ask for
    the number of rows, because the two ways round differently.
    """
    if device.type != "cpu" or mapping == "vmap":
        return False
    if convolves(host):
        return True
    size = sum(parameter.numel() for parameter in host.parameters())
    return not compiled and size >= max(APART.get(slot.kind, 2**20) for slot in host.slots)


_WITH_HOST, _DOOMED, _INCUBATING, _IDLE = range(4)


def _rank(seeds: Seeds, envs: Indices, slot: int) -> Indices:
    """Return (n,) the group of each row, by which the rows of a stack are sorted."""
    stage, alpha, doomed = seeds.stage[envs, slot], seeds.alpha[envs, slot], seeds.doomed[envs, slot]
    rank = np.full(len(envs), _IDLE, np.int64)
    rank[among(stage, ADDED)] = _WITH_HOST
    rank[doomed & (alpha > 0)] = _DOOMED
    rank[doomed & (alpha == 0)] = _IDLE
    rank[stage == Stage.TRAINING] = _INCUBATING
    assert among(stage, IN_BUDGET).all(), "a stack must not hold a seed that its slot does not hold"
    return rank


class _Flow(NamedTuple):
    """Holds the stream of the rows of a pass, and that of the branches that have left them so far."""

    base: Any  # (n, B, ...) tensor; before the first segment a batch with leaves (n, B, ...)
    extra: Tensor | None  # (m, B, ...)


class _Running:
    """Runs a route once, and holds the state of the run."""

    def __init__(self, body: Body, route: Route, kept: Kept, keys: Indices | None, ops: PassOperations) -> None:
        self.body, self.route = body, route
        self.kept, self.keys, self.frozen = kept, keys, kept == "all"
        self.ops = ops
        # the segments whose input is read behind them, each with the last slot that reads it, and these inputs
        self.last: dict[int, int] = {}
        for at, slot in enumerate(body.layout.slots):
            taps = {tap for calls in (route.base, route.branch) if calls for call in calls[at] for tap in call.taps}
            if Tap.BEFORE in taps or kept != "none":
                self.last[slot.start] = at
            if Tap.INPUT in taps:
                self.last[0] = at
        self.entered: dict[int, _Flow] = {}
        self.streams: list[Streams] = []
        self.proximal: Tensor | None = None

    def run(self, x: Batch, steps: Steps) -> _Flow:
        """Run some steps on leaves x (n, B, ...), with what happens at the sites behind them, and return the last streams."""
        flow = _Flow(x, None)
        for segment, path, slot in steps:
            if segment in self.last:
                self.entered[segment] = flow
            ahead, flow = flow, self._call(segment, path, flow)
            if slot is not None:
                flow = self._visit(slot, flow, ahead.base)
        return flow

    def _call(self, segment: int, path: str, flow: _Flow) -> _Flow:
        """Run the segment of a path, or several that begin at an index, which draw nothing and between which no branch joins."""
        host = self.body.host
        keys = place_keys(self.keys, segment)
        base = self.ops.call(host, flow.base, self.route.part, part=path, frozen=self.frozen, keys=keys)
        extra = flow.extra
        if extra is not None:
            extra = self.ops.call(host, extra, self.route.joins[segment].rows, part=path, frozen=True)
        return _Flow(base, extra)

    def _visit(self, slot: int, here: _Flow, ahead: Any) -> _Flow:
        """Let branches leave, keep the streams that were asked for, and add the changes of the seeds of a slot.

        here: the streams behind the segment in front of the slot; ahead: what the environments read in front of it.
        """
        h, extra = here
        layout, route = self.body.layout, self.route
        start, segment, place = layout.slots[slot].start, layout.slots[slot].after, len(layout.steps) + slot
        join = route.joins[segment] if route.joins else None
        leaving = h
        if join is not None and join.seeded:
            extra = self._joined(join, extra, h)
        read = {tap: self.entered[at] for tap, at in ((Tap.BEFORE, start), (Tap.INPUT, 0)) if at in self.entered}
        if self.frozen and not h.requires_grad:
            h = h.detach().requires_grad_()
        if self.kept != "none":
            inner, count = None, layout.slots[slot].inner
            if self.frozen and count:  # the features inside the segment in front of the slot are computed again
                inner = map_leaves(Tensor.detach, ahead)
                for index in range(count):
                    inner = self.body.host(inner, route.part, part=f"segments.{segment}.{index}", frozen=True)
            self.streams.append(Streams(h, read[Tap.BEFORE].base, inner))
        for call in route.base[slot]:
            sources = {Tap.HERE: h, **{tap: flow.base for tap, flow in read.items()}}
            h = self._with_seed(call, sources, place_keys(self.keys, place))
        if extra is not None:
            keys = None if self.keys is None else place_keys(self.keys[route.owners[: len(extra)]], place)
            for call in route.branch[slot]:
                sources = {Tap.HERE: extra, **{tap: flow.extra for tap, flow in read.items()}}
                extra = self._with_seed(call, sources, keys)
        self.entered = {start: flow for start, flow in self.entered.items() if self.last[start] > slot}
        if join is not None and join.joining and not join.seeded:
            extra = self._joined(join, extra, leaving)  # behind the seeds, which would copy it
        return _Flow(h, extra)

    def _joined(self, join: Join, extra: Tensor | None, h: Tensor) -> Tensor:
        """Append the streams of the branches that join behind a segment."""
        for start, (base, branched) in self.entered.items():
            if isinstance(base, Tensor):  # and not a batch of several tensors, which no seed reads
                here = self.ops.select(self.ops.constant(base), join.where)
                self.entered[start] = _Flow(base, self.ops.append(branched, here))
        return self.ops.append(extra, self.ops.select(self.ops.constant(h), join.where))

    def _with_seed(self, call: SeedCall, sources: dict[Tap, Any], keys: Indices | None) -> Tensor:
        stream, h, ops = self.body.layout.streams[call.slot], sources[Tap.HERE], self.ops
        first, *others = call.taps
        u = ops.fitted(stream, ops.select(sources[first], call.where), h)
        for tap, reads in zip(others, call.reads, strict=True):  # each row reads its own tap
            u = ops.either(reads, ops.fitted(stream, ops.select(sources[tap], call.where), h), u)
        acts_on = ops.select(h, call.where) if call.blend is not None or call.straight else h
        if call.straight:
            u, acts_on = ops.constant(u), ops.constant(acts_on)
        elif call.attached is not None:
            u = ops.either(call.attached, u, ops.constant(u))
        drawn = keys[call.places] if keys is not None else None
        stack, rows = self.body.stacks[call.slot, call.form], call.rows
        delta = ops.call(stack, u, rows, part="delta", frozen=call.frozen, keys=drawn)
        gate = None
        if call.gated:
            gate = stream.spread(ops.call(stack, stream.gated(u), rows, part="gate", frozen=call.frozen))
        change = ops.blended(acts_on, delta, gate, call.alpha, call.blend).to(h.dtype)
        if call.straight:
            where = call.where if call.where is not None else torch.arange(len(h), device=h.device)
            size = energy(acts_on)
            tiny = torch.finfo(size.dtype).tiny  # |h|^2 is 0 where a stream is 0 everywhere
            if self.proximal is None:
                self.proximal = size.new_zeros(len(h))
            pull = ops.apart(lambda change: energy(change) / size.clamp(min=tiny), change)
            self.proximal = ops.add(self.proximal, pull, where)
            return ops.straight(h, change, where)
        return ops.add(h, change, call.where)


def place_keys(keys: Indices | None, place: int) -> Indices | None:
    """Derive the keys of one place of the network, so that no two places draw the same numbers."""
    return None if keys is None else key(keys, place)


class Recomputed:
    """Calls stacks, but stores only the input of a call for the backward pass, which calls again.

    The numbers are those of a call: what is drawn depends on the keys alone, and the second call changes no buffer.
    Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016.
    """

    def __init__(self) -> None:
        self._tried: WeakKeyDictionary[Stack, set[str]] = WeakKeyDictionary()

    def __call__(self, stack: Stack, x: Batch, rows: Rows, *, part: str, **options: Any) -> Tensor:
        tried = self._tried.setdefault(stack, set())
        if part not in tried:
            # Both calls must store the same tensors, so what vmap cannot map has to be found out before the first of them.
            with torch.no_grad(), _unchanged(stack):
                stack(map_leaves(lambda leaf: leaf[:, :2], x), rows, part=part, **options)
            tried.add(part)
        again = partial(checkpoint, stack, x, rows, part=part, use_reentrant=False, preserve_rng_state=False)
        return again(**options, context_fn=lambda: (nullcontext(), _unchanged(stack)))


@contextmanager
def _unchanged(stack: Stack) -> Iterator[None]:
    """Restore all buffers at the end of the context."""
    before = {name: stack.columns[name].clone() for name in stack.buffers}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, buffer in before.items():
                stack.columns[name].copy_(buffer)
