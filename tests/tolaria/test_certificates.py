"""Certified keeps: levels and tests by their formulas and by simulation, and the looks of an engine at fresh examples."""

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

import esper
from esper.kasmina.certificates import BETS, Certificates, bets, log_wealth, sign_test, signs
from esper.kasmina.lifecycle import dormant
from esper.leyline.actions import Op
from esper.leyline.errors import InputError
from esper.leyline.gates import judge
from esper.leyline.stages import Stage
from esper.leyline.task import Split
from esper.leyline.trees import as_tree
from esper.runs.cohort import cohort_of
from esper.tolaria.certifying import set_aside
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.reads import counted_reads
from populations import Journalled, Script, blobs, small_config

ALPHA = 0.05
RUNS = 4000


def holding(rows, slots, age=4):
    """Seeds that are all HOLDING at one age."""
    seeds = dormant(rows, slots)
    seeds.stage[:], seeds.age[:] = Stage.HOLDING, age
    return seeds


class Examiner:
    """Runs with one slot each, whose looks follow each other at once. `naive` tests every look at alpha."""

    def __init__(self, *, naive=False):
        self.state, self.naive = Certificates.none(RUNS, 1, ALPHA), naive

    def verdict(self, differences):
        """(RUNS,) whether each run certifies its differences, (RUNS, N)."""
        if self.naive:
            self.state = Certificates.none(RUNS, 1, 2 * ALPHA)
        p = sign_test(signs(torch.from_numpy(differences), None).numpy())
        self.state = self.state.looked(np.ones((RUNS, 1), bool), p, holding(RUNS, 1))
        return self.state.level[:, 0] > 0


@given(verdicts=st.lists(st.booleans(), max_size=12))
def test_what_follows_a_certificate_and_what_follows_a_refusal_have_the_budget_together(verdicts):
    state, due, seeds = Certificates.none(1, 1, ALPHA), np.ones((1, 1), bool), holding(1, 1)
    for verdict in verdicts:
        level = state.next_level()
        assert 0 < level[0] < state.budget[0]
        after = {p: state.looked(due, np.array([p]), seeds) for p in (0.0, 1.0)}
        assert after[0.0].budget + after[1.0].budget == pytest.approx(state.budget)
        assert (after[0.0].level[0, 0], after[1.0].level[0, 0]) == (level[0], 0)
        state = after[0.0 if verdict else 1.0]


def test_after_refusals_the_levels_fall_with_the_square_and_after_a_certificate_they_go_on_from_its_level():
    state, due, levels = Certificates.none(1, 1, ALPHA), np.ones((1, 1), bool), []
    for p in (1.0, 1.0, 0.0, 1.0, 1.0):
        levels.append(state.next_level()[0] / ALPHA)
        state = state.looked(due, np.array([p]), holding(1, 1))
    assert levels == pytest.approx([1 / 2, 1 / 6, 1 / 12, 1 / 24, 1 / 72])


