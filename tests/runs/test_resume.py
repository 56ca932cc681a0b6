"""Check that a run that is left and taken up again comes to the numbers of the run that was not."""

import json
import os
import re
import shutil
import signal
import time
from dataclasses import replace

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import nn

from crashes import Leaving, Left
from esper.kasmina.host import SegmentedHost
from esper.kasmina.stack.layers import Linear
from esper.leyline.config.tree import build_config, dump_config
from esper.leyline.lifecycle.slots import SlotSpec
from esper.leyline.lifecycle.vocabulary import Stage
from esper.leyline.messages import InputError
from esper.leyline.progress import Progress
from esper.nissa.events import decode
from esper.nissa.recovery import check_events
from esper.nissa.rows import RunRow
from esper.runs.configuration import training_configs
from esper.runs.folder.resume import Opening, cohort_configs, read_config, reward_of, with_cohorts
from esper.runs.grow import grow
from esper.runs.train import train
from esper.simic.rewards import Escrow
from esper.store.checkpoint import Checkpoints
from esper.store.tensors import flatten, unflatten
from esper.tamiyo.catalog import get_controller
from esper.tamiyo.policy.actor import Learned
from esper.tamiyo.policy.controller import Language, Policy
from esper.tamiyo.rules.schedule import load_schedule
from esper.tolaria.engine import VectorizedEngine
from journals import events
from populations import GROW, Script, blobs, small_config
from thinning import thinned

TIMES = ("seconds", "env_steps_per_second", "phase_seconds", "controller_share")
EVERY = {"every_steps": 1, "every_seconds": 0, "keep": 2}
STEPS = 10
SCHEDULE = """
- {at: 1, op: germinate, slot: block0, blueprint: bypass-mlp, tempo: 2, keep: true}
- {at: 2, op: germinate, slot: block1, blueprint: mlp-small, blend: gate, tempo: 2}
- {at: 7, op: prune, slot: block1, tempo: 1}
"""


def timeless(value):
    """Leave out what a clock has a part in, at any depth."""
    if isinstance(value, dict):
        return {name: timeless(item) for name, item in value.items() if name not in TIMES and name != "time"}
    return [timeless(item) for item in value] if isinstance(value, list) else value


def kept(folder, config):
    """Take apart the last checkpoint of a run: (tensors, the rest), without the clock's part."""
    notes = []
    found = Checkpoints(folder, config.checkpoint).read(notes.append)
    assert notes == []
    tensors, plain = flatten(timeless(json_free(found.state)))
    return tensors, plain


def json_free(tree):
    """Leave out the seconds that an episode took until it was left, and the digest of the events, which hold times."""
    if isinstance(tree, dict):
        return {name: json_free(item) for name, item in tree.items() if name not in ("before", "deciding", "events")}
    return [json_free(item) for item in tree] if isinstance(tree, list) else tree


def equal(one, other):
    """Return whether two checkpoints hold the same bits."""
    (mine, plain), (theirs, other_plain) = one, other
    assert plain == other_plain
    assert list(mine) == list(theirs)
    for name, tensor in mine.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert tensor.numpy().tobytes() == theirs[name].numpy().tobytes(), name
    return True


def learned(space):
    policy, generator = Policy.fresh(Language.of([space]), 3), torch.Generator().manual_seed(1)
    with torch.no_grad():  # decisions that differ from step to step
        for parameter in policy.network.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return Learned(policy)


def client_of(name, config, tmp_path):
    if name == "schedule":
        (tmp_path / "schedule.yaml").write_text(SCHEDULE)
        return load_schedule(tmp_path / "schedule.yaml")
    if name == "learned":
        return learned(VectorizedEngine(blobs(), config).space)
    return get_controller(name, config)


def config_of(name="random-valid", **over):
    settings = {"steps": STEPS, "models": "none", "twin": True, "checkpoint": EVERY, "seed": 4}
    lifecycle = {
        "lifecycle": {"min_prune_age": 0, "embargo": 0},
        "heuristic": {"plant_below": 1.1, "weak_below": 1.1},
    }
    return small_config(lifecycle, {"probe": {"sensors_every": 3}}, settings, {"controller": name}, over)


