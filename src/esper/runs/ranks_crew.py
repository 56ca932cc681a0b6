"""Actors as the ranks that torchrun starts, on one machine or several. Rank 0 learns, and has its actor in a process beside it.

The ranks find each other through torchrun's store, and talk over authenticated TCP connections.
"""

import json
import os
import secrets
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from torch.distributed.rendezvous import rendezvous

from esper.leyline.errors import ActorError
from esper.runs.processes import Processes, received, serve

ACTOR = "actor"
"""The status that a training or an evaluation returns in a rank that was an actor; it writes nothing."""

_KEY = "esper/actors"


def world_size() -> int:
    """Return the number of ranks."""
    return int(os.environ["WORLD_SIZE"])


def is_learner() -> bool:
    """Whether this process is rank 0."""
    return os.environ["RANK"] == "0"


def _store() -> Any:
    store, _, _ = next(iter(rendezvous("env://")))
    return store


class RanksCrew:
    """A crew of all ranks, for rank 0."""

    def __init__(self, work: object, devices: Sequence[str | None], again: str) -> None:
        """again: how the run continues after a rank was lost."""
        self.size, self._again = world_size(), again
        self._beside = Processes(1, work, devices)
        secret = secrets.token_hex(32)
        listener = Listener(("", 0), backlog=self.size, authkey=secret.encode())
        self._store = _store()
        _, port = listener.address  # of a TCP socket
        self._store.set(_KEY, json.dumps([port, secret]))
        self._connections: dict[int, Connection] = {}
        self._started: set[int] = set()
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()  # a rank may never come

    def start(self, actor: int) -> None:
        """Start the actor beside this process; other ranks connect by themselves. Raises ActorError for a rank that was lost."""
        if actor == 0:
            self._beside.start(0)
        elif actor in self._started:
            raise ActorError(f"rank {actor} was lost, and torchrun does not start a single rank again; {self._again}")
        self._started.add(actor)

    def send(self, actor: int, message: bytes) -> None:
        """Send a message."""
        if actor == 0:
            self._beside.send(0, message)
            return
        try:
            self._connections[actor].send_bytes(message)
        except OSError:
            return  # the connection is broken, as `receive` will say

    def receive(self, seconds: float) -> list[tuple[int, bytes | None]]:
        """Wait for answers of all ranks."""
        return received(self._connections | self._beside.connections, seconds, self._lost)

    def close(self) -> None:
        """End the connections, which ends the other ranks."""
        self._beside.close()
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def _accept(self, listener: Listener) -> None:
        """Take the connections of all other ranks; what does not know the secret is no rank."""
        ranks = set[int]()
        with listener:
            while len(ranks) < self.size - 1:
                with suppress(AuthenticationError, EOFError, ConnectionError):
                    connection = listener.accept()
                    rank = int(connection.recv_bytes())
                    ranks.add(rank)
                    self._connections[rank] = connection

    def _lost(self, actor: int) -> None:
        (self._beside.connections if actor == 0 else self._connections).pop(actor).close()


def serve_rank(work: Any, devices: Sequence[str | None]) -> dict[str, Any]:
    """Be the actor of a rank above 0 until the learner ends. Returns the summary of this process."""
    port, secret = json.loads(_store().get(_KEY))
    rank = int(os.environ["RANK"])
    device = devices[int(os.environ.get("LOCAL_RANK", "0")) % len(devices)]
    with Client((os.environ["MASTER_ADDR"], port), authkey=secret.encode()) as connection:
        connection.send_bytes(str(rank).encode())
        serve(connection, lambda: work.make(device))
    return {"status": ACTOR}
