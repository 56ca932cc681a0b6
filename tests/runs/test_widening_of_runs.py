"""Runs whose networks become wider together: what they are compared with, where the sizes are shown, and what is refused."""

import pytest
from sklearn.datasets import load_iris

import esper
from commands import files
from esper.karn.report.page import write_report
from esper.karn.run_model import RunModel
from esper.karn.terminal.console import closing_lines
from esper.nissa.events import read_events

SMALL = {
    "envs": 3,
    "first_instance": 2,
    "steps": 8,
    "models": "best",
    "controller": "heuristic",
    "widen": {"at": [2, 5]},
    "blueprints": ["bypass-linear"],
    "data": {"batch_size": 12, "batches_per_step": 3},
    "gates": {"permissive": True, "min_training_steps": 1, "min_holding_steps": 1},
    "heuristic": {"plant_below": 2.0, "weak_below": 2.0, "holding_patience": 3, "training_patience": 1},
}


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Run a growth, and return its folder and its summary."""
    folder = tmp_path_factory.mktemp("runs") / "wide"
    return folder, esper.grow("iris-plain", SMALL, run=folder, progress=False)


def test_twins_and_static_networks_become_wider_and_the_plain_one_is_as_large_from_the_start(wide):
    summary = wide[1]
    assert summary["seeds"]["fossilized"] > 0, "or this test shows nothing"
    first, last = summary["widened"]
    sizes = [first["host_params_before"], first["host_params"], last["host_params"]]
    assert sizes == [1219, 4483, 17155]
    static = summary["baselines"]
    assert static["twin"]["params"] == [17155] * 3
    assert static["same-size"]["params"] == summary["grown_params"]
    assert static["skips"]["params"] == [17155] * 3
    assert all(plain >= grown for plain, grown in zip(static["plain"]["params"], summary["grown_params"], strict=True))


def test_the_sizes_over_time_are_in_the_closing_lines_the_report_and_what_watch_shows(wide):
    folder, summary = wide
    line = "all networks became wider after steps 2, 5: hosts of 1,219 -> 4,483 -> 17,155 parameters"
    assert any(line in each for each in closing_lines(summary))
    assert line.replace(">", "&gt;") in write_report(folder).read_text()
    model = RunModel().update(read_events(folder / "events.jsonl"))
    assert model.widenings == [
        "step 1: all networks became wider; a host has 4,483 parameters",
        "step 4: all networks became wider; a host has 17,155 parameters",
    ]
    assert any(model.widenings[0] in each for each in model.log(1))


def test_the_outcome_names_the_steps_that_a_run_stopped_early_did_not_reach(tmp_path):
    config = SMALL | {"steps": 40, "early_stopping": {"enabled": True, "patience": 1}, "controller": "never"}
    summary = esper.grow("iris-plain", config | {"widen": {"at": [1, 38, 39]}}, run=tmp_path / "run", progress=False)
    assert summary["stopped_early"]
    line = (
        f"no network became wider after steps 38, 39 (widen.at), as the run ended after {summary['steps_done']} steps"
    )
    assert any(line in each for each in closing_lines(summary))
    assert line in write_report(tmp_path / "run").read_text()


def test_the_best_network_loads_with_its_last_widths(wide):
    folder, summary = wide
    network = esper.load(folder / "models" / "best")
    assert network.segments[1][0].weight.shape == (64, 64)
    assert sum(each.numel() for each in network.parameters()) == summary["grown_params"][summary["best"]["env"]]


def test_the_network_of_a_run_that_became_wider_can_be_grown_further_and_become_wider(wide, tmp_path):
    folder, summary = wide
    x, y = (each[:140] for each in load_iris(return_X_y=True))  # the others hold an example twice

    def host():
        return esper.load(folder / "models" / "best")

    task = esper.task("more", x, y, host=host)
    more = esper.grow(task, SMALL | {"steps": 4, "widen": {"at": [2]}}, run=tmp_path / "more", progress=False)
    assert more["widened"][0]["host_params_before"] == summary["grown_params"][summary["best"]["env"]]
    again = esper.load(tmp_path / "more" / "models" / "best", host=host)
    assert sum(each.numel() for each in again.parameters()) == more["grown_params"][more["best"]["env"]]
    assert again.predict(x[:5]).shape == (5,)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("grow", "iris", "--steps", "8", "--set", "widen.at=[8]"),
            "widen.at names step 8, and the run ends after 8 steps, so that nothing",
        ),
        (("grow", "iris", "--set", "widen.at=[5,3]"), "widen.at is [5, 3]; give increasing numbers of steps"),
        (("grow", "iris", "--set", "widen.factor=1.5"), "widen.factor is 1.5"),
        (("grow", "iris", "--set", "widen.factor=1"), "at least 2"),
        (("grow", "repair", "--set", "widen.at=[2]"), "the hosts of repair differ from instance to instance"),
        (("grow", "iris", "--set", "widen.at=[2]", "--set", "widen.factor=1000000"), "there is memory for"),
        (
            ("grow", "iris", "--steps", "1200", "--set", f"widen.at={list(range(1, 1200))}"),
            "lower it, or give fewer steps in widen.at",
        ),
        (("train", "iris", "--set", "widen.at=[2]"), "networks become wider in `esper grow` alone"),
        (
            ("eval", "heuristic", "--tasks", "iris", "--set", "widen.at=[2]"),
            "networks become wider in `esper grow` alone",
        ),
    ],
)
def test_bad_input_ends_with_exit_code_2_and_a_sentence_before_anything_is_written(elsewhere, esper, arguments, said):
    code, _, err = esper(*arguments)
    assert (code, err.count("\n")) == (2, 1)
    assert said in err
    assert files() == []


def test_a_run_that_goes_on_keeps_its_widths(wide, esper):
    code, _, err = esper("resume", str(wide[0]), "--set", "widen.factor=3", "--set", "steps=12")
    assert code == 2
    assert "changing widen would make this another run" in err
