"""Runs on a disk that is full for a while, or stays so: they wait, or stop, and come to the numbers of those that had room."""

import json

import pytest

from esper.leyline.progress import Progress
from esper.runs.configuration import training_configs
from esper.runs.folder.resume import Opening, read_config
from esper.runs.grow import grow
from esper.runs.train import train
from esper.store import disk as full_disk
from esper.store.disk import DiskFull
from esper.tamiyo.catalog import get_controller
from journals import events
from populations import blobs, small_config

pytestmark = pytest.mark.campaign

TIMES = ("seconds", "env_steps_per_second", "phase_seconds", "controller_share")
CHECKPOINT = {"every_steps": 2, "every_seconds": 0}
LEARN = {
    "envs": 4,
    "steps": 4,
    "data": {"batch_size": 12, "batches_per_step": 1},
    "reward": {"group_size": 2},
    "checkpoint": CHECKPOINT,
    "ppo": {"rounds": 2, "update_epochs": 1, "imitation_rounds": 0, "validate_envs": 2, "validate_every": 1},
}
GROWN = (  # what a run of grow writes, by the path it is written to
    r"/lock$",
    r"/\.config\.yaml\.\w+\.tmp$",
    r"/\.environment\.json\.\w+\.tmp$",
    r"/events\.jsonl$",
    r"/\.step-\d+\.new/state\.safetensors$",
    r"/\.step-\d+\.new/state\.json$",
    r"/\.latest\.\w+\.tmp$",
    r"/\.env-001\.new/model\.safetensors$",
    r"/\.env-001\.new/model\.pt2$",
    r"/\.summary\.json\.\w+\.tmp$",
)
TRAINED = (r"/events\.jsonl$", r"/\.step-\d+\.new/state\.safetensors$", r"/\.controller\.new/controller\.json$")


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    monkeypatch.setattr(full_disk, "EVERY", 0.005)


class Noting(Progress):
    def __init__(self):
        self.notes = []

    def note(self, text):
        self.notes.append(text)

    def round(self, number, rounds, figures):
        pass


def timeless(value):
    if isinstance(value, dict):
        return {name: timeless(item) for name, item in value.items() if name not in TIMES and name != "time"}
    return [timeless(item) for item in value] if isinstance(value, list) else value


def files(folder):
    """Return the names of what a run left, and the bytes of what a user takes home."""
    kept = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return sorted(kept), {
        name: path.read_bytes() for name, path in kept.items() if name.startswith(("models/", "controller/"))
    }


def growth(folder, seconds, watch=None, resume=False):
    over = {"steps": 6, "models": "all", "checkpoint": CHECKPOINT, "faults": {"disk_seconds": seconds}}
    config = small_config({"controller": "random-valid"}, over)
    return grow(blobs(), config, get_controller("random-valid", config), folder, watch, opening=Opening(resume=resume))


def training(folder, seconds, watch=None, resume=False):
    configs = training_configs([blobs()], "quick", LEARN, {"faults": {"disk_seconds": seconds}})
    return train([blobs()], configs, folder, watch, opening=Opening(resume=resume))


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight")
    return {run: (run(folder / run.__name__, 60), folder / run.__name__) for run in (growth, training)}


EACH = [(growth, pattern) for pattern in GROWN] + [(training, pattern) for pattern in TRAINED]


FLUSHED = [each for each in EACH if each[1] != GROWN[0]]  # all but the lock: what holds is in no file


USUAL = (GROWN[1], GROWN[3], GROWN[4], GROWN[6], TRAINED[2])
"""What every run of the tests fills the disk at; the other files are written by the same functions."""


def rare(pattern):
    return [] if pattern in USUAL else pytest.mark.slow


@pytest.mark.parametrize(
    ("run", "pattern", "call"),
    [pytest.param(*each, "write", marks=rare(each[1])) for each in EACH]
    + [pytest.param(*each, "fsync", marks=[] if each[1] == GROWN[4] else pytest.mark.slow) for each in FLUSHED],
)
def test_a_run_waits_for_room_and_goes_on_to_the_same_numbers(straight, tmp_path, full, run, pattern, call):
    disk, watch = full(pattern, 3, call), Noting()
    summary = run(tmp_path / "run", 60, watch)
    assert len(disk.failed) == 3
    assert sum("The run waits up to 60 s" in text for text in watch.notes) == 1
    assert sum("the run goes on" in text for text in watch.notes) == 1
    assert timeless(summary) == timeless(straight[run][0])
    assert events(tmp_path / "run") == events(straight[run][1])
    assert files(tmp_path / "run") == files(straight[run][1])


@pytest.mark.parametrize(("run", "pattern"), [pytest.param(*each, marks=rare(each[1])) for each in EACH])
def test_a_run_that_stops_on_a_full_disk_is_resumed_to_the_same_numbers(straight, tmp_path, full, run, pattern):
    folder, disk = tmp_path / "run", full(pattern, 10**9)
    begun = pattern not in GROWN[:2]
    with pytest.raises(DiskFull, match="esper resume" if begun else "start the run again"):
        run(folder, 0)
    disk.times = 0
    for line in (folder / "events.jsonl").read_text().splitlines() if (folder / "events.jsonl").exists() else ():
        json.loads(line)
    assert not (folder / "lock").exists()
    if begun:
        read_config(folder)
    assert timeless(run(folder, 0, resume=begun)) == timeless(straight[run][0])
    assert events(folder) == events(straight[run][1])
    names, taken = files(folder)
    assert [name for name in names if not name.startswith("events-cut")] == files(straight[run][1])[0]
    assert taken == files(straight[run][1])[1]


def test_a_disk_that_is_really_full_is_waited_for_and_resumed_behind(straight, tmpfs):
    class Filling(Noting):
        def step(self, view, speed, rollbacks):
            if view.step == 3:
                tmpfs.fill()

        def note(self, text):
            super().note(text)
            tmpfs.free()

    watch = Filling()
    assert timeless(growth(tmpfs.path / "waits", 60, watch)) == timeless(straight[growth][0])
    assert any("The run waits" in text for text in watch.notes)
    watch = Filling()
    with pytest.raises(DiskFull, match="esper resume"):
        growth(tmpfs.path / "stops", 0, watch)
    tmpfs.free()
    assert timeless(growth(tmpfs.path / "stops", 0, resume=True)) == timeless(straight[growth][0])
    for folder in (tmpfs.path / "waits", tmpfs.path / "stops"):
        assert events(folder) == events(straight[growth][1])
        assert files(folder)[1] == files(straight[growth][1])[1]
