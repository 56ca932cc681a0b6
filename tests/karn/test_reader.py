"""Test the reader of run folders: it gives the same rows whether a run goes on, has ended or was killed, in whatever chunks."""

import csv
import json
import shutil
import subprocess
import sys
import threading

import numpy as np
import pandas
import pytest

import esper
from esper.karn.reader import Tail
from esper.leyline.messages import InputError
from esper.nissa.events import read_events
from esper.nissa.rows import KINDS
from iris import grow_iris, printed

SETTINGS = {"envs": 3, "steps": 6, "models": "none", "baselines": ["twin"]}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return grow_iris(tmp_path_factory.mktemp("runs") / "iris")


def test_an_ended_run_gives_its_config_its_figures_and_its_steps_as_arrays(run):
    opened = esper.open_run(run)
    assert opened.status == "finished"
    assert opened.config["envs"] == 3
    assert opened.summary["status"] == "finished"
    assert opened.environment["esper"]
    steps = opened.steps
    assert steps["metrics"].shape == (6, 3)
    assert steps["stages"].shape == steps["alphas"].shape == (6, 3, 2)
    line = json.loads((run / "events.jsonl").read_text().splitlines()[int(steps["seq"][0])])
    assert steps["metrics"][0].tolist() == line["metrics"]
    gains = opened.columns("measurement")["gain_means"]
    assert gains.shape[1:] == (3, 2)
    assert np.isnan(gains).any()
    assert set(opened.lifecycle["env"]) <= {0, 1, 2}
    assert sorted(opened.episodes["env"]) == [0, 1, 2]
    assert opened.rounds == {}


def test_what_was_not_measured_is_nan_and_never_0(run):
    gains = esper.open_run(run).lifecycle["gain_mean"]
    assert gains.dtype == float
    absent = [row.gain_mean is None for row in esper.open_run(run).rows("lifecycle")]
    assert np.isnan(gains).tolist() == absent
    assert any(absent)


@pytest.mark.parametrize("kind", ["run", "step", "lifecycle", "episode"])
def test_a_frame_has_a_column_for_every_field_and_a_row_for_every_row(run, kind):
    frame, rows = esper.open_run(run).frame(kind), list(esper.open_run(run).rows(kind))
    assert list(frame.columns) == list(KINDS[kind].__struct_encode_fields__)
    assert frame["seq"].tolist() == [row.seq for row in rows]


def test_a_journal_read_in_any_chunks_gives_the_rows_of_one_that_is_read_at_once(run, tmp_path):
    lines, every = (
        (run / "events.jsonl").read_bytes().splitlines(keepends=True),
        list(read_events(run / "events.jsonl")),
    )
    for size, rows in ((1, 12), (7, 12), (100, len(every)), (1000, len(every)), (10**9, len(every))):
        data, whole = b"".join(lines[:rows]), every[:rows]
        path = tmp_path / f"{size}.jsonl"
        again, found = [], []
        tail = Tail(path, lambda again=again: again.append(1))
        with path.open("wb", buffering=0) as file:
            for begin in range(0, len(data), size):
                file.write(data[begin : begin + size])
                found += tail.read()
        assert found == whole
        assert not again


@pytest.mark.parametrize("most", [1, 500, 10**9])
def test_a_tail_that_is_read_in_parts_gives_every_row_once(run, most):
    tail, found = Tail(run / "events.jsonl"), []
    while rows := tail.read(most):
        found += rows
    assert found == list(read_events(run / "events.jsonl"))


@pytest.mark.parametrize("most", [500, 10**9])
def test_a_tail_leaves_rows_that_come_while_it_is_read_to_the_next_time(run, tmp_path, most):
    path, lines = tmp_path / "events.jsonl", (run / "events.jsonl").read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:20]))
    tail, seen, ahead = Tail(path), [], iter(lines[20:])
    for rows in tail.parts(most):
        seen += rows
        with open(path, "ab") as file:
            file.writelines(next(ahead) for _ in rows)
    assert 20 <= len(seen) < len(lines) - 1
    for rows in tail.parts(most):
        seen += rows
    assert [row.seq for row in seen] == list(range(len(seen)))
    assert path.read_bytes() == b"".join(lines[: len(seen)])


def test_after_rows_were_cut_off_and_written_again_a_tail_begins_anew(run, tmp_path):
    path, lines = tmp_path / "events.jsonl", (run / "events.jsonl").read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:6]))
    again = []
    tail = Tail(path, lambda: again.append(1))
    assert len(tail.read()) == 6
    path.write_bytes(b"".join(lines[:4]))
    assert [row.seq for row in tail.read()] == [0, 1, 2, 3]
    assert again == [1]
    path.write_bytes(b"".join(lines))
    assert [row.seq for row in tail.read()] == list(range(4, len(lines)))


