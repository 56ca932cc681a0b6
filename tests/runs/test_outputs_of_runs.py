"""Outputs that a user gives to a run: they get every row, and an error of theirs does not stop it."""

import msgspec
import pytest

import esper
from esper.leyline.errors import RunWarning
from esper.nissa.events import encode, read_events
from esper.nissa.outputs import Guarded
from esper.nissa.rows import RoundRow, RunRow, StepRow
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
    with pytest.raises(KeyboardInterrupt):
        guarded.write(RoundRow(round=0, seconds=0.0, figures={}))
    assert guarded.output is not None


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
    esper.train("iris", settings, outputs=[memory], progress=False)
    assert [row.round for row in memory.rows if isinstance(row, RoundRow)] == [0]
    assert isinstance(memory.rows[-1], RunRow)
