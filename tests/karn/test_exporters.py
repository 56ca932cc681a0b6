"""Test exports of runs into a target in memory: every number once, in order, whatever becomes of the run and of the exporter."""

import io
import os
import shutil
import sys

import pytest
from rich.console import Console

import esper
from esper.karn.exporters import Box, Exporter, ExportError, as_markdown, boxes_of, drawing, export_of, final_table
from esper.karn.report.frame import Table
from esper.karn.run_model import RunModel
from esper.karn.terminal.console import comparison_table, print_summary
from esper.leyline.messages import InputError, RunWarning
from esper.nissa.hub import Guarded
from esper.nissa.rows import EpisodeRow, RoundRow
from exported import Kept, carried, curves_of_steps, spread
from iris import grow_iris, printed

SETTINGS = {"envs": 3, "steps": 6, "models": "none", "baselines": ["twin"]}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return grow_iris(tmp_path_factory.mktemp("runs") / "iris")


@pytest.fixture
def copy(run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    return folder


def lines_of(folder):
    return (folder / "events.jsonl").read_bytes().splitlines(keepends=True)


def cut(folder, count):
    """Cut a run folder as if the run had been killed after so many rows."""
    lines = lines_of(folder)
    (folder / "events.jsonl").write_bytes(b"".join(lines[:count]) + lines[count][:9])
    (folder / "summary.json").unlink(missing_ok=True)


def test_the_curves_of_a_grown_run_are_medians_quartiles_and_the_best_of_its_step_rows(run, tmp_path):
    kept = Kept()
    exported = carried(run, kept)
    assert kept.runs["iris"]["curves"] == curves_of_steps(run)
    assert (exported.points, exported.x, exported.status, exported.final) == (6, 5, "finished", True)
    assert kept.runs["iris"]["facts"]["task"] == "iris"
    assert kept.said == ["open", "flush", "close"]


def test_the_final_table_is_the_one_that_the_run_prints_and_the_image_has_a_box_for_each_slot(run, tmp_path):
    kept, summary = Kept(), esper.open_run(run).summary
    carried(run, kept)
    ((name, table, x),) = kept.runs["iris"]["tables"]
    assert (name, x, table.columns[0]) == ("final_table", 5, "network")
    console = Console(file=io.StringIO(), width=200)
    print_summary(summary, console)
    printed = [" ".join(line.split()) for line in console.file.getvalue().splitlines()]
    for row in table.rows:
        assert " ".join(filter(None, row)) in printed
    assert (
        [row[0] for row in table.rows]
        == ["grown", "twin", "constant"]
        == [row[0] for row in comparison_table(summary).rows]
    )
    ((name, (height, width, colours), x),) = kept.runs["iris"]["images"]
    assert (name, width, colours, x) == ("architecture", 1300, 3, 5)
    slots = next(esper.open_run(run).rows("run")).slots
    boxes = list(boxes_of(summary, slots))
    assert [box.head for box in boxes if box.head.startswith("slot")] == [f"slot {slot}" for slot in slots]
    assert {box.head for box in boxes if box.kind == "seed"} == set(summary["grown"][summary["best"]["env"]].values())
    assert height == pytest.approx(1300 / 720 * (20 + 44 * sum(box.kind != "seed" for box in boxes)), abs=2)


@pytest.mark.parametrize("count", [1, 2, 20, -1])
def test_a_killed_run_is_exported_as_far_as_it_came_and_replaced_when_it_was_continued(run, copy, tmp_path, count):
    kept, whole = Kept(), lines_of(run)
    count %= len(whole)
    cut(copy, count)
    exported = carried(copy, kept)
    assert (exported.status, exported.final) == ("killed", False)
    assert kept.runs.get("run", {"curves": {}})["curves"] == curves_of_steps_of(whole[:count], tmp_path)
    (copy / "events.jsonl").write_bytes(b"".join(whole))
    shutil.copy(run / "summary.json", copy)
    carried(copy, kept)
    assert list(kept.runs) == ["run"]
    assert kept.runs["run"]["curves"] == curves_of_steps(run)
    assert len(kept.runs["run"]["tables"]) == 1


def curves_of_steps_of(lines, tmp_path):
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "events.jsonl").write_bytes(b"".join(lines))
    return curves_of_steps(tmp_path / "part")


