import io
import json
from typing import Any

import pytest
from rich.console import Console

import esper
from esper.karn.evaluation import (
    compared,
    draw_evaluation,
    interval,
    interval_lines,
    print_evaluation,
)
from esper.leyline.intervals import plus_minus
from esper.leyline.messages import InputError
from pages import EVIL, Page

ABSENT = {"value": None, "low": None, "high": None}
RULES = ["never", "random-valid", "heuristic", "best fixed plan"]


def estimate(value: float, width: float = 0.05) -> dict[str, Any]:
    return {"value": value, "low": value - width, "high": value + width}


def estimates(names: list[str]) -> dict[str, Any]:
    controllers = [
        {
            "name": name,
            "rule": name in RULES,
            "objective": estimate(0.5 + index / 10),
            "objective_iqm": estimate(0.52 + index / 10),
            "metric": estimate(0.6 + index / 10),
            "added_params": estimate(1234.0 * index),
            "kept": estimate(0.25 * index),
            "seconds": 1234.5,
        }
        for index, name in enumerate(names)
    ]
    comparisons = [
        {"controller": ours, "rule": rule, "difference": estimate(0.02), "probability": estimate(0.75)}
        for ours in names
        for rule in RULES
        if ours != rule
    ]
    return {"controllers": controllers, "comparisons": comparisons}


def record(names: list[str], **over: Any) -> dict[str, Any]:
    task = {
        "task": "repair",
        "metric": "accuracy",
        "sampled": True,
        "problems": 200,
        "runs_of_each": 3,
        "lines": ["a line of [b]oth"],
        **estimates(names),
    }
    return {
        "seeds": [0, 1, 2],
        "part": "heldout",
        "confidence": 0.95,
        "draws": 2000,
        "rules": RULES,
        "tasks": [task | over],
        "together": None,
    }


def printed(evaluation: dict[str, Any], width: int = 120) -> str:
    file = io.StringIO()
    print_evaluation(evaluation, Console(file=file, width=width))
    return file.getvalue()


def test_a_controller_has_j_twice_with_its_intervals_and_then_the_other_means():
    rows = [row.split() for row in printed(record([*RULES, "mine"])).splitlines() if row.startswith(" mine")]
    assert rows[0] == ["mine", "0.900", "[0.850,", "0.950]", "0.920", "[0.870,", "0.970]"]
    assert rows[1] == ["mine", "1.000", "4,936", "1.00", "1,234.5", "-"]


def test_in_a_narrow_window_names_are_folded_and_figures_are_whole():
    text = printed(record([*RULES, "schedules/of/mine/with-a-long-name.yaml"]), width=80)
    assert "…" not in text
    assert text.count("0.900 [0.850, 0.950]") == 1


def test_a_controller_is_compared_with_every_rule():
    text = printed(record([*RULES, "mine"]))
    rows = [row.split() for row in text.splitlines() if row.startswith(" mine") and "+0.020" in row]
    assert [row[1] for row in rows] == ["never", "random-valid", "heuristic", "best"]
    assert rows[0][2:] == ["+0.020", "[-0.030,", "+0.070]", "0.75", "[0.70,", "0.80]"]


def test_rules_alone_are_compared_with_never():
    pairs = [(row["controller"], row["rule"]) for row in compared(estimates(RULES), record(RULES))]
    assert pairs == [(name, "never") for name in RULES[1:]]


def test_a_rule_that_was_named_is_compared_with_every_other_rule():
    rows = compared(estimates(RULES), record(RULES) | {"named": ["heuristic"]})
    assert [(row["controller"], row["rule"]) for row in rows] == [
        ("heuristic", "never"),
        ("heuristic", "random-valid"),
        ("heuristic", "best fixed plan"),
    ]


@pytest.mark.parametrize(
    ("over", "said"),
    [
        (
            {"problems": 2, "runs_of_each": 1},
            "the intervals are too narrow, because they are drawn from 2 instances alone",
        ),
        ({"problems": 1, "runs_of_each": 9, "sampled": False}, "because they are drawn from 9 runs alone"),
    ],
)
def test_intervals_over_few_runs_are_called_too_narrow(over, said):
    text = printed(record(RULES, **over))
    assert said in text
    assert "[low, high]: 95% interval" in text
    assert "too narrow" not in printed(record(RULES, problems=10, runs_of_each=1))


def test_every_task_with_few_problems_is_named():
    found = record(RULES, problems=2, runs_of_each=1)
    found["tasks"] = [{**found["tasks"][0], "task": name, "problems": n} for name, n in (("a", 2), ("b", 9), ("c", 10))]
    legend, *few = interval_lines(found)
    assert legend.startswith("[low, high]: 95% interval")
    assert [line.partition(":")[0] for line in few] == ["a", "b"]


