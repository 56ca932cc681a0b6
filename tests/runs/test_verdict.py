"""Check that the line on whether growth paid follows from the figures of static networks, and never from an ablation."""

import re

import numpy as np
import pytest
from sklearn.datasets import load_digits

import esper
from esper.leyline.config.tree import RewardConfig
from esper.runs.baselines import Absent, BaselineResult
from esper.runs.verdict import compared_networks, verdict, verdict_of_loop

RENT = RewardConfig(rent=0.1, rent_size=0)
HOST, WHOLE = 1000, 1100  # parameters: rent of 0.1 ln 1.1 = .0095


def said(grown, baselines, *, kept=None, reward=RENT, metric="accuracy", **over):
    """Give the verdict on networks whose metrics are given: of the grown ones, and of static ones with their parameters."""
    envs = len(grown)
    kept = [1] * envs if kept is None else kept
    hosts = np.full(envs, HOST)
    params = hosts + (WHOLE - HOST) * np.array(kept)
    worth = np.array(grown) - reward.rent * np.log1p((params - hosts) / np.maximum(hosts, reward.rent_size))
    static = {
        name: Absent("it is a GRU")
        if values is None
        else BaselineResult(np.array(values, float), 1 - np.array(values, float), np.full(envs, size), None)
        for name, (values, size) in baselines.items()
    }
    summary = {
        "status": "finished",
        "envs": envs,
        "steps": 24,
        "steps_done": 24,
        "metric": metric,
        f"test_{metric}": {"grown": list(grown)},
        "test_objective": {"grown": worth.tolist()},
        "grown": [{"block0": "mlp"} if each else {} for each in kept],
        "baselines": {
            name: {"absent": "it is a GRU"} if values is None else {f"test_{metric}": list(values)}
            for name, (values, _) in baselines.items()
        },
        "compared": compared_networks(worth.tolist(), static, hosts, reward),
        "plantings": [],
        "prunes": [],
    }
    return verdict(summary | over, reward)


HIGH, LOW, MIXED = [0.91, 0.90, 0.92, 0.91], [0.80, 0.80, 0.82, 0.80], [0.95, 0.85, 0.97, 0.85]


def test_growth_paid_where_it_beats_the_host_and_a_plain_network_and_ties_with_its_own_shape():
    line = said(HIGH, {"twin": (LOW, HOST), "same-size": (MIXED, WHOLE), "plain": (LOW, WHOLE)})
    assert line.startswith(
        "Growth paid: J (accuracy less rent) is 0.900 with growth, the host as it is (twin) has 0.805 ("
    )
    assert "a network of this size from the start (plain) has 0.795 (growth +0.105 [" in line
    assert line.endswith("; 4 of 4 environments kept a seed.")


@pytest.mark.parametrize("better", ["twin", "same-size", "plain"])
def test_growth_did_not_pay_where_one_of_the_three_is_better(better):
    sizes = {"twin": HOST, "same-size": WHOLE, "plain": WHOLE}
    line = said(LOW, {name: (HIGH if name == better else [0.7] * 4, size) for name, size in sizes.items()})
    assert line.startswith("Growth did not pay here: ")
    assert ("yet the host without it is better" in line) == (better == "twin")


def test_where_a_seed_was_kept_and_the_twin_is_as_good_the_line_says_so():
    line = said([0.91, 0.79, 0.92, 0.80], {"twin": ([0.90, 0.80, 0.90, 0.82], HOST)}, kept=[1, 0, 1, 1])
    assert line.startswith("Growth did not pay here: ")
    assert "3 of 4 environments kept a seed, yet the host without it is as good" in line


def test_a_gain_whose_interval_holds_0_is_not_resolved():
    line = said(MIXED, {"twin": (LOW[::-1], HOST)})
    assert line.startswith("Not resolved by 4 environments whether growth paid: ")
    assert "yet the host without it may be as good" in line
    plain = said(HIGH, {"twin": (LOW, HOST), "plain": (MIXED, WHOLE)})
    assert plain.startswith("Not resolved by 4 environments whether growth paid: ")


def test_a_gain_that_is_not_resolved_did_not_pay_where_a_plain_network_is_better_in_the_mean():
    better = [0.96, 0.90, 0.97, 0.86]
    line = said(MIXED, {"twin": (LOW[::-1], HOST), "plain": (better, WHOLE)})
    assert line.startswith("Growth did not pay here: ")
    assert "yet the host without it may be as good" in line


def test_a_gain_in_the_metric_that_is_not_worth_the_rent_did_not_pay_and_that_is_said():
    line = said([0.803, 0.804, 0.823, 0.804], {"twin": (LOW, HOST)})
    assert line.startswith("Growth did not pay here: ")
    assert "what the seeds add to accuracy, +0.004 [+0.003, +0.004], is not worth their rent" in line
    free = said([0.803, 0.804, 0.823, 0.804], {"twin": (LOW, HOST)}, reward=RewardConfig(rent=0))
    assert free.startswith("Growth paid: accuracy is 0.808 with growth")


def test_a_static_network_pays_rent_for_its_own_parameters():
    metrics = {"twin": (LOW, HOST), "plain": (HIGH, 40 * HOST)}
    assert said(HIGH, metrics).startswith("Growth paid: "), "plain has 40 times the parameters for the same accuracy"


