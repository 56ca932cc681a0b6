"""Check that what the examples of the README print stands below them."""

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
            # the machine decides how wide a network is nearly free, and which of two close remedies is the best on the probe
            left_out = rf"{NUMBER}|[\d,]+(?= parameters, acc)|(?m:^(?:->)? )"
            shown, page = (re.sub(left_out, "#", text) for text in (printed, expected))
            assert shown == page
            assert printed.count("->") == expected.count("->")
            numbers = [list(map(float, re.findall(NUMBER, text))) for text in (printed, expected)]
            assert numbers[0] == pytest.approx(numbers[1], abs=LOOSE)
    finally:
        BLUEPRINTS.clear()
        BLUEPRINTS.update(known)


@pytest.mark.parametrize(
    ("units", "growth", "accuracy"),
    [(4, "most_parameters=1", 0.74), (64, "most_parameters=1", 0.98), (4, 'cost="parameters"', 0.97)],
    ids=["4 units", "64 units", "by parameters"],
)
def test_the_first_example_without_growth_or_by_parameters_ends_where_the_page_says(units, growth, accuracy, capsys):
    text = README.read_text()
    assert f"{accuracy:.2f}".lstrip("0") in text
    code = re.search(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[1]
    code = re.sub(r"\b4\b(?=[,)])", str(units), code).replace('cost="seconds"', growth)
    exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert float(printed.split()[-1]) == pytest.approx(accuracy, abs=LOOSE if "most" in growth and units == 4 else 0.02)
    assert ("1,482 parameters" in printed.splitlines()[-1]) == ("cost" in growth)


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


CLAIMS = README.parent / "docs" / "claims.md"


FIGURE = r"(?<![\w.])(?:(?:\d[\d,]*\d|\d)(?:\.\d+)?|\.\d+)(?!\w)"


def figures_in(text):
    """Return the figures of a text without their signs: numbers, and numbers with an interval, each number with its decimals."""
    text = re.sub(r"\]\([^)]*\)|`[^`]*`|[-+](?=[\d.])", " ", text)
    with_interval = rf"({FIGURE})(?: \w+){{0,2}} +\[ *({FIGURE}), +({FIGURE})\]"
    found = [(middle, *sorted((low, high), key=value)) for middle, low, high in re.findall(with_interval, text)]
    return found + [(each,) for each in re.findall(FIGURE, re.sub(with_interval, " ", text))]


def value(number):
    return float(number.replace(",", ""))


def lacking(figures, text):
    """Return the figures that a text does not hold, as they are or with more decimals."""

    def equal(ours, theirs):
        rounding = [0.5001 * 10 ** -len(number.partition(".")[2]) for number in ours]
        return len(ours) == len(theirs) and all(
            abs(value(a) - value(b)) <= most for a, b, most in zip(ours, theirs, rounding, strict=True)
        )

    known = figures_in(text)
    known += [(number,) for figure in known for number in figure]
    return [figure for figure in figures if not any(equal(figure, other) for other in known)]


def test_every_figure_of_the_readme_is_on_the_page_of_claims():
    text = re.sub(r"^```.*?^```", "", README.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    uses = text[text.index("**Use it if**") : text.index("`pip install .`")]
    results = text[text.index("## What was measured") : text.index("[Own data]")]
    loop = text[text.index("Three lines are") : text.index("## Heal a damaged network")]
    claimed = figures_in(uses + loop + results)
    assert len(claimed) > 25
    assert not lacking(claimed, CLAIMS.read_text(encoding="utf-8"))


def test_every_claim_has_a_command_and_its_figures_are_on_the_page_that_it_links_to():
    rows = [line for line in CLAIMS.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    rows = [row for row in rows if not row.startswith("| claim |")]
    assert len(rows) > 15
    for row in rows:
        claim, figure, *opponent, linked = row.strip("| ").split(" | ")
        page = (CLAIMS.parent / re.search(r"\]\(([^)]+)\)", linked)[1]).read_text(encoding="utf-8")
        page = page.replace("```", "")  # what an example prints is on the page, too
        assert re.search(r"`(python|make|esper|pytest) [^`]+`", row), row
        assert figures_in(figure), row
        assert not lacking(figures_in(" | ".join((claim, figure, *opponent))), page), row
