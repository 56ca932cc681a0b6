"""Runs compared with each other: the figures are those of textbooks, and pairs are environments of one host and data."""

import json
import math
import shutil

import numpy as np
import pytest
from scipy import stats

import esper
from esper.cli import main
from esper.karn.comparison import difference
from esper.leyline.messages import InputError
from esper.nissa.events import read_events
from pages import EVIL, Page

QUICK = {"envs": 3, "steps": 6, "models": "none", "baselines": []}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Grow runs a and b of the same environments; `later` has two of them and two others; `seeded` shares none."""
    folder = tmp_path_factory.mktemp("compared")
    for name, settings in {
        "a": {"lifecycle": {"max_seeds": 1}},
        "b": {},
        "later": {"envs": 4, "first_instance": 1},
        "seeded": {"seed": 5},
    }.items():
        esper.grow("iris", QUICK | settings, controller="random-valid", run=folder / name, progress=False)
    return folder


def keyed(values, first=0):
    return {("task", "training", 0, first + index): value for index, value in enumerate(values)}


def test_shared_environments_are_paired_and_the_others_left_out():
    draws = np.random.default_rng(0)
    one, other = draws.normal(size=8), draws.normal(size=9)
    found = difference(keyed(one), keyed(other, first=3))
    gaps = one[3:] - other[:5]
    low, high = stats.ttest_rel(one[3:], other[:5]).confidence_interval()
    assert found.pairs == 5
    assert np.allclose([found.mean, found.low, found.high], [gaps.mean(), low, high])


def test_runs_that_share_no_environment_are_compared_as_independent_samples():
    draws = np.random.default_rng(1)
    one, other = draws.normal(size=8), draws.normal(2, 5, size=5)
    found = difference(keyed(one), keyed(other, first=100))
    low, high = stats.ttest_ind(one, other, equal_var=False).confidence_interval()
    assert found.pairs == 0
    assert np.allclose([found.mean, found.low, found.high], [one.mean() - other.mean(), low, high])


@pytest.mark.parametrize("first", [0, 100])
def test_the_other_order_has_the_opposite_sign(first):
    one, other = keyed([1.0, 2.0, 4.0]), keyed([3.0, 3.5, 0.0], first)
    there, back = difference(one, other), difference(other, one)
    assert np.allclose([there.mean, there.low, there.high], [-back.mean, -back.high, -back.low])


def test_one_environment_has_a_difference_and_no_interval():
    found = difference(keyed([1.0]), keyed([0.5]))
    assert found.mean == 0.5
    assert math.isnan(found.low)
    assert math.isnan(found.high)


def test_the_verdict_on_runs_of_the_same_environments_is_that_of_their_summaries(folder):
    (verdict,) = esper.compare(folder / "a", folder / "b").verdicts
    one, other = (json.loads((folder / name / "summary.json").read_text()) for name in "ab")
    gaps = np.subtract(one["test_accuracy"]["grown"], other["test_accuracy"]["grown"])
    assert verdict.metric.mean == pytest.approx(gaps.mean())
    assert verdict.metric.pairs == 3
    assert verdict.objective.mean == pytest.approx(
        np.subtract(one["test_objective"]["grown"], other["test_objective"]["grown"]).mean()
    )
    assert "over 3 environments that both grew from the same host and data" in verdict.sentence


def test_a_run_and_its_copy_do_not_differ(folder, tmp_path):
    shutil.copytree(folder / "a", tmp_path / "copy")
    (verdict,) = esper.compare(folder / "a", tmp_path / "copy").verdicts
    assert verdict.metric[:3] == (0, 0, 0)
    assert verdict.sentence.startswith("The difference in the metric between a and copy is not resolved by")


def test_every_pair_has_a_verdict_and_pairs_are_environments_of_one_number_and_seed(folder):
    names = ("a", "b", "later", "seeded")
    found = {
        (each.first, each.second): each.metric.pairs for each in esper.compare(*(folder / n for n in names)).verdicts
    }
    assert found == {
        ("a", "b"): 3,
        ("a", "later"): 2,
        ("b", "later"): 2,
        ("a", "seeded"): 0,
        ("b", "seeded"): 0,
        ("later", "seeded"): 0,
    }


def test_runs_without_final_figures_and_of_other_tasks_say_why_they_are_not_compared(folder, tmp_path, capsys):
    shutil.copytree(folder / "a", tmp_path / "killed")
    lines = (tmp_path / "killed" / "events.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "killed" / "events.jsonl").write_bytes(b"".join(lines[:-1]))
    (tmp_path / "killed" / "summary.json").unlink()
    esper.grow("wine", QUICK, controller="never", run=tmp_path / "wine", progress=False)
    training = {"envs": 8, "steps": 2, "ppo": {"rounds": 1, "imitation_rounds": 0, "validate_envs": 2}}
    esper.train("iris", training, run=tmp_path / "t", progress=False)
    said = [esper.compare(folder / "a", tmp_path / name).verdicts[0].sentence for name in ("killed", "wine", "t")]
    assert said == [
        "a and killed cannot be compared: killed was killed before its end and has no final figures.",
        "a and wine cannot be compared: they measure accuracy on iris and accuracy on wine.",
        "a and t cannot be compared: t is a training, which has no figures on the test split; "
        "compare controllers with esper eval.",
    ]
    for name, sentence, form in zip(("killed", "wine", "t"), said, ([], ["--json"], []), strict=True):
        with pytest.raises(SystemExit) as ended:
            main(["compare", str(folder / "a"), str(tmp_path / name), *form])
        shown = capsys.readouterr()
        assert (ended.value.code, shown.err) == (2, f"error: {sentence}\n")
        assert sentence in shown.out if form else name in shown.out
    page = Page(esper_page(tmp_path, folder / "a", tmp_path / "killed", tmp_path / "t"))
    assert "Trainings" in page.said
    assert all(sentence in page.said for sentence in (said[0], said[2]))


def esper_page(tmp_path, *runs):
    esper.compare(*runs, out=tmp_path / "page.html")
    return (tmp_path / "page.html").read_text(encoding="utf-8")


def test_the_page_shows_what_differs_and_makes_no_request(folder, tmp_path):
    text = esper_page(tmp_path, folder / "a", folder / "b")
    page = Page(text)
    assert "Settings that differ" in page.said
    assert "lifecycle.max_seeds 1 " in page.said
    assert [value for name, value in page.attributes if name in ("src", "href") and not value.startswith("#")] == []
    assert "Metric on the probe split" in page.said


def test_curves_of_runs_of_different_length_end_where_their_steps_end(folder, tmp_path):
    longer = QUICK | {"steps": 9}
    esper.grow("iris", longer, controller="never", run=tmp_path / "longer", progress=False)
    text = esper_page(tmp_path, folder / "a", tmp_path / "longer")
    ends = [
        max(float(pair.split(",")[0]) for pair in line.split('points="')[1].split('"')[0].split())
        for line in text.split('<polyline class="line')[1:3]
    ]
    assert ends[0] < ends[1]
    steps = [row.step for row in read_events(tmp_path / "longer" / "events.jsonl") if type(row).__name__ == "StepRow"]
    assert max(steps) == 8


def test_names_of_folders_can_neither_run_nor_turn_the_text(folder, tmp_path, capsys):
    evil = tmp_path / EVIL.replace("/", "")
    shutil.copytree(folder / "a", evil)
    text = esper_page(tmp_path, evil, folder / "b")
    assert Page(text).tags.count("script") == 1
    assert "\u202e" not in text
    assert "\x1b" not in text
    with pytest.raises(SystemExit):
        main(["compare", str(evil), str(folder / "b")])
    shown = capsys.readouterr().out
    assert "\x1b[31m" not in shown
    assert "\u202e" not in shown


def test_the_command_prints_a_table_and_every_verdict(folder, tmp_path, capsys):
    runs = [str(folder / name) for name in ("a", "b", "later")]
    with pytest.raises(SystemExit) as ended:
        main(["compare", *runs, "--out", str(tmp_path / "page.html")])
    assert not ended.value.code
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count("that both grew from the same host and data") == 3
    assert "none is corrected for the number of pairs" in shown
    assert f"page: {tmp_path / 'page.html'}" in shown
    with pytest.raises(SystemExit):
        main(["compare", *runs, "--json"])
    verdicts = json.loads(capsys.readouterr().out)["verdicts"]
    assert [verdict["metric"]["pairs"] for verdict in verdicts] == [3, 2, 2]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["a"], "a comparison needs two runs or more, but 1 run was given; name another"),
        (["a", "b", "a"], r"a is named more than once; name each run once"),
        (["a", "none"], "none is not a run folder"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_one_sentence(folder, given, sentence):
    with pytest.raises(InputError, match=sentence):
        esper.compare(*(folder / name for name in given))
