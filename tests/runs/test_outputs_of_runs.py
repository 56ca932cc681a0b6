"""Check that outputs that a user gives to a run get every row, and that an error of theirs does not stop it."""

import signal
import threading
import time
from contextlib import closing

import msgspec
import numpy as np
import pytest

import esper
from esper.leyline.lifecycle.masks import complete, defaults
from esper.leyline.lifecycle.vocabulary import Op
from esper.leyline.messages import RunWarning
from esper.nissa.events import encode, read_events
from esper.nissa.hub import Guarded, Hub
from esper.nissa.rows import PhasesRow, RoundRow, RunRow, StepRow
from esper.tamiyo.rules.base import Rule
from populations import Memory

SETTINGS = {"envs": 2, "steps": 4, "models": "none", "baselines": []}


class Table(Memory):
    """Keeps rows as they are in the file, and counts its calls of close."""

    def __init__(self):
        super().__init__()
        self.closed = 0

    def write(self, row):
        self.rows.append(encode(row))

    def close(self):
        self.closed += 1


class Breaks(Table):
    """Raises an error at a row."""

    def __init__(self, at):
        super().__init__()
        self.at = at

    def write(self, row):
        super().write(row)
        if row.seq >= self.at:
            raise KeyError("no room")


class BreaksAtEnd(Table):
    def close(self):
        raise OSError("gone")


def grown(path, *outputs, **more):
    return esper.grow(
        "iris", SETTINGS | more, controller="random-valid", run=path, outputs=list(outputs), progress=False
    )


def test_an_output_gets_the_rows_of_the_file(tmp_path):
    table = Table()
    grown(tmp_path / "r", table)
    assert b"".join(table.rows) == (tmp_path / "r" / "events.jsonl").read_bytes()
    assert table.closed == 1


def test_an_output_gets_rows_without_a_folder():
    table, memory = Table(), Memory()
    grown(None, table, memory)
    assert [type(row) for row in memory.rows[:1] + memory.rows[-1:]] == [RunRow, RunRow]
    assert sum(isinstance(row, StepRow) for row in memory.rows) == 4
    assert [msgspec.json.decode(row)["seq"] for row in table.rows] == list(range(len(memory.rows)))


def test_an_output_gets_the_rows_that_the_level_keeps():
    table, memory = Table(), Memory()
    grown(None, memory, telemetry={"level": "run"})
    grown(None, table, telemetry={"level": "off"})
    assert not any(isinstance(row, StepRow) for row in memory.rows)
    assert memory.rows
    assert table.rows == []


def test_an_output_that_raises_is_reported_once_and_dropped_and_the_run_goes_on(tmp_path):
    broken, table = Breaks(at=3), Table()
    with pytest.warns(RunWarning) as caught:
        summary = grown(tmp_path / "r", broken, table)
    (told,) = [str(each.message) for each in caught if each.category is RunWarning]
    assert told == "write of the output Breaks raised KeyError: 'no room'; the run goes on without this output"
    assert summary["status"] == "finished"
    assert (len(broken.rows), broken.closed) == (4, 0)
    assert len(table.rows) == len(list(read_events(tmp_path / "r" / "events.jsonl")))


def test_an_output_that_cannot_be_closed_is_reported():
    with pytest.warns(RunWarning, match="close of the output BreaksAtEnd raised OSError: gone"):
        assert grown(None, BreaksAtEnd())["status"] == "finished"


def test_an_interrupt_within_an_output_is_no_error_of_it():
    class Interrupts(Table):
        def write(self, row):
            raise KeyboardInterrupt

    guarded = Guarded(Interrupts())
    guarded.write_all([RoundRow(round=0, seconds=0.0, figures={})])
    with pytest.raises(KeyboardInterrupt):
        guarded.close()
    assert guarded.output is not None


class Slow(Table):
    """Takes its time for each row, and keeps the threads that called it."""

    def __init__(self, seconds=0.002):
        super().__init__()
        self.seconds, self.threads = seconds, set()

    def write(self, row):
        time.sleep(self.seconds)
        self.threads.add(threading.current_thread())
        super().write(row)


def lines(path):
    return (path / "events.jsonl").read_bytes()


def test_a_slow_output_has_every_row_once_and_in_order_when_the_run_ends(tmp_path):
    slow = Slow()
    summary = grown(tmp_path / "r", slow)
    assert b"".join(slow.rows) == lines(tmp_path / "r")
    assert (slow.closed, len(slow.threads)) == (1, 1)
    assert threading.main_thread() not in slow.threads
    assert summary["outputs"] == {"waits": 0, "waiting_seconds": 0.0}


def test_a_run_without_outputs_says_nothing_of_waits(tmp_path):
    assert "outputs" not in grown(tmp_path / "r")


class Gate(Slow):
    """Takes no row until it is open."""

    def __init__(self):
        super().__init__(0.0)
        self.open = threading.Event()

    def write(self, row):
        assert self.open.wait(60)
        super().write(row)


def rounds(count):
    return [RoundRow(round=number, seconds=0.0, figures={}) for number in range(count)]


