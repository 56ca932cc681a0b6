"""The scripts behind the figures run in their quick form."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"


def run(name, *arguments, cwd):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPTS / name), "--quick", *arguments]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_benchmark_sets_the_engine_beside_its_floors(tmp_path):
    run("benchmark_hot_path.py", "--json", "figures.json", cwd=tmp_path)
    (result,) = json.loads((tmp_path / "figures.json").read_text())["results"]
    assert set(result["table"]) == {"bare stack", "engine auto", "engine vmap", "engine loop", "plain loop"}
    assert all(row["eps"] > 0 for row in result["table"].values())
    assert set(result["phases"]["auto"]) == {"apply", "train", "tick", "probe", "close"}


def test_a_step_under_random_decisions_reads_the_device_no_more_than_twice(tmp_path):
    run("profile_gpu_sync.py", "--json", "reads.json", cwd=tmp_path)
    (result,) = json.loads((tmp_path / "reads.json").read_text())["results"]
    assert 1 <= result["reads_per_step"]["most"] <= 2
    assert list(result["sites"]) == ["runtime.py:read_packet (numpy)"]


def test_the_operators_of_a_step_are_listed(tmp_path):
    run("profile_hot_path_operations.py", "--json", "operators.json", cwd=tmp_path)
    operators = json.loads((tmp_path / "operators.json").read_text())["operators"]
    assert "aten::baddbmm" in {row["operator"] for row in operators}


@pytest.mark.slow
def test_the_studies_write_their_pages(tmp_path):
    run("study_negative_controls.py", "--page", "controls.md", cwd=tmp_path)
    assert "| iris |" in (tmp_path / "controls.md").read_text()
    run("study_headroom.py", "--page", "headroom.md", cwd=tmp_path)
    assert "unbiased oracle" in (tmp_path / "headroom.md").read_text()
