"""Exports of runs, into a target in memory: every number once, in order, whatever becomes of the run and of the exporter."""

import io
import json
import os
import shutil
import sys
from collections import defaultdict

import pytest
from rich.console import Console

import esper
from esper.karn.export_targets import KEPT, Box, FinalTable, as_markdown, boxes_of, drawing, final_table
from esper.karn.exporters import Export, Exporter, ExportError, Exports
from esper.karn.run_model import RunModel
from esper.karn.terminal.console import comparison_table, print_summary
from esper.leyline.errors import InputError, RunWarning
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
    """As if the run had been killed after so many rows."""
    lines = lines_of(folder)
    (folder / "events.jsonl").write_bytes(b"".join(lines[:count]) + lines[count][:9])
    (folder / "summary.json").unlink(missing_ok=True)


def test_the_curves_of_a_grown_run_are_medians_quartiles_and_the_best_of_its_step_rows(run, tmp_path):
    kept = Kept()
    exported = carried(run, tmp_path / "store", kept)
    assert kept.runs["iris"]["curves"] == curves_of_steps(run)
    assert (exported.points, exported.x, exported.status, exported.final) == (6, 5, "finished", True)
    assert kept.runs["iris"]["facts"]["task"] == "iris"
    assert kept.said == ["open", "flush", "close"]


def test_the_final_table_is_the_one_that_the_run_prints_and_the_image_has_a_box_for_each_slot(run, tmp_path):
    kept, summary = Kept(), esper.open_run(run).summary
    carried(run, tmp_path / "store", kept)
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
        == [str(c) for c in comparison_table(summary).columns[0].cells]
    )
    ((name, (height, width, colours), x),) = kept.runs["iris"]["images"]
    assert (name, width, colours, x) == ("architecture", 1000, 3, 5)
    slots = next(esper.open_run(run).rows("run")).slots
    boxes = list(boxes_of(summary, slots))
    assert [box.head for box in boxes if box.head.startswith("slot")] == [f"slot {slot}" for slot in slots]
    assert {box.head for box in boxes if box.kind == "seed"} == set(summary["grown"][summary["best"]["env"]].values())
    assert height == 70 + 62 * sum(box.kind != "seed" for box in boxes)


def test_a_second_export_adds_nothing_and_does_not_open_the_target(run, tmp_path):
    kept = Kept()
    carried(run, tmp_path / "store", kept)
    kept.said.clear()
    assert carried(run, tmp_path / "store", kept).points == 0
    assert kept.said == []


@pytest.mark.parametrize("count", [1, 2, 20, -1])
def test_a_killed_run_is_exported_as_far_as_it_came_and_continued_when_it_goes_on(run, copy, tmp_path, count):
    kept, whole = Kept(), lines_of(run)
    count %= len(whole)
    cut(copy, count)
    exported = carried(copy, tmp_path / "store", kept)
    assert (exported.status, exported.final) == ("killed", False)
    assert kept.runs.get("run", {"curves": {}})["curves"] == curves_of_steps_of(whole[:count], tmp_path)
    (copy / "events.jsonl").write_bytes(b"".join(whole))
    shutil.copy(run / "summary.json", copy)
    carried(copy, tmp_path / "store", kept)
    assert list(kept.runs) == ["run"]
    assert kept.runs["run"]["curves"] == curves_of_steps(run)
    assert len(kept.runs["run"]["tables"]) == 1


def curves_of_steps_of(lines, tmp_path):
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "events.jsonl").write_bytes(b"".join(lines))
    return curves_of_steps(tmp_path / "part")


def test_rows_that_a_resume_cut_off_and_wrote_again_are_not_exported_twice(run, copy, tmp_path):
    kept, whole = Kept(), lines_of(run)
    cut(copy, len(whole) - 2)
    carried(copy, tmp_path / "store", kept)
    again = [line.replace(b'"time":1', b'"time":2') for line in whole]  # the same rows, written at another time
    cut(copy, 8)
    carried(copy, tmp_path / "store", kept)  # fewer rows than were exported
    (copy / "events.jsonl").write_bytes(b"".join(whole[:8] + again[8:]))
    carried(copy, tmp_path / "store", kept)
    assert list(kept.runs) == ["run"]
    assert kept.runs["run"]["curves"] == curves_of_steps(run)


