"""Grow whole runs on a small task. Episodes are short and gates permissive, so that seeds reach every end in them."""

import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import esper
from esper.leyline.config.tree import Config, build_config
from esper.leyline.data.task import Task
from esper.leyline.lifecycle.view import Outcome, View
from esper.leyline.messages import InputError
from esper.leyline.protocols import Controller
from esper.nissa.events import decode
from esper.nissa.rows import (
    CheckpointRow,
    DecisionRow,
    EnvironmentRow,
    EpisodeRow,
    EvaluationRow,
    LifecycleRow,
    RunRow,
    StepRow,
)
from esper.runs.folder.resume import Opening
from esper.runs.folder.run_folder import list_contents
from esper.runs.grow import grow
from esper.simic.rewards import objective
from esper.tamiyo.catalog import get_controller
from esper.tasks.hosts import MLP
from esper.tasks.own.custom import task_from
from esper.tolaria.runtime import resolve_device

AT_RUN = {RunRow, EnvironmentRow, CheckpointRow, DecisionRow, LifecycleRow, EpisodeRow, EvaluationRow}
TIMES = {"seconds", "env_steps_per_second", "phase_seconds"}
SETTINGS: dict[str, Any] = {
    "task": "blobs",
    "envs": 3,
    "steps": 16,
    "data": {"batch_size": 16, "batches_per_step": 2},
    "gates": {"permissive": True, "min_training_steps": 1, "min_holding_steps": 0},
    "lifecycle": {"min_prune_age": 0, "embargo": 0, "auto_advance": True, "tempos": [0, 1]},
    "controller": "random-valid",
    "models": "none",
    "baselines": ["twin"],
}


@pytest.fixture(scope="module")
def task() -> Task:
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(240) % 3
    x = torch.randn(240, 4, generator=generator) + 2 * torch.nn.functional.one_hot(y, 4)
    return task_from("blobs", x, y, host=MLP(inputs=4, width=6, hidden=(2, 3), outputs=3))


def config_of(**settings: Any) -> Config:
    return build_config(SETTINGS, settings)


def run(task: Task, config: Config, folder: Path | None = None, **over: Any) -> dict[str, Any]:
    return grow(task, config, get_controller(config.controller, config), folder, **over)


def events(folder: Path) -> list[Any]:
    return [decode(line) for line in (folder / "events.jsonl").read_bytes().splitlines()]


@pytest.fixture(scope="module")
def finished(task, tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("runs") / "deep" / "run"
    return folder, run(task, config_of(models="all"), folder)


def without_times(summary: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in summary.items() if key not in TIMES}


def test_the_folder_of_a_run_holds_what_it_should(finished):
    folder, _ = finished
    assert sorted(path.name for path in folder.iterdir()) == [
        "checkpoints",
        "config.yaml",
        "environment.json",
        "events.jsonl",
        "models",
        "summary.json",
    ]
    assert sorted(path.name for path in (folder / "models").iterdir()) == ["best", "env-000", "env-001", "env-002"]


def test_a_run_folder_loads_the_network_of_its_best_environment_and_says_which_it_is(finished, capsys):
    folder, summary = finished
    env = summary["best"]["env"]
    x = torch.randn(5, 4)
    best, same = esper.load(folder), esper.load(folder / "models" / f"env-{env:03d}")
    assert torch.equal(best(x), same(x))
    assert not torch.equal(best(x), esper.load(folder / "models" / f"env-{(env + 1) % 3:03d}")(x))
    assert capsys.readouterr().err == (
        f"environment {env} of {folder}, the best by {summary['best']['select']} on the validation split\n"
    )
    assert torch.equal(esper.load(folder / "models" / "best")(x), best(x))
    assert list_contents(folder).others == list_contents(folder).in_the_way == []


def test_a_run_folder_of_an_earlier_version_without_a_copy_of_the_best_loads_it_all_the_same(finished, tmp_path):
    shutil.copytree(finished[0], tmp_path / "r")
    shutil.rmtree(tmp_path / "r/models/best")
    x = torch.randn(5, 4)
    assert torch.equal(esper.load(tmp_path / "r")(x), esper.load(finished[0])(x))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda run: (run / "summary.json").unlink(), "has not ended, so no environment is its best; continue it with"),
        (
            lambda run: shutil.rmtree(run / "models"),
            "holds no network of its best environment; grow it with models 'best'",
        ),
        (lambda run: (run / "summary.json").write_text("[]"), "summary.json is not the summary of a run"),
    ],
)
def test_a_run_folder_without_a_best_network_says_so(finished, tmp_path, damage, said):
    shutil.copytree(finished[0], tmp_path / "r")
    damage(tmp_path / "r")
    with pytest.raises(InputError, match=said):
        esper.load(tmp_path / "r")