def left_and_resumed(config, folder, client, *lefts):
    """Grow until the process is gone after each of some steps, and then to the end."""
    for number, after in enumerate(lefts):
        with pytest.raises(Left):
            grow(blobs(), config, client(), folder, Leaving(after), opening=Opening(resume=number > 0))
    return grow(blobs(), config, client(), folder, opening=Opening(resume=True))


@pytest.mark.parametrize(
    ("name", "twin"),
    thinned([("learned", True), ("heuristic", True), ("schedule", False), ("random-valid", False)], 2),
)
def test_five_steps_a_resume_and_five_steps_are_ten(tmp_path, name, twin):
    config = config_of(name, twin=twin)

    def client():
        return client_of(name, config, tmp_path)

    straight = grow(blobs(), config, client(), tmp_path / "straight")
    resumed = left_and_resumed(config, tmp_path / "resumed", client, 5)
    assert straight["seeds"]["germinated"] > 0, "or this test shows nothing"
    assert timeless(resumed) == timeless(straight)
    assert events(tmp_path / "resumed") == events(tmp_path / "straight")
    assert equal(kept(tmp_path / "resumed", config), kept(tmp_path / "straight", config))


@pytest.mark.parametrize("widen", [{}, {"at": [2, 4]}], ids=["of one width", "that becomes wider"])
def test_a_run_may_be_left_after_every_step(tmp_path, widen):
    config = config_of(widen=widen, steps=6)

    def client():
        return get_controller("random-valid", config)

    straight = grow(blobs(), config, client(), tmp_path / "straight")
    resumed = left_and_resumed(config, tmp_path / "resumed", client, *[2] * (config.steps - 1))
    assert straight["seeds"]["germinated"] > 0, "or this test shows nothing"
    assert timeless(resumed) == timeless(straight)
    assert equal(kept(tmp_path / "resumed", config), kept(tmp_path / "straight", config))
    assert events(tmp_path / "resumed") == events(tmp_path / "straight")


@pytest.mark.parametrize(("optimizer", "incubation"), [("adamw", "shadow"), ("sgd", "ste")])
def test_an_engine_goes_on_from_a_snapshot_at_every_stage_as_if_it_had_not_stopped(optimizer, incubation):
    config = small_config(
        envs=3,
        steps=STEPS,
        twin=True,
        optimizer={"name": optimizer, "weight_decay": 0.01},
        lifecycle={"incubation": incubation, "max_training_seeds": 2},
        probe={"sensors_every": 2},
    )
    client, straight = Script(GROW), VectorizedEngine(blobs(), config)
    view, snapshots, stages = straight.reset(), [], set()
    while view.step < STEPS:
        tensors, plain = flatten(straight.snapshot())
        snapshots.append((tensors, json.loads(json.dumps(plain))))
        view, _ = straight.step(client.act(view))
        stages |= set(view.seeds.stage.ravel().tolist())
    assert stages == set(Stage) - {Stage.GERMINATED, Stage.PRUNED}, "those two pass within a step"
    final = flatten(straight.snapshot())
    for snapshot in snapshots:
        resumed = VectorizedEngine(blobs(), config)
        view = resumed.restore(unflatten(*snapshot))
        while view.step < STEPS:
            view, _ = resumed.step(client.act(view))
        assert equal(flatten(resumed.snapshot()), final)


class Drawing(nn.Module):
    """Draws without being one of torch's dropouts: what vmap cannot map runs in a loop, with keys."""

    def __init__(self):
        super().__init__()
        self.linear = Linear(6, 8)

    def forward(self, x):
        y = self.linear(x)
        return y * (torch.rand(y.shape, device=y.device) < 0.7) if self.training else y


def test_a_host_that_draws_for_itself_goes_on_from_a_snapshot_as_if_it_had_not_stopped():
    def host():
        return SegmentedHost([Drawing(), Linear(8, 3)], [SlotSpec("s", 0, 8)])

    config, client, task = small_config(steps=6), get_controller("random-valid", small_config()), blobs()
    straight = VectorizedEngine(replace(task, host=host), config)
    view, snapshots = straight.reset(), []
    while view.step < 6:
        snapshots.append(flatten(straight.snapshot()))
        view, _ = straight.step(client.act(view))
    for snapshot in snapshots[1:4]:
        resumed = VectorizedEngine(replace(task, host=host), config)
        view = resumed.restore(unflatten(*snapshot))
        while view.step < 6:
            view, _ = resumed.step(client.act(view))
        assert equal(flatten(resumed.snapshot()), flatten(straight.snapshot()))


