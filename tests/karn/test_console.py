import io
import math
import re
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from esper.karn.terminal import console
from esper.karn.terminal.console import print_summary
from esper.karn.terminal.progress import Aside, Display, figures
from esper.leyline.intervals import mean_and_error
from esper.leyline.lifecycle.view import Measurements, Seeds, View
from esper.leyline.lifecycle.vocabulary import Stage
from esper.runs.grow import grow
from esper.tamiyo.rules.base import Never
from populations import blobs, small_config

SUMMARY = {
    "status": "finished",
    "task": "digits",
    "controller": "heuristic",
    "envs": 3,
    "steps": 24,
    "steps_done": 24,
    "epochs_done": 12.5,
    "seed": 0,
    "device": "cpu",
    "rows": 6,
    "metric": "accuracy",
    "objective_formula": "accuracy - 0.1 * ln(1 + added parameters / host parameters)",
    "best": {"env": 1, "select": "metric", "validation": 0.9},
    "host_params": 1000,
    "grown_params": [1500, 1500, 1000],
    "test_accuracy": {"host": [0.8, 0.7, 0.9], "grown": [0.9, 0.8, 0.9]},
    "test_objective": {"host": [0.8, 0.7, 0.9], "grown": [0.86, 0.76, 0.9]},
    "baselines": {
        "twin": {"test_accuracy": [0.8, 0.7, 0.9], "params": [1000, 1000, 1000], "seconds": None},
        "same-size": {
            "test_accuracy": [0.85, 0.85, 0.9],
            "params": [1500, 1500, 1000],
            "seconds": 2.5,
            "note": "1 of 3 environments kept no seed; there it is the twin",
        },
        "plain": {"absent": "segment 0 of the host is a [/]GRU, whose width cannot be scaled"},
    },
    "seeds": {"germinated": 4, "fossilized": 2, "unfinished": 1, "pruned": 1, "discarded": 0},
    "grown": [{"a": "mlp"}, {"a": "mlp", "[b]": "low"}, {}],
    "unfinished": [[], [], ["a"]],
    "rollbacks": {},
    "refused": {},
    "best_step": None,
    "stopped_early": False,
    "stopped_because": None,
    "seconds": 1.25,
    "env_steps_per_second": 1234.5,
}


def view(stage: list[list[Stage]]) -> View:
    array = np.array(stage, np.int8)
    seeds = Seeds(array, *(np.zeros_like(array) for _ in Seeds._fields[1:]))

    measured = Measurements(**dict.fromkeys(Measurements._fields) | {"metric": np.array([0.5, 0.75])})
    return View(**dict.fromkeys(View._fields) | {"seeds": seeds, "measurements": measured})


def told(summary: dict, **over: object) -> str:
    """Return the lines on a run that its report has; the terminal has a selection."""
    known = summary | over
    lines = *console.closing_lines(known), *console.table_notes(known), console.time_line(known)
    return "\n".join(lines) + "\n"


GROWING = view([[Stage.TRAINING, Stage.DORMANT], [Stage.HOLDING, Stage.TRAINING]])


def printed(summary: dict, **over: object) -> str:
    file = io.StringIO()
    print_summary(summary | over, Console(file=file, width=80), "runs/x")
    return file.getvalue()


def cells(text: str, label: str) -> str:
    return next(line for line in text.splitlines() if line.strip().startswith(label))


def test_the_table_holds_means_with_standard_errors_and_sizes():
    text = printed(SUMMARY)
    assert cells(text, "grown").split() == ["grown", "0.8667", "±", "0.0333", "1,333", "±", "167", "0.1"]
    assert cells(text, "twin").split()[:4] == ["twin", "0.8000", "±", "0.0577"]
    assert cells(text, "twin").split()[-1] == "1,000", "the twins have no seconds of their own"
    assert cells(text, "same-size").split()[-4:] == ["1,333", "±", "167", "2.5"]


