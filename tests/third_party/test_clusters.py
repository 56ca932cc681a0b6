"""Test workers on a local Ray cluster, and workers that torchrun starts: the results of runs without them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from esper.cli import main

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


def alone_in(folder, *arguments):
    """Run the command in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        with pytest.raises(SystemExit) as ended:
            main(arguments)
    assert not ended.value.code


def ran(folder, *command):
    """Run a command in processes of its own to its end."""
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr


def training(folder):
    """Return the arguments of a small training whose config is in a folder."""
    (folder / "small.yaml").write_text(json.dumps(SMALL))
    return ["train", "iris", "--config", "small.yaml", "--run", "run"]


def controller(run):
    return (run / "controller" / "controller.safetensors").read_bytes()


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return the controller of a training without workers."""
    folder = tmp_path_factory.mktemp("alone")
    alone_in(folder, *training(folder))
    return controller(folder / "run")


CLUSTERS = pytest.mark.parametrize(
    ("command", "options"),
    [(ESPER, ("--cluster", "ray", "--workers", "2")), (TORCHRUN, ("--cluster", "torchrun"))],
    ids=["ray", "torchrun"],
)


@CLUSTERS
def test_a_cluster_trains_the_same_controller(alone, tmp_path, command, options):
    ran(tmp_path, *command, *training(tmp_path), *options)
    assert controller(tmp_path / "run") == alone
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["workers"]["number"] == 2


def evaluation(*settings, instances):
    """Return the arguments of a small evaluation."""
    shown = ["eval", "--tasks", "iris", "--instances", str(instances), "--seeds", "1"]
    shown += ["--baselines", "none", "--set", "data.batch_size=12"]
    return [*shown, *(word for setting in settings for word in ("--set", setting))]


def runs(folder):
    """Return what the contenders of a record came to, without seconds, and how many workers there were."""
    record = json.loads((folder / "evaluation.json").read_text())
    found = record["tasks"][0]["runs"]
    for each in found.values():
        del each["seconds"]
    return found, record.get("workers", {}).get("number")


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """Return the record of an evaluation without workers."""
    folder = tmp_path_factory.mktemp("compared")
    alone_in(folder, *evaluation("steps=2", instances=2), "--out", "alone")
    return runs(folder / "alone")[0]


@pytest.mark.slow
@CLUSTERS
def test_a_cluster_makes_the_same_record_of_an_evaluation(compared, tmp_path, command, options):
    ran(tmp_path, *command, *evaluation("steps=2", instances=2), "--out", "out", *options)
    assert runs(tmp_path / "out") == (compared, 2)


def test_an_evaluation_that_lost_a_rank_says_how_it_goes_on(tmp_path):
    asked = [*evaluation("steps=24", instances=256), "--out", "out"]
    output = (tmp_path / "output").open("w+")
    launcher = subprocess.Popen(
        [*TORCHRUN, *asked, "--cluster", "torchrun"], cwd=tmp_path, stdout=output, stderr=output
    )
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("out/grown/*never*")) and launcher.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    ranks = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    (lost,) = [rank for rank in ranks if b"\0RANK=1\0" in Path(f"/proc/{rank}/environ").read_bytes()]
    os.kill(int(lost), signal.SIGKILL)
    assert launcher.wait(120) != 0
    said = (tmp_path / "output").read_text()
    assert "error: rank 1 was lost" in said or "interrupted;" in said, said  # torchrun ends rank 0 too
    assert "the same command goes on from it" in said
    assert not (tmp_path / "out" / "evaluation.json").exists()
    assert list(tmp_path.glob("out/grown/*never*"))
