"""What each seed is worth: from the values of coalitions to Shapley and Banzhaf values and pairwise interactions.

The players of an environment are its live seeds, in the order of their slots. A coalition is a bit mask over them, player
i the bit 1 << i; players outside it are off. E environments that have the same number n of players, M coalitions, P pairs
of permutations.
"""

from math import comb
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit  # type: ignore[import-untyped]

from esper.leyline.view import CoalitionValues, Estimate, Floats
from esper.tolaria.coalitions import COMPLETE, Sampled, joined_in, sampled_coalitions


class Attribution(NamedTuple):
    """What each live seed of a population brings; nan where a slot was not live."""

    shapley: Estimate  # (rows, S); a standard error of 0 where the table was complete
    half_width: Floats  # (rows, S) of the 95 % interval of the Shapley value; 0 where the table was complete
    banzhaf: Floats  # (rows, S); nan above COMPLETE live seeds, as are interactions
    interaction: Floats  # (rows, S, S) of pairs


def attribute(values: CoalitionValues, pairs: int, *, loss: bool = False) -> Attribution:
    """Attribution of the metric, or of the fall of the loss, to live seeds, from the coalitions that a probe evaluated.

    `pairs` is `probe.shapley_samples` of the run. Environments with one number of live seeds are worked out together.
    """
    rows, slots = values.live.shape
    nothing = np.full((rows, slots), np.nan)
    found = Attribution(
        Estimate.absent(rows, slots), nothing.copy(), nothing.copy(), np.full((rows, slots, slots), np.nan)
    )
    count = values.live.sum(1)
    worth = -values.loss if loss else values.metric
    for n in np.unique(count[count > 0]).tolist():
        env = np.flatnonzero(count == n)
        player = np.nonzero(values.live[env])[1].reshape(len(env), n)
        # Players are numbered in the order of their slots, so masks over either come in one order.
        table = worth[np.isin(values.env, env)].reshape(len(env), -1)
        at = env[:, None], player
        if n <= COMPLETE:
            found.shapley.mean[at], found.shapley.se[at] = shapley(table), 0.0
            found.half_width[at] = 0.0
            found.banzhaf[at] = banzhaf(table)
            found.interaction[env[:, None, None], player[:, :, None], player[:, None]] = interactions(table)
        else:
            estimate = shapley_sampled(table, sampled_coalitions(n, pairs, values.draw))
            found.shapley.mean[at], found.shapley.se[at] = estimate.mean, estimate.se
            found.half_width[at] = half_width(estimate.se, pairs)
        found.shapley.measured[at] = True
    return found


def shapley(values: Floats) -> Floats:
    """phi_i = sum over T without i of  |T|! (n - |T| - 1)! / n!  *  (v(T + i) - v(T)).

    values (E, 2^n), each coalition at the index that is its mask -> (E, n). They add up to v(all) - v(none) (Shapley, "A
    value for n-person games", 1953).
    """
    n = _players(values)
    weight = _weight(n)
    return np.stack([(_marginal(values, i) * weight).sum(1) for i in range(n)], 1)


def banzhaf(values: Floats) -> Floats:
    """beta_i = 2^(1 - n) * sum over T without i of (v(T + i) - v(T)): every coalition counts alike.

    values (E, 2^n) -> (E, n). They need not add up to v(all) - v(none) (Banzhaf, "Weighted voting doesn't work", 1965).
    """
    return np.stack([_marginal(values, i).mean(1) for i in range(_players(values))], 1)


def interactions(values: Floats) -> Floats:
    """I_ij = sum over T without i, j of  |T|! (n - |T| - 2)! / (n - 1)!  *  (v(T + ij) - v(T + i) - v(T + j) + v(T)).

    values (E, 2^n) -> (E, n, n), symmetric: positive where two players do more for each other, negative where they do the
    same thing. nan on the diagonal, as nobody makes a pair with himself. Of two players it is v(12) - v(1) - v(2) + v(none)
    (the Shapley interaction index of pairs: Grabisch and Roubens, "An axiomatic approach to the concept of interaction among
    players in cooperative games", 1999).
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
    """Shapley values as means of v(T + i) - v(T) over sampled permutations, T being who joined before i.

    values (E, M) of `sampled.masks` -> (E, n), unbiased, with standard errors over the P independent pairs. They add up to
    v(all) - v(none), as every single permutation does (Castro, Gomez and Tejada, "Polynomial calculation of the Shapley
    value based on sampling", 2009).
    """
    orders, masks = sampled
    assert values.shape[1] == len(masks)
    pairs, n = orders.shape
    joined = joined_in(orders)
    forward = np.take(values, np.searchsorted(masks, joined), axis=1)  # (E, P, n + 1)
    # In the reverse order, those who joined before a player are those who joined after it in this one.
    reverse = np.take(values, np.searchsorted(masks, ((1 << n) - 1) ^ joined), axis=1)
    in_order = (np.diff(forward) - np.diff(reverse)) / 2  # (E, P, n)
    marginal = np.take_along_axis(in_order, orders.argsort(1)[None], 2)
    mean = marginal.mean(1)
    return Estimate(mean, marginal.std(1, ddof=1) / np.sqrt(pairs), np.isfinite(mean))


def half_width(se: Floats, pairs: int) -> Floats:
    """h_i = t(0.975, P - 1) * sqrt((se_i^2 + mean over j of se_j^2) / 2):   mean ± h covers the Shapley value in 95 %.

    se (E, n) of `shapley_sampled` over P pairs -> (E, n). Two standard errors cover too little at few pairs, and so does the
    quantile of Student's t alone: few orders often agree by chance, which makes a player's own standard error far too small.
    Half of its variance is therefore the mean of all players (docs/attribution.md shows the coverage of all three).
    """
    pooled = np.square(se).mean(1, keepdims=True)
    return np.asarray(stdtrit(pairs - 1, 0.975) * np.sqrt((np.square(se) + pooled) / 2), np.float64)


def _marginal(values: Floats, player: int) -> Floats:
    """v(T + i) - v(T) for every T without the player: (E, 2^n) -> (E, 2^(n - 1)), the bits above the player's moved down."""
    apart = values.reshape(len(values), -1, 2, 1 << player)
    return (apart[:, :, 1] - apart[:, :, 0]).reshape(len(values), -1)


def _weight(n: int) -> Floats:
    """|T|! (n - |T| - 1)! / n! for the masks T of n - 1 players: the chance that exactly T comes before one given player."""
    masks = np.arange(1 << max(n - 1, 0))
    size = ((masks[:, None] >> np.arange(n)) & 1).sum(1)
    return np.array([1 / (n * comb(n - 1, k)) for k in size.tolist()]) if n else np.zeros(0)


def _players(values: Floats) -> int:
    """n of a table (E, 2^n)."""
    n = int(values.shape[1]).bit_length() - 1
    assert values.shape[1] == 1 << n, "the table is not complete"
    assert n > 0, "there are no players"
    return n
