"""The body of a population: stacked hosts, stacked seeds, and a forward pass at any dose.

E environments, S slots, K blueprints of the menu, B examples, X branches.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from esper.kasmina.blueprints import Blueprint, drawn_with
from esper.kasmina.host import SegmentedHost, dtype_of
from esper.kasmina.host_table import HostTable
from esper.kasmina.layout import Layout
from esper.kasmina.lifecycle import Edits
from esper.kasmina.passes import Kept, Pass, Step
from esper.kasmina.plan import Branches, Indices, PlanCache, Route
from esper.kasmina.planning import OneDose, Planner
from esper.kasmina.slot import Seed
from esper.kasmina.stack import Mapping, Stack
from esper.leyline.batches import Batch, on_cpu, run
from esper.leyline.slots import SlotSpec
from esper.leyline.stages import ADDED, IN_BUDGET, Stage, among
from esper.leyline.streams import Kind
from esper.leyline.view import Bools, Seeds

PLANS = 256
"""Plans of passes that a body keeps what it prepared for."""


class Body:
    """All hosts and seeds of a population.

    `host` is one stack, run segment by segment, so that its optimizer is one operation whatever the number of segments.
    `stacks[slot, form]` holds the seeds of one form at one slot, and `envs[slot, form]` which environment each row belongs
    to. Rows are kept in the order: those that train with the host, doomed ones, incubating ones, ones not run yet; each by
    environment. Every pass then reads a contiguous run of rows. `layout` says what all rows have in common, `table` what the
    host of each row is, and `plans` counts how often what was prepared for a pass served again.
    """

    def __init__(
        self,
        factory: Callable[[], nn.Module],
        menu: Sequence[Blueprint],
        rows: int,
        example: Batch,
        *,
        mapping: Mapping = "auto",
        isolated: bool = False,
        moments: Sequence[str] = (),
        device: torch.device | str = "cpu",
    ) -> None:
        """Room for `rows` hosts, all zero until `plant_host`; `factory` makes the largest of them.

        example (B, ...) is some input of that; `moments` names the columns that an optimizer keeps beside every value. All
        parameters are of the dtype of the host's.
        """
        with drawn_with(0):
            host = factory()
        assert isinstance(host, SegmentedHost)
        self.isolated = isolated
        self.device = torch.device(device)
        self.dtype = dtype_of(host)
        self._moments = tuple(moments)
        self.host = Stack(host, rows, mapping=mapping, moments=moments, device=device, dtype=self.dtype)
        self.by_row = self.host.convolves and self.device.type == "cpu" and mapping != "vmap"
        self._mapping: Mapping = mapping
        self.layout = Layout(host, menu, example, self.dtype)
        self.slots: tuple[SlotSpec, ...] = self.layout.slots
        self.table = HostTable(rows, self.layout)
        with torch.no_grad():
            output = run(host.eval(), on_cpu(example, self.dtype))
        self._output_axes = max(output.dim() - 1, 1)  # of one example
        self._widest_output = output.shape[-1] if output.dim() > 1 else 1
        self._real_outputs: Tensor | None = None  # (E, 1, ..., C) bool, where some row has fewer outputs than others
        self.stacks: dict[tuple[int, int], Stack] = {}
        self.envs: dict[tuple[int, int], Indices] = {}
        self.plans: PlanCache[Step] = PlanCache(PLANS)

    # Surgery.

    def plant_host(self, rows: Sequence[int], module: nn.Module, example: Batch, outputs: int) -> None:
        """Put a freshly initialised host into rows; example (B, ...) is some input of it, at its true width."""
        assert isinstance(module, SegmentedHost)
        self.table.plant(rows, module, self.layout.widths(module, example), outputs)
        for row in rows:
            self.host.write(row, module)

    def mask_outputs(self) -> None:
        """Give outputs that a row does not have the value -inf; called when every host is planted."""
        self._real_outputs = None
        outputs = self.table.outputs
        if (outputs < self._widest_output).any():
            real = np.arange(self._widest_output) < outputs[:, None]
            spread = real.reshape(len(real), *(1,) * self._output_axes, self._widest_output)
            self._real_outputs = torch.from_numpy(spread).to(self.device)

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
            "widths": self.table.state(),
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
        self.table.load_state(state["widths"])
        self.mask_outputs()
        self.stacks, self.envs = {}, {}
        for entry in state["seeds"]:
            at = entry["slot"], entry["form"]
            if at not in self.layout.forms:
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

    def growth(self, slot: Indices, blueprint: Indices) -> int:
        """Bytes that further seeds (n,) take while the stacks that they go into grow; 0 where there is room for them."""
        needed = 0
        forms, counts = np.unique(np.stack([slot, self.layout.form_of[slot, blueprint]], 1), axis=0, return_counts=True)
        for (s, form), more in zip(forms.tolist(), counts.tolist(), strict=True):
            stack, rows = self.stacks.get((s, form)), more + len(self.envs.get((s, form), ()))
            capacity = stack.capacity if stack is not None else 0
            if rows > capacity:
                row = sum(parameter.nbytes for parameter in self.layout.forms[s, form].parameters()) * (
                    2 + len(self._moments)
                )
                needed += max(rows, 2 * capacity) * row
        return needed

    def finite(self) -> Tensor:
        """(E,) sums of all parameters of every host and its seeds: not finite where one of them is not."""
        total = self.host.columns["value"].sum(1)
        for at, envs in self.envs.items():
            if len(envs):
                total = total.index_add(
                    0,
                    torch.from_numpy(envs).to(self.device, non_blocking=True),
                    self.stacks[at].columns["value"][: len(envs)].sum(1),
                )
        return total

    def seed_module(self, seeds: Seeds, env: int, slot: int) -> Seed:
        """A copy of a seed as a module of its own, at its true widths."""
        blueprint = int(seeds.blueprint[env, slot])
        at = slot, int(self.layout.form_of[slot, blueprint])
        row = int(np.flatnonzero(self.envs[at] == env)[0])
        seed = self.layout.build(slot, blueprint, 0, *self.table.widths_of(env, slot, blueprint))
        self.stacks[at].read(row, seed)
        return seed

    # The forward pass.

    def route(
        self,
        dose: OneDose,
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
        planner = Planner(self, seeds, train=train, straight=straight, frozen=frozen)
        return planner.route(dose, branches, part or slice(0, len(dose)))

    def run(self, x: Batch, route: Route, *, streams: Kept = "none", keys: Indices | None = None) -> Pass:
        """Run a route over a batch of its part, leaves x (n, B, ...) -> outputs (n, B, ..., C).

        `keys` (n,) seeds dropout in training mode. With streams "here" the stream and what entered its segment are kept for each
        slot; with "all" also inner features, parameters are constants, and the streams are part of a graph that begins at the
        first slot. Changes no state but the buffers of modules in training mode.
        """
        step = self.plans.get(route.plan, lambda plan: Step(self, plan))
        return step(x, route.doses, streams, keys)

    def masked(self, result: Pass, route: Route) -> Pass:
        """Outputs, with -inf where a row does not have one."""
        if self._real_outputs is None:
            return result
        padded, branches = ~self._real_outputs[route.part], result.branches
        if branches is not None:
            assert route.origin is not None
            branches = branches.masked_fill(padded.index_select(0, route.origin), -torch.inf)
        return result._replace(output=result.output.masked_fill(padded, -torch.inf), branches=branches)

    @property
    def draws(self) -> bool:
        """Whether some module may draw in training mode, so that a pass needs keys: what runs in a loop may, and so may what
        vmap is yet to find out that it cannot map.
        """
        stacks = [(self.host, path) for path in self.layout.chain.paths]
        stacks += [(stack, "delta") for stack in self.stacks.values()]
        return any(stack.draws and stack.part(path).way != "direct" for stack, path in stacks)

    @property
    def parts(self) -> list[slice]:
        """The parts that passes go over in turn: everything at once, or each row by itself where convolutions run in a loop.

        The activations of one network then stay in the processor's cache from its forward to its backward pass.
        """
        capacity = self.host.capacity
        if not self.by_row:
            return [slice(0, capacity)]
        return [slice(row, row + 1) for row in range(capacity)]

    def train(self, mode: bool) -> None:
        """Training or evaluation mode of every module."""
        self.host.train(mode)
        for stack in self.stacks.values():
            stack.train(mode)

    # Inside.

    def _germinate(self, env: int, slot: int, seeds: Seeds, key: int) -> None:
        blueprint = int(seeds.blueprint[env, slot])
        at = slot, int(self.layout.form_of[slot, blueprint])
        if at not in self.stacks:
            self._make_room(at, 2)
        stack, envs = self.stacks[at], self.envs[at]
        stack.reserve(len(envs) + 1)
        stack.write(len(envs), self.layout.build(slot, blueprint, key, *self.table.widths_of(env, slot, blueprint)))
        self.envs[at] = np.append(envs, env)

    def _make_room(self, at: tuple[int, int], capacity: int) -> None:
        """An empty stack of a form at a slot."""
        mapping: Mapping = "loop" if self.by_row and self.slots[at[0]].kind == Kind.MAP else self._mapping
        module = self.layout.forms[at]
        self.stacks[at] = Stack(
            module, capacity, mapping=mapping, moments=self._moments, device=self.device, dtype=self.dtype
        )
        self.envs[at] = np.zeros(0, np.int64)


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