def when_it_waits(backlog, event):
    """Set an event once a backlog has held its caller."""
    while not backlog.waits:
        time.sleep(0.001)
    event.set()


def test_rows_wait_in_the_queue_and_a_full_one_holds_the_run_until_there_is_room():
    gate = Gate()
    hub = Hub([guarded := Guarded(gate, most=10)])
    hub.extend(rounds(6))
    hub.extend(rounds(4))
    assert (guarded.backlog.size, hub.waits()) == (10, {"waits": 0, "waiting_seconds": 0.0})
    opener = threading.Thread(target=lambda: when_it_waits(guarded.backlog, gate.open))
    opener.start()
    hub.emit(*rounds(1))
    opener.join()
    waits = hub.waits()
    assert waits["waits"] == 1
    assert 0 <= waits["waiting_seconds"] <= hub.seconds + 0.001
    hub.close()
    assert [msgspec.json.decode(row)["seq"] for row in gate.rows] == list(range(11))


def test_an_interrupted_wait_for_room_loses_no_row_and_no_number(monkeypatch):
    gate = Gate()
    hub = Hub([guarded := Guarded(gate, most=1)])
    with monkeypatch.context() as patch:
        patch.setattr(guarded.backlog, "wait_for_room", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            hub.extend(rounds(3))
    gate.open.set()
    hub.emit(*rounds(1))
    hub.close()
    assert [msgspec.json.decode(row)["seq"] for row in gate.rows] == [0, 1, 2, 3]


def test_the_rows_of_phases_count_the_waits(monkeypatch):
    monkeypatch.setattr(Guarded.__init__, "__defaults__", (None, 0))
    memory = Memory()
    summary = grown(None, Slow(), memory, telemetry={"sensor_rows_every": 1})
    phases = [row for row in memory.rows if isinstance(row, PhasesRow)]
    assert 0 < sum(row.output_waits for row in phases) <= summary["outputs"]["waits"]
    assert 0 < sum(row.output_wait_seconds for row in phases) <= summary["outputs"]["waiting_seconds"] + 0.001
    assert 0 < summary["outputs"]["waiting_seconds"] <= summary["phase_seconds"]["writing"] + 0.001


def test_a_run_that_fails_has_given_its_rows_to_a_slow_output(tmp_path):
    class Fails(Rule):
        def act(self, view):
            if view.step == 2:
                raise ZeroDivisionError("at step 2")
            envs = len(view.host_params)
            return complete(view.masks, np.full(envs, Op.WAIT), np.zeros(envs, np.int64), defaults(view.space))

    slow = Slow(0.01)
    with pytest.raises(Exception, match="at step 2"):
        esper.grow("iris", SETTINGS, controller=Fails(), run=tmp_path / "r", outputs=[slow], progress=False)
    assert b"".join(slow.rows) == lines(tmp_path / "r")
    assert msgspec.json.decode(slow.rows[-1])["status"] == "failed"
    assert slow.closed == 1


def test_an_interrupted_run_has_given_its_rows_to_a_slow_output(tmp_path):
    class Interrupts(Slow):
        def write(self, row):
            super().write(row)
            if isinstance(row, StepRow) and row.step == 1:
                signal.raise_signal(signal.SIGINT)

    slow = Interrupts(0.005)
    with pytest.raises(KeyboardInterrupt, match="its folder is complete"):
        grown(tmp_path / "r", slow, steps=400)
    assert msgspec.json.decode(slow.rows[-1])["status"] == "interrupted"
    assert b"".join(slow.rows) == lines(tmp_path / "r")


def test_a_long_wait_at_the_end_is_noted(monkeypatch):
    monkeypatch.setattr("esper.nissa.hub._PATIENCE", 0.01)
    notes, gate = [], Gate()

    def note(text):
        notes.append(text)
        gate.open.set()

    with closing(Hub([Guarded(gate, note)])) as hub:
        hub.extend(rounds(5))
    assert notes == ["waiting for the output Gate, which has 5 rows to take"]
    assert len(gate.rows) == 5


def test_a_resumed_run_hands_its_further_rows_to_outputs(tmp_path):
    grown(tmp_path / "r")
    memory = Memory()
    esper.resume(tmp_path / "r", settings={"steps": 6}, outputs=[memory], progress=False)
    rows = list(read_events(tmp_path / "r" / "events.jsonl"))
    assert [row.seq for row in rows] == list(range(len(rows)))
    assert [row.seq for row in memory.rows] == list(range(len(rows) - len(memory.rows), len(rows)))
    assert [row.step for row in memory.rows if isinstance(row, StepRow)] == [4, 5]


def test_a_training_hands_its_rows_to_outputs():
    memory = Memory()
    settings = {"envs": 8, "steps": 4, "ppo": {"rounds": 1, "imitation_rounds": 0, "validate_envs": 2}}
    summary = esper.train("iris", settings, outputs=[memory], progress=False)
    (row,) = [row for row in memory.rows if isinstance(row, RoundRow)]
    assert (row.round, row.figures["output_wait_seconds"]) == (0, 0.0)
    assert summary["outputs"] == {"waits": 0, "waiting_seconds": 0.0}
    assert isinstance(memory.rows[-1], RunRow)
