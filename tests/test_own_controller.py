"""Test a controller and a reward of the user's own, as objects and as path.py:function: those of docs/own-controller.md."""

import json
import pickle
import re
import shutil
from pathlib import Path

import pytest
import yaml

import esper
from esper.leyline.config.tree import RewardConfig, build_config
from esper.leyline.messages import InputError
from esper.leyline.protocols import as_controller
from esper.runs.evaluation.contenders import Contender, named
from esper.simic.rewards import load_reward
from populations import blobs

grow, train = esper.grow, esper.train  # in a test, the fixture `esper` is the command
pytestmark = pytest.mark.usefixtures("elsewhere")

PAGE = (Path(__file__).parents[1] / "docs" / "own-controller.md").read_text()
PYTHON = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
STUDY = PYTHON[0].partition("\n\ngrown =")[0] + "\n\n" + PYTHON[2].partition("\n\nsummary =")[0]
MORE = """

class Resumed(Eager):
    def state(self):
        return {"errors": self.errors}

    def load_state(self, state):
        self.errors = state["errors"]


class Costly:
    def __init__(self, price):
        self.price = price


def nothing():
    return 5


def flat(config):
    return lambda outcome: {"metric": 0.0}


def number(config):
    return 5


def two(config, outcome):
    return {}


eager = Eager()
paid = frugal(None)
"""
GROW = ["--envs", "2", "--steps", "6", "--models", "none", "--baselines", "none", "--json"]
TRAIN = ["--envs", "4", "--steps", "4", "--set", "reward.group_size=2", "--set", "data.batches_per_step=1", "--json"]
TRAIN += ["--set", "ppo={imitation_rounds: 0, validate_envs: 2, validate_every: 1}"]
FEW = {"instances": 2, "seeds": 1, "baselines": (), "progress": False}
SHORT = {"steps": 6, "data": {"batches_per_step": 1, "batch_size": 12}}


@pytest.fixture(autouse=True)
def study(elsewhere):
    Path("study.py").write_text(STUDY + MORE)


def timeless(text):
    """Read a summary without what a clock says and without the name of the controller."""
    times = ("seconds", "env_steps_per_second", "phase_seconds", "controller_share", "controller")
    return json.loads(text, object_hook=lambda each: {name: each[name] for name in each if name not in times})


def eager():
    namespace = {}
    exec(STUDY, namespace)
    return namespace["Eager"]()


def test_a_controller_by_its_place_grows_what_the_object_grows(esper):
    code, out, _ = esper("grow", "spirals-narrow", "--controller", "study.py:Eager", *GROW)
    assert code == 0
    folder = Path("runs/spirals-narrow-study.py-Eager-s0")
    assert yaml.safe_load((folder / "config.yaml").read_text())["controller"] == "study.py:Eager"
    settings = {"envs": 2, "steps": 6, "models": "none", "baselines": []}
    theirs = grow("spirals-narrow", settings, controller=eager())
    assert timeless(out) == timeless(json.dumps(theirs))
    assert json.loads(out)["seeds"]["germinated"] > 0


def test_a_run_of_a_controller_by_its_place_is_resumed_only_with_the_place(esper):
    asked = ["spirals-narrow", *GROW, "--set", "checkpoint={every_steps: 1, every_seconds: 0}"]
    _, straight, _ = esper("grow", *asked, "--controller", "study.py:Resumed", "--run", "straight")
    esper("grow", *asked, "--controller", "study.py:Resumed", "--run", "r", "--steps", "3")
    assert list(json.loads(Path("r/environment.json").read_text())["code"]) == ["study.py:Resumed"]
    Path("study.py").write_text((STUDY + MORE).replace("import esper", "import esper\nopen('imported', 'w')"))
    code, _, err = esper("resume", "r", "--set", "steps=6")
    assert (code, err.count("\n")) == (2, 1)
    assert "whose code a run folder may not start" in err
    assert "give esper resume r --controller study.py:Resumed" in err
    assert not Path("imported").exists()
    code, out, err = esper("resume", "r", "--set", "steps=6", "--controller", "study.py:Resumed", "--json")
    assert re.search(r"continues under other versions \(study\.py:Resumed [0-9a-f]{16} -> [0-9a-f]{16}\)", err)
    assert (code, "going on after step 3" in err) == (0, True)
    assert timeless(out) == timeless(straight)