def test_the_summary_returned_is_the_one_on_disk_and_strict(finished):
    folder, summary = finished
    assert json.loads((folder / "summary.json").read_text(), parse_constant=pytest.fail) == summary


def test_the_config_on_disk_is_the_config_of_the_run(finished):
    folder, _ = finished
    assert build_config(yaml.safe_load((folder / "config.yaml").read_text())) == config_of(models="all")


def test_the_summary_has_the_promised_keys(finished):
    _, summary = finished
    assert summary["status"] == "finished"
    assert (summary["task"], summary["controller"], summary["envs"], summary["steps"], summary["seed"]) == (
        "blobs",
        "random-valid",
        3,
        16,
        0,
    )
    assert (summary["rows"], summary["device"], summary["steps_done"]) == (6, resolve_device("auto").type, 16)
    assert len(summary["grown_params"]) == 3
    for split in ("test", "validation"):
        for name in ("accuracy", "loss", "objective"):
            pair = summary[f"{split}_{name}"]
            assert [len(pair[kind]) for kind in ("host", "grown")] == [3, 3]
    assert summary["env_steps_per_second"] > 0
    assert summary["seconds"] > 0
    assert summary["verdict"].startswith(("Growth paid: ", "Growth did not pay here: ", "Not resolved"))
    assert list(summary["compared"]) == ["twin"]


def test_the_constant_prediction_is_that_of_the_train_split_on_the_test_split(finished, task):
    _, summary = finished
    most = task.instance(0).train.y.bincount().argmax()
    assert summary["constant"]["test_accuracy"] == pytest.approx([float((task.test.y == most).double().mean())] * 3)


def test_every_seed_has_one_fate(finished):
    folder, summary = finished
    changes = [row for row in events(folder) if isinstance(row, LifecycleRow)]
    ends = {stage: sum(row.to_stage == stage for row in changes) for stage in ("GERMINATED", "FOSSILIZED", "PRUNED")}
    seeds = summary["seeds"]
    assert (seeds["germinated"], seeds["fossilized"], seeds["pruned"]) == tuple(ends.values())
    assert seeds["germinated"] == seeds["fossilized"] + seeds["pruned"] + seeds["unfinished"]
    assert seeds["fossilized"] > 0, "or this test shows nothing"
    assert seeds["pruned"] > 0, "or this test shows nothing"


def test_grown_and_unfinished_slots_are_what_the_events_say(finished):
    folder, summary = finished
    ends = [row for row in events(folder) if isinstance(row, EpisodeRow)]
    assert [row.grown for row in ends] == summary["grown"]
    assert [list(row.unfinished) for row in ends] == summary["unfinished"]
    assert [row.host_params + row.added_params for row in ends] == summary["grown_params"]


def test_the_events_are_numbered_without_a_gap_and_framed_by_run_rows(finished):
    folder, summary = finished
    rows = events(folder)
    assert [row.seq for row in rows] == list(range(len(rows)))
    assert [row.time for row in rows] == sorted(row.time for row in rows)
    assert [row.status for row in rows if isinstance(row, RunRow)] == ["running", "finished"]
    assert isinstance(rows[0], RunRow)
    assert isinstance(rows[-1], RunRow)
    assert [row.step for row in rows if isinstance(row, StepRow)] == list(range(summary["steps"]))
    assert [row.env for row in rows if isinstance(row, EpisodeRow)] == [0, 1, 2]


