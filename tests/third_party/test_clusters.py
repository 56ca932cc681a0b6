"""Actors on a local Ray cluster, and actors that torchrun starts: the results of runs without them."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("ray")
pytestmark = pytest.mark.third_party

SMALL = {
    "envs": 4,
    "shards": 2,
    "steps": 3,
    "data": {"batch_size": 12, "batches_per_step": 1},
    "reward": {"group_size": 2},
    "ppo": {"rounds": 1, "imitation_rounds": 0, "update_epochs": 1, "validate_envs": 2},
}


ESPER = (sys.executable, "-m", "esper")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "--", "esper")


def ran(folder, *command):
    """Run a command to its end."""
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr


def trained(folder, command, *options):
    """The folder of a training that a command ran."""
    (folder / "small.yaml").write_text(json.dumps(SMALL))
    ran(folder, *command, "train", "iris", "--config", "small.yaml", "--run", "run", *options)
    return folder / "run"


def controller(run):
    return (run / "controller" / "controller.safetensors").read_bytes()


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The controller of a training without actors."""
    return controller(trained(tmp_path_factory.mktemp("alone"), ESPER))


@pytest.mark.parametrize(
    ("command", "options"),
    [(ESPER, ("--cluster", "ray", "--workers", "2")), (TORCHRUN, ("--cluster", "torchrun"))],
    ids=["ray", "torchrun"],
)
def test_a_cluster_trains_the_same_controller(alone, tmp_path, command, options):
    run = trained(tmp_path, command, *options)
    assert controller(run) == alone
    assert json.loads((run / "summary.json").read_text())["actors"]["workers"] == 2


def test_ray_makes_the_same_record_of_an_evaluation(tmp_path):
    asked = [
        "eval",
        "--tasks",
        "iris",
        "--instances",
        "2",
        "--seeds",
        "1",
        "--search-episodes",
        "2",
        "--baselines",
        "none",
    ]
    asked += ["--opponents", "none", "--set", "steps=2", "--set", "data.batch_size=12"]
    ran(tmp_path, *ESPER, *asked, "--out", "alone")
    ran(tmp_path, *ESPER, *asked, "--out", "ray", "--cluster", "ray", "--workers", "2")
    alone, on_ray = (json.loads((tmp_path / each / "evaluation.json").read_text()) for each in ("alone", "ray"))
    for record in (alone, on_ray):
        for each in record["tasks"][0]["runs"].values():
            del each["seconds"]
    assert on_ray["tasks"][0]["runs"] == alone["tasks"][0]["runs"]
    assert on_ray["actors"]["workers"] == 2
