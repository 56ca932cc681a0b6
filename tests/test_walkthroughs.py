"""Check that the walk-through pages run, are short, and show the results that were measured."""

import json

import pytest

from walkthroughs import PAGES, STUDY, grows, runs

NAMES = sorted(path.stem for path in PAGES.glob("*.md"))


def test_every_page_is_studied():
    assert sorted(STUDY["STUDIED"]) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_page_takes_under_forty_lines(name):
    lines = "\n".join(STUDY["code_of"](name)).splitlines()
    assert sum(bool(line.strip()) for line in lines) < 40


@pytest.mark.parametrize("name", NAMES)
def test_a_page_shows_the_table_of_its_results(name):
    kept = json.loads((PAGES / f"{name}.json").read_text(encoding="utf-8"))
    assert len(kept) >= 8
    assert STUDY["table"](name, kept) in (PAGES / f"{name}.md").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adapt", "gpt", "resnet"])
def test_a_page_runs_and_grows(name):
    names = runs(name, 10)
    assert grows(names)
    assert f"{names['summary']['host_params']:,} parameters" in (PAGES / f"{name}.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_static_network_without_seeds_is_the_host_alone():
    study = STUDY["Study"]("gpt", seed=3, scale=50)
    alone, empty = (
        study.train(study.defined, prepare) for prepare in (STUDY["nothing"], STUDY["planting"]([], "none"))
    )
    assert alone.score == empty.score
    wider = study.train({**study.defined, "GPT": STUDY["widened"](study.build, 64, alone.params)}, STUDY["nothing"])
    assert wider[:2] == alone[:2]
