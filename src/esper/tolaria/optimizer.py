"""Stacked optimizers: one step of every row at once, each with its own step count. n rows, P parameters."""

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.kasmina.stack import Rows, Stack
from esper.leyline.config import OptimizerConfig


def adamw_(columns: Mapping[str, Tensor], factors: Tensor, config: "AdamW") -> None:
    """One step of AdamW, in place; columns (n, P), factors (3, n, 1).

        m_t = b1 m + (1 - b1) g        v_t = b2 v + (1 - b2) g^2
        p_t = (1 - lr wd) p - lr / (1 - b1^t) * m_t / (sqrt(v_t / (1 - b2^t)) + eps)

    Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019, algorithm 2. With c = sqrt(1 - b2^t) the factors
    are lr c / (1 - b1^t), eps c and 1 - lr wd, worked out in float64 for each row's own t and lr.

    The gradient is used up: the update is made in its place, since fresh memory of that size costs more than the arithmetic.
    v_t is raised to the smallest normal number, whose root vanishes beside eps: MKL takes six times as long for the root of 0,
    which is what padded units have.
    """
    rate, epsilon, keep = factors
    value, gradient, first, second = (columns[name] for name in ("value", "gradient", *config.moments))
    first.lerp_(gradient, 1 - config.betas[0])
    second.mul_(config.betas[1]).addcmul_(gradient, gradient, value=1 - config.betas[1])
    update = torch.clamp(second, min=torch.finfo(second.dtype).tiny, out=gradient).sqrt_().add_(epsilon)
    torch.div(first, update, out=update)
    if config.weight_decay:
        value.mul_(keep if "fixed" not in columns else torch.where(columns["fixed"], 1.0, keep))
    value.addcmul_(update, rate, value=-1)


def sgd_(columns: Mapping[str, Tensor], factors: Tensor, config: "SGD") -> None:
    """One step of SGD with momentum, in place; columns (n, P), factors (1, n, 1).

        b_t = momentum b + g + wd p        p_t = p - lr b_t

    As torch.optim.SGD without dampening (Sutskever et al., 2013, equation 3, in torch's form).
    """
    value, gradient, buffer = (columns[name] for name in ("value", "gradient", *config.moments))
    if config.weight_decay:
        decayed = value.masked_fill(columns["fixed"], 0) if "fixed" in columns else value
        gradient = gradient.add(decayed, alpha=config.weight_decay)
    buffer.mul_(config.momentum).add_(gradient)
    value.addcmul_(buffer, factors[0], value=-1)


class Rule(Protocol):
    """What differs between optimizers."""

    moments: tuple[str, ...]  # the columns that it keeps beside every value

    def factors(self, steps: NDArray[np.int64]) -> NDArray[np.float64]:
        """(f, n) the numbers of each row's next step, given how many it has taken."""
        ...

    def update(self, columns: Mapping[str, Tensor], factors: Tensor) -> None:
        """One step in place; columns (n, P), factors (f, n, 1). What is `fixed` has a gradient of 0 and does not decay."""
        ...


class AdamW:
    """AdamW with betas .9 and .999 and eps 1e-8."""

    moments: tuple[str, ...] = ("first_moment", "second_moment")
    betas = (0.9, 0.999)
    eps = 1e-8

    def __init__(self, config: OptimizerConfig) -> None:
        self.lr, self.weight_decay = config.lr, config.weight_decay

    def factors(self, steps: NDArray[np.int64]) -> NDArray[np.float64]:
        """Step size, epsilon and decay of every row, (3, n)."""
        t, lr = steps + 1.0, self.lr
        c = np.sqrt(1 - self.betas[1] ** t)
        return np.stack([lr * c / (1 - self.betas[0] ** t), self.eps * c, np.full_like(t, 1 - lr * self.weight_decay)])

    def update(self, columns: Mapping[str, Tensor], factors: Tensor) -> None:
        """One step in place."""
        adamw_(columns, factors, self)


class SGD:
    """SGD with momentum."""

    moments: tuple[str, ...] = ("momentum",)

    def __init__(self, config: OptimizerConfig) -> None:
        self.lr, self.weight_decay, self.momentum = config.lr, config.weight_decay, config.momentum

    def factors(self, steps: NDArray[np.int64]) -> NDArray[np.float64]:
        """Learning rate of every row, (1, n)."""
        return np.full((1, len(steps)), self.lr)

    def update(self, columns: Mapping[str, Tensor], factors: Tensor) -> None:
        """One step in place."""
        sgd_(columns, factors, self)


class StackedOptimizer:
    """Steps rows of stacks. What is not among the rows of a call does not move at all, moments included.

    Each row is a network, or a seed, of its own: its gradient norm, its clipping and its step count.
    """

    def __init__(self, config: OptimizerConfig) -> None:
        self.max_grad_norm = config.max_grad_norm
        self.rule: Rule
        self.rule = AdamW(config) if config.name == "adamw" else SGD(config)

    def plan(self, stack: Stack, rows: Rows, count: int) -> Tensor:
        """The factors of the next `count` steps of some rows, (count, f, n, 1) on the device: one transfer a phase."""
        steps = stack.steps[rows]
        factors = np.stack([self.rule.factors(steps + k) for k in range(count)])
        return torch.from_numpy(factors[..., None]).to(stack.device, stack.dtype, non_blocking=True)

    @torch.no_grad()
    def step(self, stack: Stack, rows: Rows, factors: Tensor) -> Tensor:
        """Move some rows by their gradients, and set the gradients of those rows to 0.

        factors (f, n, 1) is one entry of a plan. Returns the gradient norms (n,) before clipping, not finite where some
        gradient is not.
        """
        stack.steps[rows] += 1
        trained = slice(0, stack.trained)
        names = ["value", "gradient", *self.rule.moments]
        if "fixed" in stack.columns:
            names.append("fixed")
        if isinstance(rows, slice):
            columns = {name: stack.columns[name][rows, trained] for name in names}
            norm = self._update(columns, factors)
            columns["gradient"].zero_()
            return norm
        index = torch.from_numpy(rows).to(stack.device)
        columns = {name: stack.columns[name][index, trained] for name in names}
        norm = self._update(columns, factors)
        columns["gradient"].zero_()
        for name in names:
            stack.columns[name][index, trained] = columns[name]
        return norm

    def _update(self, columns: dict[str, Tensor], factors: Tensor) -> Tensor:
        gradient = columns["gradient"]
        if "fixed" in columns:
            gradient.masked_fill_(columns["fixed"], 0)
        norm: Tensor = torch.linalg.vector_norm(gradient, dim=1)
        if self.max_grad_norm is not None:
            gradient.mul_((self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)[:, None])
        self.rule.update(columns, factors)
        return norm