def test_the_objective_is_the_metric_less_the_rent(finished):
    _, summary = finished
    host, grown = summary["host_params"], np.array(summary["grown_params"])
    expected = objective(
        summary["test_accuracy"]["grown"], grown - host, host, Config().reward.rent, Config().reward.rent_size
    )
    np.testing.assert_allclose(summary["test_objective"]["grown"], expected)
    assert summary["test_objective"]["host"] == summary["test_accuracy"]["host"]


def test_the_objective_may_be_minus_the_loss(task):
    summary = run(task, config_of(controller="never", reward={"objective": "log_loss"}))
    np.testing.assert_allclose(summary["test_objective"]["grown"], -np.array(summary["test_loss"]["grown"]))


def test_an_exported_network_scores_what_the_summary_says(finished, task):
    folder, summary = finished
    for env in range(3):
        network = torch.export.load(folder / "models" / f"env-{env:03d}" / "model.pt2").module()
        assert sum(p.numel() for p in network.parameters()) == summary["grown_params"][env]
        accuracy = (network(task.test.x).argmax(1) == task.test.y).double().mean().item()
        assert accuracy == pytest.approx(summary["test_accuracy"]["grown"][env])


def test_never_growing_equals_the_twin(task):
    summary = run(task, config_of(controller="never"))
    assert summary["test_loss"]["host"] == summary["test_loss"]["grown"]
    assert summary["grown_params"] == [summary["host_params"]] * 3
    assert summary["grown"] == [{}, {}, {}]


def test_without_twins_hosts_are_absent_and_the_grown_are_the_same(task):
    with_twins, without = run(task, config_of()), run(task, config_of(twin=False))
    assert without["rows"] == 3
    assert without["test_accuracy"]["host"] is None
    assert without["test_loss"]["grown"] == with_twins["test_loss"]["grown"]
    assert without["grown"] == with_twins["grown"]


def _untimed(row):
    return {name: value for name, value in row.items() if name not in ("time", "phase_seconds", "seconds", "bytes")}


def test_two_runs_with_one_seed_are_equal_but_for_times(task, tmp_path):
    first, second = run(task, config_of(), tmp_path / "a"), run(task, config_of(), tmp_path / "b")
    assert without_times(first) == without_times(second)
    rows = [[_untimed(json.loads(line)) for line in (tmp_path / run_ / "events.jsonl").open()] for run_ in "ab"]
    assert rows[0] == rows[1]


def test_another_seed_gives_another_run(task):
    assert run(task, config_of())["test_loss"] != run(task, config_of(seed=1))["test_loss"]


@pytest.mark.parametrize("level", ["off", "run"])
def test_telemetry_never_changes_the_run(task, tmp_path, level):
    quiet = run(task, config_of(telemetry={"level": level}), tmp_path / "run")
    assert without_times(quiet) == without_times(run(task, config_of()))
    kinds = {type(row) for row in events(tmp_path / "run")} if level == "run" else set()
    assert kinds == (AT_RUN if level == "run" else set())
    assert (tmp_path / "run" / "events.jsonl").exists() == (level == "run")


def test_without_models_none_are_exported(task, tmp_path):
    assert run(task, config_of(), tmp_path / "run")["exported"] == []
    assert not (tmp_path / "run" / "models").exists()


