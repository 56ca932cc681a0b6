"""Certificates of seeds on trial: tests on one set of fresh examples, of which only the verdicts become known. R rows, S slots.

The fresh examples of a row are read by its *looks* alone. A look at a seed on trial (stage HOLDING) compares, on all of them,
the network's score with the seed with its score without it, d_i in [-1, 1] for example i, and tests the hypothesis that the
seed does not help: the expectation of d_i is at most m. The look reveals one bit, its verdict: certified, or refused.

**Levels.** A row has a budget b, which is alpha at first. A look tests at the level a = w b, where w in (0, 1) depends on
earlier verdicts alone. After a certificate the budget is a; after a refusal it is b - a.

**Claim.** For any controller, P(some seed is certified at a look at which it does not help) <= alpha, if the fresh examples are
independent and identically distributed, and independent of all else that the run reads.

**Proof.** Hold all else fixed: training data, probe examples, draws. What a look compares then depends on the fresh examples
through earlier verdicts alone. So the looks that a run may come to are the nodes of a binary tree. Each node has a fixed
network, seed and budget, and the fresh examples only choose the path. Take a node with budget b and level a. Let F be the event
that a false certificate is given at the node or behind it, F_C the event that one is given behind its certificate, and F_R the
event that one is given behind its refusal. P(F) <= b holds by induction from the leaves. If the seed does not help, F is
contained in the union of its certificate, of probability at most a, and F_R, of probability at most b - a. If it helps, F is
contained in the union of F_C, of probability at most a, and F_R, of probability at most b - a. The first look has the budget
alpha.

That data can be used again if little was revealed, by a union over transcripts: Dwork, Feldman, Hardt, Pitassi, Reingold and
Roth, "Generalization in adaptive data analysis and holdout reuse" (NeurIPS 2015), section 4. That a rejection passes on its
level: the fallback procedure of Wiens (Pharmaceutical Statistics 2, 2003), of which this is the form for hypotheses chosen by
verdicts.

**Tests.** Where every d_i is -1, 0 or 1 and m is 0: the exact sign test (McNemar, Psychometrika 12, 1947). Elsewhere a bet l on
the examples, one after another, has the wealth

    K_l(n) = product over i = 1..n of 1 + l (d_i - m).

If the seed does not help, the mean of K_l(n) over a grid of bets is a nonnegative supermartingale that starts at 1, so that p =
1 / (its maximum over n) is a p-value by Ville's inequality. Such bets are from Waudby-Smith and Ramdas, "Estimating means of
bounded random variables by betting" (JRSS B, 2024).
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import betainc  # type: ignore[import-untyped]
from torch import Tensor

from esper.leyline.brief import brief
from esper.leyline.stages import Stage
from esper.leyline.view import Bools, Floats, Seeds

BETS = 0.9 * 2.0 ** -np.arange(7)
"""(L,) shares of the largest bet at which no example can take the whole wealth."""


def bets(null: float) -> Floats:
    """l = BETS / (1 + m), so that every factor 1 + l (d - m) is at least 0.1 for d in [-1, 1]; null: m in [0, 1)."""
    assert 0 <= null < 1, null
    return np.asarray(BETS / (1 + null), np.float64)


def log_wealth(differences: Tensor, real: Tensor | None, null: float) -> Tensor:
    """-ln p of the bets: ln of the largest mean wealth. Differences (n, N) in [-1, 1] -> (n,) float64, 0 or more.

    real: (n, N) bool, the examples that a row has; None if it has all.
    """
    at = torch.from_numpy(bets(null)).to(differences.device, non_blocking=True)
    excess = differences.double() - null
    if real is not None:
        excess = excess.masked_fill(~real, 0)
    mean = (at * excess[..., None]).log1p().cumsum(1).logsumexp(-1) - math.log(len(BETS))
    return mean.amax(1).clamp(min=0)


def signs(differences: Tensor, real: Tensor | None) -> Tensor:
    """The number of differences above 0, and below: (n, N) -> (n, 2) float64. real: as in `log_wealth`."""
    if real is not None:
        differences = differences.masked_fill(~real, 0)
    return torch.stack([(differences > 0).sum(1), (differences < 0).sum(1)], 1).double()


def sign_test(counts: Floats) -> Floats:
    """p = P(X >= above), X ~ Binomial(above + below, 1/2), as I_1/2(above, below + 1).   `signs` (n, 2) -> (n,)."""
    above, below = counts.T
    return np.where(above > 0, betainc(np.maximum(above, 1), below + 1, 0.5), 1.0)


def share_of(refused: NDArray[np.int64]) -> Floats:
    """w = 1 / (r + 2) after r refusals since the last certificate: looks test at b/2, b/6, b/12, ..., b / ((r + 1) (r + 2))."""
    return np.asarray(1 / (refused + 2), np.float64)


@brief
class Certificates(NamedTuple):
    """The verdicts on the seeds on trial, and the budgets of the rows.

    Attributes:
        level ((R, S) float64): level at which a seed on trial was certified; 0 if its looks refused it; nan before the first
        again ((R, S) int64): age in HOLDING from which a seed is looked at again [steps]
        budget ((R,) float64): b, the share of alpha that is left
        refused ((R,) int64): looks of the row since its last certificate
    """

    level: Floats
    again: NDArray[np.int64]
    budget: Floats
    refused: NDArray[np.int64]

    @classmethod
    def none(cls, rows: int, slots: int, alpha: float) -> "Certificates":
        """Return the state before any look."""
        shape = (rows, slots)
        return cls(np.full(shape, np.nan), np.zeros(shape, np.int64), np.full(rows, alpha), np.zeros(rows, np.int64))

    def next_level(self) -> Floats:
        """(R,) the level of the next look: w b."""
        return self.budget * share_of(self.refused)

    def during(self, seeds: Seeds) -> "Certificates":
        """Return the state without the verdicts of trials that are over. A seed that returns to HOLDING is on a new trial."""
        over = (seeds.stage != Stage.HOLDING) | (seeds.age == 0)
        return self._replace(level=np.where(over, np.nan, self.level), again=np.where(over, 0, self.again))

    def due(self, passed: Bools, seeds: Seeds) -> Bools:
        """(R, S) the seeds to look at now: `passed` says which pass every other check of their gate.

        A seed that was refused is due again when its age has grown by a quarter and a step: a trial of n steps has some
        4 ln n looks.
        """
        return np.asarray(passed & ~(self.level > 0) & (seeds.age >= self.again), bool)

    def looked(self, due: Bools, p: Floats, seeds: Seeds) -> "Certificates":
        """Return the state after looks at the seeds that were due, slot by slot. p: (n,) in the order of `np.nonzero(due)`."""
        state, p_of, level = self, np.ones(due.shape), self.level.copy()
        p_of[due] = p
        for slot, here in enumerate(due.T):
            at = state.next_level()
            certified = here & (p_of[:, slot] <= at)
            level[here, slot] = np.where(certified, at, 0)[here]
            budget = np.where(certified, at, state.budget - at * here)
            state = state._replace(budget=budget, refused=np.where(certified, 0, state.refused + here))
        return state._replace(level=level, again=np.where(due, seeds.age + 1 + seeds.age // 4, self.again))
