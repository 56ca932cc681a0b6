"""Run the `esper` command in this process; where signals or streams matter, in one of its own."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from torch import nn

from commands import files
from esper.cli import main
from esper.kasmina.blueprints import BLUEPRINTS, LIVE_BLUEPRINTS, Blueprint
from esper.kasmina.blueprints.vector import zero_linear
from esper.kasmina.stack import invariance
from esper.leyline.config.tree import Config, build_config, reference
from esper.leyline.lifecycle.slots import Kind, Tap
from esper.tasks.catalog import TASKS
from pictures import write_cifar
from processes import begun

pytestmark = pytest.mark.usefixtures("elsewhere")

QUICK = ["--envs", "2", "--steps", "3", "--set", "data.batches_per_step=2", "--models", "none"]
QUICK += ["--set", "baselines=twin"]


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    """Grow a run whose two networks are exported."""
    folder = tmp_path_factory.mktemp("cli") / "run"
    with pytest.raises(SystemExit) as end:
        main(["grow", "spirals-narrow", *QUICK, "--models", "all", "--run", str(folder)])
    assert not end.value.code
    return folder


def test_grow_prints_the_closing_table_on_stdout_and_progress_on_stderr(esper):
    code, out, err = esper("grow", "spirals-narrow", *QUICK)
    assert code == 0
    assert "test accuracy" in out
    assert "grew:" in out
    assert "step 1/3" in err
    assert "step 3/3" in err
    assert "step" not in out.split("grew:")[0].replace("3 of 3 steps", "")


def test_the_default_folder_is_named_after_task_controller_and_seed(esper):
    esper("grow", "spirals-narrow", *QUICK, "--controller", "never", "--seed", "7")
    assert os.listdir("runs") == ["spirals-narrow-never-s7"]


def test_a_schedule_names_the_folder_by_its_stem(esper):
    Path("plans").mkdir()
    Path("plans/early.yaml").write_text("- {at: 0, op: germinate, slot: block0, blueprint: bypass-mlp}\n")
    code, _, err = esper("grow", "spirals-narrow", *QUICK, "--controller", "plans/early.yaml")
    assert (code, os.listdir("runs")) == (0, ["spirals-narrow-early-s0"]), err


def test_json_prints_the_summary_and_nothing_else_on_stdout(esper):
    code, out, _ = esper("grow", "spirals-narrow", *QUICK, "--json", "--run", "here")
    assert code == 0
    assert json.loads(out, parse_constant=pytest.fail) == json.loads(Path("here/summary.json").read_text())


def test_options_go_before_set_before_file_before_the_task(esper):
    Path("c.yaml").write_text("{envs: 3, steps: 5, seed: 5, data: {batches_per_step: 1, batch_size: 32}}")
    code, _, err = esper(
        *("grow", "spirals-narrow", "--config", "c.yaml", "--set", "steps=2", "--set", "seed=6", "--seed", "7"),
        *("--models", "none", "--run", "r"),
    )
    assert code == 0, err
    config = build_config(yaml.safe_load(Path("r/config.yaml").read_text()))
    assert (config.task, config.envs, config.steps, config.seed) == ("spirals-narrow", 3, 2, 7)
    assert (config.data.batch_size, config.data.batches_per_step) == (32, 1)


def test_a_run_can_be_repeated_from_its_config(esper):
    esper("grow", "spirals-narrow", *QUICK, "--no-twin", "--slots", "block0,block1", "--run", "a")
    esper("grow", "spirals-narrow", "--config", "a/config.yaml", "--run", "b")
    assert Path("a/config.yaml").read_text() == Path("b/config.yaml").read_text()
    config = build_config(yaml.safe_load(Path("b/config.yaml").read_text()))
    assert (config.twin, config.slots) == (False, ("block0", "block1"))


BAD = {
    "task": (["grow", "nowhere"], "'nowhere'"),
    "controller": (["grow", "spirals-narrow", "--controller", "oracle"], "'oracle'"),
    "controller file": (["grow", "spirals-narrow", "--controller", "absent.yaml"], "absent.yaml"),
    "key": (["grow", "spirals-narrow", "--set", "nope=1"], "'nope'"),
    "value": (["grow", "spirals-narrow", "--set", "data.batch_size=many"], "data.batch_size"),
    "microbatch": (["grow", "spirals-narrow", "--set", "data.microbatch=999"], "data.microbatch is 999, more than"),
    "task that is set": (["grow", "spirals-narrow", "--set", "task=digits"], "--set task"),
    "tasks that are set": (["grow", "spirals-narrow", "--set", "tasks=[digits]"], "--set tasks"),
    "form of --set": (["grow", "spirals-narrow", "--set", "envs"], "key=value"),
    "no environments": (["grow", "spirals-narrow", "--envs", "0"], "envs"),
    "no steps": (["grow", "spirals-narrow", "--steps", "0"], "steps"),
    "no number": (["grow", "spirals-narrow", "--envs", "many"], "'many'"),
    "seed": (["grow", "spirals-narrow", "--seed", "-1"], "seed"),
    "device": (["grow", "spirals-narrow", "--device", "tpu"], "'tpu'"),
    "cuda": (["grow", "spirals-narrow", "--device", "cuda:99"], "cuda:99"),
    "models": (["grow", "spirals-narrow", "--models", "some"], "'some'"),
    "baselines": (["grow", "spirals-narrow", "--baselines", "twin,best"], "'twin,best'"),
    "twin and no twin": (["grow", "spirals-narrow", "--baselines", "plain", "--twin"], "leave twin out"),
    "slot": (["grow", "spirals-narrow", "--slots", "nowhere"], "'nowhere'"),
    "blueprint": (["grow", "spirals-narrow", "--set", "blueprints=[nothing]"], "'nothing'"),
    "batch": (["grow", "spirals-narrow", "--set", "data.batch_size=99999"], "99999"),
    "config file": (["grow", "spirals-narrow", "--config", "absent.yaml"], "absent.yaml"),
    "folder with other files": (["grow", "spirals-narrow", "--run", "mine"], "mine"),
    "folder under a file": (["grow", "spirals-narrow", "--run", "mine/notes.txt/run"], "notes.txt"),
    "export of no run": (["export", "mine"], "mine"),
    "export of nothing": (["export", "absent"], "absent"),
}


@pytest.mark.parametrize(("arguments", "names"), BAD.values(), ids=BAD)
def test_bad_input_is_one_sentence_and_nothing_is_written(esper, arguments, names):
    Path("mine").mkdir()
    Path("mine/notes.txt").write_text("mine")
    code, out, err = esper(*arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert names in err
    assert files() == ["mine", "mine/notes.txt"]


@pytest.mark.parametrize("arguments", [["grow"], ["grow", "spirals-narrow", "--nope"], ["nope"]])
def test_wrong_usage_is_told_on_stderr(esper, arguments):
    code, out, err = esper(*arguments)
    assert (code, out) == (2, "")
    assert "Error" in err


def test_a_run_is_replaced_only_when_asked(esper):
    esper("grow", "spirals-narrow", *QUICK, "--run", "r", "--seed", "1")
    code, _, err = esper("grow", "spirals-narrow", *QUICK, "--run", "r", "--seed", "2")
    assert (code, json.loads(Path("r/summary.json").read_text())["seed"]) == (2, 1)
    assert "--overwrite" in err
    code, _, _ = esper("grow", "spirals-narrow", *QUICK, "--run", "r", "--seed", "2", "--overwrite")
    assert (code, json.loads(Path("r/summary.json").read_text())["seed"]) == (0, 2)


def test_a_bad_option_does_not_cost_the_run_that_was_to_be_overwritten(esper):
    esper("grow", "spirals-narrow", *QUICK, "--run", "r")
    before = files()
    code, _, _ = esper("grow", "spirals-narrow", "--run", "r", "--overwrite", "--slots", "nowhere")
    assert (code, files()) == (2, before)


def test_tasks_are_listed_with_slots_and_menus(esper):
    code, out, _ = esper("tasks")
    assert code == 0
    assert {line.split(":")[0] for line in out.splitlines() if not line.startswith(" ")} >= {"digits", "digits-narrow"}
    assert "block0 (width 16)" in out
    assert "bypass-mlp" in out


def test_blueprints_are_listed_with_their_cost(esper):

    code, out, _ = esper("blueprints")
    assert code == 0
    assert [(line.split()[1], line.split()[0]) for line in out.splitlines()[1:]] == [*BLUEPRINTS, *LIVE_BLUEPRINTS]


def test_config_lists_every_key(esper):
    code, out, _ = esper("config")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[1:]] == [row[0] for row in reference()]


def test_config_as_yaml_can_be_read_back(esper):
    _, out, _ = esper("config", "--yaml")
    assert build_config(yaml.safe_load(out)) == Config()


def test_a_task_whose_files_are_absent_is_listed_with_what_is_missing(esper, monkeypatch, tmp_path):
    monkeypatch.setenv("ESPER_DATA", str(tmp_path / "nothing"))
    code, out, _ = esper("tasks")
    assert code == 0
    assert "cifar10: " in out
    assert f"missing   {tmp_path / 'nothing' / 'cifar-10-batches-bin'} is not there" in out


def test_growing_on_files_that_are_absent_is_one_sentence_and_exit_code_2(esper, monkeypatch, tmp_path):
    monkeypatch.setenv("ESPER_DATA", str(tmp_path / "nothing"))
    code, out, err = esper("grow", "cifar10", *QUICK)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1
    assert "ESPER_DATA" in err
    assert not files()


def test_cifar_grows_from_files_of_its_format(esper, monkeypatch, tmp_path):
    write_cifar(tmp_path / "data", count=40)
    monkeypatch.setenv("ESPER_DATA", str(tmp_path / "data"))
    code, out, _ = esper("grow", "cifar10", *QUICK, "--json")
    assert code == 0
    assert json.loads(out)["host_params"] == 6362


def test_digits_as_images_grow_from_the_command(esper):
    code, out, _ = esper("grow", "digits-image-narrow", *QUICK)
    assert code == 0
    assert "test accuracy" in out


@pytest.mark.parametrize("name", ["conv-light", "affine"])
def test_a_blueprint_of_another_kind_than_the_slots_is_refused(esper, name):
    task = "digits-narrow" if name == "conv-light" else "digits-image-narrow"
    code, _, err = esper("grow", task, *QUICK, "--set", f"blueprints=[{name}]")
    assert code == 2
    assert f"blueprint '{name}' is for" in err


@pytest.mark.campaign
def test_doctor_finds_nothing_wrong(esper):
    code, out, _ = esper("doctor")
    assert code == 0, out
    assert "FAIL" not in out
    assert "bypass-mlp passes its birth checks" in out


def test_doctor_compares_rows_at_one_size_and_with_all_at_every_size(esper, monkeypatch):
    compared = []
    run = invariance._run
    monkeypatch.setattr(
        invariance,
        "_run",
        lambda stack, *rest: compared.append((stack.capacity, rest[1].shape[1])) or run(stack, *rest),
    )
    monkeypatch.setattr("esper.kasmina.blueprints.BLUEPRINTS", {})
    monkeypatch.setattr("esper.tasks.catalog.TASKS", {"iris": TASKS["iris"]})
    esper("doctor")
    assert set(compared) == {(5, 7), (1, 7)}
    esper("doctor", "--all")
    assert set(compared) == {(rows, batch) for rows in (1, 2, 3, 4, 5) for batch in (3, 7, 32)}


@pytest.mark.parametrize("options", [(), ("--all",)])
def test_doctor_names_a_blueprint_whose_rows_depend_on_their_neighbours(esper, monkeypatch, options):
    class Shared(nn.Module):
        stacks = True

        def __init__(self, reads, writes):
            super().__init__()
            self.out = zero_linear(reads, writes)

        def forward(self, u):
            y = self.out(u)
            return y - y.mean(0) if y.dim() == 3 else y

    entry = Blueprint("shared", Kind.VECTOR, Tap.HERE, Shared, lambda r, w: r * w + w, "")
    monkeypatch.setattr("esper.kasmina.blueprints.BLUEPRINTS", {(Kind.VECTOR, "shared"): entry})
    monkeypatch.setattr("esper.tasks.catalog.TASKS", {"iris": TASKS["iris"]})
    code, out, _ = esper("doctor", *options)
    assert code == 1
    (line,) = [line for line in out.splitlines() if "FAIL" in line]
    assert "blueprint shared: rows depend on their neighbours (ADD: " in line


def test_export_copies_every_network(esper, exported):
    code, out, _ = esper("export", str(exported), "--out", "deep/nets")
    assert code == 0
    assert files(Path("deep/nets")) == [name for name in files(exported / "models") if not name.startswith("best")]
    assert out.count("\n") == 2


def test_export_of_one_environment_goes_straight_into_the_folder(esper, exported):
    esper("export", str(exported), "--env", "1", "--out", "net")
    assert files(Path("net")) == ["SHA256SUMS", "model.pt2", "model.safetensors", "topology.json"]
    for name in ("model.safetensors", "topology.json"):
        assert Path("net", name).read_bytes() == (exported / "models" / "env-001" / name).read_bytes()


def test_export_of_a_host_of_ones_own_goes_without_a_program_unless_its_task_is_named(esper, exported, monkeypatch):
    shutil.copytree(exported, "own")
    for path in Path("own/models").iterdir():
        topology = json.loads((path / "topology.json").read_text()) | {"host": None}
        (path / "topology.json").write_text(json.dumps(topology))
        (path / "SHA256SUMS").unlink()
    code, _, err = esper("export", "own", "--out", "nets")
    assert code == 0
    assert (
        err.count("has no model.pt2: its host is code of your own, which a run folder may not start; give --task ") == 2
    )
    assert sorted(path.name for path in Path("nets/env-000").iterdir()) == [
        "SHA256SUMS",
        "model.safetensors",
        "topology.json",
    ]
    config = yaml.safe_load(Path("own/config.yaml").read_text())
    code, _, err = esper("export", "own", "--out", "with", "--task", config["task"])
    assert (code, err) == (0, "")
    assert Path("with/env-001/model.pt2").is_file()


def test_export_goes_to_a_folder_named_after_the_run(esper, exported):
    esper("export", str(exported))
    assert os.listdir() == ["run-networks"]


def test_export_replaces_networks_only_when_asked(esper, exported):
    esper("export", str(exported), "--out", "nets")
    code, _, err = esper("export", str(exported), "--env", "0", "--out", "nets")
    assert code == 2
    assert "--overwrite" in err
    assert files(Path("nets")) == [name for name in files(exported / "models") if not name.startswith("best")]
    code, _, _ = esper("export", str(exported), "--env", "0", "--out", "nets", "--overwrite")
    assert (code, len(files(Path("nets")))) == (0, 4)


@pytest.mark.parametrize("name", ["notes.txt", "nets/topology.json"])
def test_export_never_replaces_other_files(esper, exported, name):
    Path("nets").mkdir()
    Path("nets/notes.txt").write_text("mine")
    Path(name).touch()
    before = files()
    code, _, err = esper("export", str(exported), "--out", "nets", "--overwrite")
    assert (code, files()) == (2, before)
    assert "nets" in err


def test_export_names_the_networks_there_are(esper, exported):
    code, _, err = esper("export", str(exported), "--env", "9", "--out", "nets")
    assert (code, files()) == (2, [])
    assert "env-000, env-001" in err


def test_export_of_a_run_without_networks_says_so(esper):
    esper("grow", "spirals-narrow", *QUICK, "--run", "r")
    code, _, err = esper("export", "r")
    assert code == 2
    assert "no networks" in err


@pytest.mark.campaign
def test_ctrl_c_ends_the_run_with_what_is_done(tmp_path):
    arguments = [
        "grow",
        "spirals-narrow",
        "--envs",
        "2",
        "--steps",
        "1000000",
        "--models",
        "none",
        "--run",
        "r",
        "--json",
        "--baselines",
        "none",
    ]
    command = [sys.executable, "-m", "esper", *arguments]
    with begun(command) as process:
        assert process.stderr.readline().startswith("step 1/")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Traceback" not in err
    summary = json.loads(out)
    assert summary == json.loads((tmp_path / "r" / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert 0 < summary["steps_done"] < summary["steps"]


@pytest.mark.campaign
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs a shell that can limit the size of files")
def test_a_full_disk_is_one_sentence_and_exit_code_1(tmp_path):
    grow = f"{sys.executable} -m esper grow spirals --envs 2 --steps 1000 --models none --run r"
    limited = ["bash", "-c", f"ulimit -f 8; exec {grow}"]  # no file of more than 8 KiB
    done = subprocess.run(limited, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "error: cannot write r/events.jsonl: File too large; raise the limit on the size of files (ulimit -f), and "
        "continue with `esper resume r`"
    )
    assert "Traceback" not in done.stderr
    assert json.loads((tmp_path / "r" / "summary.json").read_text())["status"] == "failed"


def test_a_run_in_which_every_row_was_rolled_back_in_every_step_prints_so_and_exits_with_1(esper):
    code, _, err = esper("grow", "spirals-narrow", *QUICK, "--set", "optimizer.lr=1e30", "--controller", "never")
    assert code == 1
    assert "warning: the run has failed: every environment was rolled back in every step (" in err
    assert "lower optimizer.lr" in err
    assert "Traceback" not in err
