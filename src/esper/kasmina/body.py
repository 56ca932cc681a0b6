"""The body of a population: stacked hosts, stacked seeds, and a forward pass at any dose.

E environments, S slots, K blueprints of the menu, B examples, X branches.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from esper.kasmina import streams as stream_rows
from esper.kasmina.blending import Straight, blend_change
from esper.kasmina.blueprints import Blueprint, count, drawn_with
from esper.kasmina.blueprints.vector import zero_linear
from esper.kasmina.host import SegmentedHost
from esper.kasmina.lifecycle import Edits
from esper.kasmina.route import Branches, Call, Indices, Join, Pass, Route, Streams
from esper.kasmina.stack import Mapping, Rows, Stack
from esper.leyline.actions import Blend
from esper.leyline.keys import key
from esper.leyline.slots import Kind, SlotSpec, Tap
from esper.leyline.stages import ADDED, IN_BUDGET, Stage, among
from esper.leyline.view import Bools, Seeds


class Seed(nn.Module):
    """What a slot holds: the change of a blueprint, and the map of the GATE blend, which starts at g = 1/2."""

    def __init__(self, delta: nn.Module, reads: int) -> None:
        super().__init__()
        self.delta = delta
        self.gate = zero_linear(reads, 1)
        self.draws = getattr(delta, "draws", True)


class Widths(NamedTuple):
    """True widths of a host's streams, 0 where a stream is of another kind than its slot's or there is none."""

    reads: Indices  # (S, K) what each blueprint would read at each slot, 0 where it does not fit
    taps: Indices  # (S, 4) at each slot: the stream, what entered the segment, the host's input, the inner features


class Body:
    """All hosts and seeds of a population.

    `host` is one stack, run segment by segment, so that its optimizer is one operation whatever the number of segments.
    `stacks[slot, form]` holds the seeds of one form at one slot, and `envs[slot, form]` which environment each row belongs
    to. Rows are kept in the order: those that train with the host, doomed ones, incubating ones, ones not run yet; each by
    environment. Every pass then reads a contiguous run of rows.
    """

    def __init__(
        self,
        factory: Callable[[], nn.Module],
        menu: Sequence[Blueprint],
        rows: int,
        example: Tensor,
        *,
        mapping: Mapping = "auto",
        isolated: bool = False,
        moments: Sequence[str] = (),
        device: torch.device | str = "cpu",
    ) -> None:
        """Room for `rows` hosts, all zero until `plant_host`; `factory` makes the largest of them.

        example (B, ...) is some input of that; `moments` names the columns that an optimizer keeps beside every value.
        """
        with drawn_with(0):
            host = factory()
        assert isinstance(host, SegmentedHost)
        self.slots: tuple[SlotSpec, ...] = host.slots
        self.menu = tuple(menu)
        self._skips = any(entry.tap == Tap.INPUT for entry in self.menu)
        self._tap_of = np.array([_TAPS.index(entry.tap) for entry in self.menu], np.int64)
        self.isolated = isolated
        self.device = torch.device(device)
        self.dtype = example.dtype
        self._moments = tuple(moments)
        self.host = Stack(host, rows, mapping=mapping, moments=moments, device=device, dtype=self.dtype)
        self._by_row = self.host.convolves and self.device.type == "cpu" and mapping != "vmap"
        self.segments = len(host.segments)
        self._mapping: Mapping = mapping
        self._slot_after = {slot.after: index for index, slot in enumerate(self.slots)}
        self.widest = self.widths(host, example)
        self.fits: Bools = self.widest.reads > 0  # (S, K)
        shape = rows, len(self.slots), len(self.menu)
        self.host_params = np.zeros(rows, np.int64)
        self.reads = np.zeros(shape, np.int64)  # (E, S, K) the true width that a blueprint would read
        self.taps = np.zeros((*shape[:2], 4), np.int64)  # (E, S, 4) true widths, as `Widths.taps`
        self.cost = np.zeros(shape, np.int64)  # (E, S, K) parameters that a blueprint would add
        self.outputs = np.zeros(rows, np.int64)  # (E,)
        with torch.no_grad():
            self._widest_output = int(host.eval()(example.to("cpu")).shape[1])
        self._real_outputs: Tensor | None = None  # (E, 1, C) bool, where some row has fewer outputs than others
        self.forms, self.form_of = self._forms()
        self.stacks: dict[tuple[int, int], Stack] = {}
        self.envs: dict[tuple[int, int], Indices] = {}

    # Surgery.

    def plant_host(self, rows: Sequence[int], module: nn.Module, example: Tensor, outputs: int) -> None:
        """Put a freshly initialised host into rows; example (B, ...) is some input of it, at its true width."""
        assert isinstance(module, SegmentedHost)
        own = self.widths(module, example)
        cost = [
            [entry.parameters(r, w) if r else 0 for entry, r in zip(self.menu, reads, strict=True)]
            for reads, w in zip(own.reads.tolist(), own.taps[:, 0].tolist(), strict=True)
        ]
        for row in rows:
            self.host.write(row, module)
            self.reads[row], self.taps[row] = own.reads, own.taps
            self.cost[row] = np.reshape(cost, own.reads.shape)
            self.host_params[row], self.outputs[row] = count(module), outputs

    def mask_outputs(self) -> None:
        """Give outputs that a row does not have the value -inf; called when every host is planted."""
        self._real_outputs = None
        if (self.outputs < self._widest_output).any():
            real = np.arange(self._widest_output) < self.outputs[:, None, None]
            self._real_outputs = torch.from_numpy(real).to(self.device)

    def edit(self, edits: Edits, seeds: Seeds, birth_key: Callable[[int, int], int]) -> None:
        """Make and free modules as the edits say, and put rows in the order of their new stages.

        `birth_key(env, slot)` seeds the initialisation of a newborn. No other row's numbers change.
        """
        for (slot, form), envs in self.envs.items():
            gone = edits.freed[edits.freed[:, 1] == slot, 0]
            kept = np.flatnonzero(~np.isin(envs, gone))
            self.stacks[slot, form].arrange(kept)
            self.envs[slot, form] = envs[kept]
        for env, slot in edits.born.tolist():
            self._germinate(env, slot, seeds, birth_key(env, slot))
        self.arrange(seeds)

    def arrange(self, seeds: Seeds) -> None:
        """Put the rows of every stack in the order that their stages ask for."""
        for (slot, form), envs in self.envs.items():
            order = np.lexsort((envs, _rank(seeds, envs, slot)))
            self.stacks[slot, form].arrange(order)
            self.envs[slot, form] = envs[order]

    def clear(self) -> None:
        """Free every seed."""
        self.envs = {at: np.zeros(0, np.int64) for at in self.envs}

    def state(self) -> dict[str, Any]:
        """All that a later pass or edit depends on, as a tree of arrays; tensors share memory."""
        return {
            "host": self.host.state(),
            "widths": {name: getattr(self, name) for name in _WIDTHS},
            "seeds": [
                {"slot": slot, "form": form, "envs": self.envs[slot, form], "stack": stack.state()}
                for (slot, form), stack in self.stacks.items()
            ],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave, of a body of the same hosts and menu. ValueError where it was another.

        The stacks of the seeds are built first, in the order in which they came to be, and then filled.
        """
        self.host.load_state(state["host"])
        for name in _WIDTHS:
            given, known = state["widths"][name], getattr(self, name)
            if given.shape != known.shape or given.dtype != known.dtype:
                raise ValueError(
                    f"{name} is {given.shape} {given.dtype}, where {known.shape} {known.dtype} was expected"
                )
            known[...] = given
        self.mask_outputs()
        self.stacks, self.envs = {}, {}
        for entry in state["seeds"]:
            at = entry["slot"], entry["form"]
            if at not in self.forms:
                raise ValueError(f"there is no form {at[1]} at slot {at[0]}")
            self._make_room(at, len(entry["stack"]["steps"]))
            self.stacks[at].load_state(entry["stack"])
            self.envs[at] = entry["envs"]

    def trainable(self, seeds: Seeds) -> dict[tuple[int, int], list[slice]]:
        """The rows of each seed stack that an optimizer moves now: those that train with the host, and incubating ones."""
        chosen = {}
        for (slot, form), envs in self.envs.items():
            ranks = _rank(seeds, envs, slot)
            chosen[slot, form] = [_run(ranks == _WITH_HOST), _run(ranks == _INCUBATING)]
        return chosen

    def added_params(self, seeds: Seeds, stages: frozenset[Stage] = ADDED) -> Indices:
        """(E,) parameters of the seeds in the given stages, each counted whole, the gate where it is used."""
        counted = among(seeds.stage, stages)
        env, slot = (np.arange(size) for size in seeds.stage.shape)
        env = env[:, None]
        price = self.price(env, slot, np.maximum(seeds.blueprint, 0), seeds.blend)
        return np.asarray(np.where(counted, price, 0).sum(1), np.int64)

    def price(self, env: Indices, slot: Indices, blueprint: Indices, blend: NDArray[np.integer[Any]]) -> Indices:
        """Parameters that seeds add, the gate where it is used; the arrays broadcast."""
        gate = np.where(blend == Blend.GATE, self.reads[env, slot, blueprint] + 1, 0)
        return np.asarray(self.cost[env, slot, blueprint] + gate, np.int64)

    def growth(self, slot: Indices, blueprint: Indices) -> int:
        """Bytes that further seeds (n,) take while the stacks that they go into grow; 0 where there is room for them."""
        needed = 0
        forms, counts = np.unique(np.stack([slot, self.form_of[slot, blueprint]], 1), axis=0, return_counts=True)
        for (s, form), more in zip(forms.tolist(), counts.tolist(), strict=True):
            stack, rows = self.stacks.get((s, form)), more + len(self.envs.get((s, form), ()))
            capacity = stack.capacity if stack is not None else 0
            if rows > capacity:
                row = sum(parameter.nbytes for parameter in self.forms[s, form].parameters()) * (2 + len(self._moments))
                needed += max(rows, 2 * capacity) * row
        return needed

    def finite(self) -> Tensor:
        """(E,) sums of all parameters of every host and its seeds: not finite where one of them is not."""
        total = self.host.columns["value"].sum(1)
        for at, envs in self.envs.items():
            if len(envs):
                total = total.index_add(0, self._send(envs), self.stacks[at].columns["value"][: len(envs)].sum(1))
        return total

    def seed_module(self, seeds: Seeds, env: int, slot: int) -> Seed:
        """A copy of a seed as a module of its own, at its true widths."""
        blueprint = int(seeds.blueprint[env, slot])
        key = slot, int(self.form_of[slot, blueprint])
        row = int(np.flatnonzero(self.envs[key] == env)[0])
        seed = self._build(slot, blueprint, 0, int(self.reads[env, slot, blueprint]), int(self.taps[env, slot, 0]))
        self.stacks[key].read(row, seed)
        return seed

    # The forward pass.

    def forward(self, x: Tensor, dose: NDArray[np.float32], seeds: Seeds, branches: Branches | None = None) -> Pass:
        """Run every host at given doses: x (E, B, ...), dose (E, S) -> outputs (E, B, C). Changes no state."""
        return self.run(x, self.route(dose, seeds, branches))

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
        """Work out a pass over a part of the rows, or all: dose (E, S). A row at dose 0 is not run.

        `branches` are those of the part alone (`Branches.within`). With `train`, a branch is a shadow: the one seed that it
        adds at its slot learns, all else is constant. With `straight`, incubating seeds run behind the host in the pass itself.
        With `frozen` no seed's parameters get gradients.
        """
        part = part or slice(0, len(dose))
        envs = np.arange(part.start, part.stop)
        base = []
        for s in range(len(self.slots)):
            calls = self._calls(s, envs, dose[envs, s], seeds, frozen=frozen)
            if straight:
                incubating = np.where(seeds.stage[envs, s] == Stage.TRAINING, np.float32(1), np.float32(0))
                calls += self._calls(s, envs, incubating, seeds, frozen=False, straight=True)
            base.append(tuple(calls))
        if branches is None or not len(branches.env):
            return Route(part, tuple(base), (), (), None, np.zeros(0, np.int64))
        branch, joins = [], []
        for segment in range(self.segments):
            at = self._slot_after.get(segment)
            running = int(np.searchsorted(branches.slot, self._first_slot(segment)))
            owners = branches.env[:running]
            host: Rows = part if np.array_equal(owners, envs) else owners
            joining = branches.env[branches.slot == at] - part.start if at is not None else np.zeros(0, np.int64)
            joins.append(Join(host, self._send(joining) if len(joining) else None))
            if at is not None:
                there = running + len(joining)
                joined = np.arange(there) >= running
                doses = branches.dose[:there, at]
                if train:
                    old, new = np.where(joined, np.float32(0), doses), np.where(joined, doses, np.float32(0))
                    calls = self._calls(at, branches.env[:there], old, seeds, frozen=True)
                    calls += self._calls(at, branches.env[:there], new, seeds, frozen=False)
                else:
                    calls = self._calls(at, branches.env[:there], doses, seeds, frozen=True)
                branch.append(tuple(calls))
        owners = branches.env - part.start
        return Route(part, tuple(base), tuple(branch), tuple(joins), self._send(owners), owners)

    def run(
        self,
        x: Tensor,
        route: Route,
        *,
        streams: Literal["none", "here", "all"] = "none",
        keys: Indices | None = None,
    ) -> Pass:
        """Run a route over a batch of its part, x (n, B, ...); `keys` (n,) seeds dropout in training mode.

        With streams "here" the stream and what entered its segment are kept for each slot; with "all" also inner features,
        parameters are constants, and the streams are part of a graph that begins at the first slot.
        """
        h = x = stream_rows.laid_out(x)
        if self._by_row and route.bare and streams == "none" and not self.host.draws:
            # A loop saves a call a segment; the kernels are the same.
            return self._masked(self.host(x, route.part), None, route)
        kept, penalty = [], None
        frozen = streams == "all"
        extra: Tensor | None = None
        origin: Tensor | None = None
        rows = route.part
        for segment in range(self.segments):
            before, h = h, self.host(h, rows, part=f"segments.{segment}", frozen=frozen, keys=_of(keys, segment))
            at = self._slot_after.get(segment)
            extra_before = extra
            if extra is not None:
                extra = self.host(extra, route.joins[segment].host, part=f"segments.{segment}", frozen=True)
            if at is None:
                continue
            env = route.joins[segment].env if route.joins else None
            if env is not None:
                extra = stream_rows.append(extra, stream_rows.rows(h.detach(), env))
                extra_before = stream_rows.append(extra_before, stream_rows.rows(before.detach(), env))
                origin = stream_rows.append(origin, stream_rows.rows(x, env)) if self._skips else None
            if frozen and not h.requires_grad:
                h = h.detach().requires_grad_()
            if streams != "none":
                kept.append(Streams(h, before, self._inner(at, before, rows) if frozen else None))
            for call in route.base[at]:
                h, proximal = self._grow(call, h, before, x, _of(keys, self.segments + at))
                if proximal is not None:
                    penalty = proximal if penalty is None else penalty + proximal
            if extra is not None:
                assert extra_before is not None
                there = keys[route.owners[: len(extra)]] if keys is not None else None
                for call in route.branch[at]:
                    extra, _ = self._grow(call, extra, extra_before, origin, _of(there, self.segments + at))
        return self._masked(h, extra, route)._replace(streams=tuple(kept), proximal=penalty)

    def _masked(self, output: Tensor, branches: Tensor | None, route: Route) -> Pass:
        """Outputs, with -inf where a row does not have one."""
        if self._real_outputs is not None:
            padded = ~self._real_outputs[route.part]
            output = output.masked_fill(padded, -torch.inf)
            if branches is not None:
                assert route.origin is not None
                branches = branches.masked_fill(padded.index_select(0, route.origin), -torch.inf)
        return Pass(output, branches, (), None)

    @property
    def draws(self) -> bool:
        """Whether some module may draw in training mode, so that a pass needs keys: what runs in a loop may, and so may what
        vmap is yet to find out that it cannot map.
        """
        stacks = [(self.host, f"segments.{k}") for k in range(self.segments)]
        stacks += [(stack, "delta") for stack in self.stacks.values()]
        return any(stack.draws and stack.part(path).way != "direct" for stack, path in stacks)

    @property
    def parts(self) -> list[slice]:
        """The parts that passes go over in turn: everything at once, or each row by itself where convolutions run in a loop.

        The activations of one network then stay in the processor's cache from its forward to its backward pass.
        """
        capacity = self.host.capacity
        if not self._by_row:
            return [slice(0, capacity)]
        return [slice(row, row + 1) for row in range(capacity)]

    def train(self, mode: bool) -> None:
        """Training or evaluation mode of every module."""
        self.host.train(mode)
        for stack in self.stacks.values():
            stack.train(mode)

    # Inside.

    def _inner(self, slot: int, before: Tensor, rows: slice) -> Tensor | None:
        """The inner features of the segment in front of a slot, run again; None where the host does not offer them."""
        spec, z = self.slots[slot], before.detach()
        for index in range(spec.inner or 0):
            z = self.host(z, rows, part=f"segments.{spec.after}.{index}", frozen=True)
        return z if spec.inner else None

    def _grow(
        self, call: Call, h: Tensor, before: Tensor, x: Tensor | None, keys: Indices | None
    ) -> tuple[Tensor, Tensor | None]:
        """The stream behind a slot, and the proximal term of straight-through seeds."""
        sources = {Tap.HERE: h, Tap.BEFORE: before}
        if x is not None:
            sources[Tap.INPUT] = x
        first, *others = call.taps
        u = stream_rows.fitted(stream_rows.rows(sources[first], call.where), h)
        for tap in others:
            u = torch.where(call.tap[tap], stream_rows.fitted(stream_rows.rows(sources[tap], call.where), h), u)
        stream = stream_rows.rows(h, call.where) if call.blend is not None or call.straight else h
        if call.straight:
            u, stream = u.detach(), stream.detach()
        elif call.attached is not None:
            u = torch.where(call.attached, u, u.detach())
        drawn = keys[call.places] if keys is not None else None
        delta = call.stack(u, call.rows, part="delta", frozen=call.frozen, keys=drawn)
        gate = None
        if call.gated:
            gate = call.stack(stream_rows.pooled(u), call.rows, part="gate", frozen=call.frozen)
            gate = gate.view(*gate.shape, *(1,) * (delta.dim() - gate.dim()))
        change = blend_change(stream, delta, gate, call.alpha, call.blend)
        if call.straight:
            where = call.where if call.where is not None else torch.arange(len(h), device=h.device)
            tiny = torch.finfo(stream.dtype).tiny  # a dead stream is all 0
            ratio = stream_rows.energy(change) / stream_rows.energy(stream).clamp(min=tiny)
            return Straight.apply(h, change, where), ratio.sum()  # type: ignore[no-untyped-call]
        grown = h + change if call.where is None else h.index_add(0, call.where, change)
        return stream_rows.as_laid_out(grown, h), None

    def _calls(
        self, slot: int, envs: Indices, dose: NDArray[np.float32], seeds: Seeds, *, frozen: bool, straight: bool = False
    ) -> list[Call]:
        """The forms that run at a slot, over rows of a pass whose environments are `envs` (n,) and doses `dose` (n,)."""
        calls, dims = [], stream_rows.DIMENSIONS[self.slots[slot].kind]
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
            contiguous = np.array_equal(rows, np.arange(rows[0], rows[0] + len(rows)))
            blend = seeds.blend[env, slot]
            some_less = bool((dose[where] < 1).any())
            taps = self._tap_of[seeds.blueprint[env, slot]]
            used = np.unique(taps).tolist()
            detached = np.zeros(len(env), bool)
            if self.isolated:
                detached = seeds.stage[env, slot] != Stage.FOSSILIZED
            calls.append(
                Call(
                    stack=self.stacks[slot, form],
                    rows=slice(int(rows[0]), int(rows[0]) + len(rows)) if contiguous else rows,
                    where=None if np.array_equal(where, np.arange(len(envs))) else self._send(where),
                    places=where,
                    taps=tuple(_TAPS[t] for t in used),
                    tap={_TAPS[t]: self._column(taps == t, dims) for t in used[1:]},
                    alpha=self._column(dose[where].astype(np.float64), dims).to(self.dtype) if some_less else None,
                    blend=self._column(blend.astype(np.int64), dims) if blend.any() else None,
                    gated=bool((blend == Blend.GATE).any()),
                    attached=self._column(~detached, dims) if detached.any() else None,
                    frozen=frozen,
                    straight=straight,
                )
            )
        return calls

    def _germinate(self, env: int, slot: int, seeds: Seeds, key: int) -> None:
        blueprint = int(seeds.blueprint[env, slot])
        at = slot, int(self.form_of[slot, blueprint])
        if at not in self.stacks:
            self._make_room(at, 2)
        stack, envs = self.stacks[at], self.envs[at]
        stack.reserve(len(envs) + 1)
        reads, writes = int(self.reads[env, slot, blueprint]), int(self.taps[env, slot, 0])
        stack.write(len(envs), self._build(slot, blueprint, key, reads, writes))
        self.envs[at] = np.append(envs, env)

    def _make_room(self, at: tuple[int, int], capacity: int) -> None:
        """An empty stack of a form at a slot."""
        mapping: Mapping = "loop" if self._by_row and self.slots[at[0]].kind == Kind.MAP else self._mapping
        self.stacks[at] = Stack(
            self.forms[at], capacity, mapping=mapping, moments=self._moments, device=self.device, dtype=self.dtype
        )
        self.envs[at] = np.zeros(0, np.int64)

    def _build(self, slot: int, blueprint: int, key: int, reads: int, writes: int) -> Seed:
        with drawn_with(key):
            return Seed(self.menu[blueprint].build(reads, writes), reads).to(self.dtype)

    def widths(self, host: SegmentedHost, example: Tensor) -> Widths:
        """The true widths of a host, from running it on an input of its own, example (B, ...)."""
        training = host.training
        host = host.to(dtype=example.dtype).eval()
        seen = [example.to("cpu")]
        with torch.no_grad():
            for segment in host.segments:
                seen.append(segment(seen[-1]))
            taps = []
            for slot in self.slots:
                inner = None
                if slot.inner is not None:
                    segment = host.segments[slot.after]
                    assert isinstance(segment, nn.Sequential), "inner features are those of an nn.Sequential"
                    inner = seen[slot.after]
                    for module in list(segment)[: slot.inner]:
                        inner = module(inner)
                streams = seen[slot.after + 1], seen[slot.after], seen[0], inner
                taps.append([stream_rows.width(x, slot.kind) for x in streams])
        host.train(training)
        widths = np.array(taps, np.int64).reshape(len(self.slots), 4)
        fits = np.array([[entry.kind == slot.kind for entry in self.menu] for slot in self.slots], bool)
        return Widths(np.where(fits.reshape(len(taps), -1), widths[:, self._tap_of], 0), widths)

    def _forms(self) -> tuple[dict[tuple[int, int], Seed], Indices]:
        """Group the menu of each slot into forms: one module class and width read, run as one stack.

        The module of a form is its largest member, which holds the others in its leading corner.
        """
        forms: dict[tuple[int, int], Seed] = {}
        form_of = np.full(self.fits.shape, -1, np.int64)
        for s in range(len(self.slots)):
            groups: dict[tuple[object, int], list[int]] = {}
            for k, entry in enumerate(self.menu):
                if self.fits[s, k]:
                    delta = self._largest(s, k).delta
                    same = type(delta) if getattr(delta, "pads", False) else entry.name
                    groups.setdefault((same, int(self.widest.reads[s, k])), []).append(k)
            for index, members in enumerate(groups.values()):
                forms[s, index] = max((self._largest(s, k) for k in members), key=count)
                form_of[s, members] = index
        return forms, form_of

    def _largest(self, slot: int, blueprint: int) -> Seed:
        """A seed at the widths of the largest host."""
        widest = self.widest
        return self._build(slot, blueprint, 0, int(widest.reads[slot, blueprint]), int(widest.taps[slot, 0]))

    def _first_slot(self, segment: int) -> int:
        """Index of the first slot that is not in front of a segment."""
        return sum(slot.after < segment for slot in self.slots)

    def _send(self, rows: Indices) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(rows)).to(self.device, non_blocking=True)

    def _column(self, values: NDArray[np.generic], dims: int) -> Tensor:
        """(n,) on the host -> (n, 1, ...) of so many dimensions on the device."""
        sent = torch.from_numpy(np.ascontiguousarray(values)).to(self.device, non_blocking=True)
        return sent.view(-1, *(1,) * (dims - 1))


