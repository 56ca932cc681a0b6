"""Certified keeps: the fresh examples of every row, and the looks at seeds on trial with them. R rows, S slots, N examples."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from esper.kasmina.body import Body
from esper.kasmina.certificates import MOST, Certificates, log_wealth, sign_test, signs
from esper.kasmina.plan import Branches
from esper.leyline.batches import picked
from esper.leyline.config import Config, GatesConfig
from esper.leyline.errors import InputError
from esper.leyline.gates import judge
from esper.leyline.keys import Purpose, key, permutations
from esper.leyline.stages import Stage
from esper.leyline.task import Objective, Split
from esper.leyline.trees import as_tree, from_tree
from esper.leyline.view import Bools, Floats, Measurements, Seeds
from esper.tolaria.data import Examples
from esper.tolaria.population import Population
from esper.tolaria.probe import passed
from esper.tolaria.training import doses

BOUNDED = ("accuracy",)
"""Metrics whose score of an example is in [0, 1], so that a difference needs no clipping."""


def set_aside(probe: Split, share: float, seed: int) -> tuple[Split, Split]:
    """Return the probe split without some examples, drawn by key, and these: the fresh ones. Each part has two or more.

    Raises InputError if the split is too small for that.
    """
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
def compared(body: Body, seeds: Seeds, due: Bools, fresh: Examples, objective: Objective, gates: GatesConfig) -> Tensor:
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


def p_values(found: Floats) -> Floats:
    """(n,) p of the figures of `compared`."""
    return sign_test(found) if found.ndim == 2 else np.exp(-found)


def _null(gates: GatesConfig) -> float:
    """m: the largest mean difference at which a seed does not help; a contribution below 0 never counts as help."""
    return min(max(gates.min_contribution, 0.0), 0.99)


class Certifier:
    """Decides which seeds are looked at, and keeps their tests. State carries over from episode to episode.

    Rows with a fresh example in common share a budget, also if they have it in different episodes: `known` has the budget that
    each example belongs to, by the example's digest.
    """

    def __init__(self, population: Population, config: Config) -> None:
        """Raises InputError if the population has too few fresh examples for any certificate."""
        assert config.gates.certify is not None
        self.alpha, self.population = config.gates.certify, population
        self.own = GatesConfig(**{**config.gates.model_dump(), "certify": None})  # the gate without its certificate
        self.null, share = _null(config.gates), config.gates.certify_share
        self.scale = math.sqrt(share / (1 - share))  # of a standard error, from the probe to the fresh examples
        fewest, needed = min(map(len, population.fresh)), math.ceil(-math.log2(self.alpha * MOST))
        if fewest < needed:
            raise InputError(
                f"gates.certify {self.alpha:g} needs {needed} fresh examples or more, and the population ({population.label}) "
                f"has {fewest} set aside; raise gates.certify_share or bring a larger probe split, or leave gates.certify out "
                "where Esper does not hold the data"
            )
        self.known: dict[int, int] = {}
        slots = len(population.space.slots)
        self.state = Certificates.none(np.zeros(len(population.fresh), np.int64), slots, self.alpha)
        self.state = self.state._replace(budget=np.zeros(0))  # `_share` adds the budgets
        self._share()
        self.instance = population.space.instance

    def look(self, seeds: Seeds, last: Measurements) -> Bools | None:
        """Return (R, S) the seeds to look at, or None without one: those that passed all other checks at the last measurement."""
        self._renew()
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
            self.state = self.state.looked(due, p_values(found), seeds, self._evidence(last))
        budget = self.state.budget[self.state.group]
        return measured._replace(certificate=self.state.level, level=budget)

    def snapshot(self) -> dict[str, Any]:
        """Return the state as a tree of arrays."""
        known = {
            "examples": np.array(list(self.known), np.int64),
            "budgets": np.array(list(self.known.values()), np.int64),
        }
        tree: dict[str, Any] = {**as_tree(self.state), **known}
        return tree

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Restore a snapshot, with a population that is restored already. Raises ValueError if it came from another one."""
        if "examples" not in tree:
            raise ValueError("certificates are of an Esper in which every row had a budget of its own")
        budget = np.asarray(tree["budget"], np.float64)
        state = {name: tree[name] for name in Certificates._fields}
        self.state = from_tree(self.state._replace(budget=budget), state, "certificates")
        self.known = dict(zip(tree["examples"].tolist(), tree["budgets"].tolist(), strict=True))
        self.instance = self.population.space.instance

    def _evidence(self, last: Measurements) -> Floats:
        """(R, S) the contributions to the probe in standard errors, as large as they would be on the fresh examples."""
        estimate = last.contribution
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(self.scale * (estimate.mean - self.null) / estimate.se, np.float64)

    def _renew(self) -> None:
        """Give rows whose instance has changed the budgets of their fresh examples, and no verdicts."""
        instance = self.population.space.instance
        changed = instance != self.instance
        if changed.any():
            level, again = self.state.level.copy(), self.state.again.copy()
            level[changed], again[changed] = np.nan, 0
            self.state, self.instance = self.state._replace(level=level, again=again), instance
            self._share()

    def _share(self) -> None:
        """Find the budget of every row: one for all rows with an example in common, and a new one for examples that are new."""
        group, budget = self.state.group.copy(), self.state.budget.copy()
        rows = self.population.fresh
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