def test_a_snapshot_of_another_population_is_refused_with_what_differs():
    snapshot = VectorizedEngine(blobs(), small_config()).snapshot()
    with pytest.raises(ValueError, match=r"seeds\.stage is \(3, 2\)"):
        VectorizedEngine(blobs(), small_config(envs=4)).restore(snapshot)
    with pytest.raises(ValueError, match="value is"):
        VectorizedEngine(blobs(classes=4), small_config()).restore(snapshot)


@pytest.mark.parametrize("level", ["off", pytest.param("run", marks=pytest.mark.slow)])
def test_a_resume_with_telemetry_is_one_without(tmp_path, level):
    config, quiet = config_of(), config_of(telemetry={"level": level})

    def client():
        return get_controller("random-valid", config)

    loud = left_and_resumed(config, tmp_path / "loud", client, 4)
    assert timeless(left_and_resumed(quiet, tmp_path / "quiet", client, 4)) == timeless(loud)


def test_rows_from_behind_the_checkpoint_are_cut_into_a_file_beside(tmp_path):
    config = config_of(checkpoint={**EVERY, "every_steps": 4})

    def client():
        return get_controller("random-valid", config)

    folder = tmp_path / "run"
    with pytest.raises(Left):
        grow(blobs(), config, client(), folder, Leaving(7))
    before = (folder / "events.jsonl").read_bytes()
    watch = Leaving(2)
    with pytest.raises(Left):
        grow(blobs(), config, client(), folder, watch, opening=Opening(resume=True))
    side = (folder / "events-cut-1.jsonl").read_bytes()
    assert before.endswith(side)
    assert side
    assert "going on after step 4" in watch.notes
    (told,) = [note for note in watch.notes if "events-cut-1.jsonl" in note]
    assert told.startswith(
        "the run had written events after the checkpoint from which it goes on; it writes them again"
    )
    assert told.endswith("(nothing is lost)")
    with open(folder / "events.jsonl", "ab") as file:
        file.write(b'{"kind": "ste')  # as a full disk or a kill leaves a row
    grow(blobs(), config, client(), folder, opening=Opening(resume=True))
    assert (folder / "events-cut-2.jsonl").read_bytes().endswith(b'{"kind": "ste')
    rows = [decode(line) for line in (folder / "events.jsonl").read_bytes().splitlines()]
    assert [row.seq for row in rows] == list(range(len(rows)))
    assert [row.status for row in rows if isinstance(row, RunRow)] == ["running", "finished"]


def test_events_of_another_version_are_refused_before_anything_is_written(tmp_path):
    config, folder = config_of(), tmp_path / "run"
    with pytest.raises(Left):
        grow(blobs(), config, get_controller("never", config), folder, Leaving(3))
    path = folder / "events.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"schema":4', b'"schema":3', 1))
    before = {each: each.read_bytes() for each in folder.rglob("*") if each.is_file()}
    longer, opening = (
        config.model_copy(update={"steps": 20}),
        Opening(resume=True, before=config, settings=("steps=20",)),
    )
    with pytest.raises(InputError, match="holds rows of version 3, this Esper reads version 4; read them"):
        grow(blobs(), longer, get_controller("never", longer), folder, opening=opening)
    assert {each: each.read_bytes() for each in folder.rglob("*") if each.is_file()} == before


def test_without_a_checkpoint_a_run_begins_again(tmp_path):
    config = config_of()

    def client():
        return get_controller("random-valid", config)

    straight = grow(blobs(), config, client(), tmp_path / "straight")
    with pytest.raises(Left):
        grow(blobs(), config, client(), tmp_path / "run", Leaving(4))
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    (tmp_path / "run" / "environment.json").unlink()
    watch = Leaving(0)
    assert timeless(grow(blobs(), config, client(), tmp_path / "run", watch, opening=Opening(resume=True))) == timeless(
        straight
    )
    assert watch.notes[0].startswith("no complete checkpoint")
    assert events(tmp_path / "run") == events(tmp_path / "straight")