_TAPS = tuple(Tap)
_WIDTHS = ("host_params", "reads", "taps", "cost", "outputs")  # what `plant_host` knows of every row
_WITH_HOST, _DOOMED, _INCUBATING, _IDLE = range(4)


def _rank(seeds: Seeds, envs: Indices, slot: int) -> Indices:
    """(n,) the group of each row in the order of a stack."""
    stage, alpha, doomed = seeds.stage[envs, slot], seeds.alpha[envs, slot], seeds.doomed[envs, slot]
    rank = np.full(len(envs), _IDLE, np.int64)
    rank[among(stage, ADDED)] = _WITH_HOST
    rank[doomed & (alpha > 0)] = _DOOMED
    rank[doomed & (alpha == 0)] = _IDLE
    rank[stage == Stage.TRAINING] = _INCUBATING
    assert among(stage, IN_BUDGET).all(), "a stack holds a seed that its slot does not"
    return rank


def _run(chosen: Bools) -> slice:
    """The contiguous run of rows that are chosen."""
    rows = np.flatnonzero(chosen)
    return slice(int(rows[0]), int(rows[-1]) + 1) if len(rows) else slice(0, 0)


def _of(keys: Indices | None, place: int) -> Indices | None:
    """The keys of one place of the network, so that no two places draw alike."""
    return None if keys is None else key(keys, place)
