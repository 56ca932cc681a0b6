"""Update rows of stacked networks: update rules, loss scaling for float16, the updates of a step. n rows, P parameters."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.kasmina.stack.body import Body
from esper.kasmina.stack.plan import Indices
from esper.kasmina.stack.rows import Stack
from esper.leyline.config.tree import OptimizerConfig
from esper.leyline.lifecycle.view import Bools, Seeds
from esper.leyline.lifecycle.vocabulary import ADDED, Stage, among
from esper.tolaria.population import ParameterNorms, TrainedFigures

Update = Callable[[Tensor | None], None]


MOMENTS = {"adamw": ("first_moment", "second_moment"), "sgd": ("momentum",)}
"""The columns that an optimizer keeps beside every value, by its name."""


def adamw(config: OptimizerConfig, columns: Mapping[str, Tensor], steps: NDArray[np.int64]) -> Update:
    """Return a function that updates rows by AdamW with betas .9 and .999 and eps 1e-8; each row has its own step count t.

        m_t = b1 m + (1 - b1) g        v_t = b2 v + (1 - b2) g^2
        p_t = (1 - lr wd) p - lr / (1 - b1^t) * m_t / (sqrt(v_t / (1 - b2^t)) + eps)

    Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019, algorithm 2. torch's fused kernel reads and
    writes memory once.

    columns (n, P): the value, the gradient and the moments of some rows. steps (n,): number of updates that each row has
    had. The function takes which rows (n,) bool count the update as one of theirs, or None for all.
    """
    numbers = {"lr": config.lr, "beta1": 0.9, "beta2": 0.999, "weight_decay": config.weight_decay, "eps": 1e-8}
    kernel = partial(torch._fused_adamw_, **numbers, amsgrad=False, maximize=False)
    count = torch.from_numpy(steps).to(columns["value"].device, torch.float32, non_blocking=True)
    rows, counts = [column.unbind(0) for column in columns.values()], count.unbind(0)

    def update(taken: Tensor | None) -> None:
        count.add_(1)
        kernel(*rows, [], counts)
        if taken is not None:
            count.sub_((~taken).to(count.dtype))

    return update


def sgd(config: OptimizerConfig, columns: Mapping[str, Tensor]) -> Update:
    """Return a function that updates rows by SGD with momentum; columns (n, P) are their value, gradient and momentum.

        b_t = momentum b + g + wd p        p_t = p - lr b_t

    The rule is that of torch.optim.SGD without dampening (Sutskever et al., 2013, equation 3, in torch's form).
    """
    numbers = {"weight_decay": config.weight_decay, "momentum": config.momentum, "lr": config.lr, "dampening": 0.0}
    kernel = partial(torch._fused_sgd_, **numbers, nesterov=False, maximize=False, is_first_step=False)
    value, gradient, buffer = (column.unbind(0) for column in columns.values())
    buffers = buffer if config.momentum else []  # without momentum, the kernel has no buffer
    return lambda taken: kernel(value, gradient, buffers)


class Updates:
    """Makes the next updates of some rows of a stack, until rows are made, moved or freed. Other rows and their moments stay.

    Each row is a network, or a seed, of its own, with its own gradient norm, clipping and step count. The kernel gets
    each row as a separate tensor, so that the numbers of a row do not depend on the other rows. What is the same for all updates
    is looked up once.
    """

    def __init__(self, stack: Stack, rows: slice, config: OptimizerConfig) -> None:
        trained, moments = slice(0, stack.trained), MOMENTS[config.name]
        columns = {name: stack.columns[name][rows, trained] for name in ("value", "gradient", *moments)}
        self.places = stack.trained_places
        self.steps = stack.steps[rows]  # a view, so that the stack's count rises too
        self.value, self.gradient = columns["value"], columns["gradient"]
        self._moved = [columns[name] for name in ("value", *moments)]
        self.max_grad_norm = config.max_grad_norm
        self._update = adamw(config, columns, self.steps) if config.name == "adamw" else sgd(config, columns)
        # Multiplying by 1 and 0 is a dozen times as fast in torch on a CPU as filling by a mask.
        self._free: Tensor | None = None
        self._fixed_values: Tensor | None = None
        if "fixed" in stack.columns:
            fixed = stack.columns["fixed"][rows, trained]
            self._free = (~fixed).to(stack.dtype)
            if config.weight_decay:  # without decay, a parameter without a gradient does not move
                self._fixed_values = self.value * fixed

    @torch.no_grad()
    def norm(self, scale: Tensor | None = None) -> Tensor:
        """Return the gradient norms (n,); a norm is not finite if a gradient is not.

        The gradients of parameters that never train become 0, and all are divided by `scale` (n,), if it is given.
        """
        if self._free is not None:
            self.gradient.mul_(self._free)
        if scale is not None:
            self.gradient.div_(scale[:, None])
        return torch.linalg.vector_norm(self.gradient, dim=1)

    @torch.no_grad()
    def step(self, parts: Tensor | None = None, norm: Tensor | None = None, taken: Tensor | None = None) -> Tensor:
        """Update the rows with their gradients, and set these to 0. Returns the gradient norms (n,) before clipping.

        parts (n, L): the norms of each trained parameter are added to it. norm (n,): what `norm` returned, if it was called.
        taken (n,) bool: rows that are updated, the others keep their bits; None for all. `steps` counts the update for every
        row, because nothing is read from the device.
        """
        norm, gradient = self.norm() if norm is None else norm, self.gradient
        if parts is not None:
            for index, place in enumerate(self.places):
                part = torch.linalg.vector_norm(gradient[:, place.start : place.stop], dim=1)
                parts[:, index] += part if taken is None else part.where(taken, 0)
        if self.max_grad_norm is not None:
            gradient.mul_((self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)[:, None])
        before = [] if taken is None else [column.clone() for column in self._moved]
        self._update(taken)
        if self._free is not None and self._fixed_values is not None:
            self.value.mul_(self._free).add_(self._fixed_values)
        if taken is not None:
            for column, old in zip(self._moved, before, strict=True):
                column.copy_(torch.where(taken[:, None], column, old))
        gradient.zero_()
        self.steps += 1
        return norm


SCALE, TRACKER = "loss_scale", "growth_tracker"
"""The columns of the hosts that hold the scale (E,) float32 and the updates since it last changed (E,) int32."""


class GradScaler:
    """Scales the loss of each row of a population by a number of its own, so that small gradients do not vanish in float16.

    The rule is that of `torch.amp.GradScaler` with its defaults: a scale begins at 65536; an update whose gradients are not
    finite in the host of a row, or in one of its seeds, is skipped for this row and halves its scale; 2000 updates
    without one double it (Micikevicius et al., "Mixed Precision Training", 2018, section 3.2). A row does not know the
    others. Nothing is read from the device.
    Both numbers are columns of the stack of the hosts, so checkpoints hold them, and a row that is rolled back gets those of
    its snapshot.
    """

    init_scale = 2.0**16
    growth_factor = 2.0
    backoff_factor = 0.5
    growth_interval = 2000

    def __init__(self, host: Stack) -> None:
        self._host = host
        host.columns[SCALE] = torch.zeros(host.capacity, device=host.device)
        host.columns[TRACKER] = torch.zeros(host.capacity, dtype=torch.int32, device=host.device)

    @property
    def scale(self) -> Tensor:
        """The scale (E,) of each row."""
        return self._host.columns[SCALE]

    def begin(self) -> None:
        self._host.columns[SCALE].fill_(self.init_scale)
        self._host.columns[TRACKER].zero_()

    @torch.no_grad()
    def update(self, overflowed: Tensor) -> None:
        """Set the scales for the next update; overflowed (E,) bool says which rows skip the present one."""
        scale, tracker = self.scale, self._host.columns[TRACKER]
        successful = tracker + 1
        due = successful >= self.growth_interval
        larger = scale * self.growth_factor
        next_scale = torch.where(due & larger.isfinite(), larger, scale)
        scale.copy_(torch.where(overflowed, scale * self.backoff_factor, next_scale))
        tracker.copy_(torch.where(overflowed | due, 0, successful))


class RowGroup(NamedTuple):
    """Holds rows of a stack that the optimizer moves in this step."""

    updates: Updates
    slot: int  # of the seeds; -1 for the hosts
    rows: Tensor  # (n,) the row of the population that each belongs to
    norm: Tensor  # (n,) running sum
    parts: Tensor | None  # (n, L) running sum of the norms of the trained parameters, if asked for


class StepUpdates:
    """Makes the updates of the hosts and of the seeds that train in a step, and sums up their norms.

    With a scaler, a row skips an update if a gradient of its host, or of one of its seeds, is not finite. Norms are then means
    over the updates that a row has made: nan if it has made none, and inf if it is lost.
    """

    def __init__(
        self,
        body: Body,
        seeds: Seeds,
        optimizer: Callable[[Stack, slice], Updates],
        updates: int,
        scaler: GradScaler | None,
        parameter_norms: bool,
    ) -> None:
        """updates: how many the step has."""
        self.body, self.updates, self.scaler = body, updates, scaler
        rows, self.trained = len(seeds.stage), np.zeros(seeds.stage.shape, bool)  # (R, S) the seeds that train
        moved = [(-1, body.host, slice(0, rows), np.arange(rows))]
        for at, runs in body.trainable(seeds).items():
            for run in (run for run in runs if run.stop > run.start):
                moved.append((at[0], body.stacks[at], run, body.envs[at][run]))
                self.trained[body.envs[at][run], at[0]] = True
        trains = among(seeds.stage, ADDED | {Stage.TRAINING}) & ~seeds.doomed
        assert np.array_equal(self.trained, trains), "the optimizer must move exactly the trainable rows"
        self.groups = list[RowGroup]()  # of the hosts, and then of the seeds
        for slot, stack, run, envs in moved:
            norm = torch.zeros(len(envs), dtype=stack.dtype, device=stack.device)
            parts = norm.new_zeros(len(norm), len(stack.trained_places)) if parameter_norms else None
            places = torch.from_numpy(envs).to(stack.device, non_blocking=True)
            self.groups.append(RowGroup(optimizer(stack, run), slot, places, norm, parts))
        # (R,) with a scaler, how many updates overflowed in float16 and were skipped, floating point; and whether gradients
        # overflowed at a scale of at most 1, which no smaller scale mends
        self.skipped = torch.zeros(rows, device=body.device)
        self.lost = torch.zeros_like(self.skipped, dtype=torch.bool)

    @torch.no_grad()
    def update(self) -> None:
        if self.scaler is None:
            for group in self.groups:
                group.norm.add_(group.updates.step(group.parts))
            return
        scale, infinite = self.scaler.scale, torch.zeros_like(self.skipped)
        norms = [group.updates.norm(scale.index_select(0, group.rows)) for group in self.groups]
        for group, norm in zip(self.groups, norms, strict=True):
            infinite.index_add_(0, group.rows, (~norm.isfinite()).to(infinite.dtype))
        overflowed = infinite > 0
        self.skipped, self.lost = self.skipped + overflowed, self.lost | overflowed & (scale <= 1)
        for group, norm in zip(self.groups, norms, strict=True):
            taken = ~overflowed.index_select(0, group.rows)
            group.updates.step(group.parts, norm, taken)
            group.norm.add_(norm.where(taken, 0))
        self.scaler.update(overflowed)

    def figures(self, loss: Any) -> TrainedFigures:
        """Return the figures of the step, with tensors on the device for arrays; loss (R,) is the mean over the batches."""
        host, *seeds = self.groups
        seed_norm, found = loss.new_full(self.trained.shape, torch.nan), dict[str, Any]()
        for group in seeds:
            seed_norm[group.rows, group.slot] = self._mean(group.norm, group)
            for name, norms in self._by_name(group):
                # Seeds of several forms share names, but no row has two of them in one slot.
                absent = loss.new_full(loss.shape, torch.nan)
                found.setdefault(f"{self.body.slots[group.slot].name}/{name}", absent)[group.rows] = norms
        parameter_norms = None if host.parts is None else ParameterNorms(dict(self._by_name(host)), found)
        skipped: Any = None if self.scaler is None else self.skipped
        return TrainedFigures(loss, self._mean(host.norm, host), seed_norm, self.trained, parameter_norms, skipped)

    def _by_name(self, group: RowGroup) -> Iterator[tuple[str, Any]]:
        """Yield the name of each trained parameter of a group and its mean norms (n,), if they were asked for."""
        if group.parts is not None:
            for place, norms in zip(group.updates.places, self._mean(group.parts, group).unbind(1), strict=True):
                yield place.name, norms

    def _mean(self, total: Tensor, group: RowGroup) -> Any:
        """Return a sum (n, ...) over the updates that the rows of a group have made, divided by their number."""
        if self.scaler is None:
            return total / self.updates
        shape = -1, *(1,) * (total.dim() - 1)
        count, lost = (each.index_select(0, group.rows).view(shape) for each in (self.skipped, self.lost))
        return (total / (self.updates - count)).masked_fill(lost, torch.inf)


def forget_skipped(body: Body, skipped: Indices, trained: Bools) -> None:
    """Take the updates (E,) that were skipped off the step counts, which every update has raised, as nothing is read in between.

    trained: (R, S) the seeds that trained. Seeds that were freed since are passed over; no seed may have been planted since.
    """
    body.host.steps -= skipped
    for (slot, form), envs in body.envs.items():
        body.stacks[slot, form].steps[: len(envs)] -= np.where(trained[envs, slot], skipped[envs], 0)
