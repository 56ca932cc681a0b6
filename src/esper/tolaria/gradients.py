"""The forward and backward pass of training. n rows, B examples."""

from collections.abc import Callable

import torch
from torch import Tensor

from esper.kasmina.body import Body
from esper.kasmina.plan import Indices, Route
from esper.leyline.batches import Batch
from esper.leyline.config import Config
from esper.leyline.task import Objective
from esper.tolaria.precision import products_in

Total = tuple[Tensor | None, Tensor]
"""What a pass is differentiated by, () or None if nothing in it trains, and the losses (n,) of its rows."""


def total_of(
    body: Body, objective_now: Callable[[], Objective], config: Config, products: torch.dtype | None
) -> Callable[[Route, Batch, Tensor, Tensor | None, Tensor | None, Indices | None], Total]:
    """Return the function that computes the loss of a route on a batch.

    The function takes the route, x leaves (n, B, ...), y (n, B, ...), the weights (n, B) of the examples or None, the factors
    (n,) of the gradients of each row or None, and the keys (n,) of dropout or None. objective_now: returns the objective; a
    campaign of faults replaces that of a population. products: the type in which the pass multiplies; None is that of the
    parameters.
    """
    accumulate = config.optimizer.accumulation_steps

    def total(
        route: Route, x: Batch, y: Tensor, weights: Tensor | None, factors: Tensor | None, keys: Indices | None
    ) -> Total:
        objective = objective_now()
        with products_in(products, body.device):
            result = body.run(x, route, keys=keys)
        losses = _weighted(objective.loss(result.output.to(body.dtype), y), weights).mean(1)
        whole = _sum(losses, factors)
        if result.branches is not None:
            assert route.origin is not None
            branched = objective.loss(result.branches.to(body.dtype), y.index_select(0, route.origin))
            own, by = (None if each is None else each.index_select(0, route.origin) for each in (weights, factors))
            whole = whole + _sum(_weighted(branched, own).mean(1), by)
        if result.proximal is not None:
            whole = whole + config.lifecycle.proximal * _sum(result.proximal, factors)
        if not whole.requires_grad:  # nothing trains in a host that is frozen as a whole and has no seed
            return None, losses.detach()
        return (whole if accumulate == 1 else whole / accumulate), losses.detach()

    return total


def _weighted(losses: Tensor, weights: Tensor | None) -> Tensor:
    """Return (n, B) losses times the weights of their examples, if these have any."""
    return losses if weights is None else losses * weights


def _sum(losses: Tensor, factors: Tensor | None) -> Tensor:
    """Return the sum () of numbers (n,) of the rows, each times the factor of its row, if these are given."""
    return losses.sum() if factors is None else (losses * factors).sum()
