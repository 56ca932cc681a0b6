"""Test the crew of the ranks that torchrun starts: who is admitted, and what a lost rank leads to."""

import json
import os
import signal
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client

import pytest
from torch.distributed import HashStore

import esper
from esper.leyline.messages import InputError, WorkerError
from esper.runs.workers import transports
from esper.runs.workers.workers import Workers


@pytest.fixture
def store(monkeypatch):
    """Make the store by which two ranks meet; this process is rank 0."""
    meeting = HashStore()
    monkeypatch.setattr(transports, "_store", lambda: meeting)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    return meeting


def answers(crew):
    """Return what comes from the ranks within a few seconds."""
    deadline = time.monotonic() + 20
    while not (found := crew.receive(0.1)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def test_a_stranger_is_refused_and_a_lost_rank_is_not_started_again(store):
    crew = transports.TorchrunTransport(range(2), None, (None,), "give the same command again")
    crew.start(1)
    port, secret = json.loads(store.get("esper/workers"))
    with pytest.raises(AuthenticationError):
        Client(("localhost", port), authkey=b"guessed")
    rank = Client(("localhost", port), authkey=secret.encode())
    rank.send_bytes(b"1")
    rank.send_bytes(b"ready")
    assert answers(crew) == [(1, b"ready")]
    rank.close()
    assert answers(crew) == [(1, None)]
    with pytest.raises(WorkerError, match=r"rank 1 was lost, .* single rank again; give the same command again"):
        crew.start(1)
    crew.close()


def test_waiting_for_ranks_that_do_not_come_ends_when_it_is_asked_to(store):
    class Beside(transports.TorchrunTransport):
        """Starts no process beside this one."""

        def start(self, worker):
            self._started.add(worker)

    asked = iter([False, True])
    with pytest.raises(KeyboardInterrupt, match="while the workers were started"):
        Workers(Beside(range(2), None, (None,), ""), print, asked=lambda: next(asked))


def test_an_evaluation_that_torchrun_ends_while_its_ranks_start_leaves_no_lock(store, monkeypatch, tmp_path, capsys):
    locked = []

    class Ending(transports.TorchrunTransport):
        """Sends itself, before any rank has come, what torchrun sends."""

        def start(self, worker):
            if worker == 0:
                locked.append((tmp_path / "out" / "lock").exists())
                os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(transports, "TorchrunTransport", Ending)
    few = {"instances": 2, "seeds": 1, "baselines": (), "settings": {"steps": 1}}
    with pytest.raises(KeyboardInterrupt, match="while the workers were started"):
        esper.evaluate(tasks="iris", **few, out=tmp_path / "out", cluster="torchrun", progress=True)
    assert locked == [True]
    assert not (tmp_path / "out").exists()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert "interrupted while the workers were started; " in capsys.readouterr().err


def test_an_evaluation_has_no_more_ranks_than_populations(store, monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "9")
    few = {"instances": 1, "seeds": 1, "settings": {"steps": 1}, "progress": False}
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(InputError, match="workers is 9, but the evaluation has 3 populations to grow"):
            esper.evaluate(tasks="iris", **few, out=tmp_path / "out", cluster="torchrun")
    assert not (tmp_path / "out").exists()