def test_a_run_slower_than_a_step_a_second_has_its_seconds():
    text = told(SUMMARY, env_steps_per_second=0.0123, rows=3, steps_done=2)
    assert "487.8 of them for 2 steps of 3 networks (0.012 environment steps per second)" in text
    assert "(1,234 environment steps per second)" in told(SUMMARY)


def test_the_difference_to_every_static_network_is_paired_with_a_t_interval_over_environments():
    # grown - twin: .1, .1, 0; mean .0667, standard error .0333, t quantile of two degrees of freedom 4.303
    assert "+0.067 [-0.077, +0.210]" in cells(printed(SUMMARY), "twin")
    # grown - same-size: .05, -.05, 0; standard error .0289
    assert "+0.000 [-0.124, +0.124]" in cells(printed(SUMMARY), "same-size")


def test_an_absent_baseline_is_named_with_its_reason_and_no_figures():
    text = printed(SUMMARY)
    assert cells(text, "plain ").split() == ["plain", "absent"]
    assert "plain: absent: segment 0 of the host is a [/]GRU, whose width cannot be scaled" in text
    assert "same-size: 1 of 3 environments kept no seed; there it is the twin" in text


def test_the_constant_prediction_is_the_last_row_without_parameters_or_time():
    text = printed(SUMMARY, constant={"test_accuracy": [0.5, 0.5, 0.5]})
    assert cells(text, "constant ").split() == ["constant", "0.5000", "±", "0.0000", "+0.367", "[+0.223,", "+0.510]"]
    assert text.index("constant ") > text.index("plain ")
    assert "constant: the most frequent class of the train split" in told(SUMMARY, constant={})
    assert "constant" not in printed(SUMMARY)


def test_the_table_fits_into_80_columns():
    million = SUMMARY["baselines"] | {
        "plain": {"test_accuracy": [-0.5, -0.25, 0.1], "params": [12_345_678] * 2 + [23_456_789], "seconds": 12345.6}
    }
    text = printed(SUMMARY, baselines=million, grown_params=[123_456, 234_567, 345_678])
    table = [line for line in text.splitlines() if line.strip().startswith(("grown", "twin", "same-size ", "plain "))]
    assert len(table) == 4
    assert max(map(len, table)) <= 80
    assert "…" not in text
    assert "16,049,382" in cells(text, "plain ")


def test_without_baselines_the_grown_networks_stand_alone_and_that_is_said():
    text = printed(SUMMARY, rows=3, baselines={}, test_objective={"host": None, "grown": [0.86, 0.76, 0.9]})
    assert "no static network was trained for comparison" in text
    assert "twin" not in text
    alone = told(SUMMARY, rows=3, baselines={}, test_objective={"host": None, "grown": [0.86, 0.76, 0.9]})
    assert "J on the test split: grown 0.8400 ± 0.0416\n" in alone


def test_a_value_that_was_not_measured_is_left_out_of_mean_and_difference():
    twin = {"test_accuracy": [None, 0.7, 0.9], "params": [1000, 1000, 1000], "seconds": None}
    text = printed(SUMMARY, baselines={"twin": twin})
    assert "0.8000 ± 0.1000" in cells(text, "twin")
    assert "+0.050 [-0.585, +0.685]" in cells(text, "twin")  # 12.71 standard errors of two values


def test_one_environment_has_neither_standard_error_nor_interval():
    twin = {"test_accuracy": [0.5], "params": [1000], "seconds": None}
    text = printed(
        SUMMARY, test_accuracy={"host": [0.5], "grown": [0.75]}, baselines={"twin": twin}, grown_params=[1500]
    )
    assert cells(text, "twin").split() == ["twin", "0.5000", "+0.250", "1,000"]


def test_the_rate_is_over_the_seconds_beside_it_and_those_of_the_baselines_are_said_apart():
    slow = told(SUMMARY, env_steps_per_second=180.0)
    assert "took: 1.2 seconds, 0.8 of them for 24 steps of 6 networks, twins included (180 environment steps" in slow
    assert pytest.approx(0.8) == 24 * 6 / 180.0
    assert (
        "the rest for setting up, evaluating and exporting them; the other static networks took 2.5 seconds more\n"
        in slow
    )
    alone = told(SUMMARY, env_steps_per_second=180.0, rows=3, baselines={})
    assert "0.4 of them for 24 steps of 3 networks (180 environment steps per second), the rest" in alone