def test_events_are_on_the_disk_before_the_checkpoint_that_numbers_them_is_the_latest(tmp_path, monkeypatch):
    config, folder, flushed, shown = config_of(), tmp_path / "run", [0], []
    fsync, replace_ = os.fsync, os.replace

    def fsyncing(descriptor):
        fsync(descriptor)
        if os.path.samestat(os.fstat(descriptor), os.stat(folder / "events.jsonl")):
            flushed[0] = (folder / "events.jsonl").read_bytes().count(b"\n")

    def replacing(source, target):
        if str(target).endswith("/latest"):
            newest = max((folder / "checkpoints").glob("step-*"))
            shown.append((json.loads((newest / "state.json").read_text())["state"]["seq"], flushed[0]))
        replace_(source, target)

    class Watching(Progress):
        def step(self, view, speed, rollbacks):
            if view.step == 1:
                monkeypatch.setattr(os, "fsync", fsyncing)
                monkeypatch.setattr(os, "replace", replacing)

    grow(blobs(), config, get_controller("random-valid", config), folder, Watching())
    assert len(shown) == STEPS
    assert all(seq <= on_disk for seq, on_disk in shown)


def test_a_folder_is_locked_until_nothing_is_written_any_more(tmp_path, monkeypatch):
    config, folder, put, owners = config_of(), tmp_path / "run", Checkpoints._put, []

    def slow(self, *arguments):
        time.sleep(0.05)
        owners.append((folder / "lock").exists())
        put(self, *arguments)

    monkeypatch.setattr(Checkpoints, "_put", slow)
    with pytest.raises(Left):
        grow(blobs(), config, get_controller("never", config), folder, Leaving(3))
    assert owners == [True, True]
    assert not (folder / "lock").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_an_interrupted_run_goes_on_to_the_end(tmp_path, number):
    config = config_of(checkpoint={"every_seconds": 0})

    class Asking(Progress):
        def step(self, view, speed, rollbacks):
            if view.step == 5:
                os.kill(os.getpid(), number)

    def client():
        return get_controller("random-valid", config)

    straight = grow(blobs(), config, client(), tmp_path / "straight")
    first = grow(blobs(), config, client(), tmp_path / "run", Asking())
    assert (first["status"], first["steps_done"]) == ("interrupted", 5)
    assert timeless(grow(blobs(), config, client(), tmp_path / "run", opening=Opening(resume=True))) == timeless(
        straight
    )
    assert events(tmp_path / "run") == events(tmp_path / "straight")


@pytest.mark.parametrize("stopping", [True, False])
def test_of_a_run_that_was_interrupted_in_order_no_events_are_said_to_be_cut(tmp_path, stopping):
    config = config_of(checkpoint={"every_seconds": 0}, early_stopping={"enabled": stopping})

    class Asking(Leaving):
        def step(self, view, speed, rollbacks):
            if view.step == 5:
                os.kill(os.getpid(), signal.SIGINT)

    first, second = Asking(0), Leaving(0)
    grow(blobs(), config, get_controller("never", config), tmp_path / "run", first)
    grow(blobs(), config, get_controller("never", config), tmp_path / "run", second, opening=Opening(resume=True))
    assert "going on after step 5" in second.notes
    assert [note for note in second.notes if "events" in note] == []


class Exporting(Progress):
    """Ends the process as it begins to write the networks."""

    def note(self, text):
        if text.startswith("exporting"):
            raise Left


def test_a_run_that_is_left_while_its_networks_are_written_has_them_all_in_the_end(tmp_path):
    config = config_of(models="all", checkpoint={"every_seconds": 0})

    def client():
        return get_controller("random-valid", config)

    with pytest.raises(Left):
        grow(blobs(), config, client(), tmp_path / "run", Exporting())
    resumed = grow(blobs(), config, client(), tmp_path / "run", opening=Opening(resume=True))
    straight = grow(blobs(), config, client(), tmp_path / "straight")
    assert timeless(resumed) == timeless(straight)
    for name in ("env-000", "env-001", "env-002"):
        models = [
            folder / "models" / name / "model.safetensors" for folder in (tmp_path / "run", tmp_path / "straight")
        ]
        assert models[0].read_bytes() == models[1].read_bytes()


