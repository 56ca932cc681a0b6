"""Test certified keeps: levels and tests by their formulas and by simulation, and the looks of an engine at fresh examples."""

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from device_reads import counted_reads
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import ndtri
from scipy.stats import binom
from torch.utils import _pytree as pytree

import esper
from esper.kasmina.lifecycle import dormant
from esper.leyline.data.task import Lengths, Mixture, Room, Split
from esper.leyline.lifecycle.gates import judge
from esper.leyline.lifecycle.vocabulary import Op, Stage
from esper.leyline.messages import InputError
from esper.leyline.records import as_tree
from esper.runs.train import cohorts_of
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.measure.certifying import (
    BETS,
    MOST,
    Certificates,
    bets,
    chance,
    log_wealth,
    set_aside,
    sign_test,
    signs,
)
from populations import Journalled, Script, blobs, small_config
from thinning import crossed

ALPHA = 0.05
RUNS = 4000


def holding(rows, slots, age=4):
    """Make seeds that are all HOLDING at one age."""
    seeds = dormant(rows, slots)
    seeds.stage[:], seeds.age[:] = Stage.HOLDING, age
    return seeds


def blank(rows, slots, alpha=ALPHA):
    """Make certificates of rows, each with fresh examples and a budget of its own."""
    return Certificates.none(np.arange(rows), slots, alpha)


SURE = np.inf  # evidence of the probe, in standard errors, that makes a look take the largest share of the budget


class Examiner:
    """Examines runs of some rows that share their fresh examples, whose looks follow each other at once.

    `naive` tests every look at alpha; `leak` gives every row a budget of its own. `evidence` is what the probe says of every
    seed; None takes as little of it as a look needs.
    """

    def __init__(self, *, rows=1, runs=RUNS, naive=False, leak=False, evidence=SURE):
        self.rows, self.runs, self.naive, self.evidence = rows, runs, naive, evidence
        group = np.arange(runs * rows) if leak else np.arange(runs).repeat(rows)
        self.state = Certificates.none(group, 1, ALPHA)

    def verdict(self, differences, row=0):
        """Return (runs,) whether a row of each run certifies its differences, (runs, N)."""
        if self.naive:
            self.state = Certificates.none(self.state.group, 1, ALPHA / MOST)
        due = (np.arange(self.runs * self.rows) % self.rows == row)[:, None]
        p = sign_test(signs(torch.from_numpy(differences), None).numpy())
        budget = self.state.budget[self.state.group][:, None]
        z = np.full(due.shape, SURE) if self.evidence else 0.75 - ndtri(budget)  # a chance of 0.70
        self.state = self.state.looked(due, p, holding(*due.shape), z)
        return self.state.level[due[:, 0], 0] > 0


def test_the_chance_of_a_look_is_that_of_an_effect_of_which_the_probe_saw_a_noisy_mean():
    noise = np.random.default_rng(0).normal(size=(2, 100_000))
    effect = 2.5 - noise[0]  # what the probe saw is 2.5, whatever the effect
    assert chance(2.5, ALPHA) == pytest.approx((effect + noise[1] >= -ndtri(ALPHA)).mean(), abs=0.01)
    assert chance(np.array([np.nan, np.inf, 0.0]), 0.5).tolist() == [0.5, 1, 0.5]


@given(verdicts=st.lists(st.booleans(), max_size=12))
def test_what_follows_a_certificate_and_what_follows_a_refusal_have_the_budget_together(verdicts):
    state, due, seeds, sure = blank(1, 1), np.ones((1, 1), bool), holding(1, 1), np.full((1, 1), SURE)
    for verdict in verdicts:
        after = {p: state.looked(due, np.array([p]), seeds, sure) for p in (0.0, 1.0)}
        level = after[0.0].level[0, 0]
        assert 0 < level < state.budget[0]
        assert after[0.0].budget[0] == level
        assert after[0.0].budget + after[1.0].budget == pytest.approx(state.budget)
        assert after[1.0].level[0, 0] == 0
        state = after[0.0 if verdict else 1.0]


