"""Certificates of seeds on trial: tests by betting on fresh examples, valid whenever they are read. R rows, S slots, L bets.

A seed on trial (stage HOLDING) is tested at its *looks*. A look draws b fresh examples and compares, example by example, the
network's score with the seed with its score without it: d_i in [-1, 1]. For a bet l, the wealth and the e-value are

    K_l = product over all examples of all looks of (1 + l (d_i - m)),      e = mean over bets of K_l.

Let mu_i be the expectation of d_i given all that happened before its look. K_l / product (1 + l (mu_i - m)) is a nonnegative
martingale that starts at 1, and 1 + x <= exp(x). Hence, if the mean of mu_i over the looks taken is at most m, e is at most the
value of a mean of such martingales, and by Ville's inequality

    P(at some look, e >= 1 / alpha while the mean of mu_i over the looks so far is at most m) <= alpha,

however the network changes between looks and whenever the looks end. The bets are constants, not chosen from the data: the
inequality for a mean over looks of different networks needs that. The bets are those of Waudby-Smith and Ramdas, "Estimating
means of bounded random variables by betting" (JRSS B, 2024), with a mean over a grid instead of one adaptive bet.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.leyline.brief import brief
from esper.leyline.config import GatesConfig
from esper.leyline.stages import Stage
from esper.leyline.view import Bools, Floats, Seeds

BETS = 0.9 * 2.0 ** -np.arange(7)
"""(L,) shares of the largest bet at which no example can take the whole wealth."""


def bets(null: float) -> Floats:
    """l = BETS / (1 + m), so that every factor 1 + l (d - m) is at least 0.1 for d in [-1, 1]; null: m in [0, 1)."""
    assert 0 <= null < 1, null
    return np.asarray(BETS / (1 + null), np.float64)


def log_growth(differences: Tensor, null: float) -> Tensor:
    """ln of what a look multiplies the wealth of each bet by: differences (n, b) in [-1, 1] -> (n, L) float64."""
    at = torch.from_numpy(bets(null)).to(differences.device, non_blocking=True)
    return (at * (differences.double()[..., None] - null)).log1p().sum(1)


def log_e(wealth: Floats) -> Floats:
    """ln of the e-value: (..., L) ln of the wealth of each bet -> (...), ln mean exp."""
    top = wealth.max(-1)
    return np.asarray(top + np.log(np.exp(wealth - top[..., None]).mean(-1)), np.float64)


def share_of(alpha: float, rank: NDArray[np.int64]) -> Floats:
    """alpha_k = alpha 6 / (pi^2 k^2) of the k-th trial of an environment that is looked at, from 1; they sum to alpha."""
    return np.asarray(alpha * 6 / (np.pi * rank) ** 2, np.float64)


@brief
class Certificates(NamedTuple):
    """The tests of all seeds on trial, and the fresh examples that they have used.

    Attributes:
        wealth ((R, S, L) float64): ln of the wealth of each bet; 0 before the first look
        rank ((R, S) int64): k for the k-th trial of the row that was looked at; 0 where there was no look
        trials ((R,) int64): trials of the row that were looked at
        used ((R,) int64): fresh examples that the row has used
    """

    wealth: Floats
    rank: NDArray[np.int64]
    trials: NDArray[np.int64]
    used: NDArray[np.int64]

    @classmethod
    def none(cls, rows: int, slots: int) -> "Certificates":
        """Return the state before any look."""
        shape = (rows, slots)
        return cls(
            np.zeros((*shape, len(BETS))), np.zeros(shape, np.int64), np.zeros(rows, np.int64), np.zeros(rows, np.int64)
        )

    def evidence(self, alpha: float) -> Floats:
        """(R, S) ln(e alpha_k): at 0 and above, the seed is certified; nan where there was no look."""
        with np.errstate(divide="ignore"):
            needed = -np.log(share_of(alpha, np.maximum(self.rank, 1)))
        return np.where(self.rank > 0, log_e(self.wealth) - needed, np.nan)

    def during(self, seeds: Seeds) -> "Certificates":
        """Return the state without the tests of trials that are over. A seed that returns to HOLDING is a new trial."""
        over = (seeds.stage != Stage.HOLDING) | (seeds.age == 0)
        return self._replace(wealth=np.where(over[..., None], 0.0, self.wealth), rank=np.where(over, 0, self.rank))

    def due(self, passed: Bools, fresh: NDArray[np.int64], gates: GatesConfig) -> Bools:
        """(R, S) the seeds to look at now: `passed` says which pass every other check of their gate.

        fresh: (R,) fresh examples that the row began with. A certified seed is not looked at again.
        """
        assert gates.certify is not None
        left = (fresh - self.used >= gates.certify_examples)[:, None]
        return np.asarray(passed & left & ~(self.evidence(gates.certify) > 0), bool)

    def looked(self, due: Bools, growth: Floats, examples: int) -> "Certificates":
        """Return the state after a look. growth: (n, L) of the seeds that were due, in the order of `np.nonzero(due)`."""
        first = due & (self.rank == 0)
        rank = np.where(first, self.trials[:, None] + np.cumsum(first, 1), self.rank)
        wealth = self.wealth.copy()
        wealth[due] += growth
        return Certificates(wealth, rank, self.trials + first.sum(1), self.used + examples * due.any(1))
