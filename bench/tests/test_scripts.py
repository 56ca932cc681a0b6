"""Run the scripts behind the figures in their quick form."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import esper
from esper_bench.streams.methods import find_method

SCRIPTS = Path(__file__).parents[1] / "scripts"


def run(name, *arguments, cwd):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPTS / name), "--quick", *arguments]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_studies_write_their_pages(tmp_path):
    run("study_negative_controls.py", "--page", "controls.md", cwd=tmp_path)
    assert "| spirals: width |" in (tmp_path / "controls.md").read_text()
    run("study_headroom.py", "--page", "headroom.md", cwd=tmp_path)
    assert "unbiased oracle" in (tmp_path / "headroom.md").read_text()
    run("study_exploits.py", "--page", "exploits.md", cwd=tmp_path)
    assert "| honest |" in (tmp_path / "exploits.md").read_text()
    run("study_certificates.py", "--page", "certificates.md", cwd=tmp_path)
    assert "| eager | G5, certify 0.05 |" in (tmp_path / "certificates.md").read_text()
    run("study_sandbox.py", "--page", "sandbox.md", cwd=tmp_path)
    assert "| growth | blind | bandit | chain |" in (tmp_path / "sandbox.md").read_text()


@pytest.mark.slow
def test_the_study_of_slots_around_several_segments_prints_a_row_for_each_network(tmp_path):
    assert "| 64-8-16-10 |" in run("study_slots_around.py", "64-8-16-10", cwd=tmp_path)


@pytest.mark.slow
def test_the_study_of_streams_tunes_measures_and_prints_a_table(tmp_path):
    few = ["--sets", "recurring-shared", "--methods", "reset-blocks", "reactivate"]
    run("study_streams.py", "tune", "--out", "settings.json", *few, cwd=tmp_path)
    run("study_streams.py", "measure", "--settings", "settings.json", "--out", "figures", *few, cwd=tmp_path)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "figures").iterdir()}
    assert len(before) == 2
    run("study_streams.py", "measure", "--settings", "settings.json", "--out", "figures", *few, cwd=tmp_path)
    assert before == {path: path.stat().st_mtime_ns for path in before}, "kept figures were made anew"
    printed = run("study_streams.py", "table", "--out", "figures", "--reference", "reactivate", cwd=tmp_path)
    assert "| reset-blocks |" in printed


@pytest.mark.slow
def test_a_controller_of_streams_is_fitted_and_its_file_is_a_method(tmp_path):
    assert "generation 1: mean" in run("fit_streams.py", "fit", "search", cwd=tmp_path)
    assert not run("fit_streams.py", "fit", "search", cwd=tmp_path), "kept generations were made anew"
    assert "fitted" in run("fit_streams.py", "choose", "search", "own.json", cwd=tmp_path)
    assert find_method(str(tmp_path / "own.json")).settings["fits"] > 0


@pytest.mark.slow
def test_a_baseline_of_streams_begins_with_its_settings_and_gets_better_ones_alone(tmp_path):
    (tmp_path / "settings.json").write_text('{"recurring-shared": {"replay-annealed": {"drawn": 3, "lr": 0.001}}}')
    few = ["--method", "replay-annealed", "--changes", "recurring-shared", "--settings", "settings.json"]
    run("fit_streams.py", "fit", "search", *few, cwd=tmp_path)
    assert np.load(tmp_path / "search" / "0.npz")["candidates"][0, 0] == pytest.approx(0.001)
    (tmp_path / "search" / "fitted.json").write_text(
        '{"numbers": {"lr": 0.02, "head_rate": 1, "halving": 50, "least": 0.1}}'
    )
    run("fit_streams.py", "choose", "search", "settings.json", *few[:4], cwd=tmp_path)
    chosen = json.loads((tmp_path / "settings.json").read_text())["recurring-shared"]["replay-annealed"]
    assert chosen == {"drawn": 3, "lr": 0.02, "head_rate": 1, "halving": 50, "least": 0.1}


@pytest.mark.slow
def test_the_study_of_controllers_goes_on_where_it_was_left(tmp_path):
    run("study_controller.py", "--out", "study", "--page", "controller.md", "--json", "controller.json", cwd=tmp_path)
    assert "Not run" not in (tmp_path / "controller.md").read_text()
    results = json.loads((tmp_path / "controller.json").read_text())
    assert set(results) == {"evaluate", "quick", "others", "leave-out", "ablation", "trainings", "suite"}
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "study").rglob("*.*")}
    run("study_controller.py", "--out", "study", "--page", "controller.md", cwd=tmp_path)
    assert before == {path: path.stat().st_mtime_ns for path in before}, "kept results were made anew"


@pytest.mark.slow
def test_the_study_of_the_heuristic_sets_its_settings_beside_each_other_and_figures_beside_those_of_before(tmp_path):
    rows = [line.split(" | ") for line in run("study_heuristic.py", "training", cwd=tmp_path).splitlines()[3:]]
    assert rows[0][0] == "| the config's settings"
    assert rows[0][2] == "+0.0000"
    assert len({row[1] for row in rows}) > 3
    run("study_heuristic.py", "heldout", "--out", "figures.json", cwd=tmp_path)
    table = run("study_heuristic.py", "compare", "figures.json", "figures.json", cwd=tmp_path)
    assert "+0.000 [+0.000, +0.000]" in table.splitlines()[-1]


@pytest.mark.slow
def test_the_study_of_ppo_trains_once_alone_and_after_imitation_and_writes_its_page(tmp_path):
    run("study_heal_ppo.py", "out", "--taught", "1", "--page", "alone.md", cwd=tmp_path)
    before = (tmp_path / "out" / "ppo-s0" / "curve.json").stat().st_mtime_ns
    page = (tmp_path / "alone.md").read_text()
    assert "| PPO alone, 1 training | 128 |" in page
    assert "| imitation, then PPO, 1 training | 320 + the teacher's |" in page
    run("study_heal_ppo.py", "out", cwd=tmp_path)
    assert (tmp_path / "out" / "ppo-s0" / "curve.json").stat().st_mtime_ns == before
    run("study_repair_ppo.py", "repair", "--page", "repair.md", cwd=tmp_path)
    assert "| PPO alone, 1 training | 16 |" in (tmp_path / "repair.md").read_text()


@pytest.mark.slow
def test_the_study_of_the_game_trains_once_and_compares_with_every_opponent(tmp_path):
    run("study_game.py", "out", "--page", "game.md", cwd=tmp_path)
    curve = tmp_path / "out" / "learned-s0" / "curve.json"
    before = curve.stat().st_mtime_ns
    page = (tmp_path / "game.md").read_text()
    assert "| **learned**: PPO alone | 128 |" in page
    assert "| by sensors |" in page
    run("study_game.py", "out", "--train-only", cwd=tmp_path)
    assert curve.stat().st_mtime_ns == before


@pytest.mark.slow
def test_the_study_of_the_growing_game_trains_once_and_compares_with_the_oracle(tmp_path):
    run("study_growing_game.py", "out", "--page", "game.md", cwd=tmp_path)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.npz")}
    page = (tmp_path / "game.md").read_text()
    assert "| **learned**: PPO alone | 128 |" in page
    assert "| oracle |" in page
    run("study_growing_game.py", "out", cwd=tmp_path)
    assert before == {path: path.stat().st_mtime_ns for path in before}, "kept figures were made anew"


@pytest.mark.slow
def test_the_study_of_strong_growth_compares_all_ways_to_grow_and_goes_on_where_it_was_left(tmp_path):
    few = ["moons", "frozen body", "--out", "figures"]
    rows = [line.split(" | ") for line in run("study_strong_growth.py", *few, cwd=tmp_path).splitlines()]
    assert [row[1] for row in rows if row[0] == "| moons, 4-4"] == ["seeds", "whole", "whole, by seconds"]
    assert {"| seeds", "| LoRA", "| bypass"} <= {row[0] for row in rows}
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "figures").rglob("*.json")}
    run("study_strong_growth.py", *few, cwd=tmp_path)
    assert before == {path: path.stat().st_mtime_ns for path in before}, "kept figures were made anew"


def test_the_picture_of_growth_at_every_stop_is_drawn_from_the_figures_of_the_page(tmp_path, script):
    figures = SCRIPTS.parents[1] / "docs" / "benchmarks" / "anytime.json"
    assert script(SCRIPTS / "draw_anytime.py", str(figures), "--out", str(tmp_path / "anytime.svg")) == (0, "", "")
    assert (tmp_path / "anytime.svg").read_text().count("<path") > 100


def test_units_of_an_informed_birth_read_what_the_next_layer_cannot_follow(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    from study_anytime import informed_birth, mlp

    torch.manual_seed(0)
    model, x = mlp(4, 2, 4), torch.randn(8192, 4) * torch.tensor([5.0, 1.0, 1.0, 1.0])
    with torch.no_grad():
        model[0].weight[:, 3] = 0  # no hidden unit reads the feature that the label is of
    other, before, drawn = copy.deepcopy(model), model(x), copy.deepcopy(model)
    esper.widen(drawn, 4, example=x[:2])
    informed_birth([(x, (x[:, 3] > 0).long())], model, 4, example=x[:2], ema=other)
    assert torch.allclose(model(x), before, atol=1e-5)
    new, draw = model[0].weight[4:], drawn[0].weight[4:]
    assert new[0, 3].abs() > 0.98 * new[0].norm()
    assert torch.allclose(new[:4], -new[4:8])  # four directions, and what a ReLU leaves out of each
    assert torch.equal(new[8:], draw[8:])
    assert torch.allclose(new[:8].square().mean(1), draw.square().mean().expand(8))
    assert torch.equal(other[0].weight, model[0].weight)