def test_seeds_of_rows_that_share_examples_are_tested_from_the_strongest_on_and_spend_one_budget():
    group, z = np.array([0, 1, 0]), np.array([[4.2, 5.0], [np.nan, 4.0], [4.5, np.nan]])
    due, p = ~np.isnan(z), np.array([0.0, 1.0, 0.0, 0.0])
    together = Certificates.none(group, 2, ALPHA).looked(due, p, holding(3, 2), z)
    state = Certificates.none(group, 2, ALPHA)
    for row, slot in ((0, 1), (1, 1), (2, 0), (0, 0)):
        one = np.zeros((3, 2), bool)
        one[row, slot] = True
        state = state.looked(one, np.array([0.0 if (row, slot) != (0, 1) else 1.0]), holding(3, 2), z)
    for each, other in zip(together, state, strict=True):
        np.testing.assert_array_equal(each, other)
    assert together.level[0, 1] == 0
    assert together.level[2, 0] == ALPHA * (1 - MOST) * chance(4.5, ALPHA * (1 - MOST))
    assert together.budget.tolist() == [together.level[0, 0], together.level[1, 1]]


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
    """Draw differences of -1 and 1 with expectation 0."""
    return generator.choice([-1.0, 1.0], shape)


def wandering(generator, examiner, rows):
    """Look at seeds whose expectation crosses 0 from look to look, on the same examples; return the false certificates."""
    RUNS = examiner.runs
    chance, own, false = generator.random((RUNS, 60)), coins(generator, RUNS, 60), np.zeros(RUNS, bool)
    for look in range(12):
        helps = look % 3 == 0
        mine = np.where(generator.random((RUNS, 60)) < 0.5, own, coins(generator, RUNS, 60))
        differences = np.where(chance < 0.3, 1.0, mine) if helps else mine
        false |= examiner.verdict(differences, look % rows) & (not helps)
    return false


def chosen(generator, examiner, rows):
    """Learn the examples bit by bit: verdicts on seeds that help a little, 8 in each row but the last, choose a seed of the last
    row that does not help. Returns its false certificates.
    """
    votes = np.zeros((examiner.runs, 60))
    for row in range(max(rows - 1, 1)):
        for _ in range(8):
            feature = coins(generator, examiner.runs, 60)
            helps = np.where(generator.random(feature.shape) < 0.2, 1.0, feature)  # expectation 0.2
            votes += np.where(examiner.verdict(helps, row), 1, -1)[:, None] * feature
    return examiner.verdict(np.where(votes == 0, coins(generator, examiner.runs, 60), np.sign(votes)), rows - 1)


def refuted(false):
    """Return whether so many false certificates have a probability under 1e-4 where one has the probability alpha."""
    return binom.sf(false.sum() - 1, len(false), ALPHA) < 1e-4


@pytest.mark.parametrize(
    ("adversary", "size", "evidence"),
    crossed([wandering, chosen], [(1, RUNS), (2, RUNS), (8, 1000), (64, 150)], [SURE, None]),
)
def test_whatever_is_looked_at_rows_that_share_examples_have_a_false_certificate_with_probability_alpha_at_most(
    adversary, size, evidence
):
    rows, runs = size
    examiner = Examiner(rows=rows, runs=runs, evidence=evidence)
    assert not refuted(adversary(np.random.default_rng(3), examiner, rows))


@pytest.mark.parametrize("adversary", [wandering, chosen])
def test_the_adversaries_fool_looks_at_alpha_each(adversary):
    assert refuted(adversary(np.random.default_rng(3), Examiner(naive=True), 1))


@pytest.mark.parametrize("rows", [2, 8])
def test_the_adversary_of_many_rows_fools_rows_that_have_a_budget_each(rows):
    examiner = Examiner(rows=rows, runs=1000, leak=True)
    assert refuted(chosen(np.random.default_rng(3), examiner, rows))


