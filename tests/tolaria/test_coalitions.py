"""Check that coalitions of live seeds are each evaluated once, beside the environment's pass, as a network without the rest."""

import itertools

import numpy as np
import pytest
import torch

from bodies import ALL, empty, make_body, set_seed
from esper.kasmina.lifecycle import doses
from esper.kasmina.network.export import grown_network
from esper.leyline.data.task import Interface
from esper.leyline.lifecycle.view import CoalitionValues
from esper.leyline.lifecycle.vocabulary import Op, Stage
from esper.leyline.messages import InputError
from esper.tasks.hosts import MLP
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.measure.coalitions import COMPLETE, attribute, coalitions, masks, sampled_coalitions
from populations import Script, blobs, small_config


def population(live, slots=6):
    """Build a body of four environments with live seeds at the slots that are named for each."""
    body = make_body(4, hidden=(3,) * slots, dtype=torch.float64)
    seeds = empty(body)
    for env, places in enumerate(live):
        for slot in places:
            blueprint = ALL.index(("bypass-mlp", "mlp-small", "gated")[slot % 3])
            alpha = 0.25 + 0.125 * slot
            seeds = set_seed(body, seeds, env, slot, blueprint, blend=slot % 3, alpha=alpha)
    return body, seeds


SAMPLING = 3, 7


@pytest.mark.parametrize("live", [[(), (0,), (1, 3), (0, 2, 5)], [(0, 1, 2, 3), (2, 3, 4, 5), (5,), ()]])
def test_every_subset_of_up_to_four_live_seeds_is_asked_for_once(live):
    _, seeds = population(live)
    asked = coalitions(seeds, SAMPLING, terminal=False)
    pairs = list(zip(asked.env.tolist(), asked.mask.tolist(), strict=True))
    expected = set()
    for env, places in enumerate(live):
        for size in range(len(places)):  # the full coalition is the environment's own pass
            expected |= {(env, sum(1 << s for s in chosen)) for chosen in itertools.combinations(places, size)}
    assert len(pairs) == len(set(pairs)) == len(asked.branches.env)
    assert set(pairs) == expected


def test_a_seed_that_blends_in_and_does_not_act_yet_is_in_no_coalition():
    _, seeds = population([(0, 2), (1,)])
    seeds.alpha[0, 2] = seeds.alpha[1, 1] = 0
    asked = coalitions(seeds, SAMPLING, terminal=True)
    assert asked.live.nonzero()[0].tolist() == asked.live.nonzero()[1].tolist() == [0]
    assert (asked.env.tolist(), asked.mask.tolist()) == ([0], [0])


def test_above_four_live_seeds_the_prefixes_of_sampled_orders_are_asked_for_once():
    _, seeds = population([(0, 1, 2, 3, 4), (0, 1, 2, 3, 4, 5), (0,), ()])
    asked = coalitions(seeds, SAMPLING, terminal=False)
    pairs = list(zip(asked.env.tolist(), asked.mask.tolist(), strict=True))
    assert len(pairs) == len(set(pairs))
    for env, n in ((0, 5), (1, 6)):
        full = (1 << n) - 1
        expected = set(sampled_coalitions(n, *SAMPLING).masks.tolist()) - {full}
        assert {0} | {full ^ (1 << s) for s in range(n)} <= expected
        assert {mask for e, mask in pairs if e == env} == expected
    assert COMPLETE == 4


def test_the_attribution_of_a_run_adds_up_and_counts_interactions():
    seeds = population([(0, 2), (1, 3, 4), (0, 1, 2, 3, 4), (5,)])[1]
    generator = np.random.default_rng(0)
    asked = coalitions(seeds, SAMPLING, terminal=False)
    full = np.arange(4)
    env, mask = np.concatenate([asked.env, full]), np.concatenate([asked.mask, masks(asked.live)])
    order = np.lexsort((mask, env))
    worth = generator.random(len(env))
    values = CoalitionValues(4, SAMPLING[1], asked.live, env[order], mask[order], worth[order], -worth[order])
    found = attribute(values, SAMPLING[0])
    table = {(e, m): w for e, m, w in zip(env.tolist(), mask.tolist(), worth.tolist(), strict=True)}
    for e in range(4):
        everyone = int(masks(asked.live)[e])
        total = table[e, everyone] - table[e, 0]
        np.testing.assert_allclose(np.nansum(found.shapley.mean[e]), total, atol=1e-12)
    assert np.array_equal(found.shapley.measured, asked.live)
    assert np.isnan(found.shapley.mean[~asked.live]).all()
    assert found.interaction[0, 0, 2] == pytest.approx(table[0, 5] - table[0, 1] - table[0, 4] + table[0, 0])
    assert found.shapley.se[0, 0] == 0 < found.shapley.se[2, 0]


