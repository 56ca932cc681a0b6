"""Check that the benchmark of the windows measures each on a run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import esper

SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmark_windows.py"

pytestmark = pytest.mark.browser


@pytest.mark.usefixtures("browser")
def test_the_benchmark_measures_every_window(tmp_path):
    settings = {"envs": 4, "steps": 3, "reward": {"group_size": 2}}
    settings["ppo"] = {"rounds": 4, "imitation_rounds": 0, "validate_envs": 2}
    esper.train(["iris"], settings, run=tmp_path / "run", progress=False)
    page = tmp_path / "windows.md"
    quick = ["--warm", "0.5", "--seconds", "1", "--replay", "4", "--grow", "2", "--out", str(page)]
    command = [sys.executable, str(SCRIPT), str(tmp_path / "run"), *quick]
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
    text = page.read_text()
    assert "4 rounds by 4 environments of 3 steps" in text
    names = [line.split("|")[1].split(":")[0].strip() for line in text.splitlines() if line.startswith("| ")]
    assert [names.count(name) for name in ("report", "serve", "watch")] == [3, 4, 3]
