"""The probe: every network on a fixed split, at its real doses and at the coalitions that were asked for.

E rows, S slots, N examples, X branches. One forward pass; a coalition shares what comes before its first changed slot.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.kasmina.body import Body, Indices, Route
from esper.leyline.task import Objective
from esper.leyline.view import Estimate, Seeds
from esper.tolaria.coalitions import Coalitions
from esper.tolaria.data import Examples, Targets
from esper.tolaria.sensors import Sample, Widths, growth_sensors, participation_ratio
from esper.tolaria.training import doses


class Probed(NamedTuple):
    """What the probe measured, on the device."""

    loss: Tensor  # (E,)
    metric: Tensor  # (E,)
    branch_loss: Tensor  # (X,)
    branch_metric: Tensor  # (X,)
    loss_rise: Tensor  # (X, 2) mean and standard error of branch loss minus the environment's own, example by example
    metric_fall: Tensor  # (X, 2) likewise of the environment's own metric minus the branch's
    participation: Tensor  # (E, S) of the stream at each slot / its width; (E, 0) where it was not asked for


@torch.no_grad()
def probe(
    body: Body, seeds: Seeds, examples: Examples, objective: Objective, asked: Coalitions, *, rank: bool
) -> Probed:
    """Evaluate every row on its examples of a split."""
    body.train(False)
    route = body.route(doses(seeds), seeds, asked.branches)
    result = body.run(examples.x, route, streams="here" if rank else "none")
    loss, score = objective.loss(result.output, examples.y), objective.score(result.output, examples.y)
    widths = torch.from_numpy(body.taps[..., 0]).to(loss).unbind(1)
    ratios = [
        participation_ratio(seen.here, width, examples.real)
        for seen, width in zip(result.streams, widths, strict=len(result.streams) > 0)
    ]
    participation = torch.stack(ratios, 1) if ratios else loss.new_zeros(len(loss), 0)
    if result.branches is None:
        none = loss.new_zeros(0)
        none_2 = none.view(0, 2)
        return Probed(mean(loss, examples), mean(score, examples), none, none, none_2, none_2, participation)
    assert route.origin is not None
    there = examples.targets(route.origin)
    branch_loss, branch_score = objective.loss(result.branches, there.y), objective.score(result.branches, there.y)
    return Probed(
        mean(loss, examples),
        mean(score, examples),
        mean(branch_loss, there),
        mean(branch_score, there),
        paired(branch_loss - loss.index_select(0, route.origin), there),
        paired(score.index_select(0, route.origin) - branch_score, there),
        participation,
    )


def mean(values: Tensor, examples: Examples | Targets) -> Tensor:
    """(n, N) -> (n,) over each row's real examples."""
    if examples.real is None:
        return values.mean(1)
    return values.masked_fill(~examples.real, 0).sum(1) / examples.size[:, 0]


def paired(difference: Tensor, examples: Examples | Targets) -> Tensor:
    """(n, N) -> (n, 2): mean and its standard error, sd / sqrt(N) with N - 1 degrees of freedom, of the real examples."""
    if examples.real is None:
        return torch.stack([difference.mean(1), difference.std(1) / difference.shape[1] ** 0.5], 1)
    centre = mean(difference, examples)
    squares = (difference - centre[:, None]).square().masked_fill(~examples.real, 0).sum(1)
    n = examples.size[:, 0]
    return torch.stack([centre, (squares / (n - 1) / n).sqrt()], 1)


def sense(body: Body, seeds: Seeds, fit: Examples, held: Examples, objective: Objective) -> Tensor:
    """The growth sensors of every slot, (E, S, F): measured on some training examples, held against others."""
    body.train(False)
    route = body.route(doses(seeds), seeds, frozen=True)
    measured, other = (_samples(body, route, examples, objective) for examples in (fit, held))
    true = torch.from_numpy(body.taps.astype(np.float64)).to(body.device, body.dtype)
    widths = [Widths(*true[:, s].unbind(1)) for s in range(len(body.slots))]
    return growth_sensors(measured, other, widths)


def _samples(body: Body, route: Route, examples: Examples, objective: Objective) -> list[Sample]:
    """What each slot sees of some examples, and the gradient of the loss there."""
    with torch.enable_grad():
        result = body.run(examples.x, route, streams="all")
        loss = objective.loss(result.output, examples.y)
        total = (loss if examples.real is None else loss.masked_fill(~examples.real, 0)).sum()
        gradients = torch.autograd.grad(total, [seen.here for seen in result.streams])
    return [
        Sample(seen.here.detach(), seen.before.detach(), examples.x, seen.inner, gradient, examples.real)
        for seen, gradient in zip(result.streams, gradients, strict=True)
    ]


def spread(mean_se: NDArray[np.float64], where: tuple[Indices, Indices, Indices], shape: tuple[int, ...]) -> Estimate:
    """Put (X, 2) means and standard errors of branches back into (E, S), absent elsewhere."""
    branch, env, slot = where
    estimate = Estimate.absent(*shape)
    estimate.mean[env, slot] = mean_se[branch, 0]
    estimate.se[env, slot] = mean_se[branch, 1]
    estimate.measured[env, slot] = True
    return estimate


def negated(estimate: Estimate) -> Estimate:
    """The estimate of minus the quantity."""
    return estimate._replace(mean=-estimate.mean)
