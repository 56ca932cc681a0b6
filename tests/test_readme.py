"""What the examples of the README print stands below them."""

import re
from pathlib import Path

import pytest

from esper.kasmina.blueprints import BLUEPRINTS

README = Path(__file__).parents[1] / "README.md"
NUMBER = r"-?\d+\.\d+"
LOOSE = 0.2
"""How far an accuracy may be from the page's: the last bits of a processor decide where a small network ends up."""


def test_the_examples_of_the_readme_print_what_stands_below_them(tmp_path, monkeypatch, capsys):
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("esper.kasmina.blueprints.catalog.BLUEPRINTS", dict(BLUEPRINTS))
    pairs = re.findall(
        r"^```python\n(.*?)^```(?:\n\n```text\n(.*?)^```)?", README.read_text(), re.DOTALL | re.MULTILINE
    )
    assert len(pairs) == 4
    namespace = {}
    known = dict(BLUEPRINTS)
    try:
        for code, expected in pairs:
            exec(compile(code, "README.md", "exec"), namespace)
            printed = capsys.readouterr().out
            assert re.sub(NUMBER, "#", printed) == re.sub(NUMBER, "#", expected)
            numbers = [list(map(float, re.findall(NUMBER, text))) for text in (printed, expected)]
            assert numbers[0] == pytest.approx(numbers[1], abs=LOOSE)
    finally:
        BLUEPRINTS.clear()
        BLUEPRINTS.update(known)


def test_the_example_of_a_population_shows_growth_and_its_opponents():
    (text,) = [
        block
        for block in re.findall(r"^```text\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
        if "twin" in block
    ]
    rows = {line.split()[0]: float(line.split()[1]) for line in text.splitlines()}
    assert set(rows) == {"grown", "twin", "same-size", "plain", "skips"}
    assert rows["grown"] > rows["twin"] + 0.05


def test_the_readme_has_at_most_150_lines_and_shows_an_own_loop_within_twenty():
    lines = README.read_text().splitlines()
    assert len(lines) <= 150
    assert next(number for number, line in enumerate(lines) if line.startswith("```python")) < 20


def test_every_example_fits_on_a_screen():
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    assert max(len(block.splitlines()) for block in blocks) <= 30