def test_a_run_whose_process_is_gone_without_a_last_row_was_killed(run, tmp_path):
    folder = tmp_path / "killed"
    shutil.copytree(run, folder)
    lines = (folder / "events.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "events.jsonl").write_bytes(b"".join(lines[:5]) + lines[5][:20])
    (folder / "summary.json").unlink()
    opened = esper.open_run(folder)
    assert opened.status == "killed"
    assert opened.summary is None
    assert [row.seq for row in opened.rows()] == [0, 1, 2, 3, 4]


@pytest.mark.campaign
def test_a_run_in_progress_is_followed_to_its_end(tmp_path):
    folder = tmp_path / "live"
    command = [sys.executable, "-m", "esper", "grow", "iris", "--envs", "2", "--steps", "12", "--models", "none"]
    with subprocess.Popen([*command, "--run", str(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        while not (folder / "events.jsonl").exists():
            assert process.poll() is None, process.stderr.read()
            threading.Event().wait(0.02)
        opened = esper.open_run(folder)
        statuses, seen = {opened.status}, []
        for row in opened.follow(every=0.05):
            seen.append(row.seq)
        process.communicate()
    assert statuses == {"running"}
    assert opened.status == "finished"
    assert seen == [row.seq for row in read_events(folder / "events.jsonl")]


def test_a_run_without_telemetry_has_no_rows_and_a_status(tmp_path):
    settings = {**SETTINGS, "steps": 2, "telemetry": {"level": "off"}}
    esper.grow("iris", settings, controller="never", run=tmp_path / "silent", progress=False)
    opened = esper.open_run(tmp_path / "silent")
    assert (opened.status, list(opened.rows()), opened.steps) == ("finished", [], {})


def test_the_command_prints_the_rows_as_the_file_has_them(run, capsys):
    assert printed(capsys, "events", run) == (0, (run / "events.jsonl").read_text(), "")
    code, out, _ = printed(capsys, "events", run, "--kind", "episode")
    assert code == 0
    assert [json.loads(line)["kind"] for line in out.splitlines()] == ["episode"] * 3


def test_csv_and_parquet_hold_what_the_rows_do(run, tmp_path, capsys):
    _, out, _ = printed(capsys, "events", run, "--kind", "step", "--format", "csv")
    read, rows = list(csv.DictReader(out.splitlines())), list(esper.open_run(run).rows("step"))
    assert [json.loads(row["metrics"]) for row in read] == [row.metrics for row in rows]
    assert [int(row["step"]) for row in read] == list(range(6))
    target = tmp_path / "lifecycle.parquet"
    assert printed(capsys, "events", run, "--kind", "lifecycle", "--format", "parquet", "--out", target)[0] == 0
    pandas.testing.assert_frame_equal(pandas.read_parquet(target), esper.open_run(run).frame("lifecycle"))


@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet"])
def test_a_table_that_finds_no_room_leaves_the_earlier_one(run, tmpfs, capsys, form):
    target = tmpfs.path / f"step.{form}"
    target.write_bytes(b"earlier")
    tmpfs.fill()
    code, _, err = printed(capsys, "events", run, "--kind", "step", "--format", form, "--out", target)
    assert code == 1
    assert (
        err
        == f"error: cannot write {target}: No space left on device; make room there, and give the same command again\n"
    )
    assert target.read_bytes() == b"earlier"
    assert {path.name for path in tmpfs.path.iterdir()} == {target.name, tmpfs.filler.name}


def test_events_behind_a_link_and_in_a_pipe_are_written_where_they_lead(run, tmp_path, capsys):
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert printed(capsys, "events", run, "--out", tmp_path / "link")[0] == 0
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == (run / "events.jsonl").read_text()
    assert printed(capsys, "events", run, "--out", "/dev/stderr") == (0, "", "")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--kind", "stp"], "unknown kind of rows 'stp'; choose one of run, environment, step,"),
        (["--format", "xml"], "--format is 'xml'; choose one of jsonl, csv, parquet"),
        (["--format", "csv"], "--format csv is a table of one kind of rows; add --kind, for example --kind step"),
        (["--kind", "step", "--format", "parquet"], "--format parquet is a binary file; name it with --out FILE"),
        (["--kind", "step", "--format", "csv", "--follow"], "--follow prints jsonl, and --format is csv"),
        (["--out", "/no/such/folder/x"], "/no/such/folder/x cannot be written: No such file or directory"),
    ],
)
def test_options_that_do_not_go_together_are_refused_in_a_sentence(run, capsys, arguments, sentence):
    code, out, err = printed(capsys, "events", run, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {sentence}")


def test_a_folder_without_a_run_and_a_damaged_line_are_named(run, tmp_path):
    with pytest.raises(InputError, match=r"is not a run folder: it has no config\.yaml"):
        esper.open_run(tmp_path)
    folder = tmp_path / "damaged"
    shutil.copytree(run, folder)
    with open(folder / "events.jsonl", "ab") as file:
        file.write(b"{}\n")
    with pytest.raises(InputError, match=r"line \d+ of .*events\.jsonl: not a row"):
        list(esper.open_run(folder).rows())