def test_a_client_without_a_state_leaves_no_checkpoints(tmp_path):
    config = config_of(controller="Script")
    grow(blobs(), config, Script(GROW), tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_schedule_that_was_changed_is_refused(tmp_path):
    config = config_of("schedule")
    with pytest.raises(Left):
        grow(blobs(), config, client_of("schedule", config, tmp_path), tmp_path / "run", Leaving(4))
    (tmp_path / "schedule.yaml").write_text("- {at: 1, op: wait}")
    events_before = (tmp_path / "run" / "events.jsonl").read_bytes()
    with pytest.raises(InputError, match="is not the schedule that the run began with"):
        grow(blobs(), config, load_schedule(tmp_path / "schedule.yaml"), tmp_path / "run", opening=Opening(resume=True))
    assert (tmp_path / "run" / "events.jsonl").read_bytes() == events_before


ROW = re.compile(rb'"seq":(\d+)')


def damaged(data, how):
    """Return the bytes of events.jsonl as a fault leaves it."""
    lines = data.splitlines(keepends=True)
    return {
        "emptied": b"",
        "truncated": data[: len(data) // 2],
        "zero-filled": bytes(len(data)),
        "zeros before": bytes(4096) + data[4096:],
        "a digit changed": data.replace(b'"envs":3', b'"envs":7', 1),
        "a row corrupted": data.replace(lines[3], b"\xff" + lines[3][1:]),
        "a blank line": lines[0] + b"\n" + b"".join(lines[1:]),
        "a row twice": b"".join([*lines[:4], *lines[3:]]),
        "rows missing": b"".join([lines[0], *lines[4:]]),
    }[how]


EVERY_DAMAGE = [
    *("deleted", "a folder", "truncated", "zeros before", "a digit changed", "a row twice"),
    *(pytest.param(how, marks=pytest.mark.slow) for how in ("emptied", "zero-filled", "a row corrupted")),
    *(pytest.param(how, marks=pytest.mark.slow) for how in ("a blank line", "rows missing")),
]


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """Leave a run after 4 of its steps, and return its folder with the summary of the one that was not left."""
    folder, config = tmp_path_factory.mktemp("left"), config_of()
    straight = grow(blobs(), config, get_controller("random-valid", config), folder / "straight")
    with pytest.raises(Left):
        grow(blobs(), config, get_controller("random-valid", config), folder / "run", Leaving(4))
    return folder, straight


@pytest.mark.parametrize("how", EVERY_DAMAGE)
def test_damaged_events_are_named_and_a_whole_checkpoint_goes_on_with_the_rows_that_are_whole(
    tmp_path, interrupted, how
):
    config, folder, watch = config_of(), tmp_path / "run", Leaving(0)
    shutil.copytree(interrupted[0] / "run", folder)
    path = folder / "events.jsonl"
    before = path.read_bytes()
    path.unlink()
    if how == "a folder":
        path.mkdir()
    elif how != "deleted":
        path.write_bytes(damaged(before, how))
    resumed = grow(blobs(), config, get_controller("random-valid", config), folder, watch, opening=Opening(resume=True))
    assert timeless(resumed) == timeless(interrupted[1])
    *moved, note = [note for note in watch.notes if str(path) in note and "checkpoint were moved" not in note]
    assert ["not a regular file" in line for line in moved] == [True] * (how == "a folder")
    numbers = [int(number) for number in ROW.findall(path.read_bytes())]
    assert numbers == sorted(set(numbers))
    count = len((interrupted[0] / "straight" / "events.jsonl").read_bytes().splitlines())
    if how in ("a digit changed", "a blank line", "a row twice"):
        assert numbers == list(range(count))
    else:
        assert 0 < len(numbers) < count
        assert numbers[-1] == count - 1
    if how not in ("deleted", "emptied", "a folder", "a digit changed"):
        assert (folder / "events-damaged-1.jsonl").read_bytes() == damaged(before, how)
    assert ("sha256" in note) == (how == "a digit changed")


def test_whole_events_are_taken_up_without_a_word(tmp_path, interrupted):
    config, watch = config_of(), Leaving(0)
    shutil.copytree(interrupted[0] / "run", tmp_path / "run")
    grow(blobs(), config, get_controller("random-valid", config), tmp_path / "run", watch, opening=Opening(resume=True))
    assert not [note for note in watch.notes if "damaged" in note or "sha256" in note]


@pytest.mark.parametrize("how", ["deleted", "replaced", "emptied", "appended to"])
def test_events_that_are_lost_during_the_run_are_noticed_and_written_again_where_they_can_be(tmp_path, how):
    config, path = config_of(), tmp_path / "run" / "events.jsonl"

    class Meddling(Leaving):
        def step(self, view, speed, rollbacks):
            if view.step != 5:
                return
            if how in ("deleted", "replaced"):
                path.unlink()
            if how == "replaced":
                path.write_text("mine")
            if how == "emptied":
                os.truncate(path, 0)
            if how == "appended to":
                with open(path, "a") as file:
                    file.write("mine")

    watch = Meddling(0)
    summary = grow(blobs(), config, get_controller("random-valid", config), tmp_path / "run", watch)
    (note,) = [note for note in watch.notes if str(path) in note]
    expected = {"deleted": "removed", "replaced": "replaced", "emptied": "bytes instead of", "appended to": "changed"}
    assert expected[how] in note
    numbers = [int(number) for number in ROW.findall(path.read_bytes())]
    assert numbers[-5:] == list(range(numbers[-1] - 4, numbers[-1] + 1))
    assert (numbers[0] == 0) == (how != "emptied")
    if how == "replaced":
        assert (tmp_path / "run" / "events-damaged-1.jsonl").read_text() == "mine"
    wrong = check_events(tmp_path / "run")
    assert (wrong is None) == (how in ("deleted", "replaced"))
    (tmp_path / "run" / "summary.json").unlink()
    again = grow(
        blobs(), config, get_controller("random-valid", config), tmp_path / "run", opening=Opening(resume=True)
    )
    assert timeless(again) == timeless(summary)


# Trainings.

SHORT = {
    "envs": 4,
    "steps": 4,
    "data": {"batch_size": 12, "batches_per_step": 1},
    "reward": {"group_size": 2, "name": "escrow"},
    "checkpoint": EVERY,
    "ppo": {"rounds": 2, "imitation_rounds": 1, "update_epochs": 2, "validate_envs": 2, "validate_every": 1},
}


def two_tasks():
    return [blobs(), replace(blobs(hidden=(3, 4, 5), menu=("mlp-small", "bypass-linear")), name="blobs3")]


class Payer:
    """Makes rewards that remember; the process is gone when the step of a number is to be paid."""

    __name__ = "payer"

    def __init__(self, after=None):
        self.after, self.paid = after, 0

    def __call__(self, config):
        payer = self

        class Paid(Escrow):
            def __call__(self, outcome):
                payer.paid += 1
                if payer.paid == payer.after:
                    raise Left
                return super().__call__(outcome)

        return Paid(config)


def trained(folder, *lefts, **over):
    """Train, and leave the training when it pays its steps of these numbers, each counted from where it went on."""
    tasks = two_tasks()
    configs = training_configs(tasks, "quick", SHORT, over)
    for number, after in enumerate(lefts):
        with pytest.raises(Left):
            train(tasks, configs, folder, opening=Opening(resume=number > 0), reward=Payer(after))
    return train(tasks, configs, folder, opening=Opening(resume=bool(lefts)), reward=Payer())


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "run"
    return folder, trained(folder)


def controller(folder):
    return {path.name: path.read_bytes() for path in (folder / "controller").iterdir()}


@pytest.mark.campaign
@pytest.mark.parametrize(
    "lefts",
    [
        pytest.param((3,), id="imitating", marks=pytest.mark.slow),
        pytest.param((6,), id="second cohort", marks=pytest.mark.slow),
        pytest.param((9,), id="round's end", marks=pytest.mark.slow),
        pytest.param((15,), id="second cohort, learning", marks=pytest.mark.slow),
        pytest.param((18, 2), id="twice in a round", marks=pytest.mark.slow),
        pytest.param((11, 5, 7), id="thrice"),
    ],
)
def test_a_training_that_is_left_and_resumed_is_the_one_that_was_not(straight, tmp_path, lefts):
    folder, summary = straight
    resumed = trained(tmp_path / "run", *lefts)
    config = read_config(folder)
    assert timeless(resumed) == timeless(summary)
    assert controller(tmp_path / "run") == controller(folder)
    assert equal(kept(tmp_path / "run", config), kept(folder, config))
    assert events(tmp_path / "run") == events(folder)


def test_the_checkpoint_behind_the_best_validation_is_kept(straight):
    folder, summary = straight
    name = (folder / "checkpoints" / "best").read_text().split()[0]
    facts = json.loads((folder / "checkpoints" / name / "state.json").read_text())
    trainer = facts["state"]["trainer"]
    assert trainer["best"] == [summary["best_validation_objective"], summary["best_round"]]
    assert trainer["number"] == summary["best_round"] + 1


@pytest.mark.slow
@pytest.mark.parametrize("every", [3, 5])
def test_the_cadence_of_checkpoints_does_not_change_where_a_training_comes_to(straight, tmp_path, every):
    checkpoint = {"every_steps": every, "every_seconds": 0, "keep": 1}
    resumed = trained(tmp_path / "run", 8, 8, checkpoint=checkpoint)
    assert timeless(resumed) == timeless(straight[1])
    assert load_file(tmp_path / "run" / "controller" / "controller.safetensors").keys()
    weights = [load_file(at / "controller" / "controller.safetensors") for at in (tmp_path / "run", straight[0])]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])