def test_a_run_that_goes_on_is_exported_as_it_grows_and_equals_an_export_afterwards(run, copy):
    kept, lines = Kept(), lines_of(run)
    path = copy / "events.jsonl"
    path.write_bytes(b"")
    ends = iter(range(0, len(lines) + 7, 7))

    def more():
        end = next(ends, None)
        if end is not None:
            path.write_bytes(b"".join(lines[:end]) + b"".join(lines[end : end + 1])[:5] * (end < len(lines)))
        return end is not None

    carried(copy, kept, more)
    after = Kept()
    carried(run, after)
    assert kept.runs["run"]["curves"] == after.runs["iris"]["curves"]
    assert kept.runs["run"]["tables"] == after.runs["iris"]["tables"]
    assert kept.said.count("open") == 1


def test_rows_that_come_again_after_a_resume_begin_the_run_in_the_target_anew(run, copy):
    kept, lines = Kept(), lines_of(run)
    steps = iter([20, 12, len(lines)])

    def more():
        end = next(steps, None)
        if end is not None:
            (copy / "events.jsonl").write_bytes(b"".join(lines[:end]))
        return end is not None

    carried(copy, kept, more)
    assert list(kept.runs) == ["run"]
    assert kept.runs["run"]["curves"] == curves_of_steps(run)
    assert kept.said.count("open") == kept.said.count("close") > 1


def test_an_export_replaces_the_one_before_also_where_another_run_took_the_folder(copy):
    kept = Kept()
    carried(copy, kept)
    first = kept.runs["run"]["id"]
    carried(copy, kept)
    assert kept.runs["run"]["id"] == first
    os.utime(copy / "environment.json", ns=(1, 1))  # as if another run had taken the folder (--overwrite)
    carried(copy, kept)
    assert kept.runs["run"]["id"] != first
    assert list(kept.runs) == ["run"]
    assert kept.runs["run"]["curves"] == curves_of_steps(copy)


class Breaks(Kept):
    def scalars(self, x, time, values):
        if x == 3:
            raise OSError("no room")
        super().scalars(x, time, values)


def test_after_a_target_failed_the_run_is_exported_anew(run):
    broken, kept = Breaks(), Kept()
    with pytest.raises(ExportError, match=r"the export of .*iris stopped: OSError: no room"):
        carried(run, broken)
    assert "close" not in broken.said
    kept.runs = broken.runs
    carried(run, kept)
    assert list(kept.runs) == ["iris"]
    assert kept.runs["iris"]["curves"] == curves_of_steps(run)


def test_a_training_has_a_point_for_each_round_with_its_figures_and_those_of_its_populations(tmp_path):
    learner = {"rounds": 2, "imitation_rounds": 1, "validate_envs": 2, "validate_every": 1}
    esper.train("iris", {"envs": 8, "steps": 4, "ppo": learner}, run=tmp_path / "t", progress=False)
    kept = Kept()
    exported = carried(tmp_path / "t", kept)
    assert (exported.points, exported.x, exported.final) == (3, 2, True)
    opened = esper.open_run(tmp_path / "t")
    episodes = list(opened.rows("episode"))
    expected = {}
    for x, row in enumerate(opened.rows("round")):
        values = {f"round/{name}": value for name, value in row.figures.items() if value is not None}
        for cohort in ("training", "validation"):
            ended = [each for each in episodes if (each.cohort, each.round) == (cohort, row.round)]
            for name, best in (("metric", max), ("loss", min), ("added_params", None)):
                values |= spread(f"{cohort}/iris/{name}", [getattr(each, name) for each in ended], best)
        for name, value in values.items():
            expected.setdefault(name, []).append((x, value))
    assert kept.runs["t"]["curves"] == expected
    assert {name.split("/")[0] for name in expected} == {"round", "training", "validation"}
    assert kept.runs["t"]["tables"][0][1] == final_table(esper.open_run(tmp_path / "t").summary)
    assert kept.runs["t"]["images"] == []


