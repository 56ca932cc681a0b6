import itertools

import numpy as np
import pytest

from esper.leyline.lifecycle.masks import allowed
from esper.leyline.lifecycle.view import Measurements, take
from esper.leyline.lifecycle.vocabulary import ADDED, IN_BUDGET, LIVE, Actions, Op, Stage, among
from esper.leyline.messages import InputError
from esper.simic.rewards import delta, total
from esper.tamiyo.rules.base import Never, RandomValid
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.measure.coalitions import attribute
from esper.tolaria.measure.sensors import SENSORS
from esper_bench.lab.formula import trained_steps
from esper_bench.lab.optimum import Optimal, canonical, decisions_of, solve
from esper_bench.lab.sandbox import ARMS, CHAIN, GROWTH, KINDS, PLANTINGS, Sandbox, bandit, blindfolded, play
from populations import Script, blobs, small_config


def kept(slot: int, blueprint: int, env: int) -> dict:
    """Return the decisions of a whole life of a seed."""
    life = ((0, Op.GERMINATE), (2, Op.ADVANCE), (4, Op.FOSSILIZE))
    return {(step, env): (op, slot, blueprint, 0, 1, 0) for step, op in life}


def leaves(record) -> list:
    """List every array and number of a record, in order."""
    if isinstance(record, tuple):
        return [leaf for field in record for leaf in leaves(field)]
    return [record]


def same(left, right) -> bool:
    pairs = zip(leaves(left), leaves(right), strict=True)
    return all(
        np.array_equal(np.asarray(a), np.asarray(b), equal_nan=np.asarray(a).dtype.kind == "f") for a, b in pairs
    )


@pytest.fixture(scope="module")
def growth() -> Sandbox:
    return Sandbox(GROWTH, {"envs": 5 * len(KINDS)})


@pytest.fixture(scope="module")
def solution(growth):
    return solve(growth)


# The surface.


def test_sandbox_views_and_outcomes_are_shaped_like_the_engines():
    config = small_config({"probe": {"coalitions_every": 1}}, envs=2, twin=True, steps=3)
    engine = VectorizedEngine(blobs(), config)
    sandbox = Sandbox(GROWTH, {"envs": 2, "twin": True, "steps": 3, "probe": {"coalitions_every": 1}})
    for pair in [(engine.reset(), sandbox.reset())] + [
        pair for _ in range(3) for pair in zip(engine.step(Actions.wait(2)), sandbox.step(Actions.wait(2)), strict=True)
    ]:
        theirs, ours = ([leaf for leaf in leaves(record) if isinstance(leaf, np.ndarray)] for record in pair)
        assert [(a.dtype, a.ndim) for a in theirs] == [(a.dtype, a.ndim) for a in ours]


def test_sandbox_sensors_are_named_like_the_engines():
    assert set(GROWTH.sensors) <= {sensor.name for sensor in SENSORS}


def test_a_sandbox_refuses_a_config_key_that_it_does_not_know():
    with pytest.raises(InputError, match="unknown config key"):
        Sandbox(GROWTH, {"speed": 3})


def test_two_sandboxes_of_one_seed_are_equal_and_two_episodes_are_not():
    once, again = (Sandbox(GROWTH, {"envs": 6}) for _ in range(2))
    first = once.reset()
    assert same(first, again.reset())
    assert not np.array_equal(first.measurements.metric, once.reset().measurements.metric)


def test_each_environment_of_a_sandbox_alone_equals_itself_in_the_batch():
    names = np.array([3, 4, 5, 13])
    together = Sandbox(GROWTH, {"envs": 4})
    view, client = together.reset(names), RandomValid()
    alone = [Sandbox(GROWTH, {"envs": 1}) for _ in names]
    for sandbox, name in zip(alone, names, strict=True):
        sandbox.reset(np.array([name]))
    while view.step < view.steps:
        actions = client.act(view)
        view, outcome = together.step(actions)
        for env, sandbox in enumerate(alone):
            one = slice(env, env + 1)
            single, single_outcome = sandbox.step(take(actions, one))
            assert same(single.measurements, take(view.measurements, one))
            assert same(single.seeds, take(view.seeds, one))
            assert same(single.masks, take(view.masks, one))
            assert same(single_outcome.after, take(outcome.after, one))