def test_the_length_is_said_in_steps_and_in_epochs_where_the_task_has_a_train_split_of_one_size():
    assert "3 environments, 24 of 24 steps (12.5 epochs), run seed 0" in printed(SUMMARY)
    assert "24 of 24 steps (1 epoch), run seed 0" in printed(SUMMARY, epochs_done=1.0)
    assert "24 of 24 steps, run seed 0" in printed(SUMMARY, epochs_done=None)


@pytest.mark.parametrize(
    ("envs", "said"),
    [
        (1, "one environment gives no interval; --envs 16 (envs=16 in Python) gives one"),
        (2, "intervals over 2 environments are wide; --envs 16 (envs=16 in Python) narrows them"),
        (3, "intervals over 3 environments are wide; --envs 16 (envs=16 in Python) narrows them"),
        (4, None),
    ],
)
def test_few_environments_are_said_to_give_wide_intervals(envs, said):
    text = printed(SUMMARY, envs=envs)
    assert text.count("--envs 16") == (said is not None)
    assert said is None or said in text


def test_what_stands_behind_a_figure_and_the_short_name_of_a_metric_are_said():
    text = told(SUMMARY)
    assert "figures: mean ± standard error over environments" in text
    assert "paired over environments, with its 95 % t interval" in text
    assert "r2" not in text
    figures = {"test_r2": SUMMARY["test_accuracy"], "baselines": {}}
    assert "r2: the share of the variance that is explained" in told(SUMMARY, metric="r2", **figures)


def test_j_is_explained_before_its_first_figure():
    text = told(SUMMARY)
    assert text.index("J = accuracy") < text.index("J on the test split: grown")
    assert text.index("J = accuracy") == text.index("J ")


def test_what_grew_where_is_counted_and_names_are_printed_as_they_are():
    assert "grew: mlp at a in 2 of 3, low at [b] in 1 of 3\n" in printed(SUMMARY)


def test_nothing_grown_is_said():
    assert "grew: nothing\n" in printed(SUMMARY, grown=[{}, {}, {}])


def test_seconds_speed_and_folder_are_printed():
    text = told(SUMMARY)
    assert "took: 1.2 seconds, 0.1 of them" in text
    assert "(1,234 environment steps per second)" in text
    assert "took: 1.2 seconds; run folder: runs/x; everything else: esper report runs/x\n" in printed(SUMMARY)


def test_an_interrupted_run_says_so_and_how_far_it_came():
    head = printed(SUMMARY, status="interrupted", steps_done=0, env_steps_per_second=None).splitlines()[0]
    assert "0 of 24 steps" in head
    assert "interrupted" in head


@pytest.mark.parametrize(("values", "expected"), [([1.0, 3.0], (2.0, 1.0)), ([2.0, None, 2.0], (2.0, 0.0))])
def test_mean_and_standard_error(values, expected):
    assert mean_and_error(values) == pytest.approx(expected)


@pytest.mark.parametrize("values", [None, [], [None]])
def test_of_nothing_there_is_no_mean(values):
    assert all(math.isnan(value) for value in mean_and_error(values))


def test_a_line_has_speed_metric_and_seeds():
    assert figures(GROWING, 1234.5, "accuracy") == "1,234 env steps/s  accuracy 0.6250  seeds: 2 training, 1 holding"


def test_a_line_counts_rollbacks_where_there_were_any():
    assert figures(GROWING, 1.0, "accuracy", 1).endswith("  1 rollback")
    assert figures(GROWING, 1.0, "accuracy", 12).endswith("  12 rollbacks")


def test_rollbacks_and_refusals_are_printed_by_reason():
    text = printed(SUMMARY, rollbacks={"loss": 2, "rise": 1}, refused={"seed_cap": 1200})
    assert "rolled back: 2 loss, 1 rise" in text
    assert "refused: 1,200 seed cap" in text
    assert "rolled back" not in printed(SUMMARY)