@pytest.mark.campaign
def test_a_training_that_was_asked_to_end_goes_on_to_the_end(straight, tmp_path):
    tasks = two_tasks()
    configs = training_configs(tasks, "quick", SHORT)

    asked = Payer()

    class Terminating(Escrow):
        def __call__(self, outcome):
            asked.paid += 1
            if asked.paid == 6:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().__call__(outcome)

    def payer(config):
        return Terminating(config)

    payer.__name__ = "payer"
    first = train(tasks, configs, tmp_path / "run", reward=payer)
    assert (first["status"], first["rounds_done"]) == ("interrupted", 0)
    resumed = train(tasks, configs, tmp_path / "run", opening=Opening(resume=True), reward=Payer())
    assert timeless(resumed) == timeless(straight[1])
    assert controller(tmp_path / "run") == controller(straight[0])


def test_the_config_of_a_training_holds_those_of_all_its_tasks():
    tasks = two_tasks()
    configs = training_configs(tasks, "standard", SHORT)
    configs[1] = configs[1].model_copy(update={"steps": 5})
    assert cohort_configs(build_config(yaml.safe_load(dump_config(with_cohorts(configs, "ppo"))))) == configs


def test_the_config_of_a_training_starts_the_same_training():
    tasks = two_tasks()
    configs = training_configs(tasks, "standard", SHORT)
    configs[1] = configs[1].model_copy(update={"steps": 5})
    content = yaml.safe_load(dump_config(with_cohorts(configs, "ppo")))
    assert training_configs(tasks, "quick", content) == configs
    assert [config.steps for config in training_configs(tasks, "quick", content, {"steps": 7})] == [7, 7]