def test_a_seed_that_helps_is_certified_at_the_first_look():
    differences = np.random.default_rng(2).choice([-1.0, 0.0, 1.0], (RUNS, 128), p=[0.02, 0.83, 0.15])
    assert Examiner().verdict(differences).mean() > 0.9


def test_a_seed_that_returns_to_holding_is_on_a_new_trial_and_the_budget_stays_spent():
    state, due, sure = blank(1, 2), np.array([[True, False]]), np.full((1, 2), SURE)
    seeds = holding(1, 2)
    state = state.looked(due, np.zeros(1), seeds, sure)
    assert not state.due(due, seeds, sure).any()
    seeds.age[0, 0] = 0  # as after SET_ALPHA at once
    state = state.during(seeds)
    assert np.isnan(state.level).all()
    assert state.due(due, seeds, sure).tolist() == due.tolist()
    assert state.budget.tolist() == [ALPHA * MOST]


def test_a_refused_seed_is_looked_at_again_later_and_later():
    state, due, sure, ages = blank(1, 1), np.ones((1, 1), bool), np.full((1, 1), SURE), []
    for age in range(2, 25):
        seeds = holding(1, 1, age)
        if state.due(due, seeds, sure).all():
            ages.append(age)
            state = state.looked(due, np.ones(1), seeds, sure)
    assert ages == [2, 3, 4, 6, 8, 11, 14, 18, 23]


def test_a_seed_that_would_probably_be_refused_is_not_looked_at_and_costs_nothing():
    state, due, weak = blank(1, 2), np.ones((1, 2), bool), np.array([[2.0, 3.0]])
    assert state.due(due, holding(1, 2), weak).tolist() == [[False, True]]
    state = state.looked(due, np.zeros(2), holding(1, 2), weak)
    assert np.isnan(state.level).tolist() == [[True, False]]
    assert state.budget[0] == state.level[0, 1]


def test_fresh_examples_are_no_probe_examples():
    probe = Split(torch.arange(50.0)[:, None], torch.zeros(50, dtype=torch.int64))
    kept, aside = set_aside(probe, 0.4, seed=3)
    assert (len(kept.y), len(aside.y)) == (30, 20)
    assert sorted([*kept.x.flatten().tolist(), *aside.x.flatten().tolist()]) == list(range(50))


@pytest.mark.parametrize("share", [0.01, 0.99])
def test_a_probe_split_that_cannot_be_divided_is_refused(share):
    with pytest.raises(InputError, match=r"gates\.certify_share is"):
        set_aside(Split(torch.zeros(20, 1), torch.zeros(20, dtype=torch.int64)), share, 0)


LARGE = 0.9  # so that the seeds of these short runs are looked at
GATES = {"certify": LARGE, "min_contribution": -1.0, "contribution_z": 0.0}
PLANTED = {(0, env): (Op.GERMINATE, env % 2, 0, 0, 1, 3) for env in range(3)} | {
    (2, env): (Op.ADVANCE, env % 2) for env in range(3)
}


def certified_engine(*layers, **top):
    """Make an engine whose seeds are on trial at step 4 and after it, and its client."""
    config = small_config({"gates": GATES, "lifecycle": {"max_training_seeds": 2}}, *layers, **{"steps": 12, **top})
    return Journalled(blobs(examples=400, hidden=(1, 1)), config), Script(PLANTED)


def played(engine, client, steps):
    view = engine.reset()
    for _ in range(steps):
        view, _ = engine.step(client.act(view))
    return view


def watched(population):
    """Record the seeds, the seeds that were looked at and the figures of every look of a population, as they are made."""
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
    view = played(engine, client, 3)
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
                output = network.eval()(fresh.x[env].cpu())
            scores.append((output.argmax(-1) == fresh.y[env].cpu()).double())
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
    assert f"{view.measurements.level[env]:.2g} of gates.certify is left" in reason