def test_a_run_that_is_taken_up_goes_on_counting_where_it_was():
    file = io.StringIO()
    Display(Console(file=file), 6, "accuracy").step(GROWING._replace(step=5), 10.0, 0)
    assert file.getvalue().startswith("step 5/6")


def test_a_pipe_gets_the_first_line_the_last_and_those_that_are_due(monkeypatch):
    file, now = io.StringIO(), iter([0.0, 1.0, 2.0, 6.0, 7.0, 8.0])
    clock = SimpleNamespace(monotonic=lambda: next(now))
    monkeypatch.setattr("esper.karn.terminal.progress.time", clock)
    lines = Display(Console(file=file), 6, "accuracy", seconds=5.0)
    for step in range(6):
        lines.step(GROWING._replace(step=step + 1), 10.0, 0)
    assert [line.split()[1] for line in file.getvalue().splitlines()] == ["1/6", "4/6", "6/6"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_and_a_pipe_gets_lines():
    assert Display(Console(file=Terminal(), _environ={"TERM": "xterm"}), 3, "accuracy").drawn is not None
    assert Display(Console(file=Terminal(), _environ={"TERM": "dumb"}), 3, "accuracy").drawn is None
    assert Display(Console(file=io.StringIO(), force_terminal=True), 3, "accuracy").drawn is None


def test_progress_that_is_slow_holds_no_step_and_shows_the_first_the_last_and_every_line():
    class Stopped(io.StringIO):
        """Takes nothing, as a stopped terminal, until it goes on."""

        def __init__(self):
            super().__init__()
            self.goes_on = threading.Event()

        def write(self, text):
            assert self.goes_on.wait(60)
            return super().write(text)

    file = Stopped()
    with Aside(Display(Console(file=file), 40, "accuracy", seconds=0.0)) as progress:
        for step in range(40):
            progress.step(GROWING._replace(step=step + 1), 10.0, 0)
            if step == 20:
                progress.note("exporting")
        assert file.getvalue() == ""
        file.goes_on.set()
    shown = [line.split()[1] if line.startswith("step") else line for line in file.getvalue().splitlines()]
    assert shown == ["1/40", "21/40", "exporting", "40/40"]
    assert progress.waits() is None


def test_waits_for_a_terminal_that_is_slower_than_its_lines_are_counted(monkeypatch, tmp_path):
    class Slow(io.StringIO):
        """Takes nothing, as a slow terminal, until the run waits for it."""

        def write(self, text):
            while progress.waits() is None:
                time.sleep(0.001)
            return super().write(text)

    monkeypatch.setattr(Aside, "LINES", 0)
    config = small_config({"envs": 2, "steps": 3, "models": "none"})
    with Aside(Display(Console(file=Slow()), 3, "accuracy", seconds=0.0)) as progress:
        summary = grow(blobs(), config, Never(), tmp_path / "run", progress)
    assert summary["progress"]["waits"] >= 1
    assert summary["progress"]["waiting_seconds"] >= 0


def test_waits_for_outputs_are_mentioned_where_they_are_long():
    waits = {"outputs": {"waits": 7, "waiting_seconds": 3.0}}
    assert "the run waited 3.0 s, 8% of its time, because an output was slower" in printed(
        SUMMARY, **waits, seconds=40.0
    )
    assert "because an output" not in printed(SUMMARY, **waits, seconds=400.0)


def test_the_bar_shows_figures_and_notes():
    file = Terminal()
    with Display(Console(file=file, force_terminal=True, width=120, _environ={"TERM": "xterm"}), 2, "accuracy") as bar:
        assert bar.drawn is not None
        bar.step(GROWING, 10.0, 0)
        bar.note("exporting [b]")
        bar.step(GROWING, 10.0, 0)
    assert "accuracy 0.6250" in file.getvalue()
    assert "exporting [b]" in file.getvalue()


def test_a_pipe_gets_a_line_of_every_round_and_a_terminal_keeps_those_of_validated_rounds():
    file, screen = io.StringIO(), Terminal()
    console = Console(file=screen, force_terminal=True, width=120, _environ={"TERM": "xterm"})
    for display in (Display(Console(file=file)), Display(console)):
        with display:
            display.round(-1, 2, {"log_likelihood": -1.0})
            display.round(0, 2, {"return": 0.5, "validation_objective": 0.75, "rollbacks": 2.0})
            display.round(1, 2, {"return": 0.25})
    imitated, pace, first, second = file.getvalue().splitlines()
    assert imitated == "imitation, 0 to go  log-likelihood -1.00"
    assert pace.startswith("1 of 3 rounds took ")
    assert first == "round 1/2  return 0.500  validation J 0.7500  2 rolled back"
    assert second == "round 2/2  return 0.250"
    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue()))
    assert first in lines
    assert second not in lines
    assert any(line.endswith(second) for line in lines)


