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
from esper.leyline.task import Objective
from esper.leyline.view import Estimate, Seeds
from esper.tolaria.data import Examples
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
def probe(
    body: Body, seeds: Seeds, examples: Examples, objective: Objective, asked: Coalitions, *, sensors: bool
) -> Probed:
    """Evaluate every row on its examples of a split."""
    body.train(False)
    route = body.route(doses(seeds), seeds, asked.branches)
    result = body.run(examples.x, route, streams=sensors)
    loss, score = objective.loss(result.output, examples.y), objective.score(result.output, examples.y)
    participation = None
    if sensors:
        widths = torch.from_numpy(body.writes.astype(np.float64)).to(loss)
        participation = torch.stack([participation_ratio(h, examples) for h in result.streams], 1) / widths
    if result.branches is None:
        none = loss.new_zeros(0)
        none_2 = none.view(0, 2)
        return Probed(mean(loss, examples), mean(score, examples), none, none, none_2, none_2, participation)
    assert route.origin is not None
    there = examples.of(route.origin)
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


def mean(values: Tensor, examples: Examples) -> Tensor:
    """(n, N) -> (n,) over each row's real examples."""
    if examples.real is None:
        return values.mean(1)
    return values.masked_fill(~examples.real, 0).sum(1) / examples.size[:, 0]


def paired(difference: Tensor, examples: Examples) -> Tensor:
    """(n, N) -> (n, 2): mean and its standard error, sd / sqrt(N) with N - 1 degrees of freedom, of the real examples."""
    if examples.real is None:
        return torch.stack([difference.mean(1), difference.std(1) / difference.shape[1] ** 0.5], 1)
    centre = mean(difference, examples)
    squares = (difference - centre[:, None]).square().masked_fill(~examples.real, 0).sum(1)
    n = examples.size[:, 0]
    return torch.stack([centre, (squares / (n - 1) / n).sqrt()], 1)


def participation_ratio(h: Tensor, examples: Examples) -> Tensor:
    """tr(S)^2 / tr(S^2) of the covariance S of features over the real examples: h (E, N, D) -> (E,) in [1, D].

    D when the features are uncorrelated and equally large, 1 when they lie on a line; features that are always 0 do not
    count (Gao et al., "A theory of multineuronal dimensionality", 2017, equation 4). nan where every feature is constant.
    """
    if examples.real is None:
        centred = h - h.mean(1, keepdim=True)
    else:
        padding = ~examples.real[..., None]
        centre = h.masked_fill(padding, 0).sum(1, keepdim=True) / examples.size[..., None]
        centred = (h - centre).masked_fill(padding, 0)
    covariance = centred.mT @ centred
    trace = covariance.diagonal(dim1=1, dim2=2).sum(1)
    ratio = trace.square() / covariance.square().sum((1, 2))
    rounding = (
        100 * torch.finfo(h.dtype).eps ** 2 * h.square().sum((1, 2))
    )  # what is left of a constant that was centred
    return ratio.masked_fill(trace <= rounding, torch.nan)


def spread(mean_se: NDArray[np.float64], where: tuple[Indices, Indices, Indices], shape: tuple[int, ...]) -> Estimate:
    """Put (X, 2) means and standard errors of branches back into (E, S), absent elsewhere."""
    branch, env, slot = where
    estimate = Estimate.absent(*shape)
    estimate.mean[env, slot] = mean_se[branch, 0]
    estimate.se[env, slot] = mean_se[branch, 1]
    estimate.measured[env, slot] = True
    return estimate