def test_rows_that_a_resume_changed_are_not_exported_twice_and_a_new_run_gets_a_name_of_its_own(copy, tmp_path):
    kept = Kept()
    carried(copy, tmp_path / "store", kept)
    old = {name: list(values) for name, values in kept.runs["run"]["curves"].items()}
    lines = [json.loads(line) for line in lines_of(copy)]
    (last,) = [row for row in lines if row["kind"] == "step" and row["step"] == 5]
    last["metrics"][0] = 0.125
    further = {**last, "step": 6}
    (copy / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*lines, further]))
    assert carried(copy, tmp_path / "store", kept).points == 1
    changed = kept.runs["run"]["curves"]
    assert {name: values[:-1] for name, values in changed.items()} == old
    assert changed["metric/best"][-1][0] == 6
    os.utime(copy / "environment.json", ns=(1, 1))  # as if another run had taken the folder (--overwrite)
    exported = carried(copy, tmp_path / "store", kept)
    assert exported.name == "run-2"
    assert kept.runs["run-2"]["curves"] == curves_of_steps(copy)
    assert carried(copy, tmp_path / "store", kept).points == 0


def test_a_process_that_is_killed_while_it_exports_writes_nothing_twice(run, tmp_path):
    class Dies(Kept):
        def flush(self):
            raise KeyboardInterrupt

        def close(self):
            raise KeyboardInterrupt

    kept = Dies()
    with pytest.raises(KeyboardInterrupt):
        carried(run, tmp_path / "store", kept)
    kept.__class__ = Kept
    assert carried(run, tmp_path / "store", kept).points == 0
    assert kept.runs["iris"]["curves"] == curves_of_steps(run)


def test_a_run_that_goes_on_is_exported_as_it_grows_and_equals_an_export_afterwards(run, copy, tmp_path):
    kept, lines = Kept(), lines_of(run)
    path = copy / "events.jsonl"
    path.write_bytes(b"")
    ends = iter(range(0, len(lines) + 7, 7))

    def more():
        end = next(ends, None)
        if end is not None:
            path.write_bytes(b"".join(lines[:end]) + b"".join(lines[end : end + 1])[:5] * (end < len(lines)))
        return end is not None

    carried(copy, tmp_path / "live", kept, more)
    after = Kept()
    carried(run, tmp_path / "after", after)
    assert kept.runs["run"]["curves"] == after.runs["iris"]["curves"]
    assert kept.runs["run"]["tables"] == after.runs["iris"]["tables"]
    assert kept.said.count("open") == 1


def test_a_follower_that_sees_rows_cut_off_and_written_again_goes_on_with_the_same_run(run, copy, tmp_path):
    kept, lines = Kept(), lines_of(run)
    steps = iter([20, 12, len(lines)])

    def more():
        end = next(steps, None)
        if end is not None:
            (copy / "events.jsonl").write_bytes(b"".join(lines[:end]))
        return end is not None

    carried(copy, tmp_path / "store", kept, more)
    assert list(kept.runs) == ["run"]
    assert kept.runs["run"]["curves"] == curves_of_steps(run)


class Breaks(Kept):
    def scalars(self, x, time, values):
        if x == 3:
            raise OSError("no room")
        super().scalars(x, time, values)


def test_after_a_target_failed_the_run_is_exported_anew_under_another_name(run, tmp_path):
    broken, kept = Breaks(), Kept()
    with pytest.raises(ExportError, match=r"the export of .*iris to kept in .*store stopped: OSError: no room"):
        carried(run, tmp_path / "store", broken)
    assert "close" not in broken.said
    assert carried(run, tmp_path / "store", kept).name == "iris-2"
    assert kept.runs["iris-2"]["curves"] == curves_of_steps(run)


def test_a_training_has_a_point_for_each_round_with_its_figures_and_those_of_its_populations(tmp_path):
    learner = {"rounds": 2, "imitation_rounds": 1, "validate_envs": 2, "validate_every": 1}
    esper.train("iris", {"envs": 8, "steps": 4, "ppo": learner}, run=tmp_path / "t", progress=False)
    kept = Kept()
    exported = carried(tmp_path / "t", tmp_path / "store", kept)
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
    assert drawing("$\\frac{1}{ & [bold] \x07", boxes).shape == (194, 1000, 3)
    table = FinalTable(["network", "test <i>|"], [("a`|*[x](http://a) \x1b[31m", "1\n2")])
    assert as_markdown(table).splitlines() == [
        "| network | test &lt;i&gt;\\| |",
        "| --- | --- |",
        "| a\\`\\|\\*\\[x](http://a) \\x1b\\[31m | 1\\n2 |",
    ]


