"""The coalitions of live seeds that a probe evaluates. E rows, S slots, X branches.

A coalition is a bit mask over slots: the live seeds that keep their dose, while the other live seeds are at dose 0.
Fossils keep their dose in all of them. Each coalition is evaluated once.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from esper.kasmina.plan import Branches, Indices
from esper.leyline.keys import key, permutations
from esper.leyline.stages import LIVE, Stage, among
from esper.leyline.view import Seeds
from esper.tolaria.training import doses

COMPLETE = 4
"""Up to this many live seeds every subset is evaluated; above it, subsets along sampled permutations."""


class Sampling(NamedTuple):
    """The sampling of attribution above COMPLETE live seeds."""

    pairs: int  # number of antithetic pairs of permutations
    draw: int  # the key that they are drawn with


class Coalitions(NamedTuple):
    """The evaluations beside the real doses, and their places among the branches."""

    branches: Branches
    live: NDArray[np.bool_]  # (E, S) the live seeds, of which coalitions are subsets
    env: Indices  # (C,) the environment of each coalition, ascending
    mask: Indices  # (C,) ascending within an environment; never the full coalition
    branch: Indices  # (C,) the branch that evaluates it
    alone: tuple[Indices, Indices, Indices]  # (branch, env, slot) of each incubating seed

    def find(self, env: Indices, mask: Indices) -> Indices:
        """Return the branches of some coalitions, all of which were asked for."""
        bits = self.live.shape[1]
        place = np.searchsorted(self.env << bits | self.mask, env << bits | mask)
        found: Indices = self.branch[place]
        return found

    def without(self) -> tuple[Indices, Indices, Indices]:
        """(branch, env, slot) of each live seed; the branch has every live seed except this one."""
        env, slot = np.nonzero(self.live)
        return self.find(env, masks(self.live)[env] ^ (1 << slot)), env, slot

    def exported(self) -> tuple[Indices, Indices]:
        """(branch, env) of the networks with live seeds; in the branch all of them are at dose 0, because an export
        leaves them out.
        """
        env = np.flatnonzero(self.live.any(1))
        return self.find(env, np.zeros_like(env)), env


def coalitions(seeds: Seeds, sampling: Sampling | None, *, terminal: bool) -> Coalitions:
    """Return the coalitions of a step: leave-one-out of every live seed, and each incubating seed alone at dose 1.

    With `sampling`, the coalitions of attribution are added: every subset of up to COMPLETE live seeds, and above that
    the coalitions of sampled permutations. At the end of an episode, the empty coalition is added.
    """
    real = doses(seeds)
    live = among(seeds.stage, LIVE) & (real > 0)
    wanted = _leave_one_out(live)
    if sampling is not None:
        wanted += [_subsets(live), *_prefixes(live, *sampling)]
    if terminal:
        wanted.append((np.flatnonzero(live.any(1)), np.zeros(int(live.any(1).sum()), np.int64)))
    bits = live.shape[1]
    pairs = np.unique(np.concatenate([env << bits | mask for env, mask in wanted]))
    env, mask = pairs >> bits, pairs & ((1 << bits) - 1)

    absent = live[env] & ~_members(mask, bits)
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
    """(n, S) bool -> (n,) bit masks."""
    return np.asarray(members @ (1 << np.arange(members.shape[1])), np.int64)


class Sampled(NamedTuple):
    """Permutations, each of which also stands for its reverse, and the coalitions that they need."""

    orders: Indices  # (P, n) players in the order in which they join
    masks: Indices  # (M,) ascending, without repeats


def sampled_coalitions(n: int, pairs: int, draw: int) -> Sampled:
    """Draw antithetic pairs of permutations of n players with the key `draw`: each permutation and its reverse.

    The coalitions are those that form as the players join in these orders, including the empty and the full coalition,
    and all coalitions that lack one player. A pair measures a player early and late, so that in most games its mean
    varies less than that of two independent orders (Mitchell et al., "Sampling Permutations for Shapley Value
    Estimation", JMLR 23, 2022).
    """
    assert pairs > 1, "a standard error needs two pairs"
    orders = permutations(key(draw, np.arange(pairs)), np.full(pairs, n), torch.device("cpu")).numpy()
    joined, everyone = joined_in(orders), (1 << n) - 1
    all_but_one = everyone ^ (1 << np.arange(n))
    return Sampled(orders, np.unique(np.concatenate([joined.ravel(), (everyone ^ joined).ravel(), all_but_one])))


def joined_in(orders: Indices) -> Indices:
    """(P, n) -> (P, n + 1) masks of the first 0, 1, ..., n players of every order."""
    return np.cumsum(np.pad(1 << orders, ((0, 0), (1, 0))), axis=1)


def _members(mask: Indices, bits: int) -> NDArray[np.bool_]:
    """(n,) bit masks -> (n, S) bool."""
    return (mask[:, None] >> np.arange(bits) & 1).astype(bool)


def _leave_one_out(live: NDArray[np.bool_]) -> list[tuple[Indices, Indices]]:
    env, slot = np.nonzero(live)
    return [(env, masks(live)[env] ^ (1 << slot))]


def _subsets(live: NDArray[np.bool_]) -> tuple[Indices, Indices]:
    """Return every subset of the live seeds of environments that have at most COMPLETE of them."""
    count = live.sum(1)
    env = np.flatnonzero((count > 0) & (count <= COMPLETE))
    slots = np.argsort(~live[env], axis=1, kind="stable")[:, :COMPLETE]  # the live ones in order, then the others
    subset = np.arange(1 << slots.shape[1])
    chosen = (subset[:, None] >> np.arange(slots.shape[1]) & 1)[None] << slots[:, None]
    valid = subset < (1 << count[env])[:, None]
    row, _ = np.nonzero(valid)
    return env[row], chosen.sum(2)[valid]


def _prefixes(live: NDArray[np.bool_], pairs: int, draw: int) -> list[tuple[Indices, Indices]]:
    """Return the coalitions of sampled permutations for environments with more than COMPLETE live seeds."""
    count, found = live.sum(1), []
    for n in np.unique(count[count > COMPLETE]).tolist():
        env = np.flatnonzero(count == n)
        player = np.nonzero(live[env])[1].reshape(len(env), n)
        joined = sampled_coalitions(n, pairs, draw).masks
        chosen = (joined[:, None] >> np.arange(n) & 1)[None] << player[:, None]  # (e, M, n)
        found.append((np.repeat(env, len(joined)), chosen.sum(2).reshape(-1)))
    return found
