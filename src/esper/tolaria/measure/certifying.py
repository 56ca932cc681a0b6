"""Certify seeds that are kept: the fresh examples of every row, and looks at seeds on trial. R rows, S slots, N examples."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import betainc, ndtr, ndtri  # type: ignore[import-untyped]
from torch import Tensor

from esper.kasmina.lifecycle import doses
from esper.kasmina.stack.body import Body
from esper.kasmina.stack.plan import Branches
from esper.leyline.config.tree import GatesConfig, GrowthConfig
from esper.leyline.data.batches import picked
from esper.leyline.data.keys import Purpose, key, permutations
from esper.leyline.data.task import Objective, Split
from esper.leyline.lifecycle.gates import judge
from esper.leyline.lifecycle.view import Bools, Floats, Measurements, Seeds
from esper.leyline.lifecycle.vocabulary import Stage
from esper.leyline.messages import InputError
from esper.leyline.records import as_tree, brief, from_tree
from esper.tolaria.measure.probe import passed
from esper.tolaria.population import Population
from esper.tolaria.stacked.data import RowExamples

LEAST, MOST = 0.7, 0.95
"""Bounds of the share w of a budget, and the smallest chance of a certificate at which a seed is looked at (chosen by
the figures on the page "Certified keeps" of esper-bench)."""

BETS = 0.9 * 2.0 ** -np.arange(7)
"""(L,) shares of the largest bet at which no example can take the whole wealth."""


def bets(null: float) -> Floats:
    """Compute l = BETS / (1 + m), so that every factor 1 + l (d - m) is at least 0.1 for d in [-1, 1]; null: m in [0, 1)."""
    assert 0 <= null < 1, null
    return np.asarray(BETS / (1 + null), np.float64)


def log_wealth(differences: Tensor, real: Tensor | None, null: float) -> Tensor:
    """Compute -ln p of bets: ln of the largest mean wealth; differences (n, N) in [-1, 1], real (n, N) -> (n,) float64."""
    at = torch.from_numpy(bets(null)).to(differences.device, non_blocking=True)
    excess = differences.double() - null
    if real is not None:
        excess = excess.masked_fill(~real, 0)
    mean = (at * excess[..., None]).log1p().cumsum(1).logsumexp(-1) - math.log(len(BETS))
    return mean.amax(1).clamp(min=0)


def signs(differences: Tensor, real: Tensor | None) -> Tensor:
    """Return the number of differences above 0, and below: (n, N) -> (n, 2) float64. real: as in `log_wealth`."""
    if real is not None:
        differences = differences.masked_fill(~real, 0)
    return torch.stack([(differences > 0).sum(1), (differences < 0).sum(1)], 1).double()


def sign_test(counts: Floats) -> Floats:
    """Compute p = P(X >= above), X ~ Binomial(above + below, 1/2), as I_1/2(above, below + 1).   `signs` (n, 2) -> (n,)."""
    above, below = counts.T
    return np.where(above > 0, betainc(np.maximum(above, 1), below + 1, 0.5), 1.0)


def chance(z: Floats, level: Floats | float) -> Floats:
    """Compute the chance that a look at a level certifies a seed of z standard errors on as many probe examples.

        P(certified) = Phi((z - z_level) / sqrt(2)),     z_level = -Phi^-1(level)

    Both means have the same error, so that of their difference is sqrt(2) as large. nan, where no output changed, counts as 0.
    """
    evidence = np.where(np.isnan(z), 0.0, np.clip(z, -1e3, 1e3))  # finite, so that a spent budget leaves no chance
    return np.asarray(ndtr((evidence + ndtri(level)) / math.sqrt(2)), np.float64)


@brief
class Certificates(NamedTuple):
    """Holds the verdicts on the seeds on trial, and the budgets of the rows."""

    # (R, S) level at which a seed on trial was certified; 0 if its looks refused it; nan before the first look
    level: Floats
    again: NDArray[np.int64]  # (R, S) age in HOLDING from which a seed is looked at again [steps]
    group: NDArray[np.int64]  # (R,) the budget of each row; rows that share fresh examples have the same one
    budget: Floats  # (G,) b, what is left of alpha

    @classmethod
    def none(cls, group: NDArray[np.int64], slots: int, alpha: float) -> "Certificates":
        shape = (len(group), slots)
        return cls(np.full(shape, np.nan), np.zeros(shape, np.int64), group, np.full(group.max() + 1, alpha))

    def during(self, seeds: Seeds) -> "Certificates":
        """Return the state without the verdicts of trials that are over. A seed that returns to HOLDING is on a new trial."""
        over = (seeds.stage != Stage.HOLDING) | (seeds.age == 0)
        return self._replace(level=np.where(over, np.nan, self.level), again=np.where(over, 0, self.again))

    def due(self, passed: Bools, seeds: Seeds, z: Floats) -> Bools:
        """Return (R, S) the seeds to look at now: `passed` says which pass every other check of their gate.

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