def test_without_orders_only_leave_one_out_is_asked_for():
    _, seeds = population([(), (0,), (1, 3), (0, 2, 5)])
    asked = coalitions(seeds, None, terminal=False)
    assert len(asked.env) == 1 + 2 + 3
    branch, env, slot = asked.without()
    full = masks(asked.live)
    place = {int(b): i for i, b in enumerate(asked.branch)}
    assert all(asked.mask[place[int(b)]] == full[e] ^ (1 << s) for b, e, s in zip(branch, env, slot, strict=True))


def test_fused_coalitions_equal_separate_networks_at_any_dose():
    live = [(0, 2), (1, 3, 4), (0, 1, 2, 3), (5,)]
    body, seeds = population(live)
    asked = coalitions(seeds, SAMPLING, terminal=False)
    x = torch.randn(4, 9, 6, dtype=torch.float64)
    with torch.no_grad():
        result = body.run(x, body.route(doses(seeds), seeds, asked.branches))
    factory = MLP(6, 8, (3,) * 6, 3)
    for env, mask, branch in zip(asked.env, asked.mask, asked.branch, strict=True):
        kept = np.array([bool(mask >> s & 1) and s in live[env] for s in range(6)])
        state = seeds._replace(
            stage=np.where(kept, np.int8(Stage.FOSSILIZED), np.int8(Stage.DORMANT))[None].repeat(4, 0)
        )
        network, _ = grown_network(factory, body, state, int(env), Interface(tuple(x.shape[2:])))
        torch.testing.assert_close(result.branches[branch], network(x[env]), rtol=1e-10, atol=1e-12)


def test_fossils_keep_their_dose_in_every_coalition():
    body, seeds = population([(0, 2), (), (), ()])
    seeds = set_seed(body, seeds, 0, 4, ALL.index("bypass-linear"), stage=Stage.FOSSILIZED, alpha=0.5)
    asked = coalitions(seeds, SAMPLING, terminal=False)
    assert set(asked.mask.tolist()) == {0, 1, 4}
    assert (asked.branches.dose[:, 4] == 0.5).all()


def test_a_run_measures_complete_tables_at_its_cadence_and_contributions_always():
    decisions = {(0, 0): (Op.GERMINATE, 0, 1, 0, 2, 3), (1, 0): (Op.GERMINATE, 1, 2, 0, 2, 3)}
    decisions |= {(3, 0): (Op.ADVANCE, 0), (4, 0): (Op.ADVANCE, 1)}
    config = small_config(envs=2, steps=9, probe={"coalitions_every": 3})
    engine, client = VectorizedEngine(blobs(dtype=torch.float64), config), Script(decisions)
    view = engine.reset()
    while view.step < 9:
        view, _ = engine.step(client.act(view))
        assert view.coalitions.step == view.step // 3 * 3
        live = np.isin(view.seeds.stage, [Stage.BLENDING, Stage.HOLDING])
        assert np.array_equal(view.measurements.contribution.measured, live)
    values = view.coalitions
    assert values.env.tolist() == [0] * 4
    assert values.mask.tolist() == [0, 1, 2, 3]
    table = dict(zip(values.mask.tolist(), values.metric.tolist(), strict=True))
    assert table[3] == view.measurements.metric[0]
    np.testing.assert_allclose(table[3] - table[2], view.measurements.contribution.mean[0, 0], atol=1e-12)
    np.testing.assert_allclose(table[3] - table[1], view.measurements.contribution.mean[0, 1], atol=1e-12)


def test_a_cadence_of_zero_is_refused():
    with pytest.raises(InputError, match=r"^probe.coalitions_every is 0; give a whole number of at least 1$"):
        small_config(probe={"coalitions_every": 0})
