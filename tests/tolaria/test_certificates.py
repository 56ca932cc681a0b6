"""Certified keeps: the e-process by its formula and by simulation, and the looks of an engine with fresh examples."""

import copy
import math

import numpy as np
import pytest
import torch

import esper
from esper.kasmina.certificates import BETS, Certificates, bets, log_growth, share_of
from esper.kasmina.lifecycle import dormant
from esper.leyline.actions import Op
from esper.leyline.errors import InputError
from esper.leyline.gates import judge
from esper.leyline.stages import Stage
from esper.leyline.task import Split
from esper.runs.cohort import cohort_of
from esper.tolaria.certifying import FreshExamples, set_aside
from esper.tolaria.data import stack_splits
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.reads import counted_reads
from populations import Journalled, Script, blobs, small_config

ALPHA = 0.05


def looks(differences, null=0.0, alpha=ALPHA):
    """Evidence (R, looks) of one seed a row after each look; differences (R, looks, b)."""
    state, due, found = Certificates.none(len(differences), 1), np.ones((len(differences), 1), bool), []
    for batch in np.moveaxis(differences, 1, 0):
        state = state.looked(due, log_growth(torch.from_numpy(batch), null).numpy(), batch.shape[1])
        found.append(state.evidence(alpha)[:, 0])
    return np.stack(found, 1)


@pytest.mark.parametrize("null", [0.0, 0.02])
def test_the_evidence_is_the_mean_over_bets_of_products_of_one_plus_the_bet_times_the_difference(null):
    differences = np.random.default_rng(0).uniform(-1, 1, (1, 3, 5))
    wealths = []
    for bet in BETS / (1 + null):
        wealth = 1.0
        for difference in differences.ravel():
            wealth *= 1 + bet * (difference - null)
        wealths.append(wealth)
    needed = math.pi**2 / (6 * ALPHA)
    assert looks(differences, null)[0, -1] == pytest.approx(math.log(sum(wealths) / len(wealths) / needed))


def test_no_difference_can_take_the_whole_wealth():
    assert (1 + bets(0.3) * (-1 - 0.3)).min() == pytest.approx(0.1)


def test_the_shares_of_alpha_sum_to_alpha():
    assert share_of(ALPHA, np.arange(1, 10**6)).sum() == pytest.approx(ALPHA, rel=1e-5)


@pytest.mark.parametrize("kind", ["coins", "rare losses", "drift"])
def test_a_seed_that_does_not_help_is_certified_at_most_as_often_as_its_share_of_alpha(kind):
    """Read after every one of 40 looks. With drift, the seed helps at first, and the mean over the looks is never above 0."""
    generator, runs = np.random.default_rng(1), 4000
    shape = (runs, 40, 8)
    if kind == "coins":
        differences = generator.choice([-1.0, 0.0, 1.0], shape, p=[0.2, 0.6, 0.2])
    elif kind == "rare losses":
        differences = np.where(generator.random(shape) < 0.05, -0.95, 0.05)
    else:
        up = np.arange(40)[None, :, None] % 2 == 1  # a loss first, then a gain as large: the running mean is 0 or below
        differences = np.where(generator.random(shape) < 0.8, 1.0, -1.0) * np.where(up, 1, -1)
    crossed = (looks(differences) > 0).any(1).mean()
    assert crossed <= float(share_of(ALPHA, np.array(1))) + 3 * math.sqrt(0.03 / runs)


def test_a_seed_that_helps_is_certified():
    differences = np.random.default_rng(2).choice([-1.0, 0.0, 1.0], (100, 20, 32), p=[0.05, 0.75, 0.2])
    assert (looks(differences)[:, -1] > 0).mean() > 0.99


def test_a_seed_that_returns_to_holding_is_a_new_trial_with_a_smaller_share():
    state, due = Certificates.none(1, 2), np.array([[True, False]])
    state = state.looked(due, np.ones((1, len(BETS))), 4)
    seeds = dormant(1, 2)
    seeds.stage[:], seeds.age[:] = Stage.HOLDING, 3
    assert state.during(seeds).rank.tolist() == [[1, 0]]
    seeds.age[0, 0] = 0  # as after SET_ALPHA at once
    state = state.during(seeds)
    assert (state.rank.tolist(), state.wealth.any(), state.used.tolist()) == ([[0, 0]], False, [4])
    state = state.looked(np.array([[True, True]]), np.zeros((2, len(BETS))), 4)
    assert (state.rank.tolist(), state.trials.tolist(), state.used.tolist()) == ([[2, 3]], [3], [8])