def test_tasks_whose_names_differ_in_forbidden_characters_alone_have_curves_of_their_own():
    model, tasks = RunModel(history=False), ["a!", "a?", "..", "<b>\x1b[31m" * 40, ""]
    figures = {"step": 1, "env": 0, "loss": None, "host_params": 1, "added_params": 0, "fossilized": 0, "rollbacks": 0}
    for value, task in enumerate(tasks):
        row = {**figures, "metric": float(value), "cohort": "training", "task": task, "round": 0, "grown": {}}
        assert model.write(EpisodeRow(episode=0, unfinished=[], **row)) is None
    point = model.write(RoundRow(round=0, seconds=0.0, figures={"absent": None}))
    medians = {name: value for name, value in point.values.items() if name.endswith("/metric/median")}
    assert list(medians.values()) == [0.0, 1.0, 2.0, 3.0, 4.0]
    names = [name.split("/")[1] for name in medians]
    assert names[:3] == ["a_", "a_-2", "_"]
    assert all(len(name) < 70 and name.replace("-", "_").isidentifier() for name in names)


def test_names_by_users_are_neither_markup_nor_formulas():
    boxes = [Box("input", "$x_{", "<b>"), Box("seed", "a\x1b[31m|`*" * 40, ""), Box("output", "漢字", "")]
    assert drawing("$\\frac{1}{ & [bold] \x07", boxes).shape[1:] == (1300, 3)
    table = Table("", ["network", "test <i>|"], [("a`|*[x](http://a) \x1b[31m", "1\n2")])
    assert as_markdown(table).splitlines() == [
        "| network | test &lt;i&gt;\\| |",
        "| --- | --- |",
        "| a\\`\\|\\*\\[x](http://a) \\x1b\\[31m | 1\\n2 |",
    ]


@pytest.fixture
def in_memory(monkeypatch):
    """Put targets in memory in the place of tensorboard and wandb."""
    targets = {name: Kept() for name in ("tensorboard", "wandb")}
    monkeypatch.setattr(
        "esper.karn.exporters.MAKE", {name: lambda folder, kept=kept: kept for name, kept in targets.items()}
    )
    monkeypatch.setattr("esper.karn.exporters.check_installed", lambda target: None)
    return targets


def test_a_folder_with_other_files_or_another_target_is_refused_and_left_alone(run, tmp_path, in_memory):
    def refused(into, sentence, target="wandb"):
        with (
            pytest.raises(InputError, match=sentence),
            export_of(esper.open_run(run), target, into),
        ):
            pass

    (tmp_path / "notes.txt").write_text("mine")
    refused(tmp_path, r"holds other files and no exports; name a new or an empty folder \(--into\)")
    refused(tmp_path / "notes.txt", r"notes\.txt cannot be read as a folder: Not a directory")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    with export_of(esper.open_run(run), "wandb", tmp_path / "a"):
        refused(tmp_path / "a", "writes to .*; wait for its end")
    refused(tmp_path / "a", "holds exports to wandb, not to tensorboard; name another folder", "tensorboard")
    refused(run / "exports", "is in the run folder")


def test_runs_have_names_that_no_other_run_of_the_target_has(run, tmp_path, in_memory):
    folders = [tmp_path / parent / name for parent in ("a", "b") for name in ("x y\x07<b>", "x-y-b")]
    names = {"beside": [], "shared": []}
    for folder in folders:
        shutil.copytree(run, folder)
        for where, into in (("beside", None), ("shared", tmp_path / "shared")):
            with export_of(esper.open_run(folder), "wandb", into) as (export, place):
                names[where].append(export.name)
                assert place == (into or folder.parent / "exports" / "wandb")
    assert names["beside"][1] == names["beside"][3] == "x-y-b"
    assert "x-y-b" not in (names["beside"][0], names["beside"][2])
    assert len(set(names["shared"])) == 4
    assert all(name.startswith("x-y-b") for name in (*names["beside"], *names["shared"]))


