"""Test the ladder: its optima by brute force, and what a learner reaches on its two cheapest rungs."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from esper.tamiyo.policy.controller import Language, Policy
from esper_bench.lab.ladder import LIFT, RIPE, RUNGS, PlanPlayer, SlotPlan, optimum, score, train
from esper_bench.lab.optimum import solve
from esper_bench.lab.sandbox import Sandbox, play

SCRIPT = Path(__file__).parents[3] / "scripts" / "ladder.py"


def test_the_optimum_of_a_slot_is_a_ripe_seed_less_its_rent():
    (best,) = optimum("slot")
    assert best == pytest.approx(LIFT * (1 - np.exp(-9 / RIPE)) - 0.1 * np.log1p(60 / 1000), abs=1e-9)


def test_brute_force_agrees_with_dynamic_programming():
    dense = Sandbox(RUNGS["slot"].process, {"reward": {"name": "delta"}})
    assert solve(dense).optimum.tolist() == pytest.approx(optimum("slot"))


@pytest.mark.parametrize("name", RUNGS)
def test_no_kind_of_problem_is_without_reward_and_an_untrained_policy_is_far_from_the_optimum(name):
    assert min(optimum(name)) > 0.3
    sandbox = Sandbox(RUNGS[name].process, {})
    assert score(name, Policy.fresh(Language.of([sandbox.space]), 0), 0) < 0.9


def test_a_bait_pays_before_it_costs():
    rung = RUNGS["bait"]
    sandbox = Sandbox(rung.process, {"envs": 1})
    bait = PlanPlayer([(SlotPlan(1, 0),)], 1, 0, several=False)  # kind 0: slot 0 is right, slot 1 the bait
    assert play(sandbox, bait, np.zeros(1, np.int64)) < -0.1


def test_where_only_incubating_tells_no_single_planting_earns_more_than_its_share():
    process = RUNGS["incubation"].process
    sandbox = Sandbox(process, {"envs": process.kinds})
    alone = play(sandbox, PlanPlayer([(SlotPlan(0, 0),)] * process.kinds, 1, 0, several=True))
    assert 0 < alone.mean() < 0.25 * np.mean(optimum("incubation"))


def test_a_learner_climbs_the_first_rung():
    assert train("slot", 0, 6).score >= 0.95


def test_a_learner_reads_which_blueprint_is_right_from_the_sensor_of_that_blueprint():
    climbed = train("blueprint", 0, 20, marks=(10,))
    assert climbed.score >= 0.95
    assert set(climbed.curve) == {10, 20}
    assert len(climbed.rows) == 20


def test_the_script_writes_one_score_a_seed_and_refuses_a_rung_that_is_not_there(tmp_path, script):
    command = [sys.executable, str(SCRIPT), "--rung", "slot", "--seeds", "2", "--rounds", "1", "--json", "scores.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "scores.json").read_text())
    assert len(written["scores"]) == len(written["curves"]) == 2
    assert "| mean |" in done.stdout
    code, _, err = script(SCRIPT, "--rung", "stairs")
    assert code == 2
    assert "there is no rung 'stairs'; the rungs are slot," in err