def test_a_single_run_has_no_interval_and_no_legend_of_one():
    text = printed(record(RULES, problems=1, runs_of_each=1))
    assert "[low, high]" not in text
    assert "repair: one run of each controller gives no interval; --instances 200 (instances=200) gives one" in text


def test_a_difference_that_rounds_to_zero_has_no_minus():
    assert f"{interval({'value': -0.0001, 'low': -0.02, 'high': -0.0004}):+.3f}" == "+0.000 [-0.020, +0.000]"
    assert plus_minus(-0.0001, None, ".3f") == "0.000"


def test_what_was_grown_and_the_lines_that_rivals_add_are_printed():
    text = printed(record(RULES) | {"lines": ["a budget"]})
    assert "repair: 200 held-out instances, each with 3 seeds" in text
    assert "a line of [b]oth" in text
    assert "a budget" in text


def test_j_is_explained_first_and_the_static_networks_are_told_from_never():
    text = printed(record(RULES) | {"baselines": ["same-size"], "sized_by": "heuristic"})
    assert text.startswith("J: the metric of a task less rent")
    assert "same-size: static networks, trained at the size that heuristic grew to; `never` is the host" in text


def test_of_one_data_set_the_starts_are_counted():
    assert "repair: 600 runs, each from starting weights of its own" in printed(
        record(RULES, sampled=False, problems=1, runs_of_each=600)
    )


def test_several_tasks_have_a_table_together():
    text = printed(record(RULES) | {"together": estimates(RULES)})
    assert "All tasks together: 1 task, each with the same weight" in text
    assert text.count("J, interquartile mean") == 2


def test_what_is_absent_is_a_dash_and_without_bounds_there_is_a_value_alone():
    assert f"{interval(ABSENT):.3f}" == plus_minus(None, None, ".3f") == "-"
    assert f"{interval(ABSENT | {'value': 0.5}):.3f}" == "0.500"


@pytest.mark.parametrize(("form", "start"), [("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<?xml")])
def test_a_figure_is_drawn_in_every_format(form, start):
    assert draw_evaluation(record([*RULES, "mine"]), form).startswith(start)


def test_every_controller_and_comparison_is_named_in_the_figure_of_each_task_and_of_all_together():
    names = [*RULES, "mine"]
    drawn = draw_evaluation(record(names) | {"together": estimates(names)}, "svg").decode()
    pairs = ("mine less never", "mine less best fixed plan")
    for name in (*names, *(f"{name}, interquartile mean" for name in names), *pairs):
        assert drawn.count(f"<!-- {name} -->") == 2
    for words in (
        "Task repair, 200 held-out instances, each with 3 seeds",
        "All tasks together, 1 task, each with the same weight",
    ):
        assert f"<!-- {words}: J on the test split -->" in drawn
        assert f"<!-- {words}: Paired differences of J -->" in drawn


def test_what_is_absent_is_left_out_of_the_figure():
    evaluation = record(RULES)
    evaluation["tasks"][0]["controllers"][1]["objective"] = ABSENT
    evaluation["tasks"][0]["comparisons"][0]["difference"] = ABSENT | {"value": 0.1}
    drawn = draw_evaluation(evaluation, "svg").decode()
    assert "<!-- random-valid -->" not in drawn
    assert "<!-- random-valid, interquartile mean -->" in drawn


def test_the_page_of_an_evaluation_has_a_verdict_for_every_pair_and_escapes_names(tmp_path):
    environment = {"esper": "0", "command": [EVIL]}
    asked = {
        "named": [EVIL],
        "settings": [{"steps": 4}],
        "environment": environment,
        "instances": 200,
        "first_instance": 0,
    }
    kept = record(["never", EVIL]) | asked
    (tmp_path / "evaluation.json").write_text(json.dumps(kept))
    text = esper.report(tmp_path).read_text()
    page = Page(text)
    assert page.tags.count("script") == 1  # that of the page itself
    assert "onload" not in {name for name, _ in page.attributes}
    assert "\u202e" not in text
    assert "is not resolved by 200 held-out instances, each with 3 seeds: J differs by" in page.said
    assert "steps 4" in page.said
    assert [path.name for path in esper.draw_report(tmp_path, tmp_path / "p").paths] == [
        "01-task0-j-on-the-test-split.png",
        "02-task0-paired-differences-of-j.png",
    ]
    (tmp_path / "evaluation.json").write_text("{}")
    with pytest.raises(
        InputError, match=r"evaluation\.json does not hold an evaluation \(.*\); put back what esper eval wrote"
    ):
        esper.report(tmp_path)


def test_a_share_of_the_headroom_is_in_percent():
    known, unknown = record([*RULES, "mine"]), record(RULES)
    known["tasks"][0]["controllers"][-1]["share_of_headroom"] = {"value": -0.38, "low": -3.9, "high": 0.5}
    assert "-38 [-390, 50] %" in printed(known)
    assert "headroom" not in printed(unknown)
