"""Test `esper resume`: runs that were killed, finished, changed, or are none."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from journals import events

pytestmark = pytest.mark.usefixtures("elsewhere")

TIMES = ("seconds", "env_steps_per_second", "phase_seconds", "controller_share")
GROW = ["grow", "iris", "--envs", "2", "--steps", "24", "--controller", "random-valid", "--models", "none"]
GROW += ["--baselines", "twin"]
TRAIN = ["train", "iris", "wine", "--envs", "4", "--steps", "4", "--rounds", "3", "--set", "reward.group_size=2"]
TRAIN += ["--set", "ppo={imitation_rounds: 1, validate_envs: 2, validate_every: 1}", "--set", "data.batches_per_step=1"]
OFTEN = ["--set", "checkpoint={every_steps: 1, every_seconds: 0}", "--json"]


def timeless(value):
    if isinstance(value, dict):
        return {name: timeless(item) for name, item in value.items() if name not in TIMES and name != "time"}
    return [timeless(item) for item in value] if isinstance(value, list) else value


def killed(arguments, step):
    """Start the command and kill it when the checkpoint of a step, or a later one, is there."""
    command = [sys.executable, "-m", "esper", *arguments]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        latest = Path("r/checkpoints/latest")
        while not latest.exists() or int(latest.read_text()[5:11]) < step:
            assert process.poll() is None, "it ended by itself"
            time.sleep(0.002)
        os.kill(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("command", "steps"),
    [pytest.param(GROW, (3, 8), id="grow"), pytest.param(TRAIN, (3, 13), id="train", marks=pytest.mark.slow)],
)
def test_a_run_that_is_killed_twice_comes_to_the_numbers_of_one_that_is_not(esper, command, steps):
    code, out, _ = esper(*command, *OFTEN, "--run", "straight")
    assert code == 0
    killed([*command, *OFTEN, "--run", "r"], steps[0])
    killed(["resume", "r"], steps[1])
    code, resumed, err = esper("resume", "r", "--json")
    assert code == 0
    assert "going on after step" in err
    assert timeless(json.loads(resumed)) == timeless(json.loads(out))
    assert json.loads(Path("r/summary.json").read_text()) == json.loads(resumed)
    assert events("r") == events("straight")
    for path in Path("straight/controller").glob("*"):
        assert Path("r/controller", path.name).read_bytes() == path.read_bytes()


def test_a_finished_run_prints_its_summary_and_is_left_as_it_is(esper):
    _, out, _ = esper(
        "grow", "iris", "--envs", "1", "--steps", "2", "--models", "none", "--baselines", "none", "--run", "r", "--json"
    )
    before = {path: path.stat().st_mtime_ns for path in Path("r").rglob("*")}
    assert esper("resume", "r", "--json")[:2] == (0, out)
    assert "finished" in esper("resume", "r")[1] or "iris" in esper("resume", "r")[1]
    assert {path: path.stat().st_mtime_ns for path in Path("r").rglob("*")} == before


def test_a_run_that_has_only_its_config_begins_again(esper):
    _, out, _ = esper(*GROW, "--steps", "6", "--json", "--run", "straight")
    Path("r").mkdir()
    shutil.copy("straight/config.yaml", "r/config.yaml")
    code, resumed, _ = esper("resume", "r", "--json")
    assert code == 0
    assert timeless(json.loads(resumed)) == timeless(json.loads(out))
    assert Path("r/environment.json").is_file()


def test_what_cannot_be_resumed_is_one_sentence(esper):
    Path("r").mkdir()
    for config, names in (
        (None, "not a run folder"),
        ("- 1", "not a mapping"),
        ("a: [", "not valid YAML"),
        ("envs: -1", "envs"),
        ("task: nowhere", "nowhere"),
        ("controller: Script", "no command can resume the run: in Python give one like it"),
        ("{tasks: [iris], controller: 'ppo, paid by mine'}", "object from Python, which cannot be resumed"),
    ):
        if config is not None:
            Path("r/config.yaml").write_text(config)
        code, out, err = esper("resume", "r")
        assert (code, out) == (2, "")
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        assert names in err


def test_a_changed_config_is_refused(esper):
    esper(*GROW, "--steps", "3", *OFTEN, "--run", "r")
    Path("r/summary.json").unlink()
    path = Path("r/config.yaml")
    path.write_text(path.read_text().replace("lr: 0.005", "lr: 0.006"))
    before = Path("r/events.jsonl").read_bytes()
    code, _, err = esper("resume", "r")
    assert code == 2
    assert "config.yaml was changed since" in err
    assert Path("r/events.jsonl").read_bytes() == before


def content(folder):
    """Read every file that a run which stands still leaves as it is."""
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


@pytest.mark.campaign
def test_a_run_that_another_process_is_at_is_left_alone(esper):
    command = [sys.executable, "-m", "esper", *GROW, *OFTEN, "--run", "r"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while not Path("r/checkpoints/latest").exists():
            assert process.poll() is None, "it ended by itself"
            time.sleep(0.002)
        os.kill(process.pid, signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        before = content("r")
        for arguments in (["resume", "r"], [*GROW, "--run", "r", "--overwrite"], [*TRAIN, "--run", "r", "--overwrite"]):
            code, out, err = esper(*arguments)
            assert (code, out, err.count("\n")) == (2, "", 1), err
            assert f"process {process.pid} on " in err
            assert content("r") == before
        os.kill(process.pid, signal.SIGCONT)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    code, _, err = esper("resume", "r", "--json")
    assert code == 0
    assert f"process {process.pid} on " in err
    assert "left its lock behind" in err
    assert not Path("r/lock").exists()


@pytest.mark.campaign
def test_two_runs_of_one_new_folder_are_kept_apart(tmp_path):
    command = [sys.executable, "-m", "esper", "grow", "iris", "--envs", "2", "--steps", "8", "--models", "none"]
    command += ["--baselines", "none"]
    started = [
        subprocess.Popen([*command, "--run", "r"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    left = sorted((process.communicate()[1].count("error: "), process.returncode) for process in started)
    assert left == [(0, 0), (1, 2)]
    rows = [json.loads(line)["seq"] for line in Path("r/events.jsonl").read_text().splitlines()]
    assert rows == list(range(len(rows)))


@pytest.mark.campaign
def test_a_disk_that_stays_full_ends_a_run_with_the_command_that_goes_on(esper, full):
    disk = full(r"/\.step-000002\.new/", 10**9)
    code, out, err = esper(*GROW, *OFTEN, "--set", "faults.disk_seconds=0", "--run", "r")
    assert (code, out) == (1, "")
    assert err.splitlines()[-1].startswith("error: cannot write r/checkpoints/step-000002: No space left on device")
    assert err.endswith("continue with `esper resume r`\n")
    disk.times = 0
    assert esper("resume", "r", "--json")[0] == 0


def test_a_finished_run_goes_on_where_set_asks_for_more(esper):
    esper(*GROW[:4], "--steps", "4", *OFTEN, "--run", "r")
    before = content("r")
    assert json.loads(esper("resume", "r", "--set", "steps=4", "--json")[1])["steps_done"] == 4
    assert content("r") == before
    code, out, err = esper("resume", "r", "--set", "steps=6", "--set", "optimizer.lr=0.01", "--json")
    assert code == 0
    assert "going on after step 4" in err
    assert json.loads(out)["steps_done"] == 6
    assert json.loads(Path("r/changes.json").read_text())[0]["set"] == ["steps=6", "optimizer.lr=0.01"]
    assert esper("resume", "r", "--json")[:2] == (0, out)


def test_a_change_that_cannot_be_is_one_sentence_and_none(esper):
    esper(*GROW[:4], "--steps", "4", *OFTEN, "--run", "r")
    before = content("r")
    for setting, sentence in (
        ("seed=7", "another run"),
        ("steps=1", "has taken"),
        ("optimizer.name=sgd", "does not fit"),
        ("stepz=1", "unknown config key"),
        ("steps", "not of the form key=value"),
    ):
        code, out, err = esper("resume", "r", "--set", setting)
        assert (code, out) == (2, "")
        assert err.splitlines()[-1].startswith("error: ")
        assert sentence in err
        assert content("r") == before


def test_overwriting_removes_cut_events_too(esper):
    arguments = ["grow", "iris", "--envs", "1", "--steps", "2", "--models", "none", "--baselines", "none", "--run", "r"]
    esper(*arguments)
    Path("r/events-cut-1.jsonl").write_text("")
    esper(*arguments, "--overwrite")
    assert not Path("r/events-cut-1.jsonl").exists()


def test_a_finished_run_whose_events_are_damaged_says_so_beside_its_summary(esper):
    _, out, _ = esper("grow", "iris", "--envs", "1", "--steps", "2", "--models", "none", "--run", "r", "--json")
    path = Path("r/events.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)
    for content, words in (
        (None, "is missing"),
        (b"", "its end is missing"),
        (b"".join([lines[0], b"\n", *lines[2:]]), "missing rows: 1; 1 line without a row"),
    ):
        path.unlink()
        if content is not None:
            path.write_bytes(content)
        code, again, err = esper("resume", "r", "--json")
        path.touch()
        assert (code, again) == (0, out)
        assert err.startswith("warning: r/events.jsonl ")
        assert words in err