def test_a_training_paid_by_an_object_cannot_be_resumed_from_its_folder(straight):
    with pytest.raises(InputError, match="paid by payer, a reward given as an object from Python"):
        reward_of(straight[0], read_config(straight[0]), None)


SOME = ("config.yaml", "environment.json", "summary.json", "changes.json", "events-cut-1.jsonl")


def test_what_a_kill_left_behind_the_last_checkpoint_is_removed_by_who_goes_on(tmp_path):
    config, folder = config_of(models="all", checkpoint={"every_seconds": 0}), tmp_path / "run"
    with pytest.raises(Left):
        grow(blobs(), config, client_of("random-valid", config, tmp_path), folder, Exporting())
    checkpoints = folder / "checkpoints"
    there = sorted(path.name for path in checkpoints.iterdir())
    shutil.copytree(checkpoints / there[-1], checkpoints / ".step-000001.old")
    left = [checkpoints / ".latest.0123456789abcdef.tmp", *(folder / f".{name}.0123456789abcdef.tmp" for name in SOME)]
    for path in left:
        path.write_text("step-")
    grow(blobs(), config, client_of("random-valid", config, tmp_path), folder, opening=Opening(resume=True))
    assert sorted(path.name for path in checkpoints.iterdir()) == there
    assert [path for path in left if path.exists()] == []