BOUNDED = ("accuracy",)
"""Metrics whose score of an example is in [0, 1], so that a difference needs no clipping."""


def set_aside(probe: Split, share: float, seed: int) -> tuple[Split, Split]:
    """Return the probe split without a share that is drawn by key, and that share. InputError if the split is too small."""
    count = len(probe.y)
    fresh = round(share * count)
    if fresh < 1 or count - fresh < 2:
        raise InputError(
            f"gates.certify_share is {share:g} of a probe split of {count} examples, which leaves {count - fresh} of them and "
            f"sets {fresh} aside; leave 2 or more, and set 1 or more aside"
        )
    order = permutations(key(seed, Purpose.CERTIFY), np.array([count]), torch.device("cpu"))[0]
    parts = [part.sort().values for part in (order[fresh:], order[:fresh])]
    kept, aside = (Split(picked(probe.x, part), probe.y[part]) for part in parts)
    return kept, aside


@torch.no_grad()
def compared(
    body: Body, seeds: Seeds, due: Bools, fresh: RowExamples, objective: Objective, gates: GatesConfig
) -> Tensor:
    """Compare the networks with and without the n seeds that are due, in the order of `np.nonzero`, on their fresh examples.

    Returns what their test asks for: (n, 2) `signs`, or (n,) `log_wealth`. Nothing is read from the device. An example's
    difference is that of its score where the metric is the accuracy. For other metrics it is the rise of its loss without the
    seed, clipped at `gates.certify_clip` and divided by it.
    """
    body.train(False)
    env, slot = np.nonzero(due)
    dose = doses(seeds)[env]
    dose[np.arange(len(env)), slot] = 0
    branches, order = Branches.at(env, slot, dose)
    output, without, _ = passed(body, seeds, fresh, branches, signs=False)
    assert without is not None, "a look is at one seed or more"
    row = torch.from_numpy(branches.env).to(body.device, non_blocking=True)
    targets = fresh.targets(row)
    bounded = objective.metric in BOUNDED
    if bounded:
        own, other = objective.score(output, fresh.y), objective.score(without, targets.y)
        differences = own.index_select(0, row) - other
    else:
        own, other = objective.loss(output, fresh.y), objective.loss(without, targets.y)
        differences = (other - own.index_select(0, row)).clamp(-gates.certify_clip, gates.certify_clip)
        differences = torch.nan_to_num(differences, nan=-gates.certify_clip) / gates.certify_clip
    null = _null(gates) if bounded else 0.0
    exact = bounded and null == 0 and fresh.y.dim() == 2
    found = signs(differences, targets.real) if exact else log_wealth(differences, targets.real, null)
    return found.index_select(0, torch.from_numpy(np.argsort(order)).to(found.device, non_blocking=True))


def _null(gates: GatesConfig) -> float:
    """Return m, the largest mean difference at which a seed does not help; a contribution below 0 never counts as help."""
    return min(max(gates.min_contribution, 0.0), 0.99)


