"""Check that what docs/trainers.md shows runs, and prints what it says."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "trainers.md"
pytestmark = [pytest.mark.third_party, pytest.mark.filterwarnings("ignore")]


def parts():
    return re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]


def run(part):
    """Run the python of a part, and return the names that it leaves behind."""
    namespace = {}
    for index, block in enumerate(re.findall(r"^```python\n(.*?)^```", part, re.DOTALL | re.MULTILINE)):
        exec(compile(block, f"{part.splitlines()[0]}, block {index}", "exec"), namespace)
    return namespace


@pytest.mark.parametrize("heading", ["Lightning", "Hugging Face"])
def test_the_python_of_a_part_runs_from_top_to_bottom(heading, tmp_path, monkeypatch):
    pytest.importorskip(
        heading.replace(" ", "").lower() if heading == "Lightning" else "transformers",
        reason="the package is not installed: pip install -e '.[lightning,hf]'",
    )
    monkeypatch.chdir(tmp_path)
    (part,) = [part for part in parts() if part.startswith(f"{heading}\n")]
    summary = run(part)["growing"].growth.summary()
    assert summary["status"] == "finished"
    assert len(summary["keeps"]) >= 1


def test_the_python_on_networks_that_become_wider_prints_what_the_page_shows(tmp_path, monkeypatch, capsys):
    pytest.importorskip("transformers", reason="the package is not installed: pip install -e '.[hf]'")
    monkeypatch.chdir(tmp_path)
    (part,) = [part for part in parts() if part.startswith("Wider as a whole\n")]
    assert len(run(part)["growing"].growth.growths) == 2
    (shown,) = re.findall(r"^```text\n(.*?)^```", part, re.DOTALL | re.MULTILINE)
    assert capsys.readouterr().out.splitlines()[-1] == shown.strip()
