"""Choose the coalitions of live seeds that are measured, and attribute a network's value to its seeds.

A coalition is a bit mask over slots: the live seeds that keep their dose, while the other live seeds are at dose 0. Fossils keep
their dose in all of them. Each coalition is evaluated once. Attribution gives Shapley values, Banzhaf values and pairwise
interactions, whose players are the live seeds in the order of their slots: player i is the bit 1 << i of a mask.
E rows, S slots, X branches; n players of a row, M coalitions, P pairs of permutations.
"""

from math import comb
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from esper.kasmina.lifecycle import doses
from esper.kasmina.stack.plan import Branches, Indices
from esper.leyline.data.keys import key, permutations
from esper.leyline.intervals import t_factor
from esper.leyline.lifecycle.view import CoalitionValues, Estimate, Floats, Seeds
from esper.leyline.lifecycle.vocabulary import LIVE, Stage, among

COMPLETE = 4
"""Up to this many live seeds every subset is evaluated; above it, subsets along sampled permutations."""


Sampling = tuple[int, int]
"""Of attribution above COMPLETE live seeds: the number of antithetic pairs of permutations, and the key to draw them with."""


class Coalitions(NamedTuple):
    """Lists the evaluations beside the real doses, and their places among the branches."""

    branches: Branches
    live: NDArray[np.bool_]  # (E, S) the live seeds, of which coalitions are subsets
    env: Indices  # (C,) the environment of each coalition, ascending
    mask: Indices  # (C,) ascending within an environment; never the full coalition
    branch: Indices  # (C,) the branch that evaluates it
    alone: tuple[Indices, Indices, Indices]  # (branch, env, slot) of each incubating seed

    def find(self, env: Indices, mask: Indices) -> Indices:
        bits = self.live.shape[1]
        place = np.searchsorted(self.env << bits | self.mask, env << bits | mask)
        return self.branch[place]

    def without(self) -> tuple[Indices, Indices, Indices]:
        """Return (branch, env, slot) of each live seed; the branch has every live seed except this one."""
        env, slot = np.nonzero(self.live)
        return self.find(env, masks(self.live)[env] ^ (1 << slot)), env, slot

    def exported(self) -> tuple[Indices, Indices]:
        """Return (branch, env) of the networks with live seeds; an export leaves these out, so that their dose is 0 there."""
        env = np.flatnonzero(self.live.any(1))
        return self.find(env, np.zeros_like(env)), env


def coalitions(seeds: Seeds, sampling: Sampling | None, *, terminal: bool) -> Coalitions:
    """Return the coalitions of a step: leave-one-out of every live seed, and each incubating seed alone at dose 1.

    With `sampling`, the coalitions of attribution are added: every subset of up to COMPLETE live seeds, and above that
    the coalitions of sampled permutations. At the end of an episode, the empty coalition is added.
    """
    real = doses(seeds)
    live = among(seeds.stage, LIVE) & (real > 0)
    env, slot = np.nonzero(live)
    wanted = [(env, masks(live)[env] ^ (1 << slot))]  # every live seed left out alone
    if sampling is not None:
        count = live.sum(1)
        for n in np.unique(count[count > 0]).tolist():
            having = np.flatnonzero(count == n)
            player = np.nonzero(live[having])[1].reshape(len(having), n)
            joined = np.arange(1 << n) if n <= COMPLETE else sampled_coalitions(n, *sampling).masks
            chosen = (joined[:, None] >> np.arange(n) & 1)[None] << player[:, None]  # (e, M, n)
            wanted.append((np.repeat(having, len(joined)), chosen.sum(2).reshape(-1)))
    if terminal:
        wanted.append((np.flatnonzero(live.any(1)), np.zeros(int(live.any(1).sum()), np.int64)))
    bits = live.shape[1]
    pairs = np.unique(np.concatenate([env << bits | mask for env, mask in wanted]))
    env, mask = pairs >> bits, pairs & ((1 << bits) - 1)

    absent = live[env] & ~(mask[:, None] >> np.arange(bits) & 1).astype(bool)
    own = np.flatnonzero(absent.any(1))  # the full coalition is the environment's own pass
    env, mask, absent = env[own], mask[own], absent[own]
    incubating = np.nonzero(seeds.stage == Stage.TRAINING)
    dose = np.concatenate([np.where(absent, np.float32(0), real[env]), real[incubating[0]]])
    dose[np.arange(len(env), len(dose)), incubating[1]] = 1
    first = np.concatenate([absent.argmax(1).astype(np.int64), incubating[1]])
    branches, order = Branches.at(np.concatenate([env, incubating[0]]), first, dose)
    place = np.argsort(order)
    alone = place[len(env) :], incubating[0], incubating[1]
    return Coalitions(branches, live, env, mask, place[: len(env)], alone)


def masks(members: NDArray[np.bool_]) -> Indices:
    """Pack (n, S) bool into (n,) bit masks."""
    return np.asarray(members @ (1 << np.arange(members.shape[1])), np.int64)


class SampledPermutations(NamedTuple):
    """Holds permutations, each of which also stands for its reverse, and the coalitions that they need."""

    orders: Indices  # (P, n) players in the order in which they join
    masks: Indices  # (M,) ascending, without repeats


def sampled_coalitions(n: int, pairs: int, draw: int) -> SampledPermutations:
    """Draw antithetic pairs of permutations of n players with the key `draw`: each permutation and its reverse.

    The coalitions are those that form as the players join in these orders, including the empty and the full coalition, and all
    coalitions that lack one player. A pair measures a player early and late, so that in most games its mean varies less than
    that of two independent orders (Mitchell et al., "Sampling Permutations for Shapley Value Estimation", JMLR 23, 2022).
    """
    assert pairs > 1, "a standard error needs two pairs"
    orders = permutations(key(draw, np.arange(pairs)), np.full(pairs, n), torch.device("cpu")).numpy()
    joined, everyone = joined_in(orders), (1 << n) - 1
    all_but_one = everyone ^ (1 << np.arange(n))
    return SampledPermutations(
        orders, np.unique(np.concatenate([joined.ravel(), (everyone ^ joined).ravel(), all_but_one]))
    )