def test_a_decision_that_the_sandbox_refuses_is_a_wait():
    refused, waiting = (Sandbox(GROWTH, {"envs": 2}) for _ in range(2))
    for sandbox in (refused, waiting):
        sandbox.reset()
    view, outcome = refused.step(Actions.wait(2)._replace(op=np.array([Op.FOSSILIZE, Op.ADVANCE])))
    assert not outcome.accepted.any()
    assert same(view.seeds, waiting.step(Actions.wait(2))[0].seeds)


def test_a_seed_in_the_sandbox_is_trained_at_every_step_but_its_first_and_those_doomed(growth):
    view, client = growth.reset(), RandomValid()
    counted = np.zeros(view.seeds.stage.shape, int)
    while view.step < view.steps:
        actions = client.act(view)
        slow = (actions.op == Op.PRUNE)[:, None] & (actions.slot[:, None] == np.arange(3))
        trains = among(view.seeds.stage, IN_BUDGET) & ~view.seeds.doomed & ~slow
        view, _ = growth.step(actions)
        counted = np.where(among(view.seeds.stage, IN_BUDGET), counted + trains, 0)
        np.testing.assert_array_equal(trained_steps(view.seeds), counted)


def test_what_the_sandbox_measures_of_a_seed_is_a_difference_of_metrics():
    sandbox = Sandbox(GROWTH, {"envs": 1, "probe": {"coalitions_every": 1}})
    client = Script({**kept(0, 0, 0), (1, 0): (Op.GERMINATE, 2, 1, 0, 2, 0), (3, 0): (Op.ADVANCE, 2)})
    view = sandbox.reset(np.array([KINDS.index("both")]))
    seen = set()
    while view.step < view.steps:
        view, outcome = sandbox.step(client.act(view))
        measured = view.measurements
        live = among(view.seeds.stage, LIVE)
        np.testing.assert_array_equal(measured.contribution.measured, live)
        np.testing.assert_array_equal(measured.gain.measured, view.seeds.stage == Stage.TRAINING)
        table = dict(zip(view.coalitions.mask.tolist(), view.coalitions.metric, strict=True))
        every = int((live[0] << np.arange(3)).sum())
        assert len(table) == (2 ** live.sum() if live.any() else 0)
        for slot in np.flatnonzero(live[0]):
            assert measured.contribution.mean[0, slot] == pytest.approx(table[every] - table[every ^ (1 << slot)])
        assert (outcome.after.added_params > 0) == among(view.seeds.stage, ADDED).any()
        shapley = attribute(view.coalitions, 8).shapley.mean
        assert np.nansum(shapley) == pytest.approx(table[every] - table[0] if live.any() else 0)
        seen.add(int(live.sum()))
    assert seen == {0, 1, 2}


def test_the_gain_of_a_seed_in_the_sandbox_is_what_it_brings_at_dose_1():
    sandbox = Sandbox(GROWTH, {"envs": 2})
    advance = Script({(0, 0): (Op.GERMINATE, 0, 0, 0, 1, 0), (0, 1): (Op.GERMINATE, 0, 0, 0, 1, 0)})
    view = sandbox.reset(np.array([1, 1]))
    for _ in range(3):
        view, _ = sandbox.step(advance.act(view))
    gain = view.measurements.gain_metric.mean[0, 0]
    dosed = sandbox.process.metric(sandbox.population.draw, view.step, view.seeds, np.array([[1.0, 0, 0], [0, 0, 0]]))
    assert gain == pytest.approx(dosed[0] - view.measurements.metric[0])


def test_twins_in_the_sandbox_are_what_never_growing_gives():
    grown, idle = (Sandbox(GROWTH, {"envs": 6, "twin": twin}) for twin in (True, False))
    view, _ = grown.reset(), idle.reset()
    while view.step < view.steps:
        view, outcome = grown.step(RandomValid().act(view))
        _, waited = idle.step(Actions.wait(6))
        assert waited.twin is None
        assert same(outcome.twin, (waited.before, waited.after))


def test_unfinished_seeds_are_left_out_of_what_the_sandbox_exports():
    sandbox = Sandbox(GROWTH, {"envs": 3})
    script = {**kept(0, 0, 0), **kept(0, 0, 1)}
    del script[4, 1]
    client, view = Script(script), sandbox.reset(np.array([1, 1, 1]))
    while view.step < view.steps:
        view, outcome = sandbox.step(client.act(view))
    assert outcome.exported.added_params.tolist() == [300, 0, 0]
    host = outcome.exported.metric - outcome.after.metric
    assert host[0] == 0
    assert host[1] < -0.1
    assert host[2] == 0


# The optimum.


