"""Check that plans of passes are hashable, and shared by passes that differ in their doses alone."""

import numpy as np
import torch

from bodies import ALL, empty, make_body, set_seed
from esper.kasmina.lifecycle import doses
from esper.kasmina.stack.plan import plan_of
from esper.leyline.lifecycle.vocabulary import Stage
from esper.tolaria.stacked.population import shadows


def planted(envs, blueprint="mlp-small"):
    """Build a body of four rows with a seed at slot 0 of some of them."""
    body = make_body(4)
    seeds = empty(body)
    for env in envs:
        seeds = set_seed(body, seeds, env, 0, ALL.index(blueprint), alpha=0.5)
    return body, seeds


def test_passes_that_differ_in_alpha_alone_have_one_plan():
    body, seeds = planted([0, 2])
    dose = doses(seeds)
    first, second = body.route(dose, seeds), body.route(dose * np.float32(0.5), seeds)
    assert plan_of(first) == plan_of(second)
    assert hash(plan_of(first)) == hash(plan_of(second))
    assert not torch.equal(first.base[0][0].alpha, second.base[0][0].alpha)


def test_which_environments_bear_the_seeds_is_a_dose_and_how_many_is_of_the_plan():
    routes = [body.route(doses(seeds), seeds) for body, seeds in (planted([0, 2]), planted([1, 3]), planted([1]))]
    assert plan_of(routes[0]) == plan_of(routes[1]) != plan_of(routes[2])
    assert [route.base[0][0].where.tolist() for route in routes] == [[0, 2], [1, 3], [1]]


def test_a_step_of_one_plan_computes_what_the_doses_of_each_pass_say():
    body, seeds = planted([0, 2])
    x, dose = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(0)), doses(seeds)
    body.run(x, body.route(dose, seeds))
    halved = body.run(x, body.route(dose * np.float32(0.5), seeds)).output
    other, again = planted([0, 2])
    assert torch.equal(halved, other.run(x, other.route(dose * np.float32(0.5), again)).output)


def test_an_alpha_below_one_a_birth_and_a_shadow_ask_for_other_plans():
    body, seeds = planted([0, 2])
    incubating = set_seed(body, seeds, 1, 1, 0, stage=Stage.TRAINING)
    plans = {
        plan_of(body.route(doses(seeds), seeds)),
        plan_of(body.route(np.ones_like(doses(seeds)) * (doses(seeds) > 0), seeds)),
        plan_of(body.route(doses(incubating), incubating, shadows(incubating), train=True)),
        plan_of(body.route(doses(incubating), incubating, train=True, straight=True)),
        plan_of(body.route(doses(seeds), seeds, part=slice(0, 2))),
    }
    assert len(plans) == 5