def test_a_training_by_a_reward_by_its_place_is_that_by_the_function_and_is_resumed_with_the_place(esper):
    namespace = {}
    exec(STUDY, namespace)
    config = {"envs": 4, "steps": 4, "reward": {"group_size": 2}, "data": {"batches_per_step": 1}}
    config["ppo"] = {"rounds": 1, "imitation_rounds": 0, "validate_envs": 2, "validate_every": 1}
    theirs = train("iris", config, reward=namespace["frugal"], progress=False)
    code, ours, _ = esper("train", "iris", *TRAIN, "--rounds", "1", "--reward", "study.py:frugal", "--run", "r")
    assert code == 0
    assert timeless(ours) == timeless(json.dumps(theirs))
    assert yaml.safe_load(Path("r/config.yaml").read_text())["controller"] == "ppo, paid by study.py:frugal"
    code, _, err = esper("resume", "r", "--set", "ppo.rounds=2")
    assert code == 2
    assert "give esper resume r --reward study.py:frugal" in err
    code, _, err = esper("resume", "r", "--set", "ppo.rounds=2", "--reward", "study.py:flat")
    assert (code, "paid by 'study.py:frugal', not by 'study.py:flat'" in err) == (2, True)
    code, _, _ = esper("resume", "r", "--set", "ppo.rounds=2", "--reward", "study.py:frugal")
    assert code == 0


def test_what_workers_get_of_a_reward_by_its_place_is_the_place():
    reward = load_reward("study.py:frugal")
    sent = pickle.dumps(reward)
    assert b"study.py:frugal" in sent
    assert pickle.loads(sent) == reward
    assert callable(pickle.loads(sent)(RewardConfig()))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["grow", "iris", "--controller", "study.py:eager"],
            "study.py:eager is an Eager; name a function that returns",
        ),
        (
            ["grow", "iris", "--controller", "study.py:nothing"],
            "study.py:nothing returned an int without act and store",
        ),
        (["grow", "iris", "--controller", "study.py:Costly"], "study.py:Costly needs the argument 'price'"),
        (["grow", "iris", "--controller", "study.py:Egaer"], "has no function 'Egaer'; did you mean 'Eager'?"),
        (["grow", "iris", "--controller", "absent.py:Eager"], "there is no file absent.py"),
        (["grow", "iris", "--controller", "study.py"], "is a file; name the function that returns the controller"),
        (
            ["eval", "study.py:nothing", "--tasks", "iris"],
            "study.py:nothing returned an int without act and store",
        ),
        (["train", "iris", "--reward", "study.py:two"], "study.py:two cannot be called with one argument"),
        (["train", "iris", "--reward", "study.py:eager"], "study.py:eager is an Eager; give a function that takes"),
        (["train", "iris", "--reward", "frugal"], "the reward 'frugal' names no function"),
        (
            ["train", "iris", *TRAIN, "--reward", "study.py:paid"],
            "reads 'exported' of its argument, as a reward does of an",
        ),
        (
            ["train", "iris", *TRAIN, "--reward", "study.py:number"],
            "study.py:number returned an int for an esper.RewardC",
        ),
        (["train", "iris", *TRAIN, "--reward", "study.py:flat"], "returned 'metric' of shape (); return a dict"),
        (["train", "iris", "--set", "ppo.teacher=study.py:Eager"], "code of your own cannot be a teacher"),
    ],
    ids=lambda value: "-".join(value[:4]) if isinstance(value, list) else "",
)
def test_code_that_is_no_controller_or_reward_is_one_sentence(esper, arguments, sentence):
    code, out, err = esper(*arguments)
    assert (code, out) == (2, "")
    assert sentence in err.splitlines()[-1]


class Objects:
    """Counts its decisions as its state, plants nothing, and does not come from a file."""

    def __init__(self):
        self.decided = 0

    def act(self, view):
        self.decided += 1
        assert self.decided <= view.steps, "one object decided in several populations"
        return esper.Actions.wait(len(view.host_params))

    def store(self, outcome):
        pass

    def update(self):
        return {}


def test_an_object_is_compared_and_every_population_gets_a_copy_of_it():
    one, other = Objects(), Objects()
    record = esper.evaluate([one, "heuristic", other], blobs(), settings=SHORT, **FEW)
    assert record["named"] == ["Objects", "heuristic", "Objects 2"]
    runs = record["tasks"][0]["runs"]
    assert runs["Objects"]["objective"] == runs["Objects 2"]["objective"] == runs["never"]["objective"]
    assert one.decided == other.decided == 0


class Counting:
    """Counts its decisions as its state, and has no base class."""

    def __init__(self):
        self.decided = 0

    def act(self, view):
        self.decided += 1
        return esper.Actions.wait(len(view.host_params))

    def store(self, outcome):
        pass

    def update(self):
        return {}

    def state(self):
        return {"decided": self.decided}

    def load_state(self, state):
        self.decided = state["decided"]


