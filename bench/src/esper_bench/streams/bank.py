"""Keep banks of parts: heads and seeds that left a network and may return, and their doses. N rows, M places.

A *part* is the head of a network or the seed of one slot. A place keeps the parts that were active together in one context. Parts
are whole numbers with one bit each: HEAD_PART, and `slot_part` of a slot.
"""

import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from esper.kasmina.stack.rows import Stack
from esper_bench.streams.data import Floats, Ints
from esper_bench.streams.recognition import InputMeans

if TYPE_CHECKING:
    from esper_bench.streams.network import TrunkAndHead

HEAD_PART, EVERY_PART = 1, -1


def slot_part(slot: int) -> int:
    """Return the part that is the seed of a slot, a number of one bit. Slots count from 0."""
    return 2 << slot


SEED_PARTS = EVERY_PART & ~HEAD_PART


class _Places(nn.Module):
    """Runs M copies of the seeds of a network behind heads, in the order of the numbers of a place."""

    stacks = True

    def __init__(self, module: "TrunkAndHead", places: int, holds: int) -> None:
        super().__init__()
        names = [name for name, bits in (("head", HEAD_PART), ("seeds", SEED_PARTS)) if holds & bits]
        own = nn.ModuleDict({name: getattr(module, name) for name in names})
        self.places = nn.ModuleList(copy.deepcopy(own) for _ in range(places)).requires_grad_(False)


