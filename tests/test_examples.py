"""Run every program of examples/, and compare what it prints with what it says."""

import re
import runpy
from pathlib import Path

import pytest

from esper.cli import main
from esper.kasmina.blueprints import BLUEPRINTS

pytestmark = pytest.mark.campaign

ROOT = Path(__file__).parents[1]
PRINTED = {
    "heal": r"grown +\S+ +\+\d.*\nrefit[\s\S]*uniform adapters[\s\S]*^best on the probe, .*\. Its held-out loss is ",
    "own_blueprint": r"grown \[\{'middle': 'my-gated'\}.*\nnot grown \[",
    "own_controller": r"grew: bypass-mlp at block",
    "own_data": r"should be \['a 0', 'a 1', 'a 2'\]",
    "own_frame": r"^grown \[[\s\S]*test accuracy \[[\s\S]*city +age +bought\n0 +Oslo +70.0 +yes",
    "own_loop": r"without growth: 750 parameters.*\n(kept a .*\n)+with growth: [\d,]+ parameters",
    "own_reward": r"^3 rounds, best validation J \S+\nreward of an episode, by round: \[",
    "start_small": r"starts with 4, and grows +\d+ +0\.9\d+ .*\n4 from the start[\s\S]*the best of these four[\s\S]* 4 -> 16",
    "save_and_load": r"kept \['[\s\S]*computes the same: True\nexported program differs by at most (0e\+00|\de-0[5-9])",
}
"""What each example prints, as a regular expression."""


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run an example in an empty folder; returns what it printed."""
    known = dict(BLUEPRINTS)
    monkeypatch.chdir(tmp_path)

    def program(name):
        runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    yield program
    BLUEPRINTS.clear()
    BLUEPRINTS.update(known)


@pytest.mark.parametrize("name", PRINTED)
def test_an_example_runs_and_prints_what_it_says(run, name):
    assert re.search(PRINTED[name], run(name), re.MULTILINE)


def test_every_example_is_tested_named_in_the_table_and_says_how_it_is_run():
    examples = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "examples").glob("*.py")}
    table = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    assert set(examples) == set(PRINTED)
    for name, text in examples.items():
        assert f"({name}.py)" in table, name
        assert f"python examples/{name}.py" in text.split('"""')[1], name
        assert len(text.splitlines()) < 70, name


def test_the_command_takes_the_controller_of_the_example(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    place = f"{ROOT / 'examples' / 'own_controller.py'}:Bypasses"
    settings = ["--envs", "1", "--steps", "2", "--baselines", "none", "--run", "run"]
    with pytest.raises(SystemExit) as ended:
        main(["grow", "spirals-narrow", "--controller", place, *settings])
    assert not ended.value.code, capsys.readouterr().err
