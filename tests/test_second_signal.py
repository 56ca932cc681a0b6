"""The second signal, while the disk keeps whoever writes a checkpoint."""

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
        time.sleep(0.5)  # two signals in the same moment are one
        assert process.poll() is None
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == (130 if number == signal.SIGINT else -signal.SIGTERM)
    assert "Traceback" not in err
    checkpoint = Checkpoints(Path("run"), CheckpointConfig()).read(pytest.fail)
    assert checkpoint is not None
    assert checkpoint.number == 1