def test_fresh_examples_are_no_probe_examples_and_each_is_read_once():
    probe = Split(torch.arange(50.0)[:, None], torch.zeros(50, dtype=torch.int64))
    kept, aside = set_aside(probe, 0.4, seed=3)
    assert (len(kept.y), len(aside.y)) == (30, 20)
    assert sorted([*kept.x.flatten().tolist(), *aside.x.flatten().tolist()]) == list(range(50))
    examples = stack_splits([aside], np.zeros(3, np.int64), (1,), torch.device("cpu"))
    fresh = FreshExamples(examples, np.full(3, 20), np.zeros(3, np.int64), 3)
    seen = torch.cat([fresh.batch(np.full(3, used), 5).x for used in range(0, 20, 5)], 1)[..., 0]
    assert [sorted(row.tolist()) for row in seen] == [sorted(aside.x.flatten().tolist())] * 3
    assert seen[0].tolist() != seen[1].tolist()


@pytest.mark.parametrize("share", [0.01, 0.99])
def test_a_probe_split_that_cannot_be_divided_is_refused(share):
    with pytest.raises(InputError, match=r"gates\.certify_share is"):
        set_aside(Split(torch.zeros(20, 1), torch.zeros(20, dtype=torch.int64)), share, 0)


GATES = {"certify": ALPHA, "certify_examples": 8, "min_contribution": -1.0, "contribution_z": 0.0}
PLANTED = {(0, env): (Op.GERMINATE, env % 2, 0, 0, 1, 3) for env in range(3)} | {
    (2, env): (Op.ADVANCE, env % 2) for env in range(3)
}


def certified_engine(*layers, **top):
    """An engine whose seeds are on trial at step 4 and after it, and its client."""
    config = small_config({"gates": GATES, "lifecycle": {"max_training_seeds": 2}}, *layers, **{"steps": 12, **top})
    return Journalled(blobs(examples=400, hidden=(1, 1)), config), Script(PLANTED)


def played(engine, client, steps):
    view = engine.reset()
    for _ in range(steps):
        view, _ = engine.step(client.act(view))
    return view


def test_a_look_compares_the_network_with_and_without_the_seed_on_the_next_fresh_examples():
    engine, client = certified_engine()
    view = played(engine, client, 4)
    before, seen = engine.certifier.state, []
    population, probe = engine.population, engine.population.probe
    population.probe = lambda seeds, asked: seen.append((seeds, asked.look)) or probe(seeds, asked)
    engine.step(client.act(view))
    (seeds, look), after = seen[0], engine.certifier.state
    assert look.due.any()
    examples = population.data.fresh.batch(before.used, 8)
    for count, (env, slot) in enumerate(np.argwhere(look.due)):
        scores = []
        for stages in (seeds.stage.copy(), seeds.stage.copy()):
            if scores:
                stages[env, slot] = Stage.DORMANT
            kept = seeds._replace(stage=np.where(stages == Stage.HOLDING, Stage.FOSSILIZED, stages).astype(np.int8))
            network, _ = population.export(kept, env)
            with torch.no_grad():
                output = network.eval()(examples.x[env])
            scores.append((output.argmax(-1) == examples.y[env]).double())
        growth = log_growth((scores[0] - scores[1])[None], 0.0)[0].numpy()
        np.testing.assert_allclose(after.wealth[env, slot], growth, err_msg=f"seed {count}")


def test_fossilize_is_masked_until_the_certificate_and_the_reason_says_so():
    engine, client = certified_engine()
    view = played(engine, client, 5)
    gate = judge(view.seeds, view.measurements, engine.config.gates).fossilize
    holding = view.seeds.stage == Stage.HOLDING
    assert holding.any()
    certified = view.measurements.evidence > 0
    assert np.array_equal(view.masks.slot[:, Op.FOSSILIZE] & holding, certified & holding)
    env, slot = np.argwhere(holding & ~certified)[0]
    assert "of what gates.certify asks for" in gate.reason(env, slot)


