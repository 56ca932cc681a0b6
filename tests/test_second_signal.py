"""Test a second signal while the disk keeps whoever writes a checkpoint, or an example that is never read keeps training."""

import json
import signal
import sys
import time
from pathlib import Path

import pytest

from esper.leyline.config.tree import CheckpointConfig
from esper.store.checkpoint import Checkpoints
from processes import begun

pytestmark = pytest.mark.campaign

STUCK = """
import os, sys, threading, time
from pathlib import Path
from esper.cli import command

real = os.fsync

def fsync(descriptor):
    if threading.current_thread() is not threading.main_thread() and Path("run/checkpoints/latest").exists():
        Path("stuck").touch()
        time.sleep(1e6)
    real(descriptor)

os.fsync = fsync
sys.argv[1:] = {arguments}
command()
"""
EVERY = ["--run", "run", "--set", "checkpoint={every_steps: 1, every_seconds: 0}"]
GROW = ["grow", "spirals", "--envs", "2", "--steps", "1000000", "--models", "none", "--baselines", "none", *EVERY]
TRAIN = ["train", "spirals", "--envs", "2", "--steps", "1000", "--rounds", "1000000", *EVERY]
TRAIN += ["--set", "reward.group_size=2"]


def await_answer(process):
    """Wait for the line that answers a signal: a second one before it is the same as the first."""
    assert any(line.startswith("interrupted: the run ends after the step") for line in process.stderr)


@pytest.mark.parametrize(
    ("command", "number"),
    [
        (GROW, signal.SIGINT),
        (TRAIN, signal.SIGTERM),
        pytest.param(GROW, signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(TRAIN, signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_a_second_signal_leaves_at_once_though_a_checkpoint_is_being_written(tmp_path, monkeypatch, command, number):
    monkeypatch.chdir(tmp_path)
    code = STUCK.replace("{arguments}", repr(command))
    with begun([sys.executable, "-c", code]) as process:
        while not Path("stuck").exists():
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.01)
        process.send_signal(number)
        await_answer(process)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == (130 if number == signal.SIGINT else -signal.SIGTERM)
    assert "Traceback" not in err
    checkpoint = Checkpoints(Path("run"), CheckpointConfig()).read(pytest.fail)
    assert checkpoint is not None
    assert checkpoint.number == 1


BLOCKED = """
import os, time
from pathlib import Path
import torch
import esper


class Blocked(torch.utils.data.Dataset):
    def __init__(self):
        self.x = torch.randn(600, 6, generator=torch.Generator().manual_seed(0))
        self.left = 3000

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        self.left -= 1
        if self.left < 0 and not Path("mended").exists():
            Path("stuck").touch()
            time.sleep(1e6)
        return self.x[index], int(self.x[index, :3].argmax())


def task():
    host = esper.mlp(inputs=6, width=8, classes=3)
    return esper.task("t", Blocked(), host=host, classes=3, stream=True, workers=int(os.environ["WORKERS"]))
"""


@pytest.mark.parametrize(
    ("kind", "workers"), [("grow", 0), ("grow", 2), pytest.param("train", 0, marks=pytest.mark.slow)]
)
def test_a_second_signal_while_an_example_is_read_saves_the_last_whole_step_and_leaves_no_worker(
    elsewhere, esper, monkeypatch, kind, workers
):
    monkeypatch.setenv("WORKERS", str(workers))
    Path("blocked.py").write_text(BLOCKED)
    settings = {
        "grow": ["--envs", "2", "--steps", "40", "--models", "none", "--baselines", "none"],
        "train": ["--envs", "8", "--steps", "40", "--rounds", "1", "--set", "ppo.imitation_rounds=0"],
    }[kind]
    settings += ["--set", "data.batch_size=32", "--set", "data.batches_per_step=4"]
    with begun([sys.executable, "-m", "esper", kind, "blocked.py:task", *settings, "--run", "run"]) as process:
        while not Path("stuck").exists():
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.01)
        time.sleep(1)  # training has come to the batch that is not read
        process.send_signal(signal.SIGINT)
        await_answer(process)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)  # which ends when no worker holds the pipes any more
    assert process.returncode == 130
    assert "Traceback" not in err
    checkpoint = Checkpoints(Path("run"), CheckpointConfig()).read(pytest.fail)
    assert checkpoint is not None
    assert checkpoint.number > 1
    Path("mended").touch()
    for command in (["resume", "run", "--task", "blocked.py:task"], [kind, "blocked.py:task", *settings]):
        code, _, err = esper(*command, *([] if command[0] == "resume" else ["--run", "straight"]))
        assert code == 0, err
    ends = [json.loads((Path(name) / "summary.json").read_text()) for name in ("run", "straight")]
    for name in {"grow": ("test_loss", "steps_done"), "train": ("best_validation_objective", "rounds_done")}[kind]:
        assert ends[0][name] == ends[1][name]
