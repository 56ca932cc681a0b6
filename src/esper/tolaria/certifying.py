"""Certified keeps: fresh examples of every row, and the looks at seeds on trial with them. R rows, S slots, N examples."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from esper.kasmina.body import Body
from esper.kasmina.certificates import Certificates, log_growth
from esper.kasmina.plan import Branches
from esper.leyline.batches import map_leaves, picked
from esper.leyline.config import Config, GatesConfig
from esper.leyline.errors import InputError
from esper.leyline.gates import judge
from esper.leyline.keys import Purpose, key, permutations
from esper.leyline.stages import Stage
from esper.leyline.task import Objective, Split
from esper.leyline.trees import as_tree, from_tree
from esper.leyline.view import Floats, Measurements, Seeds, choose
from esper.tolaria.data import Examples
from esper.tolaria.population import Indices, Look, Population
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


class FreshExamples:
    """Examples of every row that nothing else reads, in an order of its own. Each look goes on where the last one ended."""

    def __init__(self, examples: Examples, sizes: Indices, instance: Indices, seed: int) -> None:
        """sizes (R,): real examples of each row. instance (R,): keys of the orders, with the number of the row."""
        self.examples, self.sizes = examples, sizes
        keys = key(seed, Purpose.CERTIFY, instance, np.arange(len(instance)) + 1)
        self.order = permutations(keys, sizes, torch.device("cpu")).numpy()

    def batch(self, used: Indices, count: int) -> Examples:
        """Return `count` examples of every row behind the first `used` (R,); a row that has fewer left gets any."""
        place = np.minimum(used[:, None] + np.arange(count), self.sizes[:, None] - 1)
        index = np.take_along_axis(self.order, place, 1)
        device = self.examples.y.device
        at = (
            torch.arange(len(index), device=device)[:, None],
            torch.from_numpy(index).to(device, non_blocking=True),
        )
        size = torch.full_like(self.examples.size, count)
        return Examples(
            map_leaves(lambda leaf: leaf[at], self.examples.x), self.examples.y[at], size, None, self.examples.pixels
        )


@torch.no_grad()
def growth(
    body: Body, seeds: Seeds, look: Look, fresh: FreshExamples, objective: Objective, gates: GatesConfig
) -> Tensor:
    """Return (n, L) `log_growth` of the n seeds that are due, in the order of `np.nonzero`. Nothing is read from the device.

    An example's difference is that of its score where the metric is the accuracy. For other metrics it is the rise of its loss
    without the seed, clipped at `gates.certify_clip` and divided by it.
    """
    body.train(False)
    examples = fresh.batch(look.used, gates.certify_examples)
    env, slot = np.nonzero(look.due)
    dose = doses(seeds)[env]
    dose[np.arange(len(env)), slot] = 0
    branches, order = Branches.at(env, slot, dose)
    output, without, _ = passed(body, seeds, examples, branches, signs=False)
    assert without is not None, "a look is at one seed or more"
    row = torch.from_numpy(branches.env).to(body.device, non_blocking=True)
    targets = examples.targets(row)
    if objective.metric in BOUNDED:
        own, other = objective.score(output, examples.y), objective.score(without, targets.y)
        differences = own.index_select(0, row) - other
    else:
        own, other = objective.loss(output, examples.y), objective.loss(without, targets.y)
        differences = (other - own.index_select(0, row)).clamp(-gates.certify_clip, gates.certify_clip)
        differences = torch.nan_to_num(differences, nan=-gates.certify_clip) / gates.certify_clip
    grown = log_growth(differences, _null(objective.metric in BOUNDED, gates))
    return grown.index_select(0, torch.from_numpy(np.argsort(order)).to(grown.device, non_blocking=True))


def _null(bounded: bool, gates: GatesConfig) -> float:
    """m: the largest mean difference at which a seed does not help; a contribution below 0 never counts as help."""
    return min(max(gates.min_contribution, 0.0), 0.99) if bounded else 0.0


class Certifier:
    """Decides which seeds are looked at, and keeps their tests. State carries over from episode to episode."""

    def __init__(self, population: Population, config: Config) -> None:
        """Raises InputError if the population has not enough fresh examples for one look."""
        self.gates, self.population = config.gates, population
        self.own = GatesConfig(**{**config.gates.model_dump(), "certify": None})  # the gate without its certificate
        if population.fresh.min() < config.gates.certify_examples:
            raise InputError(
                f"gates.certify needs {config.gates.certify_examples} fresh examples for a look (gates.certify_examples), and "
                f"{population.label} has {population.fresh.min()} set aside; lower gates.certify_examples, raise "
                "gates.certify_share, or leave gates.certify out where Esper does not hold the data"
            )
        self.instance = population.space.instance
        self.state = Certificates.none(len(population.fresh), len(population.space.slots))

    def look(self, seeds: Seeds, last: Measurements) -> Look | None:
        """Return the look at the seeds that pass all other checks of their gate by the last measurements; None without one."""
        self._renew()
        self.state = self.state.during(seeds)
        other = (seeds.stage == Stage.HOLDING) & judge(seeds, last, self.own).fossilize.passed()
        due = self.state.due(other, self.population.fresh, self.gates)
        return Look(due, self.state.used) if due.any() else None

    def certified(self, measured: Measurements, look: Look | None, grown: Floats | None) -> Measurements:
        """Return measurements with the evidence after a look; grown: (n, L) of its seeds."""
        if look is not None:
            assert grown is not None, "a look asks for the growth of the wealth"
            self.state = self.state.looked(look.due, grown, self.gates.certify_examples)
        assert self.gates.certify is not None
        left = (self.population.fresh - self.state.used).astype(np.float64)
        return measured._replace(evidence=self.state.evidence(self.gates.certify), fresh=left)

    def snapshot(self) -> dict[str, Any]:
        """Return the state as a tree of arrays."""
        tree: dict[str, Any] = as_tree(self.state)
        return tree

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Restore a snapshot, with a population that is restored already. Raises ValueError if it came from another one."""
        self.state, self.instance = from_tree(self.state, tree, "certificates"), self.population.space.instance

    def _renew(self) -> None:
        """Start anew in rows whose instance has changed: they have other fresh examples."""
        instance = self.population.space.instance
        if not np.array_equal(instance, self.instance):
            blank = Certificates.none(*self.state.rank.shape)
            self.state, self.instance = choose(instance != self.instance, blank, self.state), instance