def test_a_controller_sees_of_the_fresh_examples_no_more_than_verdicts():
    engines = [certified_engine() for _ in range(2)]
    for number, (engine, _) in enumerate(engines):
        fresh = engine.population.data.fresh
        engine.population.data.fresh = fresh._replace(y=(fresh.y + 2 * number) % 3)
    looks = [watched(engine.population) for engine, _ in engines]
    views = [played(engine, client, 9) for engine, client in engines]
    assert any((one[-1] != other[-1]).any() for one, other in zip(*looks, strict=True))
    assert not any((view.measurements.certificate > 0).any() for view in views)
    one, other = (as_tree(view._replace(space=None)) for view in views)
    pytree.tree_map(np.testing.assert_array_equal, one, other)


def test_a_step_with_looks_reads_the_device_once():
    engine, client = certified_engine()
    view = played(engine, client, 3)
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
    assert (engine.certifier.state.budget < LARGE).any()
    for name, field in engine.snapshot()["certificates"].items():
        np.testing.assert_array_equal(field, other.snapshot()["certificates"][name], err_msg=name)
    np.testing.assert_array_equal(engine.view().measurements.certificate, view.measurements.certificate)


def test_an_episode_goes_on_with_the_budget_that_the_last_one_left():
    engine, client = certified_engine()
    played(engine, client, 6)
    budget = engine.certifier.state.budget.copy()
    assert (budget < LARGE).all()
    for instance in (None, np.array([7, 8, 9])):  # other starts on the same data
        engine.reset(instance)
        assert engine.certifier.state.budget.tolist() == budget.tolist()


def drawn(key):
    """Make an instance whose probe is moved by its key; of the keys from 10 on, every second example is that of the key 0."""
    task = blobs(examples=400, hidden=(1, 1))
    offset = torch.full((len(task.probe.y), 1), key)
    if key >= 10:
        offset[::2] = 0
    return replace(task, probe=Split(task.probe.x + offset, task.probe.y))


def test_instances_have_budgets_of_their_own_and_one_that_returns_goes_on_with_its_own():
    task = blobs(examples=400, hidden=(1, 1))
    mixture = Mixture(
        name="drawn",
        summary="blobs that each instance moves",
        room=Room(task.host, (6,), Lengths(probe=len(task.probe.y), held=len(task.test.y))),
        sample=drawn,
        test=lambda _: task.test,
        ranges={"training": range(20), "validation": range(0), "heldout": range(0)},
        objective=task.objective,
        menu=task.menu,
    )
    engine = VectorizedEngine(mixture, small_config({"gates": GATES}, envs=2, steps=12))
    first, client = np.array([0, 1]), Script(PLANTED)
    budgets = {}
    for instance in (first, first + 1, first, first + 10):
        view = engine.reset(instance)
        state = engine.certifier.state
        assert [budgets.get(key, LARGE) for key in instance.tolist()] == state.budget[state.group].tolist()
        for _ in range(6):
            view, _ = engine.step(client.act(view))
        state = engine.certifier.state
        budgets |= dict(zip(instance.tolist(), state.budget[state.group].tolist(), strict=True))
        if instance[0] == 0:  # the keys 10 and 11 share examples with the key 0
            budgets |= dict.fromkeys((10, 11), budgets[0])
    assert budgets[0] < LARGE
    assert state.group[0] == state.group[1]
    assert len(state.budget) == 3


def test_a_comparison_does_not_depend_on_other_environments():
    found = []
    for envs in (3, 2):
        engine, _ = certified_engine(envs=envs)
        looks = watched(engine.population)
        played(engine, Script({at: what for at, what in PLANTED.items() if at[1] < envs}), 4)
        _, due, compared = looks[0]
        found.append(compared[np.nonzero(due)[0] < 2].tolist())
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
        InputError, match=r"gates\.certify 0\.05 needs 5 fresh examples or more, and the population .* has 3 set aside"
    ):
        certified_engine({"gates": {"certify": ALPHA, "certify_share": 0.05}})


def test_a_training_refuses_certificates():
    config = small_config({"gates": {"certify": ALPHA}, "reward": {"group_size": 1}})
    with pytest.raises(InputError, match="a training plays many episodes on the same fresh examples"):
        cohorts_of(blobs(), config)


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