def joined_in(orders: Indices) -> Indices:
    """Return (P, n + 1) bit masks: column k has the bits of the first k players of an order (P, n)."""
    return np.cumsum(np.pad(1 << orders, ((0, 0), (1, 0))), axis=1)


class Attribution(NamedTuple):
    """Holds the attribution of each live seed of a population, float64; nan where the slot holds no live seed.

    With at most COMPLETE live seeds every coalition is evaluated. With more, coalitions are sampled.
    """

    shapley: Estimate  # (rows, S) Shapley values; the standard error is 0 where every coalition was evaluated
    # (rows, S) half width of the 95 % interval of the Shapley value; 0 where every coalition was evaluated
    half_width: Floats
    banzhaf: Floats  # (rows, S) Banzhaf values; nan where coalitions were sampled
    interaction: Floats  # (rows, S, S) interaction of each pair; nan where coalitions were sampled


def attribute(values: CoalitionValues, pairs: int) -> Attribution:
    """Attribute the metric to seeds, from coalitions; pairs: `probe.shapley_samples`."""
    rows, slots = values.live.shape
    half, banzhaf_values = np.full((2, rows, slots), np.nan)
    result = Attribution(Estimate.absent(rows, slots), half, banzhaf_values, np.full((rows, slots, slots), np.nan))
    count = values.live.sum(1)
    for n in np.unique(count[count > 0]).tolist():
        env = np.flatnonzero(count == n)
        player = np.nonzero(values.live[env])[1].reshape(len(env), n)
        # Players are numbered in the order of their slots, so the masks of players and of slots sort alike.
        table = values.metric[np.isin(values.env, env)].reshape(len(env), -1)
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
    """Compute phi_i = sum over T without i of  |T|! (n - |T| - 1)! / n!  *  (v(T + i) - v(T)).

    values (E, 2^n), indexed by the mask of the coalition -> (E, n). The Shapley values sum to v(all) - v(none) (Shapley, "A
    value for n-person games", 1953).
    """
    n = _players(values)
    weight = _weight(n)
    return np.stack([(_marginal(values, i) * weight).sum(1) for i in range(n)], 1)


def banzhaf(values: Floats) -> Floats:
    """Compute beta_i = 2^(1 - n) * sum over T without i of (v(T + i) - v(T)): every coalition has the same weight.

    values (E, 2^n) -> (E, n). Their sum need not be v(all) - v(none) (Banzhaf, "Weighted voting doesn't work", 1965).
    """
    return np.stack([_marginal(values, i).mean(1) for i in range(_players(values))], 1)


def interactions(values: Floats) -> Floats:
    """Compute I_ij = sum over T without i, j of  |T|! (n - |T| - 2)! / (n - 1)!  *  (v(T + ij) - v(T + i) - v(T + j) + v(T)).

    values (E, 2^n) -> (E, n, n), symmetric, with nan on the diagonal. The index is positive where two players complement each
    other and negative where they are redundant. For n = 2 it is v(12) - v(1) - v(2) + v(none) (the Shapley interaction index of
    pairs: Grabisch and Roubens, "An axiomatic approach to the concept of interaction among players in cooperative games", 1999).
    """
    n = _players(values)
    index = np.full((len(values), n, n), np.nan)
    weight = _weight(n - 1)
    for j in range(1, n):
        with_j = _marginal(values, j)
        for i in range(j):
            index[:, i, j] = index[:, j, i] = (_marginal(with_j, i) * weight).sum(1)
    return index


def shapley_sampled(values: Floats, sampled: SampledPermutations) -> Estimate:
    """Estimate Shapley values without bias: means of v(T + i) - v(T), where T precedes i in a sampled permutation.

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
    """Compute h_i = t(0.975, P - 1) * sqrt((se_i^2 + mean over j of se_j^2) / 2), for a 95 % interval mean ± h.

    se (E, n) of `shapley_sampled` over P pairs -> (E, n). With few pairs, the marginals of a player often agree by chance, and
    its standard error is then far too small. Half of the variance is therefore the mean over all players
    (`esper docs attribution` compares the coverage with that of two standard errors and of Student's t alone).
    """
    pooled = np.square(se).mean(1, keepdims=True)
    return np.asarray(t_factor(pairs) * np.sqrt((np.square(se) + pooled) / 2), np.float64)


def _marginal(values: Floats, player: int) -> Floats:
    """Compute v(T + i) - v(T) for every T without player i: (E, 2^n) -> (E, 2^(n - 1)), by the mask of T without bit i."""
    apart = values.reshape(len(values), -1, 2, 1 << player)
    return (apart[:, :, 1] - apart[:, :, 0]).reshape(len(values), -1)


def _weight(n: int) -> Floats:
    """Compute |T|! (n - |T| - 1)! / n! for the masks T of n - 1 players: the chance that exactly T precedes a given player."""
    masks = np.arange(1 << max(n - 1, 0))
    size = ((masks[:, None] >> np.arange(n)) & 1).sum(1)
    return np.array([1 / (n * comb(n - 1, k)) for k in size.tolist()]) if n else np.zeros(0)


def _players(values: Floats) -> int:
    """Return n of a table (E, 2^n)."""
    n = int(values.shape[1]).bit_length() - 1
    assert values.shape[1] == 1 << n, "the table is not complete"
    assert n > 0, "there are no players"
    return n
