"""Attribution of a network's value to its seeds: Shapley values, Banzhaf values and pairwise interactions.

The players of an environment are its live seeds, in the order of their slots. A coalition is a bit mask in which player i is
the bit 1 << i; the seeds outside a coalition are off. E environments with the same number n of players, M coalitions, P pairs
of permutations.
"""

from math import comb
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit  # type: ignore[import-untyped]

from esper.leyline.view import CoalitionValues, Estimate, Floats
from esper.tolaria.coalitions import COMPLETE, Sampled, joined_in, sampled_coalitions


class Attribution(NamedTuple):
    """The attribution of each live seed of a population, float64; nan where the slot holds no live seed.

    With at most COMPLETE live seeds every coalition is evaluated. With more, coalitions are sampled.

    Attributes:
        shapley (Estimate, (rows, S)): Shapley values; the standard error is 0 where every coalition was evaluated
        half_width ((rows, S) array): half width of the 95 % interval of the Shapley value; 0 where every coalition was evaluated
        banzhaf ((rows, S) array): Banzhaf values; nan where coalitions were sampled
        interaction ((rows, S, S) array): interaction of each pair; nan where coalitions were sampled
    """

    shapley: Estimate
    half_width: Floats
    banzhaf: Floats
    interaction: Floats


def attribute(values: CoalitionValues, pairs: int, *, loss: bool = False) -> Attribution:
    """Attribution of the metric, or with `loss` of minus the loss, from the coalitions that a probe evaluated.

    pairs: `probe.shapley_samples` of the run.
    """
    rows, slots = values.live.shape
    half, banzhaf_values = np.full((2, rows, slots), np.nan)
    result = Attribution(Estimate.absent(rows, slots), half, banzhaf_values, np.full((rows, slots, slots), np.nan))
    count = values.live.sum(1)
    worth = -values.loss if loss else values.metric
    for n in np.unique(count[count > 0]).tolist():
        env = np.flatnonzero(count == n)
        player = np.nonzero(values.live[env])[1].reshape(len(env), n)
        # Players are numbered in the order of their slots, so the masks of players and of slots sort alike.
        table = worth[np.isin(values.env, env)].reshape(len(env), -1)
        at = env[:, None], player
        if n <= COMPLETE:
            result.shapley.mean[at], result.shapley.se[at] = shapley(table), 0.0
            result.half_width[at] = 0.0
            result.banzhaf[at] = banzhaf(table)
            result.interaction[env[:, None, None], player[:, :, None], player[:, None]] = interactions(table)
        else:
            estimate = shapley_sampled(table, sampled_coalitions(n, pairs, values.draw))
            result.shapley.mean[at], result.shapley.se[at] = estimate.mean, estimate.se
            result.half_width[at] = half_width(estimate.se, pairs)
        result.shapley.measured[at] = True
    return result


def shapley(values: Floats) -> Floats:
    """phi_i = sum over T without i of  |T|! (n - |T| - 1)! / n!  *  (v(T + i) - v(T)).

    values (E, 2^n), indexed by the mask of the coalition -> (E, n). The Shapley values sum to v(all) - v(none) (Shapley, "A
    value for n-person games", 1953).
    """
    n = _players(values)
    weight = _weight(n)
    return np.stack([(_marginal(values, i) * weight).sum(1) for i in range(n)], 1)


def banzhaf(values: Floats) -> Floats:
    """beta_i = 2^(1 - n) * sum over T without i of (v(T + i) - v(T)): every coalition has the same weight.

    values (E, 2^n) -> (E, n). Their sum need not be v(all) - v(none) (Banzhaf, "Weighted voting doesn't work", 1965).
    """
    return np.stack([_marginal(values, i).mean(1) for i in range(_players(values))], 1)


def interactions(values: Floats) -> Floats:
    """I_ij = sum over T without i, j of  |T|! (n - |T| - 2)! / (n - 1)!  *  (v(T + ij) - v(T + i) - v(T + j) + v(T)).

    values (E, 2^n) -> (E, n, n), symmetric, with nan on the diagonal. The index is positive where two players complement each
    other and negative where they are redundant. For n = 2 it is v(12) - v(1) - v(2) + v(none) (the Shapley interaction index
    of pairs: Grabisch and Roubens, "An axiomatic approach to the concept of interaction among players in cooperative games",
    1999).
    """
    n = _players(values)
    index = np.full((len(values), n, n), np.nan)
    weight = _weight(n - 1)
    for j in range(1, n):
        with_j = _marginal(values, j)
        for i in range(j):
            index[:, i, j] = index[:, j, i] = (_marginal(with_j, i) * weight).sum(1)
    return index


def shapley_sampled(values: Floats, sampled: Sampled) -> Estimate:
    """Unbiased estimates of Shapley values: means of v(T + i) - v(T), where T precedes i in a sampled permutation.

    values (E, M) of `sampled.masks` -> (E, n), with standard errors over the P independent pairs of permutations. The
    estimates sum to v(all) - v(none), as do those of a single permutation (Castro, Gomez and Tejada, "Polynomial calculation
    of the Shapley value based on sampling", 2009).
    """
    orders, masks = sampled
    assert values.shape[1] == len(masks)
    pairs, n = orders.shape
    joined = joined_in(orders)
    forward = np.take(values, np.searchsorted(masks, joined), axis=1)  # (E, P, n + 1)
    # The players before i in the reversed permutation are the players after i in the permutation.
    reverse = np.take(values, np.searchsorted(masks, ((1 << n) - 1) ^ joined), axis=1)
    in_order = (np.diff(forward) - np.diff(reverse)) / 2  # (E, P, n)
    marginal = np.take_along_axis(in_order, orders.argsort(1)[None], 2)
    mean = marginal.mean(1)
    return Estimate(mean, marginal.std(1, ddof=1) / np.sqrt(pairs), np.isfinite(mean))


def half_width(se: Floats, pairs: int) -> Floats:
    """h_i = t(0.975, P - 1) * sqrt((se_i^2 + mean over j of se_j^2) / 2), for a 95 % interval mean ± h.

    se (E, n) of `shapley_sampled` over P pairs -> (E, n). With few pairs, the marginals of a player often agree by chance, and
    its standard error is then far too small. Half of the variance is therefore the mean over all players
    (`esper docs attribution` compares the coverage with that of two standard errors and of Student's t alone).
    """
    pooled = np.square(se).mean(1, keepdims=True)
    return np.asarray(stdtrit(pairs - 1, 0.975) * np.sqrt((np.square(se) + pooled) / 2), np.float64)


def _marginal(values: Floats, player: int) -> Floats:
    """v(T + i) - v(T) for every T without player i: (E, 2^n) -> (E, 2^(n - 1)), indexed by the mask of T without bit i."""
    apart = values.reshape(len(values), -1, 2, 1 << player)
    return (apart[:, :, 1] - apart[:, :, 0]).reshape(len(values), -1)


def _weight(n: int) -> Floats:
    """|T|! (n - |T| - 1)! / n! for the masks T of n - 1 players: the probability that exactly T precedes a given player."""
    masks = np.arange(1 << max(n - 1, 0))
    size = ((masks[:, None] >> np.arange(n)) & 1).sum(1)
    return np.array([1 / (n * comb(n - 1, k)) for k in size.tolist()]) if n else np.zeros(0)


def _players(values: Floats) -> int:
    """n of a table (E, 2^n)."""
    n = int(values.shape[1]).bit_length() - 1
    assert values.shape[1] == 1 << n, "the table is not complete"
    assert n > 0, "there are no players"
    return n