@pytest.mark.parametrize("target", ["tensorboard", "wandb", "mlflow", "trackio"])
def test_bad_input_of_the_command_is_one_sentence_and_writes_nothing(run, tmp_path, capsys, monkeypatch, target):
    assert printed(capsys, "export-events", run, "--to", "tb") == (
        2,
        "",
        "error: unknown target 'tb'; choose one of tensorboard, wandb, mlflow, trackio\n",
    )
    monkeypatch.setitem(sys.modules, target, None)  # as if it were not installed
    sentence = f"the target {target} needs {target}, which is not installed; run pip install 'esper-grow[{target}]'"
    assert printed(capsys, "export-events", run, "--to", target) == (2, "", f"error: {sentence}\n")
    code, _, err = printed(capsys, "export-events", tmp_path, "--to", target)
    assert (code, "is not a run folder" in err) == (2, True)
    with pytest.raises(InputError, match=f"needs {target}, which is not installed"):
        esper.grow("iris", SETTINGS | {"telemetry": {"exporters": [target]}}, run=tmp_path / "r", progress=False)
    assert list(tmp_path.iterdir()) == []
    assert not (run.parent / "exports").exists()


@pytest.mark.parametrize(
    ("telemetry", "folder", "sentence"),
    [
        (
            {"exporters": "tb"},
            "r",
            "telemetry.exporters is 'tb'; give a list of names out of tensorboard, wandb, mlflow, trackio",
        ),
        ({"exporters": "wandb"}, None, "telemetry.exporters is wandb, and exporters read the run folder; name one"),
        ({"exporters": "wandb", "level": "off"}, "r", "telemetry.exporters needs events, and telemetry.level is off"),
    ],
)
def test_settings_with_which_nothing_could_be_exported_are_refused(tmp_path, telemetry, folder, sentence):
    with pytest.raises(InputError) as caught:
        esper.grow("iris", {**SETTINGS, "telemetry": telemetry}, run=folder and tmp_path / folder, progress=False)
    assert str(caught.value).startswith(sentence)
    assert list(tmp_path.iterdir()) == []


def test_an_exporter_that_fails_is_reported_once_with_its_reason(tmp_path):
    exporter = Guarded(Exporter(tmp_path / "none", "tensorboard", lambda run, summary: None))
    exporter.write_all([RoundRow(round=0, seconds=0.0, figures={})])
    with pytest.warns(RunWarning) as caught:
        exporter.close()
    (told,) = [str(each.message) for each in caught]
    assert "the exporter to tensorboard failed, and the run is not affected: " in told
    assert f"{tmp_path / 'none'} is not a run folder" in told
    assert f"; `esper export-events {tmp_path / 'none'} --to tensorboard` exports the run afterwards" in told
    assert told.endswith("; the run goes on without this output")


def test_an_exporter_beside_a_run_writes_what_an_export_afterwards_writes(tmp_path, in_memory, monkeypatch):
    monkeypatch.setattr("esper.karn.exporters.EVERY", 0.0)
    live, after = in_memory["tensorboard"], Kept()
    exporter = Exporter(tmp_path / "iris", "tensorboard", lambda run, summary: None)
    esper.grow("iris", SETTINGS, controller="random-valid", run=tmp_path / "iris", outputs=[exporter], progress=False)
    carried(tmp_path / "iris", after)
    for part in ("curves", "tables", "images", "facts"):
        assert live.runs["iris"][part] == after.runs["iris"][part]
    assert live.said[-1] == "close"
    assert curves_of_steps(tmp_path / "iris") == live.runs["iris"]["curves"]


def test_the_command_exports_a_run_in_parts(run, capsys, in_memory, monkeypatch):
    monkeypatch.setattr("esper.karn.exporters.CHUNK", 1000)
    code, out, err = printed(capsys, "export-events", run, "--to", "wandb", "--follow")
    assert (code, err) == (0, "")
    assert out == f"{run.parent / 'exports' / 'wandb'}: wandb has 6 points up to x = 5, as the run iris\n"
    assert in_memory["wandb"].runs["iris"]["curves"] == curves_of_steps(run)
    shutil.rmtree(run.parent / "exports")
