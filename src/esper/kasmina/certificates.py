"""Certificates of seeds on trial: tests on sets of fresh examples, of which only the verdicts become known. R rows, S slots.

Fresh examples are read by *looks* alone. A look at a seed on trial (stage HOLDING) compares, on all fresh examples of its row,
the network's score with the seed with its score without it, d_i in [-1, 1] for example i, and tests the hypothesis that the
seed does not help: the expectation of d_i is at most m. The look reveals one bit, its verdict: certified, or refused.

**Levels.** Rows that share fresh examples have one budget b, which is alpha at first. Their looks come one after another. A look
tests at the level a = w b, where w in (0, 1) depends on earlier verdicts and on what was computed without the fresh examples.
After a certificate the budget is a; after a refusal it is b - a.

**Claim.** For any controller, P(some seed of the rows of a budget is certified at a look at which it does not help) <= alpha, if
the fresh examples of the budget are independent and identically distributed, and independent of all else that the run reads.

**Proof.** Hold all else fixed: training data, probe examples, draws, and the fresh examples of other budgets. What a look
compares then depends on the fresh examples through earlier verdicts alone, those on all rows of the budget. So the looks that
the rows may come to are the nodes of one binary tree. Each node has a fixed row, network, seed and budget, and the fresh
examples only choose the path. Take a node with budget b and level a. Let F be the event that a false certificate is given at
the node or behind it, F_C the event that one is given behind its certificate, and F_R the event that one is given behind its
refusal. P(F) <= b holds by induction from the leaves. If the seed does not help, F is contained in the union of its
certificate, of probability at most a, and F_R, of probability at most b - a. If it helps, F is contained in the union of F_C,
of probability at most a, and F_R, of probability at most b - a. The first look has the budget alpha.

That data can be used again if little was revealed, by a union over transcripts: Dwork, Feldman, Hardt, Pitassi, Reingold and
Roth, "Generalization in adaptive data analysis and holdout reuse" (NeurIPS 2015), section 4. That a rejection passes on its
level: the fallback procedure of Wiens (Pharmaceutical Statistics 2, 2003), of which this is the form for hypotheses chosen by
verdicts.

**Shares.** A budget is alpha times the probability that a forecaster, which gives the chance w to a certificate, gave to the
verdicts so far. So the better the forecast, the more is left: a verdict that was foreseen costs almost nothing. The forecast is
`chance`, from the contribution to the probe examples, and a seed whose look would probably be refused is not looked at.

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
from scipy.special import betainc, ndtr, ndtri  # type: ignore[import-untyped]
from torch import Tensor

from esper.leyline.brief import brief
from esper.leyline.stages import Stage
from esper.leyline.view import Bools, Floats, Seeds

LEAST, MOST = 0.7, 0.95
"""Bounds of the share w of a budget, and the smallest chance of a certificate at which a seed is looked at (chosen in
`esper docs benchmarks/certificates`)."""

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


def chance(z: Floats, level: Floats | float) -> Floats:
    """The probability that a look at a level certifies a seed whose contribution on as many probe examples is z standard errors.

        P(certified) = Phi((z - z_level) / sqrt(2)),     z_level = -Phi^-1(level)

    Both means have the same error, so that of their difference is sqrt(2) as large. nan, where no output changed, counts as 0.
    """
    evidence = np.where(np.isnan(z), 0.0, np.clip(z, -1e3, 1e3))  # finite, so that a spent budget leaves no chance
    return np.asarray(ndtr((evidence + ndtri(level)) / math.sqrt(2)), np.float64)


@brief
class Certificates(NamedTuple):
    """The verdicts on the seeds on trial, and the budgets of the rows.

    Attributes:
        level ((R, S) float64): level at which a seed on trial was certified; 0 if its looks refused it; nan before the first look
        again ((R, S) int64): age in HOLDING from which a seed is looked at again [steps]
        group ((R,) int64): the budget of each row; rows that share fresh examples have the same one
        budget ((G,) float64): b, what is left of alpha
    """

    level: Floats
    again: NDArray[np.int64]
    group: NDArray[np.int64]
    budget: Floats

    @classmethod
    def none(cls, group: NDArray[np.int64], slots: int, alpha: float) -> "Certificates":
        """Return the state before any look. group: (R,)."""
        shape = (len(group), slots)
        return cls(np.full(shape, np.nan), np.zeros(shape, np.int64), group, np.full(group.max() + 1, alpha))

    def during(self, seeds: Seeds) -> "Certificates":
        """Return the state without the verdicts of trials that are over. A seed that returns to HOLDING is on a new trial."""
        over = (seeds.stage != Stage.HOLDING) | (seeds.age == 0)
        return self._replace(level=np.where(over, np.nan, self.level), again=np.where(over, 0, self.again))

    def due(self, passed: Bools, seeds: Seeds, z: Floats) -> Bools:
        """(R, S) the seeds to look at now: `passed` says which pass every other check of their gate.

        A seed that was refused is due again when its age has grown by a quarter and a step: a trial of n steps has some
        4 ln n looks. A seed that a look would probably refuse is not due: z (R, S) is its contribution to the probe, in
        standard errors and scaled to the number of fresh examples.
        """
        waited = passed & ~(self.level > 0) & (seeds.age >= self.again)
        return np.asarray(waited & (chance(z, self.budget[self.group][:, None]) >= LEAST), bool)

    def looked(self, due: Bools, p: Floats, seeds: Seeds, z: Floats) -> "Certificates":
        """Return the state after looks at the seeds that were due, one after another, from the largest z on.

        A seed of which earlier verdicts left too small a chance is not looked at. p: (n,) in the order of `np.nonzero(due)`.
        """
        level, again, budget = self.level.copy(), self.again.copy(), self.budget.copy()
        row, slot = np.nonzero(due)
        evidence, group = z[row, slot], self.group[row]
        order = np.lexsort((-evidence, group))
        turn = np.arange(len(order)) - np.searchsorted(group[order], group[order])
        for now in range(turn.max(initial=-1) + 1):  # one look of every budget at once
            place = order[turn == now]
            likely = chance(evidence[place], budget[group[place]])
            place, likely = place[likely >= LEAST], likely[likely >= LEAST]
            at, own = (row[place], slot[place]), group[place]
            test = budget[own] * np.minimum(likely, MOST)
            certified = p[place] <= test
            level[at], again[at] = np.where(certified, test, 0), seeds.age[at] + 1 + seeds.age[at] // 4
            budget[own] = np.where(certified, test, budget[own] - test)
        return self._replace(level=level, again=again, budget=budget)
