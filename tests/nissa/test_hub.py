import json
import signal
import subprocess
import sys
from contextlib import closing

import pytest

from esper.nissa.events import read_events
from esper.nissa.hub import Hub, JsonLines
from esper.nissa.rows import LifecycleRow, Row, StepRow
from esper.store.disk import Unwritable
from populations import Memory


def change(env: int = 0) -> LifecycleRow:
    return LifecycleRow(
        episode=0, step=0, env=env, slot="a", from_stage="DORMANT", to_stage="GERMINATED", blueprint="mlp", alpha=0.0
    )


def step() -> StepRow:
    return StepRow(
        episode=0,
        step=0,
        metrics=[0.5],
        losses=[1.0],
        train_losses=[1.0],
        stages=[[0]],
        alphas=[[0.0]],
        added_param_counts=[0],
    )


def rows(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_are_numbered_from_0_without_a_gap(tmp_path):
    with closing(Hub([JsonLines(tmp_path / "events.jsonl")])) as hub:
        hub.extend(change(env) for env in range(5))
        hub.emit(step())
    written = rows(tmp_path / "events.jsonl")
    assert [row["seq"] for row in written] == list(range(6))
    assert all(row["time"] > 0 and row["kind"] for row in written)


def test_numbers_go_on_where_they_stopped(tmp_path):
    path = tmp_path / "events.jsonl"
    with closing(Hub([JsonLines(path)])) as hub:
        hub.extend([change(), change()])
    before = hub.seq
    with closing(Hub([JsonLines(path)])) as hub:
        hub.seq = before
        hub.emit(change())
    assert [row["seq"] for row in rows(path)] == [0, 1, 2]


@pytest.mark.parametrize(("level", "kinds"), [("off", []), ("run", [LifecycleRow]), ("step", [StepRow, LifecycleRow])])
def test_a_level_leaves_out_rows_but_no_numbers(level, kinds):
    memory = Memory()
    with closing(Hub([memory], level)) as hub:
        hub.extend([step(), change()])
    assert [type(row) for row in memory.rows] == kinds
    assert [row.seq for row in memory.rows] == list(range(len(kinds)))
    assert [kind for kind in (StepRow, LifecycleRow) if hub.wants(kind)] == kinds


def test_every_output_gets_every_row(tmp_path):
    first, second = Memory(), Memory()
    with closing(Hub([first, second])) as hub:
        hub.extend([step(), change()])
    assert first.rows == second.rows
    assert len(first.rows) == 2


def test_a_hub_without_outputs_keeps_no_rows():
    with closing(Hub()) as hub:
        assert not hub.wants(StepRow)
        hub.emit(step())
    assert hub.seq == 0


def test_a_restoration_raises_the_level_for_some_steps():
    with closing(Hub([Memory()], "run", raise_steps=2)) as hub:
        seen = []
        for restored in (False, True, False, False, True, True, False, False):
            hub.begin_step(restored=restored)
            seen.append(hub.wants(StepRow))
            hub.end_step()
    assert seen == [False, True, True, False, True, True, True, False]


@pytest.mark.parametrize("level", ["off", "step", "debug"])
def test_only_the_level_run_is_raised(level):
    with closing(Hub([Memory()], level, raise_steps=2)) as hub:
        before = hub.wants(StepRow), hub.wants(LifecycleRow)
        hub.begin_step(restored=True)
        assert (hub.wants(StepRow), hub.wants(LifecycleRow)) == before


def test_a_row_is_in_the_file_when_emit_returns(tmp_path):
    with closing(Hub([JsonLines(tmp_path / "events.jsonl")])) as hub:
        hub.emit(change())
        assert len(rows(tmp_path / "events.jsonl")) == 1


def test_rows_that_are_given_together_are_those_of_one_by_one(tmp_path):
    paths = tmp_path / "one.jsonl", tmp_path / "other.jsonl"
    together, memory = JsonLines(paths[1]), Memory()
    with closing(Hub([JsonLines(paths[0])])) as one, closing(Hub([together, memory])) as other:
        for _ in range(5):
            one.emit(change())
        other.emit(change())
        other.extend(change() for _ in range(4))
        assert other.seq == one.seq == 5
        assert other.state()["events"]["bytes"] == paths[1].stat().st_size
    untimed = [[{**row, "time": 0} for row in rows(path)] for path in paths]
    assert untimed[0] == untimed[1]
    assert [row.seq for row in memory.rows] == [0, 1, 2, 3, 4]


def test_of_rows_that_cannot_all_be_written_none_is_left(tmp_path):
    written = []

    def half(path, write):
        written.append(path)
        if len(written) > 2:  # the file was opened and its first row written
            with open(path, "ab") as file:
                file.write(b"half of the rows")
            raise OSError(28, "No space left on device")
        write()

    with closing(Hub([JsonLines(tmp_path / "events.jsonl", half)])) as hub:
        hub.emit(change())
        with pytest.raises(Unwritable, match="No space left"):
            hub.extend([change(), change()])
        assert hub.seq == 1
    assert len(rows(tmp_path / "events.jsonl")) == 1


WRITER = """
import sys
from contextlib import closing
from pathlib import Path
from esper.nissa.hub import Hub, JsonLines
from esper.nissa.rows import RoundRow
with closing(Hub([JsonLines(Path(sys.argv[1]))])) as hub:
    while True:
        hub.extend(RoundRow(round=n, seconds=0.5, figures={"loss": n / 7}) for n in range(50))
        print(hub.seq, flush=True)
"""


def test_a_process_that_is_killed_leaves_every_row_that_it_had_written(tmp_path):
    path = tmp_path / "events.jsonl"
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        told = [int(process.stdout.readline()) for _ in range(20)]
        process.kill()
        told += [int(line) for line in process.stdout]
    assert process.returncode == -signal.SIGKILL
    found = list(read_events(path))
    assert [row.seq for row in found] == list(range(len(found)))
    assert len(found) >= told[-1] >= 1000
    assert [row.round for row in found] == [number % 50 for number in range(len(found))]


def test_a_line_that_is_cut_at_any_byte_is_no_row(tmp_path):
    path = tmp_path / "events.jsonl"
    with closing(Hub([JsonLines(path)])) as hub:
        hub.extend([change(0), change(1)])
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for end in range(first, len(whole)):
        path.write_bytes(whole[:end])
        assert [row.env for row in read_events(path)] == [0]


def test_no_rows_no_file(tmp_path):
    with closing(Hub([JsonLines(tmp_path / "events.jsonl")], "off")) as hub:
        hub.emit(change())
        hub.flush()
    assert not (tmp_path / "events.jsonl").exists()


def test_a_full_disk_stops_the_run_with_a_sentence(full_device, tmp_path):
    def full(path, write):
        full_device.write_bytes(b"rows")

    with (
        closing(Hub([JsonLines(tmp_path / "events.jsonl", full)])) as hub,
        pytest.raises(Unwritable, match="No space left"),
    ):
        hub.emit(change())


def test_a_file_that_cannot_be_opened_is_named(tmp_path):
    missing = tmp_path / "absent" / "events.jsonl"
    with closing(Hub([JsonLines(missing)])) as hub, pytest.raises(Unwritable, match="absent"):
        hub.emit(change())


def test_a_failed_output_takes_no_number():
    class Broken(Memory):
        def write(self, row: Row) -> None:
            raise Unwritable("broken")

    hub = Hub([Broken()])
    with pytest.raises(Unwritable):
        hub.emit(change())
    assert hub.seq == 0
