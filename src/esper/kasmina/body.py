"""The body of a population: stacked hosts, stacked seeds, and a forward pass at any doses.

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
from esper.kasmina.plan import Branches, Indices, Plan, PlanCache, Route
from esper.kasmina.planning import OneDose, Planner
from esper.kasmina.recomputing import Recomputed
from esper.kasmina.slot import Seed
from esper.kasmina.stack import Mapping, Stack, convolves
from esper.leyline.batches import Batch, on_cpu, run
from esper.leyline.slots import SlotSpec
from esper.leyline.stages import ADDED, IN_BUDGET, Stage, among
from esper.leyline.streams import Kind
from esper.leyline.view import Bools, Seeds

APART: dict[Kind, int] = {Kind.VECTOR: 2**20, Kind.SEQUENCE: 2**18}
"""Parameters of a host, by the kind of its streams, from which on a CPU runs the rows one after another. It then takes about as
long for several rows as at all at once, and half as long for one (`scripts/benchmark_rows.py`)."""

PLANS = 256
"""Number of plans for which a body keeps what it prepared."""


class Body:
    """All hosts and seeds of a population.

    `host` is one stack of all hosts, run segment by segment; its optimizer step is one operation for any number of
    segments. `stacks[slot, form]` holds the seeds of one form at one slot, and `envs[slot, form]` the environment of
    each of its rows. Rows are sorted by group, then by environment. The groups are: seeds that train with the host,
    doomed seeds, incubating seeds, and seeds that have not run yet. Every pass therefore reads a contiguous run of
    rows. `layout` describes what all rows share, `table` holds the sizes of the host of each row, and `plans` caches
    what is prepared for a pass and counts its reuse.
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
        recomputed: bool = False,
        compiled: bool = False,
    ) -> None:
        """Make room for `rows` hosts, all zero until `plant_host`; `factory` makes the largest of them.

        example (B, ...) is an input of that host; `moments` names the columns that an optimizer keeps beside every
        value. All parameters have the dtype of the host. With `recomputed`, the backward pass of training computes the
        activations inside of segments and seeds again. `compiled` says that passes may be compiled.
        """
        with drawn_with(0):
            host = factory()
        assert isinstance(host, SegmentedHost)
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
        self.table = HostTable(rows, self.layout)
        with torch.no_grad():
            output = run(host.eval(), on_cpu(example, self.dtype))
        self._output_axes = max(output.dim() - 1, 1)  # number of axes of the outputs of one example
        self._widest_output = output.shape[-1] if output.dim() > 1 else 1
        self.real_outputs: Tensor | None = None  # (E, 1, ..., C) bool, where some row has fewer outputs than others
        self.stacks: dict[tuple[int, int], Stack] = {}
        self.envs: dict[tuple[int, int], Indices] = {}
        self.plans: PlanCache[Plan, Step] = PlanCache(PLANS)

    # Surgery.

    def plant_host(self, rows: Sequence[int], module: nn.Module, example: Batch, outputs: int) -> None:
        """Write a newly initialised host into rows; example (B, ...) is an input of that host, at its true width."""
        assert isinstance(module, SegmentedHost)
        self.table.plant(rows, module, self.layout.widths(module, example), outputs)
        for row in rows:
            self.host.write(row, module)

    def mask_outputs(self) -> None:
        """Note which outputs a row does not have, so that `masked` sets them to -inf; called after every host is planted."""
        self.real_outputs = None
        outputs = self.table.outputs
        if (outputs < self._widest_output).any():
            real = np.arange(self._widest_output) < outputs[:, None]
            spread = real.reshape(len(real), *(1,) * self._output_axes, self._widest_output)
            self.real_outputs = torch.from_numpy(spread).to(self.device)

    def edit(self, edits: Edits, seeds: Seeds, birth_key: Callable[[int, int], int]) -> None:
        """Make and free seed modules as the edits say, and sort the rows by their new stages.

        `birth_key(env, slot)` seeds the initialisation of a newly planted seed. The values of the other rows do not
        change.
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
        """Sort the rows of every stack by the groups of their stages."""
        for (slot, form), envs in self.envs.items():
            order = np.lexsort((envs, _rank(seeds, envs, slot)))
            self.stacks[slot, form].arrange(order)
            self.envs[slot, form] = envs[order]

    def clear(self) -> None:
        """Free every seed."""
        self.envs = {at: np.zeros(0, np.int64) for at in self.envs}

    def state(self) -> dict[str, Any]:
        """Return everything that later passes and edits depend on, as a tree of arrays that share memory with the body."""
        return {
            "host": self.host.state(),
            "widths": self.table.state(),
            "seeds": [
                {"slot": slot, "form": form, "envs": self.envs[slot, form], "stack": stack.state()}
                for (slot, form), stack in self.stacks.items()
            ],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned. Raises ValueError if it came from a body of other hosts or another menu.

        The stacks of the seeds are built first, in the order in which they were first made, and then filled.
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
        """Return the rows of each seed stack that an optimizer moves now: those that train with the host, and incubating ones."""
        chosen = {}
        for (slot, form), envs in self.envs.items():
            ranks = _rank(seeds, envs, slot)
            chosen[slot, form] = [_run(ranks == _WITH_HOST), _run(ranks == _INCUBATING)]
        return chosen

    def growth(self, slot: Indices, blueprint: Indices) -> int:
        """Return the bytes that stacks need to grow by for further seeds (n,); 0 if they have room."""
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
        """Return (E,) sums of all parameters of every host and its seeds; a sum is not finite if a parameter is not."""
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
        dose: OneDose,
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
        planner = Planner(self, seeds, train=train, straight=straight, frozen=frozen)
        return planner.route(dose, branches, part or slice(0, len(dose)))

    def run(self, x: Batch, route: Route, *, streams: Kept = "none", keys: Indices | None = None) -> Pass:
        """Run a route over a batch of its part: leaves x (n, B, ...) -> outputs (n, B, ..., C).

        `keys` (n,) seeds dropout in training mode. With streams "here", the stream at each slot and the input of its
        segment are kept. With "all", inner features are kept too, parameters are constants, and the streams are part of
        a graph that begins at the first slot. The only state that changes is the buffers of modules in training mode.
        """
        step = self.plans.get(route.plan, lambda plan: Step(self, plan))
        return step(x, route.doses, streams, keys)

    def masked(self, result: Pass, route: Route) -> Pass:
        """Return the result with -inf in the outputs that a row does not have."""
        if self.real_outputs is None:
            return result
        padded, branches = ~self.real_outputs[route.part], result.branches
        if branches is not None:
            assert route.origin is not None
            branches = branches.masked_fill(padded.index_select(0, route.origin), -torch.inf)
        return result._replace(output=result.output.masked_fill(padded, -torch.inf), branches=branches)

    @property
    def draws(self) -> bool:
        """Whether a module may draw random numbers in training mode, so that a pass needs keys.

        Modules run in a loop may draw. Modules run by vmap may turn out not to be mappable, and are then run in a loop.
        """
        stacks = [(self.host, path) for path in self.layout.chain.paths]
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
        """Set every module to training or evaluation mode."""
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
        """Make an empty stack for a form at a slot."""
        options = self._options
        if self.by_row and self.slots[at[0]].kind == Kind.MAP:
            options = {**options, "mapping": "loop"}
        self.stacks[at] = Stack(self.layout.forms[at], capacity, **options)
        self.envs[at] = np.zeros(0, np.int64)


def runs_by_row(host: SegmentedHost, device: torch.device, mapping: Mapping, *, compiled: bool) -> bool:
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


def _run(chosen: Bools) -> slice:
    """Return the contiguous run of the chosen rows."""
    rows = np.flatnonzero(chosen)
    return slice(int(rows[0]), int(rows[-1]) + 1) if len(rows) else slice(0, 0)
