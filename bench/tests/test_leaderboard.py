"""Test the leaderboard: a controller of another package adds its row by one command, and its table is that of its rows."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from esper_bench.records import SUITE

BENCH = Path(__file__).parents[1]
SCRIPT = BENCH / "scripts" / "leaderboard.py"
ANCHOR = "full fine-tuning, dead units drawn anew"
PACKAGE = """
import esper


class First(esper.Controller):
    def act(self, view):
        actions = esper.Actions.wait(len(view.host_params))
        for op in (esper.Op.GERMINATE, esper.Op.ADVANCE, esper.Op.FOSSILIZE):
            able = view.masks.op[:, op]
            actions.op[able], actions.slot[able] = op, view.masks.slot[able, op].argmax(1)
        actions.tempo[:], actions.target[:] = view.space.tempos.index(2), view.space.targets.index(1.0)
        return actions


def first(argument):
    return esper.ControllerSpec("other", lambda config: First(), "plants wherever it may")
"""


@pytest.fixture
def leaderboard(tmp_path):
    """Run the script on two cases in a process that has a further package, with a controller `other`."""
    site = tmp_path / "site"
    facts = site / "other-1.0.dist-info"
    facts.mkdir(parents=True)
    (site / "other_package.py").write_text(PACKAGE)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[esper.controllers]\nother = other_package:first\n")
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])

    def run(*names):
        command = [sys.executable, str(SCRIPT), "heal", *names, "--cases", "2", "--out", "rows", "--figures", "figures"]
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    run.folder = tmp_path / "rows"
    return run


@pytest.mark.slow
def test_a_controller_of_another_package_adds_its_row_below_the_anchor_and_other_versions_are_refused(leaderboard):
    added = leaderboard(ANCHOR, "other")
    assert added.returncode == 0, added.stderr
    rows = [line.split(" | ") for line in added.stdout.splitlines() if line.startswith("| ")][1:]
    assert [row[0] for row in rows] == [f"| {ANCHOR}", "| `other`"]
    assert rows[1][3] == "0, 0"
    assert rows[1][5].startswith("`python bench/scripts/leaderboard.py heal other`")
    own = json.loads((leaderboard.folder / "other.json").read_text())
    assert own["suite"] == SUITE
    assert len(own["objective"]) == 2

    again = leaderboard()
    assert again.stdout == added.stdout[added.stdout.index("suite heal") :]

    (leaderboard.folder / "other.json").write_text(json.dumps(own | {"suite": SUITE - 1}))
    refused = leaderboard()
    assert refused.returncode == 2
    assert re.fullmatch(rf"rows/other.json is of version {SUITE - 1} of the suite, and .*\n", refused.stderr)


def test_the_tables_of_the_readme_are_those_of_the_rows(script):
    readme = (BENCH / "README.md").read_text(encoding="utf-8")
    suites = list((BENCH / "docs" / "leaderboard").iterdir())
    assert suites
    for suite in suites:
        code, out, err = script(SCRIPT, suite.name, "--out", str(suite))
        assert code == 0, err
        table = "\n".join(line for line in out.splitlines() if line.startswith("|"))
        assert f"### `{suite.name}`" in readme
        assert table in readme
