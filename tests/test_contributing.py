"""Check that the additions that CONTRIBUTING.md shows as changes of a file work when they are made."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PROGRAM = """
import numpy as np

import esper
from esper.tamiyo.rules.base import RandomValid

task = esper.get_task("iris")
settings = {"envs": 2, "steps": 3, "probe": {"sensors_every": 1}}
engine = esper.VectorizedEngine(task, esper.build_config(task.defaults, settings))
view = engine.reset()
values = view.measurements.sensors[..., view.space.sensors.index("constant")]
assert values.shape == (2, 2) and ((values > 0) & (values <= 1)).all(), values
assert np.isfinite(view.measurements.sensors[..., 0]).all()
engine.step(RandomValid().act(view))
"""


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def patched(source, patch):
    """Add the lines of a patch to a source, each behind the context before it, which stands in the source once."""
    context = "".join(line[1:] for line in patch.splitlines(keepends=True) if line.startswith(" "))
    added = "".join(line[1:] for line in patch.splitlines(keepends=True) if line.startswith("+"))
    assert source.count(context) == 1, context
    return source.replace(context, context + added)


@pytest.mark.campaign
def test_a_sensor_that_is_added_as_the_page_says_is_measured(tmp_path):
    package = tmp_path / "esper"
    shutil.copytree(ROOT / "src" / "esper", package, ignore=shutil.ignore_patterns("__pycache__"))
    (code,) = [block for block in blocks("python") if "def constant_share" in block]
    function = re.search(r"^def constant_share.*?(?=^\S)", code, re.DOTALL | re.MULTILINE)[0]
    sensors = package / "tolaria" / "measure" / "sensors.py"
    source = sensors.read_text(encoding="utf-8") + "\n\n" + function
    for patch in blocks("diff"):
        source = patched(source, patch)
    sensors.write_text(source, encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