def test_without_a_network_that_did_not_grow_nothing_is_claimed():
    for baselines in ({}, {"skips": (LOW, HOST)}, {"twin": (None, HOST)}):
        line = said(HIGH, baselines)
        assert line.startswith(
            "Not resolved whether growth paid: 4 of 4 environments kept a seed, and no network without"
        )
        assert "--baselines twin,same-size,plain" in line
    assert "(--baselines twin)" in said(HIGH, {"plain": (LOW, WHOLE)})
    assert "not compared with a network of this size" in said(HIGH, {"twin": (LOW, HOST), "plain": (None, WHOLE)})


def test_one_environment_resolves_nothing():
    line = said([0.9], {"twin": ([0.5], HOST), "plain": ([0.5], WHOLE)})
    assert line.startswith("Not resolved by 1 environment whether growth paid: ")
    assert "(growth +0.390)" in line
    assert "--envs 16" in line


def test_where_nothing_was_kept_growth_did_not_pay_and_the_plain_network_stands_beside():
    line = said(LOW, {"twin": (LOW, HOST), "plain": (HIGH, HOST)}, kept=[0] * 4)
    assert line == (
        "Growth did not pay here: no seed was planted, so the grown network is the host alone, with accuracy 0.805; "
        "a network of this size from the start (plain) has 0.910."
    )


def test_where_nothing_was_kept_the_line_names_the_condition_that_removed_most_seeds():
    reasons = ["it did not pass its gate; gain -0.1", "it did not pass its gate; gain -0.2", "the run ended; gain 0"]
    lists = {"plantings": [{}] * 4, "prunes": [{"reason": reason} for reason in reasons]}
    line = said(LOW, {"twin": (LOW, HOST)}, kept=[0] * 4, **lists)
    assert (
        "no seed was kept of 4 planted (2 removed: it did not pass its gate), so the grown network is the host" in line
    )
    assert "no seed was kept of 4 planted, so" in said(LOW, {}, kept=[0] * 4, **lists | {"prunes": []})


def test_a_host_that_trained_beside_seeds_that_were_all_pruned_is_told_from_one_that_never_had_any():
    line = said(LOW, {"twin": ([0.82] * 4, HOST)}, kept=[0] * 4)
    assert line.endswith("is the host alone, with accuracy 0.805; the host as it is (twin) has 0.820.")


def test_a_regression_and_the_loss_are_named_as_what_they_are():
    assert "J (r2 less rent) is" in said(HIGH, {"twin": (LOW, HOST)}, metric="r2")
    loss = RewardConfig(rent=0.1, objective="log_loss", compute_price=0.5)
    assert "J (minus the loss less rent and compute) is" in said(HIGH, {"twin": (LOW, HOST)}, reward=loss)


def test_a_run_that_failed_has_no_verdict_and_one_that_was_interrupted_says_after_how_many_steps():
    assert said(LOW, {}, status="failed").startswith("No verdict: the run failed")
    cut = {"status": "interrupted", "steps_done": 3}
    assert "; interrupted after 3 of 24 steps." in said(HIGH, {"twin": (LOW, HOST), "plain": (LOW, WHOLE)}, **cut)
    assert "interrupted after 3 of 24 steps, and no seed is kept yet" in said(LOW, {}, kept=[0] * 4, **cut)


def test_a_network_whose_metric_is_not_known_is_left_out():
    line = said([0.9, 0.9, 0.9], {"twin": ([0.8, 0.82, np.nan], HOST)}, test_accuracy={"grown": [0.9] * 3})
    assert line.startswith(("Growth paid: ", "Not resolved"))
    assert "nan" not in line


def test_digits_on_a_narrow_host_keeps_seeds_whose_contributions_are_high_and_did_not_pay():
    x, y = load_digits(return_X_y=True)
    task = esper.task("narrow", x.astype("float32"), y, host=esper.mlp(64, width=4, classes=10, blocks=1))
    config = {"envs": 7, "baselines": ["twin"], "models": "none"}
    summary = esper.grow(task, config, controller="heuristic", progress=False)
    assert summary["seeds"]["fossilized"] >= 4
    assert next(iter(summary)) == "verdict"
    assert summary["verdict"].startswith("Growth did not pay here: ")
    assert re.search(r"[4-7] of 7 environments kept a seed, yet the host without it is as good", summary["verdict"])
    gain = summary["compared"]["twin"]
    host, grown = (summary["test_objective"][name] for name in ("host", "grown"))
    assert gain["test_objective"] == host
    assert gain["difference"] == pytest.approx(np.subtract(grown, host).mean())
    assert gain["low"] < gain["difference"] < gain["high"]


def test_in_a_loop_of_ones_own_the_line_says_what_was_kept_and_what_to_run_to_know():
    line = verdict_of_loop(2, 1732, 750, finished=True)
    assert (
        "2 seeds with 1,732 parameters, 230.9% of the model's, are kept, but no network without growth was trained"
        in line
    )
    assert "train the model without esper.Growth, and one of 2,482 parameters from the start" in line
    assert verdict_of_loop(0, 0, 750, finished=True).startswith("Growth did not pay here: no seed was kept")
    assert verdict_of_loop(0, 0, 750, finished=False) == "Not resolved whether growth pays: no seed is kept yet."
