"""Test how much of the probe is measured with a seed acting otherwise: as many batches as decide."""

import pytest
import torch

from esper.leyline.lifecycle.vocabulary import Op
from esper.tolaria.live.population import LOOK, risen_by
from loops import growth_at_two_sites, two_class_data
from populations import Script

BATCHES, SIZE = 8, LOOK // 2


def growing(size=SIZE):
    """Make a growth with a seed that incubates at the first site, whose probe has eight batches."""
    x, y = two_class_data(1, size * BATCHES)
    return growth_at_two_sites(
        list(zip(x.split(size), y.split(size), strict=True)), budget=9.0, every=4,
        controller=Script({(0, 0): (Op.GERMINATE, 0, 1, 0, 1, 3)}),
        settings={"gates": {"permissive": True}, "probe": {"sensors_every": 0}},
    )  # fmt: skip


def measured(growth, value, limits):
    """Measure the rise of the loss with the seed at dose 1, whose last bias has this value, and count the examples measured."""
    population = growth.population
    seed = population.at(population.sites[0].name)
    with torch.no_grad():
        seed.seed.delta.out.bias.fill_(value)
    population.network.eval()
    batches = population.probe_batches.batches()
    doses = torch.zeros(len(population.sites)).numpy()
    population.act_at(doses)
    own, _ = population.probe_batches.see(population.network, batches)
    doses[0] = 1
    population.act_at(doses)
    before = population.passes
    with torch.no_grad():
        rise = risen_by(population, own, batches, limits)
        whole = population.probe_batches.see(population.network, batches)[0] - own
    return rise, whole, population.passes - before


def test_a_rise_that_is_plain_is_measured_on_a_quarter_of_the_batches():
    rise, whole, examples = measured(growing(), 5.0, (-99.0, -98.0))
    assert len(rise) == examples == 2 * SIZE
    assert torch.equal(rise, torch.cat([whole[:SIZE], whole[4 * SIZE : 5 * SIZE]]))


@pytest.mark.parametrize("limits", [None, (-0.1, 0.0)])
def test_a_rise_that_is_not_plain_is_measured_on_all_batches_as_one_without_limits_is(limits):
    rise, whole, examples = measured(growing(), 0.0 if limits else 5.0, limits)
    assert examples == BATCHES * SIZE
    assert torch.equal(rise, whole)


def test_a_rise_is_compared_with_the_nearer_of_two_limits():
    growth = growing()
    mean = float(measured(growth, 5.0, None)[0].mean())
    for limits, examples in (((98.0, 99.0), 2), ((-99.0, mean), BATCHES), ((mean, 99.0), BATCHES)):
        assert measured(growth, 5.0, limits)[2] == examples * SIZE


def test_few_losses_decide_nothing():
    assert measured(growing(size=8), 5.0, (-99.0, -98.0))[2] == BATCHES * 8


def test_a_seed_is_compared_with_nothing_and_with_its_rent_and_coalitions_are_measured_whole():
    growth = growing()
    population, seeds = growth.population, growth.engine.state.seeds
    low, high = population.limits(seeds, [0])
    assert low <= 0 <= high
    assert high > low
    assert population.limits(seeds, [0, 1]) is None
