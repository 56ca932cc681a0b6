"""Stacked optimizers: one step of every row at once, each with its own step count. n rows, P parameters."""

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.kasmina.stack import Stack
from esper.leyline.config import OptimizerConfig

Update = Callable[[Tensor | None], None]


class Rule(Protocol):
    """An update rule."""

    moments: tuple[str, ...]  # names of the columns that it keeps beside every value
    weight_decay: float

    def updates(self, columns: Mapping[str, Tensor], steps: NDArray[np.int64]) -> "Update":
        """Return a function that makes one update in place at each call.

        columns (n, P): the value, the gradient and the moments of some rows. steps (n,): number of updates that each
        row has had. The function takes which rows (n,) bool count the update as one of theirs, or None for all.
        """
        ...


class AdamW:
    """AdamW with betas .9 and .999 and eps 1e-8; each row has its own step count t.

        m_t = b1 m + (1 - b1) g        v_t = b2 v + (1 - b2) g^2
        p_t = (1 - lr wd) p - lr / (1 - b1^t) * m_t / (sqrt(v_t / (1 - b2^t)) + eps)

    Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019, algorithm 2. torch's fused kernel reads and
    writes memory once.
    """

    moments: tuple[str, ...] = ("first_moment", "second_moment")
    betas = (0.9, 0.999)
    eps = 1e-8

    def __init__(self, config: OptimizerConfig) -> None:
        self.lr, self.weight_decay = config.lr, config.weight_decay

    def updates(self, columns: Mapping[str, Tensor], steps: NDArray[np.int64]) -> Update:
        """Return a function that makes one update in place at each call."""
        value = columns["value"]
        count = torch.from_numpy(steps).to(value.device, torch.float32, non_blocking=True)
        rows = (columns[name].unbind(0) for name in ("value", "gradient", *self.moments))
        value_rows, gradient_rows, first_rows, second_rows = rows
        counts = count.unbind(0)

        def update(taken: Tensor | None) -> None:
            count.add_(1)
            torch._fused_adamw_(
                value_rows,
                gradient_rows,
                first_rows,
                second_rows,
                [],
                counts,
                lr=self.lr,
                beta1=self.betas[0],
                beta2=self.betas[1],
                weight_decay=self.weight_decay,
                eps=self.eps,
                amsgrad=False,
                maximize=False,
            )
            if taken is not None:
                count.sub_((~taken).to(count.dtype))

        return update


class SGD:
    """SGD with momentum.

        b_t = momentum b + g + wd p        p_t = p - lr b_t

    The same as torch.optim.SGD without dampening (Sutskever et al., 2013, equation 3, in torch's form).
    """

    moments: tuple[str, ...] = ("momentum",)

    def __init__(self, config: OptimizerConfig) -> None:
        self.lr, self.weight_decay, self.momentum = config.lr, config.weight_decay, config.momentum

    def updates(self, columns: Mapping[str, Tensor], steps: NDArray[np.int64]) -> Update:
        """Return a function that makes one update in place at each call."""
        value, gradient, buffer = (columns[name].unbind(0) for name in ("value", "gradient", *self.moments))

        def update(taken: Tensor | None) -> None:
            torch._fused_sgd_(
                value,
                gradient,
                buffer if self.momentum else [],  # without momentum, the kernel has no buffer
                weight_decay=self.weight_decay,
                momentum=self.momentum,
                lr=self.lr,
                dampening=0.0,
                nesterov=False,
                maximize=False,
                is_first_step=False,
            )

        return update


class StackedOptimizer:
    """Updates rows of stacks. Rows that are not passed to `begin` do not change, nor do their moments.

    Each row is a network, or a seed, of its own, with its own gradient norm, clipping and step count. The kernel gets
    each row as a separate tensor, so that the numbers of a row do not depend on the other rows.
    """

    def __init__(self, config: OptimizerConfig) -> None:
        self.max_grad_norm = config.max_grad_norm
        self.rule: Rule
        self.rule = AdamW(config) if config.name == "adamw" else SGD(config)

    def begin(self, stack: Stack, rows: slice) -> "Updates":
        """Return the next updates of some rows; valid until rows are made, moved or freed."""
        return Updates(stack, rows, self.rule, self.max_grad_norm)


class Updates:
    """The next updates of some rows of a stack; what is the same for all updates is looked up once."""

    def __init__(self, stack: Stack, rows: slice, rule: Rule, max_grad_norm: float | None) -> None:
        trained = slice(0, stack.trained)
        names = ("value", "gradient", *rule.moments)
        columns = {name: stack.columns[name][rows, trained] for name in names}
        self.places = stack.trained_places
        self.steps = stack.steps[rows]  # a view, so that the stack's count rises too
        self.value, self.gradient = columns["value"], columns["gradient"]
        self._moved = [columns[name] for name in ("value", *rule.moments)]
        self.max_grad_norm = max_grad_norm
        self._update = rule.updates(columns, self.steps)
        # Multiplying by 1 and 0 is a dozen times as fast in torch on a CPU as filling by a mask.
        self._free: Tensor | None = None
        self._fixed_values: Tensor | None = None
        if "fixed" in stack.columns:
            fixed = stack.columns["fixed"][rows, trained]
            self._free = (~fixed).to(stack.dtype)
            if rule.weight_decay:  # without decay, a parameter without a gradient does not move
                self._fixed_values = self.value * fixed

    def step(self, parts: Tensor | None = None) -> Tensor:
        """Update the rows with their gradients, and set the gradients of these rows to 0.

        Returns the gradient norms (n,) before clipping; a norm is not finite if a gradient is not. The norms of each of the
        L trained parameters are added to `parts` (n, L), if it is given.
        """
        norm = self.norm()
        self.apply(norm, parts)
        return norm

    @torch.no_grad()
    def norm(self, scale: Tensor | None = None) -> Tensor:
        """Return the gradient norms (n,); a norm is not finite if a gradient is not.

        The gradients of parameters that never train become 0, and all are divided by `scale` (n,), if it is given.
        """
        if self._free is not None:
            self.gradient.mul_(self._free)
        if scale is not None:
            self.gradient.div_(scale[:, None])
        norm: Tensor = torch.linalg.vector_norm(self.gradient, dim=1)
        return norm

    @torch.no_grad()
    def apply(self, norm: Tensor, parts: Tensor | None = None, taken: Tensor | None = None) -> None:
        """Update the rows with their gradients, whose norms are `norm` (n,), and set these gradients to 0.

        parts (n, L): the norms of each trained parameter are added to it. taken (n,) bool: rows that are updated, the others
        keep their bits; None for all. `steps` counts the update for every row, because nothing is read from the device.
        """
        gradient = self.gradient
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
