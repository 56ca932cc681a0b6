"""The optimizer updates of a step: the groups of rows that are moved, with or without loss scaling. E rows, n of a group."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from esper.kasmina.body import Body
from esper.kasmina.plan import Indices
from esper.kasmina.stack import Stack
from esper.leyline.stages import ADDED, Stage, among
from esper.leyline.view import Seeds
from esper.tolaria.optimizer import StackedOptimizer, Updates
from esper.tolaria.scaling import GradScaler


class Group(NamedTuple):
    """Rows of a stack that the optimizer moves in this step."""

    updates: Updates
    envs: Indices  # (n,) the row of the population that each belongs to
    norm: Tensor  # (n,) running sum
    names: tuple[str, ...]  # (L,) of the trained parameters
    parts: Tensor | None  # (n, L) running sum of their norms


class Skipped(NamedTuple):
    """The updates of a step that were skipped, because gradients of the row overflowed in float16; on the device.

    Attributes:
        updates ((E,) float32): how many
        lost ((E,) bool): whether gradients overflowed at a scale of at most 1, which no smaller scale mends
    """

    updates: Tensor
    lost: Tensor


class Updating:
    """Make the updates of all groups, and add their norms to the sums."""

    skipped: Skipped | None = None

    def __init__(self, groups: list[Group], updates: int) -> None:
        """updates: how many the step has."""
        self.groups, self.updates = groups, updates

    def factors(self, part: slice) -> Tensor | None:
        """Return the factors (n,) of the losses of a part of the rows; None for 1."""
        return None

    def update(self) -> None:
        """Update every row with its gradients, and set them to 0."""
        for group in self.groups:
            group.norm.add_(group.updates.step(group.parts))

    def mean(self, total: Tensor, group: Group) -> Tensor:
        """Return a sum (n, ...) over the updates of a group, divided by their number."""
        return total / self.updates


class ScaledUpdating(Updating):
    """The same with a scaler. A row skips an update if a gradient of its host, or of one of its seeds, is not finite.

    Norms are means over the updates that a row has made: nan if it has made none, and inf if it is lost.
    """

    skipped: Skipped

    def __init__(self, groups: list[Group], updates: int, scaler: GradScaler, rows: int) -> None:
        super().__init__(groups, updates)
        device = scaler.scale.device
        self._scaler = scaler
        self._envs = {id(group): torch.from_numpy(group.envs).to(device, non_blocking=True) for group in groups}
        self.skipped = Skipped(torch.zeros(rows, device=device), torch.zeros(rows, dtype=torch.bool, device=device))

    def factors(self, part: slice) -> Tensor | None:
        """Return the scales (n,) of a part of the rows."""
        return self._scaler.scale[part]

    @torch.no_grad()
    def update(self) -> None:
        """Update every row whose gradients are finite, set all gradients to 0, and adapt the scales."""
        scale, (count, lost) = self._scaler.scale, self.skipped
        norms = [(group, self._of(scale, group)) for group in self.groups]
        norms = [(group, group.updates.norm(own)) for group, own in norms]
        infinite = torch.zeros_like(count)
        for group, norm in norms:
            infinite.index_add_(0, self._envs[id(group)], (~norm.isfinite()).to(count.dtype))
        overflowed = infinite > 0
        self.skipped = Skipped(count + overflowed, lost | overflowed & (scale <= 1))
        for group, norm in norms:
            taken = ~self._of(overflowed, group)
            group.updates.apply(norm, group.parts, taken)
            group.norm.add_(norm.where(taken, 0))
        self._scaler.update(overflowed)

    def mean(self, total: Tensor, group: Group) -> Tensor:
        """Return a sum (n, ...) over the updates that a group has made, divided by their number."""
        shape = -1, *(1,) * (total.dim() - 1)
        count, lost = (self._of(each, group).view(shape) for each in self.skipped)
        return (total / (self.updates - count)).masked_fill(lost, torch.inf)

    def _of(self, values: Tensor, group: Group) -> Tensor:
        """Return the values (n,) of a group out of those (E,) of the population."""
        return values.index_select(0, self._envs[id(group)])


def trained_groups(
    body: Body, seeds: Seeds, optimizer: StackedOptimizer, parameter_norms: bool
) -> tuple[list[Group], list[tuple[int, Indices]]]:
    """Return the group of the hosts, then those of the seeds that train; and the slot and the rows (n,) of each of the latter.

    The sums of the norms of each parameter are None without `parameter_norms`.
    """
    rows = len(seeds.stage)
    groups, owners = [_group(body.host, slice(0, rows), np.arange(rows), optimizer, parameter_norms)], []
    for (slot, form), runs in body.trainable(seeds).items():
        for run in runs:
            if run.stop > run.start:
                envs = body.envs[slot, form][run]
                groups.append(_group(body.stacks[slot, form], run, envs, optimizer, parameter_norms))
                owners.append((slot, envs))
    _check_trainable(seeds, owners)
    return groups, owners


def forget_skipped(body: Body, skipped: Indices, owners: Iterable[tuple[int, Indices]]) -> None:
    """Take the updates (E,) that were skipped off the step counts, which every update has raised, as nothing is read in between.

    owners: the slot and the rows (n,) of the seeds that trained. Seeds that were freed since are passed over; no seed may have
    been planted since.
    """
    body.host.steps -= skipped
    for slot, rows in owners:
        for (at, form), envs in body.envs.items():
            here = np.flatnonzero(np.isin(envs, rows)) if at == slot else np.zeros(0, np.int64)
            body.stacks[at, form].steps[here] -= skipped[envs[here]]


def _group(stack: Stack, rows: slice, envs: Indices, optimizer: StackedOptimizer, parameter_norms: bool) -> Group:
    norm = torch.zeros(rows.stop - rows.start, dtype=stack.dtype, device=stack.device)
    names = tuple(place.name for place in stack.trained_places)
    parts = norm.new_zeros(len(norm), len(names)) if parameter_norms else None
    return Group(optimizer.begin(stack, rows), envs, norm, names, parts)


def _check_trainable(seeds: Seeds, owners: list[tuple[int, Indices]]) -> None:
    optimised = np.zeros(seeds.stage.shape, bool)
    for slot, envs in owners:
        optimised[envs, slot] = True
    trains = among(seeds.stage, ADDED | {Stage.TRAINING}) & ~seeds.doomed
    assert np.array_equal(optimised, trains), "the optimizer must move exactly the trainable rows"