def test_the_steps_that_early_stopping_chose_and_why_it_ended_the_run_are_said():
    best = {"host": [4, 9, 9], "grown": [3, 9, 12]}
    text = printed(SUMMARY, best_step=best, stopped_early=True, stopped_because="nothing rose for 12 steps")
    assert "networks: restored to their best by the validation split, of steps 3 to 12; stopped early" in text
    assert "stopped early: nothing rose for 12 steps\n" in text
    assert "restored" not in printed(SUMMARY)


def test_below_the_table_stand_the_verdict_and_at_most_eight_lines_whatever_happened():
    everything = {
        "verdict": "Growth paid: [much].",
        "explanations": ["nothing was planted in 1 of 3", "a seed was not kept", "another"],
        "examples": {"train": 90, "probe": 9, "validation": 9, "test": 9},
        "rollbacks": {"loss": 2},
        "refused": {"seed_cap": 1200},
        "best_step": {"host": [4, 9, 9], "grown": [3, 9, 12]},
        "stopped_early": True,
        "stopped_because": "nothing rose for 12 steps",
        "regrown": True,
        "grown": [{f"slot{slot}": "mlp" for slot in range(9)}] * 3,
        "keeps": [{"env": 0, "slot": "a", "blueprint": "mlp", "step": 9, "reason": "it pays"}] * 99,
    }
    lines = printed(SUMMARY, **everything).splitlines()
    verdict = lines.index("Growth paid: [much].")
    assert "plain " in "\n".join(lines[:verdict]), "the table comes first"
    below = lines[verdict + 1 :]
    assert len(below) == 8
    for said in (
        "mlp at slot3 in 3 of 3 and 5 more; the host is a network that was grown before",
        "rolled back: 2 loss; refused: 1,200 seed cap",
        "why: nothing was planted in 1 of 3 (and 2 more reasons)",
        "plain: absent: segment 0 of the host is a [/]GRU",
        "warning: the test split has only 9 examples",
        "stopped early: nothing rose for 12 steps",
    ):
        assert sum(said in line for line in below) == 1, said
    assert below[-1].endswith("everything else: esper report runs/x")


def test_the_closing_lines_say_why_nothing_was_planted():
    assert "why: nothing was planted" in printed(SUMMARY | {"explanations": ["nothing was planted in 1 of 3"]})


def test_rent_is_explained_where_j_is_shown_and_the_best_network_is_named():
    text = " ".join(told(SUMMARY).split())
    assert "J = accuracy - 0.1 * ln(1 + added parameters / host parameters): the metric less rent" in text
    assert "(reward.rent)" in text
    assert "best: environment 1, by validation accuracy, 0.9000 (select=metric)" in text


def test_seeds_that_were_fossilized_after_the_best_step_are_said_to_be_discarded():
    seeds = SUMMARY["seeds"] | {"discarded": 2}
    assert "2 discarded; unfinished seeds" in printed(SUMMARY, seeds=seeds)
    assert "discarded ones were fossilized after the best step" in printed(SUMMARY, seeds=seeds)