def test_an_object_of_no_base_class_gets_the_defaults_and_keeps_its_name_its_attributes_and_its_state():
    mine = Counting()
    client = as_controller(mine)
    assert type(client).__name__ == "Counting"
    assert (client.sensors_every, client.reasons(), client.explain(), client.sensing()) == (0, None, (), True)
    mine.decided = 3
    assert client.state() == {"decided": 3}
    quick = SHORT | {"envs": 1, "steps": 2, "baselines": [], "models": "none", "report": False}
    esper.grow(blobs(), quick, controller=mine, run="r", progress=False)
    assert mine.decided == 5
    resumed = Counting()
    esper.resume("r", task=blobs(), controller=resumed, settings={"steps": 3}, progress=False)
    assert resumed.decided == 6


def test_a_place_is_compared_as_what_it_makes(tmp_path):
    theirs = Contender("theirs", {}, lambda config: eager())
    record = esper.evaluate(["study.py:Eager", theirs], blobs(), settings=SHORT, **FEW)
    runs = record["tasks"][0]["runs"]
    assert runs["study.py:Eager"]["objective"] == runs["theirs"]["objective"]
    assert runs["study.py:Eager"]["kept"] is not None


def test_what_is_kept_of_a_place_is_grown_again_after_a_file_that_it_imports_was_edited():
    Path("rates_of_study.py").write_text("RATE = 1\n")
    Path("study.py").write_text("from rates_of_study import RATE\n" + STUDY)
    before = named("study.py:Eager").content
    assert named("study.py:Eager").content == before
    Path("rates_of_study.py").write_text("RATE = 2\n")
    assert named("study.py:Eager").content != before


@pytest.mark.parametrize(
    ("controllers", "sentence"),
    [
        ([Objects], "a controller of the evaluation is the class Objects; give an object with the methods act"),
        ([5], "a controller of the evaluation is an int"),
        (5, "a controller of the evaluation is an int"),
    ],
)
def test_what_is_no_controller_is_refused_by_an_evaluation(controllers, sentence):
    with pytest.raises(InputError, match=sentence):
        esper.evaluate(controllers, "iris", **FEW)


def test_a_controller_that_cannot_be_copied_is_one_sentence():
    client = Objects()
    client.stream = (number for number in range(3))
    with pytest.raises(InputError, match=r"Objects cannot be copied for every population .*; give it as path\.py:fun"):
        esper.evaluate([client], "iris", **FEW)


def test_a_folder_starts_no_code_that_its_config_names(esper):
    Path("study.py").write_text("open('imported', 'w')\n")
    for name in ("study.py:Eager",):
        Path("r").mkdir()
        Path("r/config.yaml").write_text(f"{{task: iris, controller: '{name}'}}")
        assert esper("resume", "r")[0] == 2
        shutil.rmtree("r")
    for content in ("controller: 'ppo, paid by study.py:frugal'", "controller: ppo, ppo: {teacher: 'study.py:Eager'}"):
        Path("r").mkdir()
        Path("r/config.yaml").write_text(f"{{tasks: [iris], task: iris, {content}}}")
        assert esper("resume", "r")[0] == 2
        shutil.rmtree("r")
    assert not Path("imported").exists()


def test_a_file_of_settings_starts_no_code_that_it_names(esper):
    Path("study.py").write_text("open('imported', 'w')\n" + STUDY)
    Path("c.yaml").write_text("controller: 'study.py:Eager'\n")
    code, _, err = esper("grow", "spirals-narrow", *GROW, "--config", "c.yaml")
    assert (code, Path("imported").exists()) == (2, False)
    assert "if you trust it, give --controller study.py:Eager" in err
    assert esper("grow", "spirals-narrow", *GROW, "--config", "c.yaml", "--controller", "study.py:Eager")[0] == 0


def test_the_same_reference_is_run_once_until_its_file_is_edited():
    Path("study.py").write_text(STUDY + "\nopen('times', 'a').write('x')\n")
    for _ in range(2):
        esper.get_controller("study.py:Eager", build_config())
    assert Path("times").read_text() == "x"
    Path("study.py").write_text(STUDY + "\nopen('times', 'a').write('y')\n")
    esper.get_controller("study.py:Eager", build_config())
    assert Path("times").read_text() == "xy"


def test_a_reward_in_place_of_the_function_that_makes_it_is_named_and_other_errors_of_it_are_raised_unchanged(tmp_path):
    def reward(outcome):
        return {"metric": outcome.after.metric}

    def mistaken(config):
        return config.group_sise

    with pytest.raises(
        esper.InputError, match=r"^the reward reward reads 'after' .*; give the function that makes the reward"
    ):
        esper.train("iris", {"envs": 4, "steps": 4, "reward": {"group_size": 2}}, reward=reward, run=tmp_path / "run")
    with pytest.raises(AttributeError, match="group_sise"):
        esper.train("iris", {"envs": 4, "steps": 4, "reward": {"group_size": 2}}, reward=mistaken)
    assert not (tmp_path / "run").exists()