class PartBank:
    """Stores parts of N rows, bit for bit as they were when active, and the dose table of each row.

    Attributes:
        holds (int): the parts that places are made for
        regions (tuple): each of these parts, and its numbers in a row of the network
        numbers (Tensor): (N, M, numbers) the stored parts
        held (Ints): (N, M) which parts a place holds; 0 if it is empty
        used (Ints): (N, M) the update at which parts were stored, -1 before
        age (Ints): (N, M) updates for which they have trained
        dose (Tensor): (N, M + 1, M + 1) float32, the dose table. In the context of place c, the seeds of place p act with the
            alpha dose[c, p]; index M stands for the active parts. Parts act with 1 in their own context. Rows and columns move
            with their parts.
        inputs (InputMeans): of the contexts of all places, and of the active parts as index M, if the learner adds them
    """

    def __init__(self, module: "TrunkAndHead", stack: Stack, places: int, holds: int) -> None:
        """Make empty banks for the rows of a stack of `module`."""
        count = stack.capacity
        bits = [HEAD_PART, *(slot_part(slot) for slot in range(len(module.seeds)))]
        names = ["head.", *(f"seeds.{slot}." for slot in range(len(module.seeds)))]
        own = [[place for place in stack.places if place.name.startswith(name)] for name in names]
        self.regions = tuple(
            (bit, slice(each[0].start, each[-1].stop)) for bit, each in zip(bits, own, strict=True) if holds & bit
        )
        self.holds = sum(bit for bit, _ in self.regions)
        self.start = self.regions[0][1].start
        size = self.regions[-1][1].stop - self.start
        self.stack = Stack(_Places(module, places, holds), count) if places and self.holds & SEED_PARTS else None
        flat = torch.zeros(count, places * size) if self.stack is None else self.stack.columns["value"]
        self.numbers = flat.view(count, places, size)
        self.held = np.zeros((count, places), np.int64)
        self.used, self.age = np.full((count, places), -1, np.int64), np.zeros((count, places), np.int64)
        self.dose = torch.eye(places + 1).repeat(count, 1, 1)
        self.inputs = InputMeans(count, places + 1, module.inputs)
        self.width = module.head.in_features

    def _in_place(self, region: slice) -> slice:
        return slice(region.start - self.start, region.stop - self.start)

    def seed(self, h: Tensor, rows: Ints, place: int, slot: int) -> Tensor:
        """Return what a stored seed adds: h (n, B, width) -> (n, B, width). It does not train; gradients reach h."""
        assert self.stack is not None
        return self.stack(h, rows, part=f"places.{place}.seeds.{slot}", frozen=True)

    def head_logits(self, features: Tensor, rows: Ints) -> Tensor:
        """Return the logits of every stored head: features (n, B, width) -> (n, M, B, C). Only for banks of heads alone."""
        n, examples, width = features.shape
        heads = self.numbers[rows]
        classes = heads.shape[-1] // (width + 1)
        weight = heads[..., : classes * width].reshape(n, -1, width).mT  # all heads of a row as one matrix
        bias = heads[..., classes * width :].reshape(n, 1, -1)
        y = torch.baddbmm(bias, features, weight)
        return y.view(n, examples, -1, classes).movedim(2, 1)

    def show(self, value: Tensor, rows: Ints, place: int) -> None:
        """Copy the parts of a place, and its doses, over the active ones; value (N, P). The place keeps its parts.

        The parts that were active before do not act, although they would after STORE if the table says so.
        """
        for bit, region in self.regions:
            own = rows[(self.held[rows, place] & bit) != 0]
            value[own, region] = self.numbers[own, place, self._in_place(region)]
        dose = self.dose[rows, place]
        dose[:, -1] = self.dose[rows, place, place]
        dose[:, place] = 0
        self.dose[rows, -1] = dose

    def move(self, value: Tensor, row: int, store: bool, place: int, parts: int, update: int, age: int) -> int:
        """STORE and ACTIVATE in one row, value (P,), as `Rows.store_and_activate`. Returns the age of the parts now active."""
        parts &= self.holds
        active, order = value.clone(), np.arange(self.held.shape[1] + 1)
        now = age
        if place >= 0:
            moved = parts & int(self.held[row, place])
            assert moved, (row, place)
            self._copy(self.numbers[row, place], value, moved)
            self.held[row, place] &= ~moved
            now = int(self.age[row, place])
            order[-1] = place
            order[place] = place if self.held[row, place] else -1
        if store and len(order) > 1:
            if place < 0:
                place = int(np.where(self.held[row] != 0, self.used[row], -1).argmin())
                self.held[row, place] = 0
            self._copy(active, self.numbers[row, place], parts, out=False)
            self.held[row, place] |= parts
            self.used[row, place], self.age[row, place] = update, age
            order[place] = len(order) - 1
        self._follow(row, order)
        return now

    def _copy(self, source: Tensor, target: Tensor, parts: int, out: bool = True) -> None:
        """Copy parts out of a place into a row of the network, or back."""
        for bit, region in self.regions:
            if parts & bit:
                inside = self._in_place(region)
                target[region if out else inside] = source[inside if out else region]

    def _follow(self, row: int, order: Ints) -> None:
        """Reorder the dose table: index i is now what order[i] was, -1 for nothing. A copy does not act beside its original."""
        old = self.dose[row]
        new = old[order][:, order]
        gone, same = order < 0, (order[:, None] == order) & ~np.eye(len(order), dtype=bool)
        new[gone[:, None] | gone | same] = 0
        alpha = old.diagonal()[order]
        alpha[gone] = 1
        self.dose[row] = new.fill_diagonal_(0) + alpha.diag()
        self.inputs.follow(row, order)

    def set_doses(self, dose: Floats) -> NDArray[np.bool_]:
        """Set the doses (N, M) in the context of the active parts: SET_DOSE. nan leaves a dose, and places without a seed get 0.

        Returns which rows have changed, (N,).
        """
        given = ~np.isnan(dose)
        wanted = torch.from_numpy(np.where(given & ((self.held & SEED_PARTS) != 0), dose, 0.0)).float()
        before = self.dose[:, -1, :-1].clone()
        self.dose[:, -1, :-1] = torch.where(torch.from_numpy(given), wanted, before)
        return np.asarray((self.dose[:, -1, :-1] != before).any(1).numpy())

    def part_from_others(self, rows: Ints) -> None:
        """Separate new active parts from stored ones: they act with 1 in their own context, alone, and in no other context."""
        self.dose[rows, -1, :] = 0
        self.dose[rows, :, -1] = 0
        self.dose[rows, -1, -1] = 1
        self.inputs.seen[rows, -1] = 0

    def empty(self, rows: Ints) -> None:
        """Forget all parts and doses of some rows."""
        self.held[rows] = 0
        self.dose[rows] = torch.eye(self.dose.shape[1])
        self.inputs.seen[rows, :-1] = 0

    def snapshot(self) -> dict[str, Any]:
        """Return everything."""
        return {**{name: getattr(self, name) for name in _STATE}, "inputs": self.inputs.snapshot()}

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `snapshot` returned."""
        for name in _STATE:
            getattr(self, name)[:] = state[name]
        self.inputs.load(state["inputs"])


_STATE = ("numbers", "held", "used", "age", "dose")
