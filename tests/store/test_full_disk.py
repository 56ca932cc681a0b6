"""Test waiting for room on a full disk."""

import errno
import json
import os
import resource
import signal
from contextlib import closing
from dataclasses import replace

import pytest

from esper.nissa.hub import Hub, JsonLines
from esper.nissa.rows import LifecycleRow
from esper.runs.folder.interrupt import Interrupt
from esper.store import disk as module
from esper.store.disk import DiskFull, DiskRetry, Unwritable, write_atomic


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    monkeypatch.setattr(module, "EVERY", 0.005)


@pytest.fixture
def notes():
    return []


def waiting(tmp_path, notes, seconds=60.0, asked=lambda: False):
    return DiskRetry(seconds, notes.append, tmp_path, asked)


class Failing:
    """Raises an error of a number so many times, and then writes."""

    def __init__(self, times, number=errno.ENOSPC):
        self.times, self.number, self.calls = times, number, 0

    def __call__(self):
        self.calls += 1
        if self.calls <= self.times:
            raise OSError(self.number, os.strerror(self.number))


def change(blueprint="mlp"):
    return LifecycleRow(
        episode=0, step=0, env=0, slot="a", from_stage="DORMANT", to_stage="GERMINATED", blueprint=blueprint, alpha=0.0
    )


def test_where_there_is_room_nothing_is_said(tmp_path, notes):
    write = Failing(0)
    waiting(tmp_path, notes)(tmp_path / "a", write)
    assert (write.calls, notes) == (1, [])


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_it_waits_for_room_with_one_line_and_goes_on_with_another(tmp_path, notes, number):
    write = Failing(4, number)
    waiting(tmp_path, notes)(tmp_path / "a", write)
    assert write.calls == 5
    assert len(notes) == 2
    assert all(text in notes[0] for text in (str(tmp_path / "a"), os.strerror(number), "60 s", "remove files"))
    assert "the run goes on" in notes[1]


def test_it_waits_no_longer_than_it_is_told_and_only_once(tmp_path, notes):
    patient, write = waiting(tmp_path, notes, seconds=0.02), Failing(10**9)
    with pytest.raises(DiskFull, match="No space left"):
        patient(tmp_path / "a", write)
    assert write.calls > 1
    assert len(notes) == 1
    write.calls = 0
    with pytest.raises(DiskFull):
        patient(tmp_path / "a", write)
    assert write.calls == 1
    assert len(notes) == 1


def test_no_seconds_are_no_waiting(tmp_path, notes):
    with pytest.raises(DiskFull):
        waiting(tmp_path, notes, seconds=0)(tmp_path / "a", Failing(1))
    assert notes == []


def test_what_stops_says_how_to_go_on(tmp_path, notes):
    impatient = replace(waiting(tmp_path, notes, seconds=0), resumed=f"continue with `esper resume {tmp_path}`")
    (tmp_path / "config.yaml").write_text("")
    with pytest.raises(DiskFull, match=f"continue with `esper resume {tmp_path}`"):
        impatient(tmp_path / "a", Failing(1))
    (tmp_path / "config.yaml").unlink()
    with pytest.raises(DiskFull, match="start the run again"):
        impatient(tmp_path / "a", Failing(1))


@pytest.mark.parametrize("times", [0, 3])
def test_other_errors_are_not_waited_for(tmp_path, notes, times):
    write = Failing(times)

    def write_then_fail():
        write()
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(Unwritable, match=f"cannot write {tmp_path / 'a'}: Input/output error; repair that, and start"):
        waiting(tmp_path, notes)(tmp_path / "a", write_then_fail)


def test_a_file_that_grows_over_the_limit_of_the_process_is_named_with_the_limit(tmp_path, notes):
    limit, path = resource.getrlimit(resource.RLIMIT_FSIZE), tmp_path / "summary.json"
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))
    try:
        with pytest.raises(Unwritable, match=r"cannot write .*/summary\.json: File too large; .*ulimit -f"):
            waiting(tmp_path, notes)(path, lambda: write_atomic(path, "x" * 101))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_waiting(tmp_path, notes, number):
    with Interrupt() as interrupt:

        def note(text):
            os.kill(os.getpid(), number)

        with pytest.raises(DiskFull):
            DiskRetry(3600, note, tmp_path, lambda: interrupt.asked)(tmp_path / "a", Failing(10**9))


# The events.


def test_a_disk_that_stays_full_is_given_up_with_the_way_to_go_on(tmpfs, notes):
    output = JsonLines(tmpfs.path / "events.jsonl", waiting(tmpfs.path, notes, seconds=0.02))
    with closing(Hub([output])) as hub:
        hub.emit(change())
        tmpfs.fill()
        with pytest.raises(DiskFull, match="start the run again"):
            hub.emit(change("mlp" * 3000))
    assert hub.seq == 1
    assert len(notes) == 1


@pytest.mark.parametrize("left", [0, 1, 50, 4000])
def test_a_row_that_found_no_room_for_its_end_is_completed(tmpfs, notes, left):
    path = tmpfs.path / "events.jsonl"

    def note(text):
        notes.append(text)
        tmpfs.free()

    with closing(Hub([JsonLines(path, DiskRetry(60, note, tmpfs.path, lambda: False))])) as hub:
        hub.emit(change())
        tmpfs.fill(left)
        hub.extend(change("mlp" * 3000) for _ in range(3))
        hub.emit(change())
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["seq"] for row in rows] == list(range(5))
    assert len(notes) == 2


@pytest.mark.parametrize("left", [0, 1, 50, 4000])
def test_a_row_that_finds_no_room_in_time_leaves_no_part_of_itself(tmpfs, notes, left):
    path = tmpfs.path / "events.jsonl"
    with closing(Hub([JsonLines(path, waiting(tmpfs.path, notes, seconds=0))])) as hub:
        hub.emit(change())
        before = path.read_bytes()
        tmpfs.fill(left)
        with pytest.raises(DiskFull):
            hub.emit(change("mlp" * 3000))
        assert path.read_bytes() == before
        tmpfs.free()
        hub.emit(change())
    assert [json.loads(line)["seq"] for line in path.read_text().splitlines()] == [0, 1]


def test_without_patience_a_full_disk_is_an_error(tmpfs):
    with closing(Hub([JsonLines(tmpfs.path / "events.jsonl")])) as hub:
        tmpfs.fill()
        with pytest.raises(Unwritable, match="No space left"):
            hub.emit(change("mlp" * 3000))
    assert (tmpfs.path / "events.jsonl").read_bytes() == b""
