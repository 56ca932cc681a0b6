"""What each seed is worth: from the values of coalitions to Shapley and Banzhaf values and pairwise interactions.

The players of an environment are its live seeds, in the order of their slots. A coalition is a bit mask over them, player
i the bit 1 << i; players outside it are off. E environments that have the same number n of players, M coalitions, P pairs
of permutations.
"""

from math import comb
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from esper.leyline.keys import key, permutations
from esper.leyline.view import Estimate, Floats

Ints = NDArray[np.int64]


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


class Sampled(NamedTuple):
    """Permutations, each of which also stands for its reverse, and the coalitions that they need."""

    orders: Ints  # (P, n) players in the order in which they join
    masks: Ints  # (M,) rising, so each once


def sampled_coalitions(n: int, pairs: int, draw: int) -> Sampled:
    """Draw antithetic pairs of permutations of n players by the key `draw`: a permutation and its reverse.

    The coalitions are those that form as the players join in these orders, none and all among them, and all but each one.
    A pair measures a player early and late at once, so that in most games its mean varies less than that of two
    independent orders (Mitchell et al., "Sampling Permutations for Shapley Value Estimation", JMLR 23, 2022).
    """
    assert pairs > 1, "a standard error takes two pairs"
    orders = permutations(key(draw, np.arange(pairs)), np.full(pairs, n), torch.device("cpu")).numpy()
    joined, everyone = _joined(orders), (1 << n) - 1
    all_but_one = everyone ^ (1 << np.arange(n))
    return Sampled(orders, np.unique(np.concatenate([joined.ravel(), (everyone ^ joined).ravel(), all_but_one])))


def shapley_sampled(values: Floats, sampled: Sampled) -> Estimate:
    """Shapley values as means of v(T + i) - v(T) over sampled permutations, T being who joined before i.

    values (E, M) of `sampled.masks` -> (E, n), unbiased, with standard errors over the P independent pairs. They add up to
    v(all) - v(none), as every single permutation does (Castro, Gomez and Tejada, "Polynomial calculation of the Shapley
    value based on sampling", 2009).
    """
    orders, masks = sampled
    assert values.shape[1] == len(masks)
    pairs, n = orders.shape
    joined = _joined(orders)
    forward = np.take(values, np.searchsorted(masks, joined), axis=1)  # (E, P, n + 1)
    # In the reverse order, those who joined before a player are those who joined after it in this one.
    reverse = np.take(values, np.searchsorted(masks, ((1 << n) - 1) ^ joined), axis=1)
    in_order = (np.diff(forward) - np.diff(reverse)) / 2  # (E, P, n)
    marginal = np.take_along_axis(in_order, orders.argsort(1)[None], 2)
    mean = marginal.mean(1)
    return Estimate(mean, marginal.std(1, ddof=1) / np.sqrt(pairs), np.isfinite(mean))


def _joined(orders: Ints) -> Ints:
    """(P, n) -> (P, n + 1) masks of the first 0, 1, ..., n players of every order."""
    return np.cumsum(np.pad(1 << orders, ((0, 0), (1, 0))), axis=1)


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
