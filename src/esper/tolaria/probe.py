"""The probe: every network on a fixed split, at its real doses and at the coalitions that were asked for.

E rows, S slots, N examples, X branches. One forward pass; a coalition shares what comes before its first changed slot.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.kasmina.body import Body, Branches, Indices
from esper.leyline.stages import LIVE, Stage, among
from esper.leyline.task import Objective, Split
from esper.leyline.view import Estimate, Seeds
from esper.tolaria.training import doses


class Coalitions(NamedTuple):
    """What is evaluated beside the real doses, and which rows of the branches it is."""

    branches: Branches
    without: tuple[Indices, Indices, Indices]  # (branch, env, slot) of each live seed, at dose 0
    alone: tuple[Indices, Indices, Indices]  # (branch, env, slot) of each incubating seed, at dose 1
    exported: tuple[Indices, Indices]  # (branch, env) of networks whose unfinished slots are at dose 0


class Probed(NamedTuple):
    """What the probe measured, on the device."""

    loss: Tensor  # (E,)
    metric: Tensor  # (E,)
    branch_loss: Tensor  # (X,)
    branch_metric: Tensor  # (X,)
    loss_rise: Tensor  # (X, 2) mean and standard error of branch loss minus the environment's own, example by example
    metric_fall: Tensor  # (X, 2) likewise of the environment's own metric minus the branch's
    participation: Tensor | None  # (E, S) of the stream at each slot / its width


def coalitions(seeds: Seeds, *, terminal: bool) -> Coalitions:
    """Leave-one-out of live seeds and incubation gain of incubating ones; at the end also the exported networks."""
    real = doses(seeds)
    live = np.nonzero(among(seeds.stage, LIVE) & (real > 0))
    incubating = np.nonzero(seeds.stage == Stage.TRAINING)
    final = np.where(seeds.stage == Stage.FOSSILIZED, real, np.float32(0))
    differs = (final != real) if terminal else np.zeros(real.shape, bool)
    unfinished = np.flatnonzero(differs.any(1))

    env = np.concatenate([live[0], incubating[0], unfinished])
    slot = np.concatenate([live[1], incubating[1], differs[unfinished].argmax(1).astype(np.int64)])
    dose = np.concatenate([real[live[0]], real[incubating[0]], final[unfinished]])
    first, second = len(live[0]), len(live[0]) + len(incubating[0])
    dose[np.arange(first), live[1]] = 0
    dose[np.arange(first, second), incubating[1]] = 1
    branches, order = Branches.at(env, slot, dose)
    place = np.argsort(order)
    return Coalitions(
        branches,
        without=(place[:first], live[0], live[1]),
        alone=(place[first:second], incubating[0], incubating[1]),
        exported=(place[second:], unfinished),
    )


@torch.no_grad()
def probe(body: Body, seeds: Seeds, split: Split, objective: Objective, asked: Coalitions, *, sensors: bool) -> Probed:
    """Evaluate every row on a split x (N, ...), y (N,) or (N, C) that all rows share."""
    rows = len(seeds.stage)
    x, y = split.x.expand(rows, *split.x.shape), split.y.expand(rows, *split.y.shape)
    body.train(False)
    route = body.route(doses(seeds), seeds, asked.branches)
    result = body.run(x, route, streams=sensors)
    loss, score = objective.loss(result.output, y), objective.score(result.output, y)
    participation = torch.stack([participation_ratio(h) for h in result.streams], 1) if result.streams else None
    if result.branches is None:
        none = loss.new_zeros(0)
        return Probed(loss.mean(1), score.mean(1), none, none, none.view(0, 2), none.view(0, 2), participation)
    assert route.origin is not None
    target = y.index_select(0, route.origin)
    branch_loss, branch_score = objective.loss(result.branches, target), objective.score(result.branches, target)
    return Probed(
        loss.mean(1),
        score.mean(1),
        branch_loss.mean(1),
        branch_score.mean(1),
        _paired(branch_loss - loss.index_select(0, route.origin)),
        _paired(score.index_select(0, route.origin) - branch_score),
        participation,
    )


def participation_ratio(h: Tensor) -> Tensor:
    """tr(S)^2 / tr(S^2) of the covariance S of features, divided by their number: h (E, N, D) -> (E,) in (0, 1].

    1 when the features are uncorrelated and equally large, 1 / D when they lie on a line (Gao et al., "A theory of
    multineuronal dimensionality", 2017, equation 4). nan where every feature is constant.
    """
    centred = h - h.mean(1, keepdim=True)
    covariance = centred.mT @ centred
    trace = covariance.diagonal(dim1=1, dim2=2).sum(1)
    return trace.square() / covariance.square().sum((1, 2)) / h.shape[2]


def spread(mean_se: NDArray[np.float64], where: tuple[Indices, Indices, Indices], shape: tuple[int, ...]) -> Estimate:
    """Put (X, 2) means and standard errors of branches back into (E, S), absent elsewhere."""
    branch, env, slot = where
    estimate = Estimate.absent(*shape)
    estimate.mean[env, slot] = mean_se[branch, 0]
    estimate.se[env, slot] = mean_se[branch, 1]
    estimate.measured[env, slot] = True
    return estimate


def _paired(difference: Tensor) -> Tensor:
    """(X, N) -> (X, 2): mean and its standard error, sd / sqrt(N) with N - 1 degrees of freedom."""
    return torch.stack([difference.mean(1), difference.std(1) / difference.shape[1] ** 0.5], 1)