def brute_force(sandbox: Sandbox) -> np.ndarray:
    """Find the best returns (E,) from the sandbox's state on, by trying every sequence of valid decisions in all environments."""
    envs, masks = sandbox.config.envs, sandbox.masks
    if sandbox.over:
        return np.zeros(envs)
    before = sandbox.snapshot()
    best = np.full(envs, -np.inf)
    for decision in decisions_of(sandbox.space):
        actions = Actions(*(np.full(envs, choice) for choice in decision))
        if allowed(masks, actions).any():
            sandbox.restore(before)
            _, outcome = sandbox.step(actions)
            assert outcome.accepted.all()
            best = np.maximum(best, total(delta(outcome, sandbox.config.reward)) + brute_force(sandbox))
    return best


@pytest.mark.parametrize(
    ("steps", "may", "layer"),
    [
        (6, [(0, 0)], {"lifecycle": {"tempos": [0, 1]}}),
        (
            4,
            [(0, 0), (1, 1)],
            {"lifecycle": {"tempos": [0, 1]}, "gates": {"min_training_steps": 0, "min_holding_steps": 0}},
        ),
        (
            5,
            [(0, 0), (2, 0)],
            {
                "lifecycle": {"tempos": [0, 1], "min_prune_age": 9},
                "gates": {"min_training_steps": 0, "min_holding_steps": 0},
            },
        ),
        (6, [(0, 0)], {"lifecycle": {"tempos": [0, 2], "targets": [0.5, 1.0], "embargo": 0, "min_prune_age": 2}}),
    ],
)
def test_the_optimum_of_the_sandbox_is_that_of_every_sequence_of_decisions(steps, may, layer):
    sandbox = Sandbox(GROWTH, {"envs": len(KINDS), "steps": steps}, layer)
    sandbox.space.fits[:] = False
    for slot, blueprint in may:
        sandbox.space.fits[slot, blueprint] = True
    sandbox.reset()
    solution = solve(sandbox)
    np.testing.assert_allclose(solution.optimum, brute_force(sandbox), rtol=0, atol=1e-12)
    assert (solution.optimum > solution.never + 0.05).any()


def test_who_follows_the_solution_of_the_sandbox_gets_the_optimum(growth, solution):
    returns = play(growth, Optimal(growth, solution))
    np.testing.assert_allclose(returns, solution.optimum[growth.space.instance % len(KINDS)], rtol=0, atol=1e-12)


def test_the_blind_solution_of_the_sandbox_gets_what_it_is_said_to(growth, solution):
    assert play(growth, Optimal(growth, solution, blind=True)).mean() == pytest.approx(solution.blind, abs=1e-12)


def test_in_the_sandbox_never_and_random_valid_are_far_below_the_optimum(growth, solution):
    kind = growth.space.instance % len(KINDS)
    assert solution.score(play(growth, Never()), kind) == pytest.approx(0, abs=1e-12)
    assert solution.score(play(growth, RandomValid()), kind) < 0.1
    assert solution.score(solution.optimum[kind], kind) == 1


def test_who_cannot_tell_the_kinds_of_the_sandbox_apart_gets_less_than_a_third(solution):
    floor = solution.never.mean()
    assert (solution.blind - floor) / (solution.optimum.mean() - floor) < 1 / 3


def test_the_best_decisions_of_the_sandbox_differ_between_kinds(growth, solution):
    view, client = growth.reset(), Optimal(growth, solution)
    while view.step < view.steps:
        view, _ = growth.step(client.act(view))
    fossils = np.where(view.seeds.stage == Stage.FOSSILIZED, view.seeds.blueprint, -1)[: len(KINDS)]
    assert fossils.tolist() == [[-1, -1, -1], [0, -1, -1], [-1, -1, 0], [0, -1, 0], [-1, 1, -1], [-1, -1, -1]]


def test_states_of_the_sandbox_that_count_as_one_have_one_future():
    layers = {"envs": 300}, {"lifecycle": {"targets": [0.5, 1.0], "min_prune_age": 2}}
    kept_whole, cut = Sandbox(GROWTH, *layers), Sandbox(GROWTH, *layers)
    view, client = kept_whole.reset(), RandomValid()
    cut.reset()
    while view.step < view.steps:
        cut.state.seeds = canonical(cut.state.seeds, cut.config)
        actions = client.act(view)
        view, outcome = kept_whole.step(actions)
        lost, same_outcome = cut.step(actions)
        assert same(lost.masks, view.masks)
    assert same(same_outcome.exported, outcome.exported)
    assert (outcome.exported.added_params > 0).sum() > 10


