"""Test the example of a package that adds names to Esper, installed as a person would install it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def esper_with_plugin(tmp_path_factory):
    """Run `esper` in a process that finds the package."""
    folder = tmp_path_factory.mktemp("plugin")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-cache-dir",
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
    ]
    subprocess.run([*pip, "--target", folder / "site", ROOT / "examples" / "plugin"], check=True, capture_output=True)
    path = os.pathsep.join([str(folder / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])

    def esper(*arguments):
        command = [sys.executable, "-m", "esper", *arguments]
        environment = os.environ | {"PYTHONPATH": path}
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)

    esper.folder = folder
    return esper


@pytest.mark.slow
def test_an_installed_package_adds_a_task_a_controller_an_output_and_a_command(esper_with_plugin):
    listed = esper_with_plugin("controller")
    assert "plants one blueprint in the first step" in listed.stdout, listed.stderr
    asked = ("--envs", "2", "--steps", "6", "--baselines", "none", "--json", "--set", "telemetry.exporters=kinds")
    grown = esper_with_plugin("grow", "rings", "--controller", "first-step:bypass-linear", *asked)
    assert grown.returncode == 0, grown.stderr
    assert '"controller": "first-step:bypass-linear"' in grown.stdout
    assert '"germinated": 2' in grown.stdout
    kinds = (esper_with_plugin.folder / "runs" / "kinds.txt").read_text()
    assert "StepRow: 6" in kinds
    drawn = esper_with_plugin("rings-picture", "--rows", "6")
    assert len(drawn.stdout.splitlines()) == 6, drawn.stderr


@pytest.mark.usefixtures("elsewhere")
def test_a_name_of_a_package_that_is_not_installed_says_which_brings_it(esper):
    for arguments in (("grow", "heal"), ("grow", "iris", "--controller", "tree")):
        code, _, err = esper(*arguments)
        assert (code, "pip install esper-bench" in err) == (2, True), err