def test_seeds_that_are_looked_at_together_are_tested_slot_by_slot():
    state = Certificates.none(2, 3, ALPHA)
    due = np.array([[True, False, True], [False, True, False]])
    together = state.looked(due, np.array([1.0, 0.0, 0.0]), holding(2, 3))
    for slot, p in enumerate(([1.0], [0.0], [0.0])):
        state = state.looked(due & (np.arange(3) == slot), np.array(p), holding(2, 3))
    for one, other in zip(together, state, strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_allclose(state.level, ALPHA * np.array([[0, np.nan, 1 / 6], [np.nan, 1 / 2, np.nan]]))


def test_the_sign_test_is_the_tail_of_fair_coins():
    counts = np.array([(above, below) for above in range(7) for below in range(7)], float)
    expected = [
        sum(math.comb(int(above + below), k) for k in range(int(above), int(above + below) + 1)) / 2 ** (above + below)
        for above, below in counts
    ]
    np.testing.assert_allclose(sign_test(counts), expected)


@pytest.mark.parametrize("null", [0.0, 0.02])
def test_the_wealth_is_the_largest_mean_over_bets_of_products_of_one_plus_the_bet_times_the_difference(null):
    differences = np.random.default_rng(0).uniform(-0.7, 1, 12)
    wealth, largest = np.ones(len(BETS)), 1.0
    for difference in differences[:9]:
        wealth *= 1 + BETS / (1 + null) * (difference - null)
        largest = max(largest, wealth.mean())
    found = log_wealth(torch.from_numpy(differences[None]), torch.arange(12)[None] < 9, null)
    assert found.item() == pytest.approx(math.log(largest))
    assert largest > 1


def test_examples_that_a_row_does_not_have_count_for_nothing():
    differences = torch.tensor([[1.0, -1.0, 0.0, 1.0, 1.0]])
    assert signs(differences, torch.arange(5)[None] < 4).tolist() == [[2, 1]]


def test_no_difference_can_take_the_whole_wealth():
    assert (1 + bets(0.3) * (-1 - 0.3)).min() == pytest.approx(0.1)


@pytest.mark.parametrize("null", [0.0, 0.02])
@pytest.mark.parametrize("kind", ["coins", "rare losses", "rare gains"])
def test_bets_on_a_seed_that_does_not_help_win_at_most_as_often_as_their_level(kind, null):
    generator, shape = np.random.default_rng(1), (RUNS, 96)
    if kind == "coins":
        differences = generator.choice([-1.0, 0.0, 1.0], shape, p=[0.2 - null / 2, 0.6, 0.2 + null / 2])
    elif kind == "rare losses":
        differences = np.where(generator.random(shape) < 0.05, -0.95, 0.05) + null
    else:
        differences = np.where(generator.random(shape) < 0.05, 0.95, -0.05) + null
    p = np.exp(-log_wealth(torch.from_numpy(differences), None, null).numpy())
    assert (p <= ALPHA).mean() <= ALPHA + 3 * math.sqrt(ALPHA / RUNS)


def coins(generator, *shape):
    """Differences of -1 and 1 with expectation 0."""
    return generator.choice([-1.0, 1.0], shape)


def wandering(generator, examiner):
    """Seeds whose expectation goes above and below 0 from look to look, on the same examples. Returns false certificates."""
    chance, own, false = generator.random((RUNS, 60)), coins(generator, RUNS, 60), np.zeros(RUNS, bool)
    for look in range(12):
        helps = look % 3 == 0
        mine = np.where(generator.random((RUNS, 60)) < 0.5, own, coins(generator, RUNS, 60))
        differences = np.where(chance < 0.3, 1.0, mine) if helps else mine
        false |= examiner.verdict(differences) & (not helps)
    return false


def chosen(generator, examiner):
    """Learn the examples bit by bit: verdicts on 8 seeds that help a little choose a ninth that does not. False certificates."""
    features = coins(generator, 8, RUNS, 60)
    votes = np.zeros((RUNS, 60))
    for feature in features:
        helps = np.where(generator.random((RUNS, 60)) < 0.2, 1.0, feature)  # expectation 0.2
        votes += np.where(examiner.verdict(helps), 1, -1)[:, None] * feature
    return examiner.verdict(np.sign(votes))


@pytest.mark.parametrize("adversary", [wandering, chosen])
def test_whatever_is_looked_at_a_run_gives_a_false_certificate_with_probability_alpha_at_most(adversary):
    """The same adversaries fool tests at alpha on examples that are used again, so they are adversaries."""
    guarded, naive = (
        adversary(np.random.default_rng(3), examiner).mean() for examiner in (Examiner(), Examiner(naive=True))
    )
    assert guarded <= ALPHA + 3 * math.sqrt(ALPHA / RUNS)
    assert naive > 2 * ALPHA


def test_a_seed_that_helps_is_certified_at_the_first_look():
    differences = np.random.default_rng(2).choice([-1.0, 0.0, 1.0], (RUNS, 128), p=[0.02, 0.83, 0.15])
    assert Examiner().verdict(differences).mean() > 0.9


def test_a_seed_that_returns_to_holding_is_on_a_new_trial_and_the_budget_stays_spent():
    state, due = Certificates.none(1, 2, ALPHA), np.array([[True, False]])
    seeds = holding(1, 2)
    state = state.looked(due, np.zeros(1), seeds)
    assert not state.due(due, seeds).any()
    seeds.age[0, 0] = 0  # as after SET_ALPHA at once
    state = state.during(seeds)
    assert np.isnan(state.level).all()
    assert state.due(due, seeds).tolist() == due.tolist()
    assert state.budget.tolist() == [ALPHA / 2]


def test_a_refused_seed_is_looked_at_again_later_and_later():
    state, due, ages = Certificates.none(1, 1, ALPHA), np.ones((1, 1), bool), []
    for age in range(2, 25):
        seeds = holding(1, 1, age)
        if state.due(due, seeds).all():
            ages.append(age)
            state = state.looked(due, np.ones(1), seeds)
    assert ages == [2, 3, 4, 6, 8, 11, 14, 18, 23]


def test_fresh_examples_are_no_probe_examples():
    probe = Split(torch.arange(50.0)[:, None], torch.zeros(50, dtype=torch.int64))
    kept, aside = set_aside(probe, 0.4, seed=3)
    assert (len(kept.y), len(aside.y)) == (30, 20)
    assert sorted([*kept.x.flatten().tolist(), *aside.x.flatten().tolist()]) == list(range(50))


@pytest.mark.parametrize("share", [0.01, 0.99])
def test_a_probe_split_that_cannot_be_divided_is_refused(share):
    with pytest.raises(InputError, match=r"gates\.certify_share is"):
        set_aside(Split(torch.zeros(20, 1), torch.zeros(20, dtype=torch.int64)), share, 0)


GATES = {"certify": ALPHA, "min_contribution": -1.0, "contribution_z": 0.0}
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


def watched(population):
    """The seeds, the seeds that were looked at and the figures of every look of a population, as they are made."""
    seen, probe = [], population.probe

    def probing(seeds, asked):
        figures = probe(seeds, asked)
        if asked.look is not None:
            seen.append((seeds, asked.look, figures.compared))
        return figures

    population.probe = probing
    return seen


def test_a_look_compares_the_network_with_and_without_the_seed_on_all_fresh_examples():
    engine, client = certified_engine()
    seen = watched(engine.population)
    view = played(engine, client, 4)
    population = engine.population
    engine.step(client.act(view))
    seeds, due, compared = seen[-1]
    fresh = population.data.fresh
    for found, (env, slot) in zip(compared, np.argwhere(due), strict=True):
        scores = []
        for stages in (seeds.stage.copy(), seeds.stage.copy()):
            if scores:
                stages[env, slot] = Stage.DORMANT
            kept = seeds._replace(stage=np.where(stages == Stage.HOLDING, Stage.FOSSILIZED, stages).astype(np.int8))
            network, _ = population.export(kept, env)
            with torch.no_grad():
                output = network.eval()(fresh.x[env])
            scores.append((output.argmax(-1) == fresh.y[env]).double())
        rise = scores[0] - scores[1]
        assert found.tolist() == [(rise > 0).sum(), (rise < 0).sum()]
        level = engine.certifier.state.level[env, slot]
        assert (level > 0) == (sign_test(found[None])[0] <= level) if level else level == 0


def test_fossilize_is_masked_until_the_certificate_and_the_reason_says_so():
    engine, client = certified_engine()
    view = played(engine, client, 5)
    gate = judge(view.seeds, view.measurements, engine.config.gates).fossilize
    on_trial = view.seeds.stage == Stage.HOLDING
    assert on_trial.any()
    certified = view.measurements.certificate > 0
    assert np.array_equal(view.masks.slot[:, Op.FOSSILIZE] & on_trial, certified & on_trial)
    env, slot = np.argwhere(on_trial & ~certified)[0]
    reason = gate.reason(env, slot)
    assert "fresh examples have not shown that it helps" in reason
    assert f"at level {view.measurements.level[env]:.2g} (gates.certify)" in reason


def test_a_controller_sees_of_the_fresh_examples_no_more_than_verdicts():
    engines = [certified_engine({"gates": {"certify": 1e-9, "certify_share": 0.8}}) for _ in range(2)]
    for number, (engine, _) in enumerate(engines):
        fresh = engine.population.data.fresh
        engine.population.data.fresh = fresh._replace(y=(fresh.y + number) % 3)
    looks = [watched(engine.population) for engine, _ in engines]
    views = [played(engine, client, 9) for engine, client in engines]
    assert any((one[-1] != other[-1]).any() for one, other in zip(*looks, strict=True))
    assert not any((view.measurements.certificate > 0).any() for view in views)
    one, other = (as_tree(view._replace(space=None)) for view in views)
    pytree.tree_map(np.testing.assert_array_equal, one, other)


def test_a_step_with_looks_reads_the_device_once():
    engine, client = certified_engine()
    view = played(engine, client, 4)
    actions, looks = client.act(view), watched(engine.population)
    with counted_reads() as reads:
        engine.step(actions)
    assert looks
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
    assert (engine.certifier.state.budget < ALPHA).any()
    for name, field in engine.snapshot()["certificates"].items():
        np.testing.assert_array_equal(field, other.snapshot()["certificates"][name], err_msg=name)
    np.testing.assert_array_equal(engine.view().measurements.certificate, view.measurements.certificate)


def test_an_episode_goes_on_with_the_budget_that_the_last_one_left():
    engine, client = certified_engine()
    played(engine, client, 6)
    budget = engine.certifier.state.budget.copy()
    engine.reset()
    assert (budget < ALPHA).any()
    assert engine.certifier.state.budget.tolist() == budget.tolist()
    engine.reset(np.array([7, 8, 9]))
    assert engine.certifier.state.budget.tolist() == [ALPHA] * 3


def test_a_look_does_not_depend_on_other_environments():
    found = []
    for envs in (3, 2):
        engine, _ = certified_engine(envs=envs)
        looks = watched(engine.population)
        played(engine, Script({at: what for at, what in PLANTED.items() if at[1] < envs}), 6)
        found.append([compared[np.nonzero(due)[0] < 2].tolist() for _, due, compared in looks])
    assert found[0] == found[1]
    assert found[0]


def test_other_metrics_than_the_accuracy_are_tested_by_the_clipped_loss():
    x = np.random.default_rng(0).normal(size=(400, 3))
    task = esper.task("line", x, x @ [1.0, -2.0, 0.5], host=esper.mlp(inputs=3, width=4, classes=1, blocks=2))
    engine = VectorizedEngine(task, small_config({"gates": GATES}, steps=12))
    looks = watched(engine.population)
    played(engine, Script(PLANTED), 6)
    assert looks
    for _, due, compared in looks:
        assert compared.shape == (due.sum(),)
        assert np.isfinite(compared).all()


def test_too_few_fresh_examples_for_any_certificate_are_refused():
    with pytest.raises(
        InputError, match=r"gates\.certify 0\.05 needs 6 fresh examples or more, and the population .* has 3 set aside"
    ):
        certified_engine({"gates": {"certify_share": 0.05}})


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
