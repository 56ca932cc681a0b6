"""Pages that show what their code prints are right about it, but for figures that depend on the machine; short ones run."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("page", "blocks"), [("widening.md", 5), ("how-wide.md", 1), ("lora-ranks.md", 1), ("more-data.md", 1)]
)
def test_the_page_runs_from_top_to_bottom_and_prints_what_it_shows(page, blocks, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text, namespace = (DOCS / page).read_text(encoding="utf-8"), {}
    code, shown = (re.findall(rf"^```{kind}\n(.*?)^```", text, re.DOTALL | re.MULTILINE) for kind in ("python", "text"))
    assert len(code) == len(shown) == blocks
    for block, wanted in zip(code, shown, strict=True):
        exec(compile(block, page, "exec"), namespace)
        printed = capsys.readouterr().out
        rounded = [re.sub(r"0\.\d\d$|step [\d,]+|after [\d,]+", "#", line) for line in printed.splitlines()]
        assert rounded == [re.sub(r"0\.\d\d$|step [\d,]+|after [\d,]+", "#", line) for line in wanted.splitlines()]
        assert all(float(number) > 0.94 for number in re.findall(r"0\.\d\d$", printed, re.MULTILINE))


@pytest.mark.campaign
@pytest.mark.parametrize("page", ["add-a-layer.md", "pruned-or-quantised.md"])
def test_the_python_of_a_short_page_runs_and_its_assertions_hold(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    namespace = {}
    exec(compile(block, page, "exec"), namespace)
    assert namespace["summary"]["status"] == "finished"
