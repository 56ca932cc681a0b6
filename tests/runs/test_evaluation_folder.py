"""Test the folder of `esper eval`: one for each set of arguments, one process at a time, nothing replaced unasked."""

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import esper
from esper.cli import main
from esper.leyline.data.task import Split
from esper.leyline.messages import InputError
from esper.runs.evaluation.contenders import named
from esper.runs.evaluation.evaluation import Rivals, default_folder, evaluation_folder, run_evaluation
from esper.runs.folder.interrupt import ended_by_signals
from esper.store.lock import Lock
from populations import blobs

FEW = {"instances": 1, "seeds": 1, "baselines": ()}
SHORT = {"steps": 2, "data": {"batches_per_step": 1, "batch_size": 12}, "blueprints": ["bypass-linear"]}
COMMAND = ["--tasks", "iris", "--instances", "1", "--seeds", "1", "--set", "steps=2"]
COMMAND += ["--baselines", "none"]
COMMAND += ["--set", "data.batches_per_step=1", "--set", "blueprints=[bypass-linear]"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def evaluated(**how):
    return esper.evaluate(tasks=blobs(), **FEW, settings=SHORT, out="e", progress=False, **how)


def test_a_record_is_replaced_only_where_that_is_asked_for_and_what_was_grown_is_reused():
    first = evaluated()
    before = {path: path.read_bytes() for path in Path("e").rglob("*") if path.is_file()}
    with pytest.raises(InputError, match=r"e/evaluation\.json is the record of an evaluation; .*--overwrite"):
        evaluated()
    assert {path: path.read_bytes() for path in Path("e").rglob("*") if path.is_file()} == before
    again = evaluated(overwrite=True)
    assert again["tasks"][0]["runs"] == first["tasks"][0]["runs"]  # seconds too, which were kept
    assert {path for path in Path("e").rglob("*") if path.is_file()} == set(before)


def test_an_evaluation_that_is_killed_as_its_files_are_written_is_made_again_from_what_was_grown(monkeypatch):
    replace, found = os.replace, []

    def evaluated_until(written):
        def killed(source, target):
            if Path(target).name == written:
                raise SystemExit  # nothing further is written
            replace(source, target)

        with monkeypatch.context() as once:
            once.setattr(os, "replace", killed)
            with pytest.raises(SystemExit):
                evaluated(ready=found.append)

    for written in ("evaluation.png", "report.html", "evaluation.json"):
        evaluated_until(written)
        Path("e/.evaluation.json.0123456789abcdef.tmp").write_text("{")  # which a killed process leaves
        Path("e/grown/.x.npz.0123456789abcdef.tmp").write_text("")
    last = evaluated()
    assert [record["tasks"][0]["runs"] for record in found] == [last["tasks"][0]["runs"]] * 3
    assert {path.name for path in Path("e").iterdir()} == {"evaluation.json", "evaluation.png", "report.html", "grown"}
    assert not list(Path("e/grown").glob(".*"))


def test_on_a_full_disk_an_evaluation_says_how_it_goes_on_after_it_has_printed_what_it_has(esper, full):
    command = ("eval", *COMMAND, "--out", "e", "--set", "faults.disk_seconds=0", "--set", "report=false")
    for written in (r"e/grown/iris\S+npz", "e/evaluation.png", "e/evaluation.json"):
        disk = full(written.replace("/", r"/\.?"), times=10**9)
        code, out, err = esper(*command)
        assert code == 1
        assert ("P(better)" in out) == ("npz" not in written)
        (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
        assert re.search(f"cannot write {written}: No space left on device; make room there, and give the same", line)
        assert "Traceback" not in err
        disk.times = 0
    assert esper(*command)[0] == 0


def test_what_was_grown_on_other_data_is_not_reused():
    evaluated()
    task = blobs()
    other = replace(task, test=Split(task.test.x.flip(0), task.test.y))
    grown = set(Path("e/grown").iterdir())
    esper.evaluate(tasks=other, **FEW, settings=SHORT, out="e", overwrite=True, progress=False)
    assert len(set(Path("e/grown").iterdir())) == 2 * len(grown)


def test_a_folder_that_another_process_is_at_is_left_alone():
    Path("e").mkdir()
    code = "import sys\nfrom pathlib import Path\nfrom esper.store.lock import Lock\n"
    code += "lock = Lock(Path('e'), print)\nlock.take()\nprint('taken', flush=True)\nsys.stdin.read()"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "taken\n"
        with pytest.raises(InputError, match=f"process {process.pid} on .* writes to e"):
            evaluated()
        assert [path.name for path in Path("e").iterdir()] == ["lock"]
        process.communicate("")


def test_the_lock_is_released_whatever_ends_an_evaluation():
    def leave():
        with evaluation_folder(Path("e"), pytest.fail):
            assert Path("e/lock").exists()
            raise KeyboardInterrupt

    Path("e").mkdir()
    with pytest.raises(KeyboardInterrupt):
        leave()
    assert not Path("e/lock").exists()
    Lock(Path("e"), pytest.fail).take()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_an_evaluation_in_order_unless_the_program_handles_it(number):
    def leave():
        with ended_by_signals(), evaluation_folder(Path("e"), pytest.fail):
            os.kill(os.getpid(), number)

    with pytest.raises(KeyboardInterrupt):
        leave()
    assert not Path("e").exists()
    assert signal.getsignal(number) == signal.SIG_DFL
    previous = signal.signal(number, signal.SIG_IGN)
    leave()
    signal.signal(number, previous)


def test_an_evaluation_that_is_interrupted_says_how_it_goes_on():
    class Leaving(Rivals):
        def grow(self, at, design, runner):
            raise KeyboardInterrupt

    said = []
    with pytest.raises(KeyboardInterrupt):
        run_evaluation([], [blobs()], settings=[SHORT], rivals=Leaving(), watch=said.append)
    assert said[1:] == [
        "interrupted; what was grown is stored where there is a folder, and the same command goes on from it"
    ]


def test_a_folder_under_a_file_is_named():
    Path("e").write_text("")
    with pytest.raises(InputError, match="cannot write to e"):
        evaluated()


def test_every_set_of_arguments_has_a_default_folder_of_its_own_with_a_readable_name():
    rules = [named("never")]
    usual = default_folder(rules, ["iris", "wine"], [], instances=1, seeds=2)
    assert usual == default_folder(rules, ["iris", "wine"], [], seeds=2, instances=1)
    assert usual.name.startswith("iris-wine-")
    others = {
        default_folder([], ["iris", "wine"], [], instances=1, seeds=2),
        default_folder(rules, ["wine", "iris"], [], instances=1, seeds=2),
        default_folder(rules, ["iris", "wine"], [{"steps": 3}], instances=1, seeds=2),
        default_folder(rules, ["iris", "wine"], [], instances=2, seeds=2),
    }
    assert len(others - {usual}) == 4


def test_evaluations_without_a_folder_stand_beside_each_other_and_share_what_was_grown(capsys):
    for first in ("0", "0", "1"):
        with pytest.raises(SystemExit) as end:
            main(["eval", *COMMAND, "--first", first, "--json"])
        out, err = capsys.readouterr()
        if first == "0" and end.value.code:
            assert "is the record of an evaluation" in err
    folders = sorted(Path("runs/evaluation").glob("iris-*"))
    records = [json.loads((folder / "evaluation.json").read_text()) for folder in folders]
    assert sorted(record["first_instance"] for record in records) == [0, 1]
    assert len(list(Path("runs/evaluation/grown").iterdir())) == 6  # three rules on two instances
    assert out == (folders[[record["first_instance"] for record in records].index(1)] / "evaluation.json").read_text()