def test_blindfolded_views_of_the_sandbox_do_not_tell_kinds_apart():
    sandbox = Sandbox(GROWTH, {"envs": len(KINDS)})
    client = Script({key: decision for env in range(len(KINDS)) for key, decision in kept(0, 1, env).items()})
    view = sandbox.reset()
    while view.step < view.steps:
        blind = blindfolded(view)
        shown = (blind.seeds, blind.masks, blind.measurements, blind.host_params, blind.added_params, blind.space.cost)
        for record in shown:
            first = take(record, slice(0, 1))
            assert all(same(take(record, slice(env, env + 1)), first) for env in range(1, len(KINDS)))
        assert blind.coalitions is None
        assert not blind.space.instance.any()
        assert len(np.unique(view.measurements.metric)) == len(KINDS)
        view, _ = sandbox.step(client.act(view))


def test_a_blindfold_hides_every_measurement_of_the_sandbox(growth):
    hidden = blindfolded(growth.reset()).measurements
    shown = [name for name in Measurements._fields if name != "sensor_age"]
    for leaf in leaves(tuple(getattr(hidden, name) for name in shown)):
        assert not leaf.any() if leaf.dtype == bool else np.isnan(leaf).all()


# The bandit and the chain.


def pulled(sandbox: Sandbox, arm: int) -> np.ndarray:
    """Return (E,) the rewards of one arm."""
    envs = sandbox.config.envs
    actions = Actions.wait(envs)._replace(tempo=np.ones(envs, np.int64))
    if arm:
        actions = actions._replace(op=np.full(envs, Op.GERMINATE), slot=np.full(envs, arm - 1))
    sandbox.reset()
    _, outcome = sandbox.step(actions)
    assert outcome.accepted.all()
    assert outcome.terminal
    return total(delta(outcome, sandbox.config.reward))


@pytest.mark.parametrize("best", range(ARMS))
def test_the_arms_of_the_bandit_pay_what_they_are_said_to(best):
    sandbox = Sandbox(bandit(best), {"envs": 4000})
    means = [pulled(sandbox, arm).mean() for arm in range(ARMS)]
    others = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    np.testing.assert_allclose(means, [*others[:best], 0.8, *others[best:]], atol=0.04)


def test_every_decision_that_the_bandit_allows_is_one_of_its_arms():
    masks = Sandbox(bandit(2), {"envs": 1}).reset().masks
    assert np.flatnonzero(masks.op[0]).tolist() == [Op.WAIT, Op.GERMINATE]
    assert masks.slot[0, Op.GERMINATE].sum() == ARMS - 1
    for choices in (masks.blueprint, masks.blend, masks.tempo[:, Op.GERMINATE], masks.target[:, Op.GERMINATE]):
        assert (choices.sum(2) == 1).all()


def planted_at(*plans) -> Script:
    """Make a script that plants slot s of environment e at step plans[e][s]."""
    return Script(
        {(step, env): (Op.GERMINATE, s, 0, 0, 1, 0) for env, plan in enumerate(plans) for s, step in enumerate(plan)}
    )


def test_the_chain_pays_one_for_the_right_plantings_and_nothing_for_any_other():
    steps = CHAIN.settings["steps"]
    plans = [*itertools.permutations(range(steps), len(PLANTINGS)), PLANTINGS[:2], ()]
    returns = play(Sandbox(CHAIN, {"envs": len(plans)}), planted_at(*plans))
    assert returns.tolist() == [float(plan == PLANTINGS) for plan in plans]


def test_the_chain_pays_only_at_the_end():
    sandbox, client = Sandbox(CHAIN, {"envs": 1}), planted_at(PLANTINGS)
    play(sandbox, client)
    rewards = [float(total(delta(outcome, sandbox.config.reward))[0]) for outcome in client.outcomes]
    assert rewards == [0.0] * 7 + [1.0]


def test_the_optimum_of_the_chain_is_one():
    sandbox = Sandbox(CHAIN, {"envs": 3})
    solution = solve(sandbox)
    assert (solution.optimum.tolist(), solution.never.tolist()) == ([1.0], [0.0])
    assert play(sandbox, Optimal(sandbox, solution)).tolist() == [1.0] * 3


def test_random_valid_completes_the_chain_about_once_in_384_episodes():
    envs = 20_000
    done = play(Sandbox(CHAIN, {"envs": envs}), RandomValid()).sum()
    expected = envs / 384
    assert abs(done - expected) < 4 * expected**0.5
