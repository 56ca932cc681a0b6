"""Actors as the ranks that torchrun starts, on one machine or several. Rank 0 learns, and has its actor in a process beside it.

The ranks find each other through torchrun's store, and talk over authenticated TCP connections.
"""

import json
import os
import secrets
from collections.abc import Sequence
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from torch.distributed.rendezvous import rendezvous

from esper.leyline.errors import ActorError
from esper.runs.processes import Processes, received, serve

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

    def __init__(self, work: object, devices: Sequence[str | None]) -> None:
        self.size = world_size()
        self._beside = Processes(1, work, devices)
        secret = secrets.token_hex(32)
        self._listener: Listener | None = Listener(("", 0), backlog=self.size, authkey=secret.encode())
        self._store = _store()
        _, port = self._listener.address  # of a TCP socket
        self._store.set(_KEY, json.dumps([port, secret]))
        self._connections: dict[int, Connection] = {}

    def start(self, actor: int) -> None:
        """Start the actor beside this process, or wait until a rank connects. Raises ActorError for a rank that was lost."""
        if actor == 0:
            self._beside.start(0)
        elif self._listener is None:
            raise ActorError(
                f"rank {actor} was lost, and torchrun does not start a single rank again; start the run again"
            )
        else:
            while actor not in self._connections:
                connection = self._listener.accept()
                self._connections[int(connection.recv_bytes())] = connection
            if len(self._connections) == self.size - 1:
                self._listener.close()
                self._listener = None

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

    def _lost(self, actor: int) -> None:
        (self._beside.connections if actor == 0 else self._connections).pop(actor).close()


def serve_rank(work: Any, devices: Sequence[str | None]) -> None:
    """Be the actor of a rank above 0 until the learner ends."""
    port, secret = json.loads(_store().get(_KEY))
    rank = int(os.environ["RANK"])
    device = devices[int(os.environ.get("LOCAL_RANK", "0")) % len(devices)]
    with Client((os.environ["MASTER_ADDR"], port), authkey=secret.encode()) as connection:
        connection.send_bytes(str(rank).encode())
        serve(connection, lambda: work.make(device))