def test_without_a_folder_nothing_is_written(task, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(task, config_of(models="all"))["exported"] == []
    assert list(tmp_path.iterdir()) == []


def test_overwriting_leaves_nothing_of_the_old_run(task, tmp_path):
    run(task, config_of(models="all"), tmp_path / "run")
    run(task, config_of(controller="never", envs=2), tmp_path / "run", opening=Opening(overwrite=True))
    assert not (tmp_path / "run" / "models").exists()
    assert events(tmp_path / "run")[0].controller == "never"


def test_a_folder_that_holds_a_run_is_left_alone(finished, task):
    folder, summary = finished
    with pytest.raises(InputError, match="already holds a run"):
        run(task, config_of(), folder)
    assert json.loads((folder / "summary.json").read_text()) == summary


@pytest.mark.parametrize(
    "settings",
    [{"slots": ["nowhere"]}, {"blueprints": ["nothing"]}, {"data": {"batch_size": 999}}, {"device": "cuda:99"}],
)
@pytest.mark.parametrize("overwrite", [False, True])
def test_bad_input_writes_and_removes_nothing(task, tmp_path, settings, overwrite):
    folder = tmp_path / "run"
    if overwrite:
        run(task, config_of(controller="never", envs=1, steps=1), folder)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InputError):
        run(task, config_of(**settings), folder, opening=Opening(overwrite=overwrite))
    assert sorted(tmp_path.rglob("*")) == before


def test_a_task_without_a_test_split_is_refused(task):
    with pytest.raises(InputError, match="no test split"):
        run(replace(task, test=None), config_of())


class InterruptsItself(Controller):
    """Sends Ctrl-C, once or more, while the controller decides at some step."""

    def __init__(self, client: Any, step: int, times: int = 1) -> None:
        self.client, self.step, self.times = client, step, times

    def act(self, view: View) -> Any:
        for _ in range(self.times if view.step == self.step else 0):
            os.kill(os.getpid(), signal.SIGINT)
        return self.client.act(view)

    def store(self, outcome: Outcome) -> None:
        self.client.store(outcome)

    def update(self) -> Any:
        return self.client.update()


def test_an_interrupted_run_ends_after_its_step_and_is_evaluated_and_exported(task, tmp_path):
    config = config_of(models="all")
    client = InterruptsItself(get_controller(config.controller, config), step=4)
    summary = grow(task, config, client, tmp_path / "run")
    assert (summary["status"], summary["steps_done"]) == ("interrupted", 5)
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary
    assert len(list((tmp_path / "run" / "models").glob("env-*"))) == 3
    assert None not in summary["test_accuracy"]["grown"]
    rows = events(tmp_path / "run")
    assert rows[-1].status == "interrupted"
    assert [row.step for row in rows if isinstance(row, StepRow)] == list(range(5))


def test_a_second_interrupt_ends_the_run_at_once_and_closes_its_events(task, tmp_path):
    config = config_of(models="all")
    client = InterruptsItself(get_controller(config.controller, config), step=4, times=2)
    with pytest.raises(KeyboardInterrupt):
        grow(task, config, client, tmp_path / "run")
    assert not (tmp_path / "run" / "summary.json").exists()
    assert [row.status for row in events(tmp_path / "run") if isinstance(row, RunRow)] == ["running", "interrupted"]


def test_the_environment_says_what_ran(finished):
    folder, _ = finished
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["torch"] == torch.__version__.split("+")[0] or environment["torch"] == torch.__version__
    assert environment["device"] == resolve_device("auto").type
    assert {"python", "numpy", "platform", "threads", "git_revision", "command"} <= set(environment)


@pytest.mark.parametrize("select", ["metric", "objective"])
def test_the_best_network_is_that_of_the_highest_validation_figure_that_select_names(task, tmp_path, select):
    summary = run(task, config_of(envs=6, select=select, models="best", reward={"rent": 5.0}), tmp_path / "run")
    name = "accuracy" if select == "metric" else "objective"
    values = summary[f"validation_{name}"]["grown"]
    best = int(np.argmax(values))
    assert summary["best"] == {"env": best, "select": select, "validation": values[best]}
    assert summary["exported"] == [best]


def test_a_small_host_pays_rent_as_one_of_rent_size_does(task):
    settings = {"reward": {"rent": 1.0, "rent_size": 10_000}}
    summary = run(task, config_of(**settings))
    host, grown = summary["host_params"], np.array(summary["grown_params"])
    assert (grown > host).any()
    expected = np.array(summary["test_accuracy"]["grown"]) - np.log1p((grown - host) / 10_000)
    np.testing.assert_allclose(summary["test_objective"]["grown"], expected)
    assert "max(host parameters, 10,000)" in summary["objective_formula"]