def test_a_folder_with_other_files_or_another_target_is_refused_and_left_alone(run, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"holds other files and no exports; name a new or an empty folder \(--into\)"):
        Exports(tmp_path, "wandb", run)
    with pytest.raises(InputError, match=r"notes\.txt cannot be read as a folder: Not a directory"):
        Exports(tmp_path / "notes.txt", "wandb", run)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    Exports(tmp_path / "a", "wandb", run).make()
    with pytest.raises(InputError, match="holds exports to wandb, not to mlflow; name another folder"):
        Exports(tmp_path / "a", "mlflow", run)
    exports = Exports(tmp_path / "a", "wandb", run)
    exports.write(exports.read(0))
    (record,) = (tmp_path / "a" / KEPT).glob("*/record.json")
    record.write_text("{")
    with pytest.raises(InputError, match=r"record\.json is damaged .*; remove the folder of exports, and export again"):
        exports.read(0)


def test_the_session_of_a_killed_exporter_is_written_again_where_its_target_had_kept_it_in_memory(run, copy, tmp_path):
    store, lost, again = tmp_path / "store", Kept(), Kept()
    lost.session = "sessions/1"
    exports = Exports(store, "kept", copy)
    exports.make()
    (store / lost.session).mkdir(parents=True)
    cut(copy, 12)
    killed = Export(esper.open_run(copy), exports, lost, lambda run, summary: None)
    killed.update()
    assert lost.said == ["open", "flush"]
    shutil.copy(run / "events.jsonl", copy)
    shutil.copy(run / "summary.json", copy)
    again.runs = {killed.record.name: {"curves": defaultdict(list), "images": [], "tables": [], "facts": {}, "x": -1}}
    carried(copy, store, again)
    assert again.runs[killed.record.name]["curves"] == curves_of_steps(run)
    assert not (store / lost.session).exists()
    assert exports.read(killed.record.began).session is None


def test_a_record_whose_session_lies_elsewhere_is_refused_and_nothing_is_removed(copy, tmp_path):
    exports = Exports(tmp_path / "store", "kept", copy)
    exports.make()
    (tmp_path / "mine").mkdir()
    record = exports.read((copy / "environment.json").stat().st_mtime_ns)
    for session in ("../mine", ".", str(tmp_path / "mine")):
        record.session = session
        exports.write(record)
        with pytest.raises(InputError, match=r"record\.json is damaged \(its session .* is not in .*store\)"):
            carried(copy, tmp_path / "store", Kept())
    assert (tmp_path / "mine").exists()


def test_two_runs_of_one_name_have_names_of_their_own_in_a_shared_folder(run, tmp_path):
    kept = Kept()
    names = []
    for parent in ("a", "b"):
        shutil.copytree(run, tmp_path / parent / "x y\x07<b>")
        names.append(carried(tmp_path / parent / "x y\x07<b>", tmp_path / "store", kept).name)
    assert names == ["x-y-b", "x-y-b-2"]
    assert kept.runs["x-y-b"]["curves"] == kept.runs["x-y-b-2"]["curves"]


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


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.filterwarnings("error::esper.leyline.errors.RunWarning")
def test_an_exporter_that_fails_is_reported_once_with_its_reason(tmp_path, waits):
    exporter = Exporter(tmp_path / "none", "tensorboard", lambda run, summary: None)
    row = RoundRow(round=0, seconds=0.0, figures={})
    exporter.write(row)
    if waits:
        exporter._job.exception(60)
    with pytest.warns(RunWarning) as caught:
        exporter.write(row) if waits else exporter.close()
    (told,) = [str(each.message) for each in caught]
    exporter.write(row)  # a warning would now be an error
    exporter.close()
    assert told.startswith("the exporter to tensorboard failed and was dropped, and the run is not affected: ")
    assert f"{tmp_path / 'none'} is not a run folder" in told
    assert told.endswith(f"; `esper export-events {tmp_path / 'none'} --to tensorboard` exports the run afterwards")


def test_an_exporter_beside_a_run_writes_what_an_export_afterwards_writes(tmp_path, monkeypatch):
    live, after = Kept(), Kept()
    monkeypatch.setattr("esper.karn.exporters.MAKE", {"tensorboard": lambda folder: live})
    monkeypatch.setattr("esper.karn.exporters.check_installed", lambda target: None)
    monkeypatch.setattr("esper.karn.exporters.EVERY", 0.0)
    exporter = Exporter(tmp_path / "iris", "tensorboard", lambda run, summary: None)
    esper.grow("iris", SETTINGS, controller="random-valid", run=tmp_path / "iris", outputs=[exporter], progress=False)
    carried(tmp_path / "iris", tmp_path / "after", after)
    for part in ("curves", "tables", "images", "facts"):
        assert live.runs["iris"][part] == after.runs["iris"][part]
    assert live.said[-1] == "close"
    assert curves_of_steps(tmp_path / "iris") == live.runs["iris"]["curves"]