def test_when_the_fresh_examples_run_out_a_seed_is_refused_and_the_reason_says_so():
    engine, client = certified_engine({"gates": {"certify": 1e-9, "certify_examples": 16}}, steps=10)
    view = played(engine, client, 9)
    left = view.measurements.fresh
    assert ((left >= 0) & (left < 16)).any()
    row = int(left.argmin())
    slot = int((view.seeds.stage[row] == Stage.HOLDING).argmax())
    reason = judge(view.seeds, view.measurements, engine.config.gates).fossilize.reason(row, slot)
    assert f"{left[row]:.0f} fresh examples are left of the 16 of a look" in reason
    assert not view.masks.op[row, Op.FOSSILIZE]


def test_a_step_with_looks_reads_the_device_once():
    engine, client = certified_engine()
    view = played(engine, client, 4)
    actions = client.act(view)
    with counted_reads() as reads:
        engine.step(actions)
    assert engine.certifier.state.used.any()
    assert [site for _, site in reads] == ["runtime.py:read_packet"]


def test_a_resumed_run_has_the_same_certificates():
    engine, client = certified_engine()
    played(engine, client, 5)
    tree = copy.deepcopy(engine.snapshot())
    other, _ = certified_engine()
    view = other.restore(tree)
    for _ in range(3):
        engine.step(client.act(view))
        view, _ = other.step(client.act(view))
    assert engine.certifier.state.used.any()
    for name, field in engine.snapshot()["certificates"].items():
        np.testing.assert_array_equal(field, other.snapshot()["certificates"][name], err_msg=name)
    np.testing.assert_array_equal(engine.view().measurements.evidence, view.measurements.evidence)


def test_an_episode_goes_on_with_the_fresh_examples_that_the_last_one_left():
    engine, client = certified_engine()
    played(engine, client, 6)
    used, trials = engine.certifier.state.used.copy(), engine.certifier.state.trials.copy()
    engine.reset()
    assert used.any()
    assert engine.certifier.state.used.tolist() == used.tolist()
    assert engine.certifier.state.trials.tolist() == trials.tolist()
    assert not engine.certifier.state.rank.any()
    engine.reset(np.array([7, 8, 9]))
    assert engine.certifier.state.used.tolist() == [0, 0, 0]


def test_a_look_does_not_depend_on_other_environments():
    engine, client = certified_engine()
    played(engine, client, 6)
    smaller, _ = certified_engine(envs=2)
    played(smaller, Script({at: what for at, what in PLANTED.items() if at[1] < 2}), 6)
    np.testing.assert_allclose(
        engine.certifier.state.wealth[:2], smaller.certifier.state.wealth[:2], rtol=1e-6, atol=1e-9
    )


def test_other_metrics_than_the_accuracy_are_tested_by_the_clipped_loss():
    x = np.random.default_rng(0).normal(size=(400, 3))
    task = esper.task("line", x, x @ [1.0, -2.0, 0.5], host=esper.mlp(inputs=3, width=4, classes=1, blocks=2))
    config = small_config({"gates": GATES}, steps=12)
    engine = VectorizedEngine(task, config)
    played(engine, Script(PLANTED), 6)
    state = engine.certifier.state
    assert state.used.any()
    assert np.isfinite(state.wealth).all()
    assert state.wealth.any()


def test_a_training_refuses_certificates():
    config = small_config({"gates": {"certify": ALPHA}, "reward": {"group_size": 1}})
    with pytest.raises(InputError, match="a training plays many episodes on the same fresh examples"):
        cohort_of(blobs(), config)


def test_a_network_in_a_loop_of_its_own_refuses_certificates():
    network = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    probe = [(torch.randn(8, 4), torch.arange(8) % 3)] * 2
    with pytest.raises(InputError, match=r"leave gates\.certify out where Esper does not hold the data"):
        esper.Growth(
            network,
            torch.optim.SGD(network.parameters(), lr=0.1),
            loss=torch.nn.functional.cross_entropy,
            probe=probe,
            steps=4,
            budget=1.0,
            settings={"gates": {"certify": ALPHA}},
        )
