"""Test `esper train`, and what uses its controller: `esper grow` and `esper eval`."""

import hashlib
import json
import os
import signal
import sys
from pathlib import Path

import pytest
import yaml

import esper as library
from commands import files
from esper.cli import main
from esper.leyline.config.tree import build_config
from esper.runs.configuration import TRAINING
from esper.tamiyo.policy.controller import FACTS, load_policy
from processes import begun

pytestmark = pytest.mark.usefixtures("elsewhere")

SHORT = ["--set", "data.batches_per_step=2", "--set", "reward.group_size=2", "--set", "ppo.imitation_rounds=1"]
SHORT += ["--set", "ppo.validate_envs=2", "--set", "ppo.validate_every=1", "--set", "ppo.update_epochs=1"]
TINY = ["--envs", "4", "--steps", "4", "--rounds", "2", *SHORT]
FEW = ["--instances", "2", "--seeds", "1", "--baselines", "none"]
FEW += ["--set", "steps=5", "--set", "data.batches_per_step=2", "--set", "slots=[block0]"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Train, and return the run folder with its controller."""
    folder = tmp_path_factory.mktemp("cli") / "run"
    with pytest.raises(SystemExit) as end:
        main(["train", "spirals-narrow", *TINY, "--set", "gates.min_holding_steps=2", "--run", str(folder)])
    assert not end.value.code
    return folder


def refused(found: tuple[int, str, str], names: str, code: int = 2) -> None:
    """Check one sentence on stderr, with what it is about."""
    assert found[0] == code, found
    assert found[1] == ""
    assert found[2].splitlines()[-1].startswith("error: ")
    assert found[2].count("error: ") == 1
    assert names in found[2]


def test_train_tells_of_every_round_and_of_how_to_go_on(esper):
    code, out, err = esper("train", "iris", *TINY)
    assert code == 0, err
    assert os.listdir("runs") == ["train-iris-s0"]
    first, estimate, *lines = err.splitlines()
    assert [line.split("  ")[0] for line in (first, *lines)] == ["imitation, 0 to go", "round 1/2", "round 2/2"]
    assert estimate.startswith("1 of 3 rounds took ")
    for figure in (
        "return ",
        "environment steps per second ",
        "explained variance ",
        "entropy ",
        "seeds kept ",
        "validation J ",
    ):
        assert figure in lines[-1]
    assert "best of 2 rounds: " in out
    assert "round 0" not in out
    assert "esper grow TASK --controller runs/train-iris-s0" in out


def test_json_prints_the_summary_of_a_training_and_nothing_else(esper):
    code, out, _ = esper("train", "iris", "spirals-narrow", *TINY, "--seed", "3", "--json")
    assert code == 0
    summary = json.loads(out, parse_constant=pytest.fail)
    assert summary == json.loads(Path("runs/train-iris+spirals-narrow-s3/summary.json").read_text())
    assert (summary["tasks"], summary["rounds"], summary["seed"]) == (["iris", "spirals-narrow"], 2, 3)


def test_options_go_before_set_before_file_before_the_preset_before_the_task(esper):
    Path("c.yaml").write_text(
        "{envs: 6, steps: 5, ppo: {rounds: 5, update_epochs: 3, lr: 0.01}, data: {batch_size: 24}}"
    )
    asked = ["--set", "envs=4", "--set", "ppo.update_epochs=2", "--rounds", "1", "--steps", "4", "--preset", "standard"]
    code, _, err = esper("train", "iris", *SHORT, "--config", "c.yaml", *asked, "--run", "r")
    assert code == 0, err
    config = build_config(yaml.safe_load(Path("r/config.yaml").read_text()))
    assert (config.envs, config.steps, config.task, config.tasks) == (4, 4, "iris", ("iris",))
    assert (config.ppo.rounds, config.ppo.update_epochs, config.ppo.lr) == (1, 2, 0.01)
    assert (config.data.batch_size, config.data.batches_per_step) == (24, 2)
    assert config.gates.permissive is TRAINING["gates"]["permissive"]


def test_grow_uses_the_controller_and_the_settings_that_it_was_trained_under(esper, trained):
    asked = ["--envs", "2", "--steps", "4", "--set", "data.batches_per_step=2", "--models", "none"]
    asked += ["--baselines", "none"]
    code, out, err = esper("grow", "spirals-narrow", "--controller", str(trained), *asked, "--run", "r")
    assert code == 0, err
    assert "test accuracy" in out
    config = build_config(yaml.safe_load(Path("r/config.yaml").read_text()))
    assert config.controller == str(trained)
    assert (config.gates.permissive, config.gates.min_holding_steps) == (True, 2)
    assert config.probe.sensors_every == 4
    summary = library.grow(
        library.get_task("spirals-narrow"),
        {"envs": 2, "steps": 4, "data": {"batches_per_step": 2}, "models": "none", "baselines": []},
        controller=str(trained),
    )
    written = json.loads(Path("r/summary.json").read_text())
    assert (summary["grown"], summary["test_objective"]) == (written["grown"], written["test_objective"])


def test_what_is_asked_for_goes_before_the_settings_of_a_controller(esper, trained):
    asked = ["--envs", "2", "--steps", "2", "--set", "gates.min_holding_steps=5", "--models", "none"]
    asked += ["--baselines", "none"]
    code, _, err = esper("grow", "spirals-narrow", "--controller", str(trained / "controller"), *asked, "--run", "r")
    assert code == 0, err
    config = build_config(yaml.safe_load(Path("r/config.yaml").read_text()))
    assert (config.gates.permissive, config.gates.min_holding_steps) == (True, 5)


def test_eval_compares_a_trained_controller_with_the_rules(esper, trained):
    code, out, err = esper("eval", str(trained), "--tasks", "spirals-narrow", *FEW, "--set", "blueprints=[bypass-mlp]")
    assert code == 0, err
    for name in ("never", "random-valid", "heuristic", "against", "P(better)"):
        assert name in out
    (folder,) = Path("runs/evaluation").glob("spirals-narrow-*")
    record = json.loads((folder / "evaluation.json").read_text(), parse_constant=pytest.fail)
    (task,) = record["tasks"]
    assert [row["name"] for row in task["controllers"]][-1] == str(trained)
    assert (folder / "evaluation.png").read_bytes().startswith(b"\x89PNG")
    assert "evaluation of never" in (folder / "report.html").read_text()
    assert "spirals-narrow: never, seed 0, 2 of 2 instances" in err


def test_eval_prints_the_record_and_nothing_else(esper):
    tasks = ["--tasks", "spirals-narrow,iris", "--json", "--out", "e", "--set", "blueprints=[bypass-linear]"]
    code, out, _ = esper("eval", *tasks, *FEW)
    assert code == 0
    assert out == Path("e/evaluation.json").read_text()
    assert [task["task"] for task in json.loads(out)["tasks"]] == ["spirals-narrow", "iris"]


BAD = {
    "task": (["train", "nowhere"], "'nowhere'"),
    "task twice": (["train", "iris", "iris"], "once"),
    "preset": (["train", "iris", "--preset", "endless"], "'endless'"),
    "reward": (["train", "iris", "--set", "reward.name=gold"], "reward.name"),
    "baseline": (["train", "iris", "--set", "reward.relative_to=twin"], "--twin"),
    "group": (["train", "iris", "--envs", "9"], "reward.group_size"),
    "no rounds": (["train", "iris", "--rounds", "0", "--set", "ppo.imitation_rounds=0"], "ppo.rounds"),
    "no environments": (["train", "iris", "--envs", "0"], "envs"),
    "no steps": (["train", "iris", "--steps", "0"], "steps"),
    "seed": (["train", "iris", "--seed", "-1"], "seed"),
    "no number": (["train", "iris", "--rounds", "many"], "'many'"),
    "learning rate": (["train", "iris", "--set", "ppo.lr=0"], "ppo.lr"),
    "slot": (["train", "iris", "--set", "slots=[nowhere]"], "'nowhere'"),
    "no seeds": (["train", "iris", "--set", "lifecycle.max_seeds=0"], "max_seeds"),
    "device": (["train", "iris", "--device", "tpu"], "'tpu'"),
    "task that is set": (["train", "iris", "--set", "task=digits"], "--set task"),
    "tasks that are set": (["train", "iris", "--set", "tasks=[digits]"], "--set tasks"),
    "controller that is set": (["train", "iris", "--set", "controller=never"], "--set controller"),
    "instances that are set": (["train", "iris", "--set", "instances=test"], "--set instances"),
    "models that are set": (["train", "iris", "--set", "models=all"], "--set models"),
    "models of an evaluation": (["eval", "--tasks", "iris", "--set", "models=all", "--out", "e"], "models"),
    "config file": (["train", "iris", "--config", "absent.yaml"], "absent.yaml"),
    "folder with other files": (["train", "iris", "--run", "mine"], "mine"),
    "controller of an evaluation": (["eval", "oracle", "--out", "e"], "'oracle'"),
    "task of an evaluation": (["eval", "--tasks", "nowhere", "--out", "e"], "'nowhere'"),
    "no instances": (["eval", "--tasks", "iris", "--instances", "0", "--out", "e"], "instances"),
    "no seeds of an evaluation": (["eval", "--tasks", "iris", "--seeds", "0", "--out", "e"], "seeds"),
    "folder of no controller": (["grow", "iris", "--controller", "mine"], "'mine'"),
}


@pytest.mark.parametrize(("arguments", "names"), BAD.values(), ids=BAD)
def test_bad_input_is_one_sentence_and_nothing_is_written(esper, arguments, names):
    Path("mine").mkdir()
    Path("mine/notes.txt").write_text("mine")
    found = esper(*arguments)
    refused(found, names)
    assert found[2].count("\n") == 1
    assert files() == ["mine", "mine/notes.txt"]


def test_a_training_does_not_replace_a_run_unless_asked(esper, trained):
    before = {path: (trained / path).read_bytes() for path in files(trained) if (trained / path).is_file()}
    refused(esper("train", "spirals-narrow", *TINY, "--seed", "5", "--run", str(trained)), "--overwrite")
    refused(esper("train", "spirals-narrow", "--envs", "0", "--run", str(trained), "--overwrite"), "envs")
    assert before == {path: (trained / path).read_bytes() for path in files(trained) if (trained / path).is_file()}


def forged(trained: Path, **facts) -> str:
    """Copy a controller whose JSON says something else, with a checksum that agrees."""
    folder = Path("forged")
    folder.mkdir()
    for path in (trained / "controller").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    content = json.loads((folder / FACTS).read_text()) | facts
    rest = {name: value for name, value in content.items() if name != "checksum"}
    content["checksum"] = hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
    (folder / FACTS).write_text(json.dumps(content))
    return str(folder)


@pytest.mark.parametrize("command", [["grow", "spirals-narrow", "--controller"], ["eval", "--tasks", "spirals-narrow"]])
def test_a_controller_of_another_version_is_refused(esper, trained, command):
    refused(esper(*command, forged(trained, version=99)), "format 99")
    assert not Path("runs").exists()


@pytest.mark.parametrize("command", [["grow", "spirals-narrow", "--controller"], ["eval", "--tasks", "spirals-narrow"]])
def test_a_controller_with_other_features_is_refused_with_the_one_that_differs(esper, trained, command):
    vocabulary = json.loads((trained / "controller" / FACTS).read_text())["vocabulary"]
    vocabulary["slot_features"] = ["weight" if name == "alpha" else name for name in vocabulary["slot_features"]]
    found = esper(*command, forged(trained, vocabulary=vocabulary))
    refused(found, "slot features")
    assert "alpha, weight" in found[2]
    assert not Path("runs").exists()


FOREIGN = {
    "steps": {"steps": 1},
    "seed": {"seed": 99},
    "telemetry.level": {"telemetry": {"level": "off"}},
    "controller": {"controller": "never"},
    "gates and device": {"gates": {"gain_z": 1.0}, "device": "cuda"},
}


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("command", [["grow", "spirals-narrow", "--controller"], ["eval", "--tasks", "spirals-narrow"]])
def test_a_controller_whose_settings_hold_another_key_is_refused_by_its_name(esper, trained, command, name):
    found = esper(*command, forged(trained, settings=FOREIGN[name]))
    refused(found, f"sets {name.split()[-1]}, which a controller may not set")
    assert not Path("runs").exists()


def test_a_controller_that_was_altered_is_refused(esper, trained):
    folder = Path(forged(trained))
    text = (folder / FACTS).read_text()
    (folder / FACTS).write_text(text.replace('"min_holding_steps": 2', '"min_holding_steps": 1'))
    refused(esper("grow", "spirals-narrow", "--controller", str(folder)), "altered")


def test_a_controller_grows_with_a_menu_that_it_was_not_trained_on(esper):
    esper("train", "iris", *TINY, "--set", "blueprints=[bypass-linear]", "--rounds", "1", "--run", "narrow")
    short = ["--envs", "2", "--steps", "4", "--baselines", "none", "--models", "none"]
    code, _, err = esper("grow", "iris", "--controller", "narrow", *short, "--run", "grown")
    assert code == 0, err


def test_a_training_whose_hosts_diverge_in_every_step_says_how_often_they_were_put_back(esper):
    code, out, err = esper("train", "iris", *TINY, "--set", "optimizer.lr=1e30", "--run", "r", "--json")
    assert code == 1
    assert "every environment was rolled back in every step" in err
    rounds = [json.loads(line) for line in Path("r/events.jsonl").read_text().splitlines() if '"round"' in line]
    counted = sum(row["figures"]["rollbacks"] for row in rounds if row["kind"] == "round")
    assert json.loads(out)["rollbacks"] == {"loss": counted}
    assert counted > 0
    assert "rolled back" in err


def test_a_training_whose_hosts_diverge_without_a_governor_says_so_with_exit_code_1(esper):
    asked = ["--set", "optimizer.lr=1e30", "--set", "reward.objective=log_loss", "--set", "governor.enabled=false"]
    found = esper("train", "iris", *TINY, *asked, "--run", "r")
    refused(found, "optimizer.lr", code=1)
    assert "Traceback" not in found[2]
    assert not Path("r/controller").exists()


@pytest.mark.campaign
def test_ctrl_c_ends_a_training_with_the_best_controller_so_far(tmp_path):
    arguments = ["train", "iris", *TINY, "--rounds", "1000000", "--run", "r", "--json"]
    command = [sys.executable, "-m", "esper", *arguments]
    with begun(command) as process:
        assert process.stderr.readline().startswith("imitation")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert "interrupted" in err
    summary = json.loads(out)
    assert summary == json.loads((tmp_path / "r" / "summary.json").read_text())
    assert (summary["status"], summary["rounds"]) == ("interrupted", 1000000)
    assert load_policy(tmp_path / "r" / "controller").origin["round"] == summary["best_round"]


def test_a_config_of_a_training_trains_on_the_same_tasks(esper):
    code, _, err = esper("train", "spirals-narrow", "iris", *TINY, "--rounds", "1", "--run", "first")
    assert code == 0, err
    code, _, err = esper("train", "--config", "first/config.yaml", "--run", "second")
    assert code == 0, err
    assert json.loads(Path("second/summary.json").read_text())["tasks"] == ["spirals-narrow", "iris"]


def test_a_config_of_other_tasks_is_refused(esper):
    Path("mine.yaml").write_text("tasks: [spirals-narrow, iris]\n")
    refused(esper("train", "digits", "--config", "mine.yaml"), "spirals-narrow, iris")


@pytest.mark.parametrize("content", ["tasks: repair", "tasks: [3]", "task: [repair]"])
def test_a_config_whose_tasks_are_no_names_is_refused(esper, content):
    Path("mine.yaml").write_text(content)
    refused(esper("train", "--config", "mine.yaml"), "list of names")


def test_a_controller_is_trained_by_a_reward_of_ones_own():
    paid = []

    def reward(config):
        def pay(outcome):
            paid.append(outcome.step)
            return {"mine": outcome.after.metric - outcome.before.metric}

        return pay

    settings = {
        "envs": 4,
        "steps": 4,
        "data": {"batches_per_step": 2},
        "reward": {"group_size": 2},
        "ppo": {"rounds": 1, "imitation_rounds": 0, "validate_envs": 2, "update_epochs": 1},
    }
    summary = library.train(library.get_task("spirals-narrow"), settings, reward=reward, run="own")
    assert summary["status"] == "finished"
    assert paid == [0, 1, 2, 3]
    assert load_policy(Path("own/controller")).origin["tasks"] == ["spirals-narrow"]


def test_an_unknown_teacher_is_refused_before_anything_is_written(esper):
    refused(
        esper("train", "iris", *TINY, "--set", "ppo.teacher=nobody", "--run", "r"),
        "ppo.teacher: unknown controller 'nobody'",
    )
    assert not files()
