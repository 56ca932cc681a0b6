"""Check that a lock is free after a KeyboardInterrupt at any line that opens or closes a run folder."""

import fcntl
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from esper.runs.folder import run_folder
from esper.runs.folder.interrupt import Interrupt
from esper.runs.folder.run_folder import RunFolder
from esper.store import lock as lock_module
from esper.store.lock import Lock
from populations import small_config

FILES = {lock_module.__file__, run_folder.__file__}


class Interrupting:
    """Raises KeyboardInterrupt at the line number `at`, counted over all lines of the files that are watched."""

    def __init__(self, at):
        self.left, self.where = at, None

    def __call__(self, frame, event, argument):
        if frame.f_code.co_filename not in FILES or frame.f_code.co_name == "__del__":
            return None
        if event == "line" and self.where is None:
            self.left -= 1
            if self.left < 0:
                self.where = f"{frame.f_code.co_name}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self


def open_and_close(folder):
    with RunFolder(folder, small_config(), lambda text: None, Interrupt()) as run:
        assert run.lock is not None
        if not run.lock.held:
            folder.mkdir(exist_ok=True)
            run.lock.take()


def is_free(folder):
    """Return whether another process would get the lock."""
    if not (folder / "lock").exists():
        return True
    descriptor = os.open(folder / "lock", os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


@pytest.mark.parametrize("there", [True, False], ids=["a folder that is there", "a new folder"])
def test_a_lock_is_free_behind_a_keyboard_interrupt_at_any_line(tmp_path, there):
    # an error out of a trace leaves "the exception being handled" behind in its thread
    with ThreadPoolExecutor(1) as pool:
        held, lines = pool.submit(interrupted_at_every_line, tmp_path / "run", there).result()
    assert held == []
    assert lines > 60, "or this shows little"


def interrupted_at_every_line(folder, there):
    """Find the lines at which an interrupt leaves the lock held, and count how many lines there are."""
    held, at, done = [], 0, False
    while not done:
        shutil.rmtree(folder, ignore_errors=True)
        if there:
            folder.mkdir()
        trace, before = Interrupting(at), sys.gettrace()
        sys.settrace(trace)
        try:
            open_and_close(folder)
            done = True
        except KeyboardInterrupt:
            pass  # the one that was raised on purpose
        finally:
            sys.settrace(before)
        if not is_free(folder):
            held.append(trace.where)
        lock = Lock(folder, lambda text: None)
        if folder.is_dir() and is_free(folder):
            lock.take()
            lock.release()
            assert not (folder / "lock").exists()
        at += 1
    return held, at