class Certifier:
    """Decides which seeds are looked at, and keeps their tests. State carries over from episode to episode.

    Rows with a fresh example in common share a budget, also if they have it in different episodes: `known` has the budget that
    each example belongs to, by the example's digest.
    """

    def __init__(self, population: Population, config: GrowthConfig) -> None:
        """Raises InputError if the population has too few fresh examples for any certificate."""
        assert config.gates.certify is not None
        self.alpha, self.population = config.gates.certify, population
        self.own = GatesConfig(**{**config.gates.model_dump(), "certify": None})  # the gate without its certificate
        self.null, share = _null(config.gates), config.gates.certify_share
        self.scale = math.sqrt(share / (1 - share))  # of a standard error, from the probe to the fresh examples
        fewest, needed = min(map(len, population.set_aside)), math.ceil(-math.log2(self.alpha * MOST))
        if fewest < needed:
            raise InputError(
                f"gates.certify {self.alpha:g} needs {needed} fresh examples or more, and the population ({population.label}) "
                f"has {fewest} set aside; raise gates.certify_share or bring a larger probe split, or leave gates.certify out "
                "where Esper does not hold the data"
            )
        self.known: dict[int, int] = {}
        slots = len(population.space.slots)
        self.state = Certificates.none(np.zeros(len(population.set_aside), np.int64), slots, self.alpha)
        self.state = self.state._replace(budget=np.zeros(0))  # `_share` adds the budgets
        self._share()
        self.instance = population.space.instance

    def look(self, seeds: Seeds, last: Measurements) -> Bools | None:
        """Return (R, S) the seeds to look at, or None without one: those that passed all other checks at the last measurement."""
        instance = self.population.space.instance
        if (changed := instance != self.instance).any():  # other fresh examples, and no verdicts
            level, again = self.state.level.copy(), self.state.again.copy()
            level[changed], again[changed] = np.nan, 0
            self.state, self.instance = self.state._replace(level=level, again=again), instance
            self._share()
        self.state = self.state.during(seeds)
        other = (seeds.stage == Stage.HOLDING) & judge(seeds, last, self.own).fossilize.passed()
        due = self.state.due(other, seeds, self._evidence(last))
        return due if due.any() else None

    def certified(
        self, seeds: Seeds, last: Measurements, measured: Measurements, due: Bools | None, found: Floats | None
    ) -> Measurements:
        """Return measurements with the verdicts after a look; found: the figures of `compared`, last: as `look` had them."""
        if due is not None:
            assert found is not None, "a look asks for a comparison"
            p = sign_test(found) if found.ndim == 2 else np.exp(-found)
            self.state = self.state.looked(due, p, seeds, self._evidence(last))
        budget = self.state.budget[self.state.group]
        return measured._replace(certificate=self.state.level, level=budget)

    def snapshot(self) -> dict[str, Any]:
        known = {
            "examples": np.array(list(self.known), np.int64),
            "budgets": np.array(list(self.known.values()), np.int64),
        }
        return {**as_tree(self.state), **known}

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Restore a snapshot, with a population that is restored already. Raises ValueError if it came from another one."""
        budget = np.asarray(tree["budget"], np.float64)
        state = {name: tree[name] for name in Certificates._fields}
        self.state = from_tree(self.state._replace(budget=budget), state, "certificates")
        self.known = dict(zip(tree["examples"].tolist(), tree["budgets"].tolist(), strict=True))
        self.instance = self.population.space.instance

    def _evidence(self, last: Measurements) -> Floats:
        """Return (R, S) the contributions to the probe in standard errors, as large as they would be on the fresh examples."""
        estimate = last.contribution
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(self.scale * (estimate.mean - self.null) / estimate.se, np.float64)

    def _share(self) -> None:
        """Find the budget of every row: one for all rows with an example in common, and a new one for examples that are new."""
        group, budget = self.state.group.copy(), self.state.budget.copy()
        rows = self.population.set_aside
        for fresh in {id(each): each for each in rows}.values():  # rows of one problem have one array
            examples = fresh.tolist()
            shared = sorted({self.known[example] for example in examples if example in self.known})
            if not shared:
                shared, budget = [len(budget)], np.append(budget, self.alpha)
            first = shared[0]
            if len(shared) > 1:  # what was revealed of each part was revealed of the whole
                budget[first] = self.alpha * np.prod(budget[shared] / self.alpha)
                self.known = {example: first if at in shared else at for example, at in self.known.items()}
                group[np.isin(group, shared)] = first
            self.known.update(dict.fromkeys(examples, first))
            group[[each is fresh for each in rows]] = first
        self.state = self.state._replace(group=group, budget=budget)
