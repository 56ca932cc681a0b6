"""Test two processes on one folder, with real processes, real kills, and pids that were given away again."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys

import pytest

from esper.leyline.messages import InputError
from esper.store.lock import LOCK, Lock, describe_process, lives, owner_of, process_start

HOLD = """
import sys
from pathlib import Path
from esper.store.lock import Lock
lock = Lock(Path(sys.argv[1]), print)
lock.take()
print("held", flush=True)
sys.stdin.readline()
lock.release()
"""
FORK = """
import os, sys, time
from pathlib import Path
from esper.store.lock import Lock
lock = Lock(Path(sys.argv[1]), print)
lock.take()
if os.fork() == 0:
    lock.release()
    print("held", flush=True)
    time.sleep(60)
    os._exit(0)
sys.stdin.readline()
"""


class Holder:
    """Holds the lock of a folder from another process until it is told to let go, or killed."""

    def __init__(self, folder, program=HOLD):
        command = [sys.executable, "-c", program, str(folder)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout.readline() == "held\n"

    def let_go(self):
        self.process.communicate("\n", timeout=60)

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self.process.poll() is None:
            self.kill()
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def notes():
    return []


def left_by(folder, **over):
    (folder / LOCK).write_text(json.dumps(describe_process() | over))


def test_a_lock_says_whose_it_is_and_is_removed(tmp_path, notes):
    lock = Lock(tmp_path, notes.append)
    lock.take()
    assert owner_of(tmp_path / LOCK)["pid"] == os.getpid()
    assert owner_of(tmp_path / LOCK)["started"] == process_start(os.getpid())
    assert lock.held
    lock.release()
    assert (list(tmp_path.iterdir()), notes, lock.held) == ([], [], False)


def test_a_second_process_is_refused_with_whom_and_since_when_and_changes_nothing(tmp_path, notes):
    with Holder(tmp_path) as holder:
        before = (tmp_path / LOCK).read_bytes()
        owner = json.loads(before)
        with pytest.raises(InputError) as refused:
            Lock(tmp_path, notes.append).take()
        assert all(text in str(refused.value) for text in (str(holder.process.pid), owner["host"], owner["since"]))
        assert (tmp_path / LOCK).read_bytes() == before
        assert [path.name for path in tmp_path.iterdir()] == [LOCK]
        holder.let_go()
        Lock(tmp_path, notes.append).take()
    assert notes == []


def test_the_lock_of_a_killed_process_is_taken_over_with_a_note(tmp_path, notes):
    with Holder(tmp_path) as holder:
        holder.kill()
        lock = Lock(tmp_path, notes.append)
        lock.take()
    assert len(notes) == 1
    assert f"process {holder.process.pid} on" in notes[0]
    assert owner_of(tmp_path / LOCK)["pid"] == os.getpid()
    lock.release()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(process_start(os.getpid()) is None, reason="needs /proc to tell two processes of one pid apart")
def test_a_pid_that_is_another_process_by_now_holds_nothing(tmp_path, notes):
    left_by(tmp_path, pid=os.getppid(), started=1)
    Lock(tmp_path, notes.append).take()
    assert len(notes) == 1


def test_where_flock_is_free_a_live_pid_does_not_hold(tmp_path, notes):
    left_by(tmp_path, pid=os.getppid(), started=process_start(os.getppid()))
    Lock(tmp_path, notes.append).take()
    assert len(notes) == 1


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_flock_is_refused(tmp_path, notes, monkeypatch, number):
    def flock(descriptor, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(
        InputError, match=f"cannot be locked at .*: {os.strerror(number)}; repair that, or name another"
    ):
        Lock(tmp_path, notes.append).take()


def test_without_a_start_time_a_pid_alone_is_asked_for():
    assert lives(describe_process() | {"started": None})
    assert not lives(describe_process() | {"started": None, "pid": 2**22 + 1})


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"pid": 1}'])
def test_a_lock_that_says_nothing_holds_nothing(tmp_path, notes, content):
    (tmp_path / LOCK).write_bytes(content)
    Lock(tmp_path, notes.append).take()
    assert owner_of(tmp_path / LOCK)["pid"] == os.getpid()


def test_a_lock_that_was_replaced_is_not_removed(tmp_path, notes):
    lock = Lock(tmp_path, notes.append)
    lock.take()
    (tmp_path / LOCK).unlink()
    left_by(tmp_path, pid=1)
    lock.release()
    assert owner_of(tmp_path / LOCK)["pid"] == 1


def test_a_name_that_another_file_took_meanwhile_is_opened_again(tmp_path, notes, monkeypatch):
    """Check a lock that its owner removes, and that the next process makes, between an open and a flock."""
    real, opened = fcntl.flock, []

    def late(descriptor, operation):
        if not opened:
            (tmp_path / LOCK).unlink()
            (tmp_path / LOCK).write_bytes(b"")
        opened.append(descriptor)
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    lock = Lock(tmp_path, notes.append)
    lock.take()
    monkeypatch.undo()
    assert len(opened) >= 2
    with pytest.raises(InputError):
        Lock(tmp_path, notes.append).take()


def test_a_forked_child_neither_holds_nor_removes_the_lock(tmp_path, notes):
    with Holder(tmp_path, FORK) as holder:
        assert (tmp_path / LOCK).exists()
        with pytest.raises(InputError):
            Lock(tmp_path, notes.append).take()
        holder.kill()  # the child lives on
        Lock(tmp_path, notes.append).take()
    assert len(notes) == 1


def test_another_program_started_meanwhile_does_not_hold_the_lock(tmp_path, notes):
    lock = Lock(tmp_path, notes.append)
    lock.take()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False) as child:
        lock.release()
        second = Lock(tmp_path, notes.append)
        second.take()
        assert second.held
        assert notes == []
        child.communicate(b"\n")


@pytest.mark.parametrize("make", [lambda path: path.mkdir(), lambda path: path.symlink_to("elsewhere")])
def test_what_cannot_be_a_lock_is_named(tmp_path, notes, make):
    make(tmp_path / LOCK)
    with pytest.raises(InputError, match=r"cannot be locked|is not a regular file"):
        Lock(tmp_path, notes.append).take()
    assert not (tmp_path / "elsewhere").exists()
