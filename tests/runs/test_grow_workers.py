"""Check that growths whose rows are divided among workers are the same for any number of them, also if some are killed."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import esper
from crashes import Leaving, Left
from crews import SHY, Beside
from esper.cli import main
from esper.commands.options import spread_devices
from esper.leyline.config.tree import build_config
from esper.leyline.messages import DataFault, InputError, UserCodeError, WorkerError
from esper.leyline.progress import Progress
from esper.runs.configuration import training_configs
from esper.runs.folder.resume import Opening
from esper.runs.grow import grow
from esper.runs.train import train
from esper.runs.workers.sharded import Shard
from esper.runs.workers.workers import ALONE, TRIES, WorkerOptions, check_facts, worker_options
from esper.store.files import CONFIG, MODELS, SUMMARY
from esper.tamiyo.catalog import get_controller
from esper.tamiyo.policy.controller import WEIGHTS
from esper.tamiyo.rules.base import Never
from esper.tasks.catalog import get_task
from esper.tasks.hosts import MLP
from esper.tolaria import runtime
from esper.tolaria.governor import Governor
from esper.tolaria.measure.certifying import Certifier
from esper.tolaria.stacked.population import StackedPopulation
from populations import Lost, streamed
from spans import spanned_task

pytestmark = pytest.mark.campaign

BASELINES = ["twin", "same-size", "plain", "skips"]
SMALL = {
    "task": "iris",
    "envs": 3,
    "steps": 12,
    "device": "cpu",
    "baselines": BASELINES,
    "blueprints": ["bypass-linear", "bypass-rank-1"],
    "data": {"batch_size": 12, "batches_per_step": 3},
    "lifecycle": {"max_training_seeds": 2, "max_seeds": 2},
    "gates": {"permissive": True, "min_training_steps": 1, "min_holding_steps": 1},
    "heuristic": {"plant_below": 2.0, "weak_below": 2.0, "holding_patience": 3, "training_patience": 1},
    "probe": {"sensors_every": 2},
    "telemetry": {"level": "debug"},
}
CLOCKED = ("seconds", "env_steps_per_second", "phase_seconds", "workers")


def grown(folder, asked=ALONE, watch=None, opening=None, **over):
    config = build_config(get_task("iris").defaults, SMALL, over)
    client = get_controller(config.controller, config)
    return grow(get_task("iris"), config, client, folder, watch, opening or Opening(), asked=asked)


def content(folder):
    """Return the summary, the rows and the files of the networks, without what a clock says."""
    summary = json.loads((folder / SUMMARY).read_text())
    for part in (summary, *summary["baselines"].values()):
        for name in CLOCKED:
            part.pop(name, None)
    rows = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["kind"] not in ("phases", "checkpoint", "environment")]
    for row in rows:
        del row["seq"], row["time"]
    files = {path: path.read_bytes() for path in (folder / MODELS).rglob("*") if path.is_file()}
    return summary, rows, {str(path.relative_to(folder)): each for path, each in files.items()}


@pytest.fixture
def beside(monkeypatch):
    """Let workers be in this process, where they begin without waiting; the `losses` are those of `Beside`."""
    crews, losses = [], []

    def start_workers(kind, asked, work, note, facts, *, stop):
        crews.append(Beside(asked.size, work, losses))
        return kind(crews[-1], note, lambda ready: check_facts(facts, ready), "give fewer workers", stop)

    monkeypatch.setattr("esper.runs.grow.start_workers", start_workers)
    return crews, losses


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return the content of a run without workers."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    seeds = grown(folder)["seeds"]
    assert seeds["fossilized"] > 0
    assert seeds["pruned"] > 0
    return content(folder)


# Two workers have one and two environments; some of their answers are lost, one of them twice in a row.
@pytest.mark.parametrize(
    ("workers", "lost"), [(1, []), (2, [False, True, *[False] * 20, True, True, *[False] * 40, True]), (3, [])]
)
def test_a_run_does_not_depend_on_the_number_of_workers_or_on_losses(alone, tmp_path, beside, workers, lost):
    crews, losses = beside
    losses += lost
    summary = grown(tmp_path / "run", WorkerOptions(workers))
    assert content(tmp_path / "run") == alone
    assert summary["workers"]["number"] == workers
    assert summary["workers"]["lost"] == sum(lost) == crews[0].starts - workers
    assert crews[0].closed


def test_seeds_that_go_around_several_segments_grow_the_same_with_workers(tmp_path, beside):
    task, none = spanned_task(menu=("bypass-mlp", "mlp-small")), {"task": "spans", "blueprints": None}
    found = {}
    for name, asked in (("alone", ALONE), ("two", WorkerOptions(2))):
        config = build_config(task.defaults, SMALL, none)
        client = get_controller(config.controller, config)
        summary = grow(task, config, client, tmp_path / name, opening=Opening(), asked=asked)
        assert any("late" in each or "wide" in each for each in summary["grown"]), "or this test shows nothing"
        found[name] = content(tmp_path / name)
    assert found["two"] == found["alone"]


@pytest.mark.parametrize(
    "over",
    [
        pytest.param({"baselines": [], "steps": 6, "mapping": "vmap"}, id="single rows that would need ghosts"),
        pytest.param(
            {"amp": "fp16", "early_stopping": {"enabled": True, "patience": 3}}, id="float16 that stops early"
        ),
        pytest.param(
            {
                "gates": {"certify": 0.9, "certify_share": 0.5, "min_contribution": -1.0, "contribution_z": 0.0},
                "heuristic": {"holding_patience": 9},
            },
            id="certificates",
        ),
        pytest.param({"widen": {"at": [5, 8]}, "baselines": BASELINES, "models": "all"}, id="networks become wider"),
    ],
)
def test_rows_have_their_bits_with_workers_under_every_setting_that_keeps_more_of_a_row(
    tmp_path, beside, monkeypatch, over
):
    looks, look = [], Certifier.look
    monkeypatch.setattr(Certifier, "look", lambda self, *state: looks.append(look(self, *state)) or looks[-1])
    over = {"baselines": ["twin"], "models": "none", **over}
    summary = grown(tmp_path / "alone", **over)
    grown(tmp_path / "shards", WorkerOptions(2), **over)
    assert content(tmp_path / "shards") == content(tmp_path / "alone")
    assert summary["plantings"]
    assert any(look is not None for look in looks) == ("gates" in over), "seeds of several rows are looked at at once"


def test_each_worker_reads_the_batches_of_a_streamed_dataset(tmp_path, beside):
    x = torch.randn(300, 6, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, (x[:, 0] > 0).long())
    host = MLP(inputs=6, width=8, hidden=(3, 5), outputs=2)
    task = esper.task("streamed", data, host=host, classes=2, stream=True)
    over = {name: value for name, value in SMALL.items() if name != "task"} | {"steps": 3, "models": "none"}
    for name, workers in (("alone", None), ("shards", 2)):
        esper.grow(task, over | {"baselines": ["twin"]}, run=tmp_path / name, progress=False, workers=workers)
    (summary, rows, _), alone = content(tmp_path / "shards"), content(tmp_path / "alone")
    assert (summary, rows) == ({name: value for name, value in alone[0].items() if name != "reading_p95"}, alone[1])


@pytest.mark.parametrize("amp", ["off", "fp16"])
def test_an_error_of_a_dataset_in_a_worker_leaves_a_checkpoint_of_the_last_whole_step(tmp_path, beside, amp):
    data = Lost()
    task = streamed(data)
    over = {name: value for name, value in SMALL.items() if name != "task"}
    over |= {"baselines": ["twin"], "models": "none", "amp": amp, "early_stopping": {"enabled": True, "patience": 5}}
    over |= {"checkpoint": {"every_steps": 0, "every_seconds": 0}, "widen": {"at": [2]}}
    esper.grow(task, over, run=tmp_path / "straight", progress=False)
    data.left = 400
    with pytest.raises(UserCodeError, match=r"the disk with the examples is gone.*continues after step [1-9]"):
        esper.grow(task, over, run=tmp_path / "left", progress=False, workers=2)
    data.left = None
    esper.resume(tmp_path / "left", progress=False, workers=3, task=task)
    (summary, *found), (expected, *straight) = content(tmp_path / "left"), content(tmp_path / "straight")
    assert found == straight
    assert {**summary, "reading_p95": 0} == {**expected, "reading_p95": 0}


@pytest.mark.parametrize(
    "numbers", [(2, None, 3), pytest.param((None, 3, 1), marks=pytest.mark.slow)], ids=lambda each: str(each)
)
def test_a_run_goes_on_with_another_number_of_workers(tmp_path, beside, numbers):
    over = {
        "baselines": ["twin"],
        "models": "none",
        "checkpoint": {"every_steps": 1, "every_seconds": 0},
        "early_stopping": {"enabled": True, "patience": 5},
        "amp": "fp16",
        "widen": {"at": [2, 6]},
    }
    asked = [WorkerOptions(number) for number in numbers]
    grown(tmp_path / "straight", **over)
    left = tmp_path / "left"
    with pytest.raises(Left):
        grown(left, asked[0], Leaving(5), **over)
    with pytest.raises(Left):
        grown(left, asked[1], Leaving(3), Opening(resume=True), **over)
    grown(left, asked[2], opening=Opening(resume=True), **over)
    assert content(left) == content(tmp_path / "straight")


def test_a_row_that_breaks_is_restored_where_it_is(tmp_path, beside, monkeypatch):
    inspect = Governor.inspect

    def broken(self, before, after, signs):  # environment 1 breaks in every third step
        self.count_of_looks = getattr(self, "count_of_looks", 0) + 1
        if self.count_of_looks % 3 == 0 and len(signs.loss) > 3:
            signs = signs._replace(loss=np.where(np.arange(len(signs.loss)) == 1, np.nan, signs.loss))
        return inspect(self, before, after, signs)

    monkeypatch.setattr(Governor, "inspect", broken)
    over = {"baselines": ["twin"], "models": "none"}
    assert grown(tmp_path / "alone", **over)["rollbacks"]["loss"] == 4
    grown(tmp_path / "shards", WorkerOptions(2), **over)
    assert content(tmp_path / "shards") == content(tmp_path / "alone")


class StoppingOne(Progress):
    """Stops the process of the second worker after the third step, as a debugger or a machine that hangs would."""

    def __init__(self):
        self.notes, self.stopped = [], False

    def step(self, view, speed, rollbacks):
        if view.step == 3 and not self.stopped:
            self.stopped = True
            (worker,) = (each for each in multiprocessing.active_children() if each.name == "worker-1")
            os.kill(worker.pid, signal.SIGSTOP)

    def note(self, text):
        self.notes.append(text)


@pytest.mark.campaign
def test_a_worker_that_is_stopped_is_ended_and_its_environments_are_played_again(tmp_path, monkeypatch):
    monkeypatch.setattr("esper.runs.workers.workers.QUIET", 3.0)
    over, watch = {"baselines": ["twin"], "models": "none", "steps": 6}, StoppingOne()
    grown(tmp_path / "alone", **over)
    summary = grown(tmp_path / "run", WorkerOptions(2), watch, faults={"worker_seconds": 20}, **over)
    silent = [note for note in watch.notes if note.startswith("worker 1 has given no sign for 3 s: a step takes long")]
    assert silent, watch.notes  # said of a slow start too
    assert [note.split(";")[0] for note in watch.notes if "lost" in note] == ["worker 1 was lost"]
    assert summary["workers"]["lost"] == 1
    assert content(tmp_path / "run") == content(tmp_path / "alone")


def test_workers_that_are_lost_for_good_stop_the_run(tmp_path, beside):
    beside[1].extend([False] * 4 + [True] * TRIES)
    with pytest.raises(WorkerError, match=f"was lost {TRIES} times.* its environments were lost with each; give fewer"):
        grown(tmp_path / "run", WorkerOptions(1))
    assert json.loads((tmp_path / "run" / SUMMARY).read_text())["status"] == "failed"


def test_an_error_in_a_worker_ends_the_run_as_one_of_this_process_does(tmp_path, beside, monkeypatch):
    def train(self, seeds, parameter_norms=False):
        if self.first_env:  # in the second worker alone
            raise DataFault("what environment 2 trained on is not finite")

    monkeypatch.setattr(StackedPopulation, "train", train)
    with pytest.raises(DataFault, match=r"environment 2 trained on is not finite; esper resume"):
        grown(tmp_path / "run", WorkerOptions(2))


@pytest.mark.parametrize(("envs", "baselines", "shards"), [(3, [], [3]), (5, [], [2, 3]), (3, ["twin"], [1, 1, 1])])
def test_a_worker_has_two_rows_where_one_alone_would_need_a_ghost(
    tmp_path, monkeypatch, beside, envs, baselines, shards
):
    made, init = [], StackedPopulation.__init__

    def make(self, task, config, *instance):
        init(self, task, config, *instance)
        made.append((config.envs, len(self.environment)))

    monkeypatch.setattr(StackedPopulation, "__init__", make)
    over = {"baselines": baselines, "models": "none", "steps": 1, "mapping": "vmap"}
    grown(tmp_path / "run", WorkerOptions(envs), envs=envs, **over)
    assert made == [(own, own * (1 + len(baselines))) for own in shards]


# Placement: two logical devices, on the CPU.


@pytest.mark.parametrize("amp", ["off", "bf16", "fp16"])
def test_rows_on_two_devices_are_what_they_are_on_one(tmp_path, monkeypatch, beside, amp):
    # torch computes it on any processor, only slower
    monkeypatch.setattr(runtime, "multiplies_bfloat16", lambda device: True)
    placed = []

    def make(self, task, config, instance, first_env, derive):
        placed.append((config.device, config.envs, first_env))
        init(self, task, config, instance, first_env, derive)

    init = Shard.__init__
    monkeypatch.setattr(Shard, "__init__", make)
    over = {"baselines": ["twin"], "models": "none", "steps": 8, "amp": amp, "device": "auto", "envs": 4}
    devices = worker_options(devices=["cpu", "cpu"])
    grown(tmp_path / "two", devices, **over)
    assert placed == [("cpu", 2, 0), ("cpu", 2, 2)]
    one = grown(tmp_path / "one", **over | {"device": "cpu"})
    assert content(tmp_path / "two") == content(tmp_path / "one")
    assert (tmp_path / "two" / CONFIG).read_text() == (tmp_path / "one" / CONFIG).read_text()
    if amp == "fp16":
        assert one["skipped_updates"]["updates"] == 8 * 3


@pytest.mark.campaign
def test_a_training_in_float16_on_two_devices_has_the_controller_of_one(tmp_path):
    small = {"envs": 4, "steps": 3, "data": {"batch_size": 12, "batches_per_step": 1}, "amp": "fp16", "device": "cpu"}
    small |= {"reward": {"group_size": 2}, "ppo": {"rounds": 1, "imitation_rounds": 1, "validate_envs": 2}, "shards": 2}
    task = get_task("iris")
    for name, asked in (("one", ALONE), ("two", worker_options(devices="cpu cpu"))):
        train([task], training_configs([task], "quick", small), tmp_path / name, asked=asked)
    one, two = ((tmp_path / name / "controller" / WEIGHTS).read_bytes() for name in ("one", "two"))
    assert one == two


# What cannot be had.


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (
            {"workers": 4},
            "workers is 4, but 3 environments (envs) can be divided among 3 at most; give 3 workers or fewer",
        ),
        ({"devices": "cpu,cuda:77"}, "devices is 'cpu,cuda:77': device 'cuda:77' was asked for, but torch sees"),
        ({"devices": ["cpu", "cpu"], "workers": 1}, "devices names 2 devices, but workers is 1; give a worker to each"),
        ({"workers": 0}, "workers is 0; give the number of workers, a whole number of 1 or more"),
    ],
)
def test_workers_that_cannot_be_had_are_refused_before_anything_is_written(tmp_path, how, said):
    with pytest.raises(InputError) as caught:
        esper.grow("iris", {"envs": 3, "steps": 2}, run=tmp_path / "run", progress=False, **how)
    assert said in str(caught.value)
    assert not (tmp_path / "run").exists()


class Trying(Never):
    def proposals(self, view):
        return None


def test_a_controller_that_tries_candidates_is_refused_by_name():
    with pytest.raises(
        InputError, match=r"^the controller \S*Trying tries candidates in copies of the networks, which wor"
    ):
        esper.grow("iris", {"envs": 3}, controller=Trying(), progress=False, workers=2)


def test_a_growth_has_no_cluster(tmp_path):
    over = {"baselines": [], "models": "none", "steps": 1}
    grown(tmp_path / "run", **over)
    with pytest.raises(InputError, match=r"cluster is ray, but the workers of a growth are processes of this machine"):
        esper.resume(tmp_path / "run", settings={"steps": 2}, cluster="ray", progress=False)


@pytest.mark.parametrize(
    ("line", "devices"),
    [
        ("--devices cuda:0 cuda:1", ["cuda:0", "cuda:1"]),
        ("--devices cuda:0,cuda:1", ["cuda:0,cuda:1"]),
        ("--devices=cuda:0 cuda:1", ["cuda:0", "cuda:1"]),
        ("--devices cpu --devices cpu,cpu cpu", ["cpu", "cpu,cpu", "cpu"]),
    ],
)
def test_devices_may_follow_the_option_or_have_commas_and_take_no_other_argument(line, devices):
    arguments = spread_devices(["train", "repair", *line.split(), "digits", "cpu.py:task", "--envs", "8", "cpu"])
    assert arguments[:2] == ["train", "repair"]
    assert arguments[-5:] == ["digits", "cpu.py:task", "--envs", "8", "cpu"]
    given = [argument.removeprefix("--devices=") for argument in arguments[2:-5] if argument != "--devices"]
    assert given == devices
    # a device that Esper does not know is refused as one, and no task
    assert spread_devices(["grow", "--devices", "cpu", "mps:0"]) == ["grow", "--devices", "cpu", "--devices", "mps:0"]
    assert spread_devices(["grow", "--", "--devices", "cpu", "cpu"]) == ["grow", "--", "--devices", "cpu", "cpu"]


@pytest.mark.parametrize("devices", ["cpu,cpu", "cpu cpu", " cpu , cpu", ["cpu", "cpu"], ["cpu,", "cpu"]])
def test_both_spellings_name_the_same_devices(devices):
    assert worker_options(devices=devices).devices == ("cpu", "cpu")


# Processes.

COMMAND = ["grow", "iris", "--envs", "2", "--steps", "2", "--baselines", "none", "--models", "none"]
COMMAND += ["--set", "data.batch_size=12", "--set", "blueprints=[bypass-linear]"]
TRAIN = ["--envs", "4", "--steps", "2", "--rounds", "1", "--set", "data.batch_size=12", "--set", "ppo.validate_envs=2"]
TRAIN += ["--set", "reward.group_size=2", "--set", "ppo.imitation_rounds=0"]


@pytest.mark.campaign
def test_processes_grow_the_same_run_although_one_is_killed(alone, tmp_path):
    class Killing(Progress):
        steps = 0

        def step(self, view, speed, rollbacks):
            self.steps += 1
            if self.steps == 4:
                worker = min(multiprocessing.active_children(), key=lambda each: each.name)
                os.kill(worker.pid, signal.SIGKILL)

        def note(self, text):
            notes.append(text)

    notes = []
    summary = grown(tmp_path / "run", WorkerOptions(2), Killing())
    assert content(tmp_path / "run") == alone
    assert summary["workers"]["lost"] == 1
    assert "worker 0 was lost; another is started, and plays its environments again up to here" in notes
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("command", [[*COMMAND], ["train", "iris", *TRAIN]], ids=["grow", "train"])
@pytest.mark.campaign
def test_commands_take_devices_apart_by_spaces(tmp_path, monkeypatch, capsys, command):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as leaving:
        main([*command, "--run", "run", "--json", "--devices", "cpu", "cpu"])
    assert not leaving.value.code
    summary = json.loads(capsys.readouterr().out)
    assert summary["workers"]["number"] == 2


@pytest.mark.slow
def test_a_worker_that_cannot_import_the_task_says_so_with_exit_code_2(tmp_path):
    (tmp_path / "shy.py").write_text(SHY)
    command = [sys.executable, "-m", "esper", "grow", "shy.py:task", "--workers", "2", "--run", "run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert "could not be started: UserCodeError: the task shy.py:task raised OSError: the disk with the data" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.campaign
def test_a_run_with_workers_is_interrupted_and_goes_on_to_what_it_would_have_been_without(tmp_path):
    left, steps = tmp_path / "left", 60
    command = [sys.executable, "-m", "esper", "grow", "iris", "--envs", "2", "--steps", f"{steps}", "--device", "cpu"]
    command += ["--set", "data.batch_size=12", "--baselines", "twin", "--models", "none", "--workers", "2", "--run"]
    running = subprocess.Popen([*command, str(left)], stderr=subprocess.PIPE, text=True)
    next(line for line in running.stderr if line.startswith("step "))
    running.send_signal(signal.SIGINT)
    rest = running.stderr.read()
    assert running.wait() == 130, rest
    assert f"of {steps} steps: the networks are evaluated and exported as they are" in rest
    assert esper.resume(left, workers=1, progress=False)["status"] == "finished"
    over = {"envs": 2, "steps": steps, "device": "cpu", "data": {"batch_size": 12}, "baselines": ["twin"]}
    esper.grow("iris", {**over, "models": "none"}, run=tmp_path / "straight", progress=False)
    assert content(left)[0] == content(tmp_path / "straight")[0]
