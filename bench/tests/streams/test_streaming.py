"""Test comparisons on streams: the record, the folder, and the command."""

import json
import os
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from esper.cli import main
from esper.leyline.messages import InputError
from esper.store.lock import Lock
from esper_bench.streams import comparison as streaming
from esper_bench.streams.comparison import stream
from esper_bench.streams.console import print_streams
from esper_bench.streams.data import RANGES

SMALL = {"streams": 3, "updates": 40}
METHODS = ("reset-blocks", "reactivate")


@pytest.fixture(scope="module")
def record():
    return stream(METHODS, "mixture", **SMALL)


@pytest.fixture
def command(capsys, monkeypatch, tmp_path):
    """Run the command in a folder of its own; gives (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments):
        with pytest.raises(SystemExit) as end:
            main(["stream", *arguments])
        return (end.value.code or 0, *capsys.readouterr())

    return run


def test_a_record_holds_each_stream_and_what_it_is_compared_with(record):
    assert record["keys"] == [RANGES["heldout"].start + k for k in range(3)]
    assert record["changes"] == ["novel", "recurring", "recurring-shared"]
    ours, first = (record["methods"][name] for name in ("reactivate", "reset-blocks"))
    difference = np.subtract(ours["returned"], first["returned"])
    assert ours["over_reference"]["value"] == pytest.approx(difference.mean())
    assert first["over_reference"] is None
    for own, segments, returned in zip(ours["segment_accuracy"], record["segments"], ours["returned"], strict=True):
        lengths = [stop - start for start, stop, _ in segments]
        assert np.average(own, weights=lengths) == pytest.approx(returned, abs=1e-6)
    assert json.loads(json.dumps(record, allow_nan=False)) == record


def test_an_interrupted_comparison_goes_on_to_the_same_record(record, tmp_path, monkeypatch):
    monkeypatch.setattr(streaming, "EVERY", 15)

    class Asks:
        asked = True
        __init__ = lambda self, say: None  # noqa: E731
        __enter__ = lambda self: self  # noqa: E731
        __exit__ = lambda self, *error: None  # noqa: E731

    with monkeypatch.context() as once:
        once.setattr(streaming, "Interrupt", Asks)
        for _ in range(6):  # two methods, which end three times each
            with pytest.raises(KeyboardInterrupt, match="was interrupted in"):
                stream(METHODS, "mixture", out=tmp_path, **SMALL)
    assert stream(METHODS, "mixture", out=tmp_path, **SMALL) == record
    assert json.loads((tmp_path / "streams.json").read_text()) == record
    assert stream(METHODS, "mixture", out=tmp_path, **SMALL) == record


def test_another_comparison_in_the_folder_is_refused_and_replaced_on_request(tmp_path):
    stream("adamw", out=tmp_path, streams=1, updates=5)
    before = (tmp_path / "streams.json").read_bytes()
    with pytest.raises(InputError, match="holds a comparison whose updates is 5, not 6; name another folder"):
        stream("adamw", out=tmp_path, streams=1, updates=6)
    assert (tmp_path / "streams.json").read_bytes() == before
    assert stream("adamw", out=tmp_path, streams=1, updates=6, overwrite=True)["updates"] == 6


def test_a_comparison_whose_process_was_killed_goes_on_whatever_it_left(record, tmp_path, monkeypatch):
    """Kill a process before one of the renames; every call of the comparison gets one further."""
    monkeypatch.setattr(streaming, "EVERY", 25)
    renames, unlink = {name: getattr(os, name) for name in ("replace", "rename")}, Path.unlink
    for number in range(1, 100):
        left = [number]

        def killed(source, target, name="replace", left=left):
            left[0] -= 1
            if left[0] == 0:
                raise Killed
            renames[name](source, target)

        with monkeypatch.context() as once:
            for name in renames:
                once.setattr(os, name, partial(killed, name=name))
            once.setattr(Path, "unlink", lambda *path, left=left, **how: left[0] and unlink(*path, **how))
            try:
                found = stream(METHODS, "mixture", out=tmp_path / "out", **SMALL)
            except Killed:
                continue
        break
    assert found == record
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        *sorted(f"{name}.json" for name in METHODS),
        "streams.json",
    ]


class Killed(BaseException):
    """Stops a process as a kill does."""


@pytest.mark.parametrize("written", [r"/\.streams\.json", r"/\.adamw\.new/", r"/\.adamw\.json\."])
def test_on_a_full_disk_a_comparison_says_how_it_goes_on_after_it_has_printed_what_it_has(
    command, full, monkeypatch, written
):
    monkeypatch.setattr("esper.store.disk.PATIENCE", 0.0)
    call = ("adamw", "--streams", "1", "--updates", "5", "--out", "out")
    assert command(*call)[0] == 0
    disk = full(written, times=10**9)
    code, _, err = command("adamw", "--streams", "1", "--updates", "6", "--out", "out", "--overwrite")
    assert code == 1
    assert re.search(r"error: cannot write out/\S+: No space left on device; make room there, and give the same", err)
    assert "which continues the comparison" in err
    disk.times = 0
    assert command("adamw", "--streams", "1", "--updates", "6", "--out", "out", "--overwrite")[0] == 0


def test_the_record_is_printed_before_it_is_saved(command, full, monkeypatch):
    monkeypatch.setattr("esper.store.disk.PATIENCE", 0.0)
    call = ("adamw", "--streams", "1", "--updates", "5", "--out", "out", "--json")
    disk = full(r"/\.streams\.json", times=0)
    write = disk.os_write

    def second(descriptor, data):
        disk.times = 10**9 if Path("out/adamw.json").exists() else 0
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", second)
    code, out, err = command(*call)
    assert code == 1
    assert json.loads(out)["status"] == "finished"
    assert "cannot write out/streams.json: No space left on device" in err


def test_of_two_comparisons_in_one_folder_the_second_is_refused(command, tmp_path):
    (tmp_path / "out").mkdir()
    lock = Lock(tmp_path / "out", pytest.fail)
    lock.take()
    code, _, err = command("adamw", "--streams", "1", "--updates", "5", "--out", "out")
    assert code == 2
    assert f"error: process {os.getpid()} on " in err
    lock.release()


def test_a_folder_with_other_files_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(InputError, match=r"holds 'thesis.tex', which is no file of a comparison"):
        stream("adamw", out=tmp_path, streams=1, updates=5, overwrite=True)
    assert (tmp_path / "thesis.tex").read_text() == "x"


def test_a_damaged_state_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(streaming, "EVERY", 2)
    monkeypatch.setattr(streaming, "remove_folder", lambda path: None)
    stream("adamw", out=tmp_path, streams=1, updates=4)
    (tmp_path / "adamw.json").unlink()
    (tmp_path / "streams.json").write_text(
        json.dumps(
            {
                key: value
                for key, value in json.loads((tmp_path / "streams.json").read_text()).items()
                if key != "methods"
            }
        )
    )
    (tmp_path / "adamw" / "state.safetensors").write_bytes(b"x")
    with pytest.raises(
        InputError, match=r"adamw is damaged, or was saved by another version of Esper \(SafetensorError\); name"
    ):
        stream("adamw", out=tmp_path, streams=1, updates=4)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"updates": 0}, "updates is 0, so a stream has no segments; give a whole number of at least 1"),
        ({"updates": 10**11}, "updates is 100,000,000,000; give at most 1,000,000"),
        ({"out": "/dev/null/x"}, r"cannot write to /dev/null/x: Not a directory; name another folder \(--out"),
        ({"streams": True}, "streams is True; give a whole number"),
        ({"first": 10**9}, "but heldout has 65,536 streams"),
        ({"change": "sudden"}, "change is 'sudden'; give one of 'novel', 'recurring'"),
        ({"part": "test"}, "part is 'test'; give one of 'training'"),
        ({"methods": ["adamw", "adamw"]}, "name each at most once"),
        ({"methods": ["sgd"]}, "unknown method 'sgd'; the methods are"),
        ({"settings": ["ewc.strength=2"]}, "settings are given for 'ewc', which is not compared"),
        ({"settings": ["adamw=2"]}, "give METHOD.KEY=VALUE, as ensemble.lr=0.01"),
        ({"settings": {"adamw": {"lr": "fast"}}}, "adamw.lr is 'fast'; give a number of at least 0"),
        ({"settings": {"adamw": {"norm": 1}}}, "adamw.norm is 1; give true or false"),
        ({"settings": {"adamw": {"lr": -1.0}}}, "adamw.lr is -1.0; give a finite number of at least 0"),
    ],
)
def test_bad_input_is_one_sentence(given, said):
    with pytest.raises(InputError, match=said):
        stream(**{"methods": "adamw", "streams": 1, "updates": 1, **given})


def test_the_command_prints_a_row_for_each_method(command):
    code, out, err = command("reset-blocks", "adamw", "--streams", "2", "--updates", "20", "--set", "adamw.lr=0.02")
    assert code == 0, err
    assert "recurring-shared: 2 streams of 20 updates" in out
    assert [line.split()[0] for line in out.splitlines()[4:6]] == ["reset-blocks", "adamw"]
    assert "adamw: 20 of 20 updates" in err


def test_a_network_that_breaks_is_named(command):
    code, out, _ = command("adamw", "--streams", "2", "--updates", "20", "--set", "adamw.lr=1e30")
    assert code == 0
    assert "adamw: the loss of 2 streams became nan or infinite, from where on it guesses; lower adamw.lr" in out


def test_the_command_prints_the_record_that_the_call_returns(command):
    code, out, _ = command("adamw", "--streams", "1", "--updates", "10", "--json")
    assert code == 0
    assert json.loads(out) == stream("adamw", streams=1, updates=10)


def test_the_command_ends_with_2_if_the_stream_has_no_segments(command):
    code, out, err = command("--updates", "0")
    assert (code, out) == (2, "")
    assert err == "error: updates is 0, so a stream has no segments; give a whole number of at least 1\n"


def test_the_record_is_printed(record, capsys):
    print_streams(record, Console())
    assert "mixture: 3 streams of 40 updates" in capsys.readouterr().out
