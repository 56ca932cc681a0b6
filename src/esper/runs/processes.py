"""Actors as processes of this machine, one thread each, and as processes that connect from other machines."""

import atexit
import multiprocessing
import os
import pickle
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import get_temp_dir
from typing import Any

import torch

from esper.leyline.errors import InputError, typed_line
from esper.runs.actor_work import Answers, Attached, Orphaned, Work

_PATIENCE = 5.0  # seconds that a process is given to end

_SOCKET_FOLDER = (
    "ESPER_SOCKET_FOLDER"  # the variable that names, to a fork server that starts, the folder of its socket
)

if _SOCKET_FOLDER in os.environ:
    # This process is the fork server, which loads this module first. Python leaves the removal of the folder to the process that
    # started the server, which a SIGKILL ends before it can do so. The server ends only after that process and all actors.
    atexit.register(shutil.rmtree, os.environ.pop(_SOCKET_FOLDER), ignore_errors=True)


class Processes:
    """A crew of processes, which Python's fork server starts."""

    def __init__(self, size: int, work: object, devices: Sequence[str | None]) -> None:
        """work: has a method `make`, from a device to a `Work`. devices: each actor's, taken in turn.

        Raises InputError if `work` cannot be sent to a process.
        """
        self.size, self._devices = size, devices
        self._content = pickled(work)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__])
        self.connections: dict[int, Connection] = {}
        self._processes: dict[int, BaseProcess] = {}

    def start(self, actor: int) -> None:
        """Start the process of an actor."""
        self._end([actor])
        ours, theirs = self._context.Pipe()
        device = self._devices[actor % len(self._devices)]
        process = self._context.Process(
            target=serve_pickled, args=(theirs, self._content, device), name=f"actor-{actor}"
        )
        with _set_variables({"OMP_NUM_THREADS": "1", _SOCKET_FOLDER: get_temp_dir()}):
            process.start()
        theirs.close()  # so that the end of the process ends the connection
        self.connections[actor], self._processes[actor] = ours, process

    def send(self, actor: int, message: bytes) -> None:
        """Send a message."""
        with suppress(OSError):  # of a connection that is broken, as `receive` will say
            self.connections[actor].send_bytes(message)

    def receive(self, seconds: float) -> list[tuple[int, bytes | None]]:
        """Wait for answers. An actor whose process has ended is lost."""
        return received(self.connections, seconds, lambda actor: self.connections.pop(actor).close())

    def close(self) -> None:
        """End all processes."""
        self._end(list(self._processes))

    def pids(self) -> list[int]:
        """Return the process ids."""
        return [process.pid for process in self._processes.values() if process.pid is not None]

    def _end(self, actors: Sequence[int]) -> None:
        for actor in actors:
            if (connection := self.connections.pop(actor, None)) is not None:
                connection.close()
            if actor in self._processes:
                self._processes[actor].terminate()
        for actor in actors:
            if (process := self._processes.pop(actor, None)) is not None:
                process.join(_PATIENCE)
                if process.is_alive():
                    process.kill()
                    process.join()
                process.close()


def pickled(work: object, name: str = "the run") -> bytes:
    """Return what actors are sent as bytes. Raises InputError, which calls it `name`, if it cannot be pickled."""
    try:
        return pickle.dumps(work)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise InputError(
            f"{name} cannot be sent to an actor ({typed_line(error)}); define functions and classes of your own at the top of a "
            "module"
        ) from None


def unpickled(content: bytes) -> Any:
    """Return a specification. Raises InputError if what it names cannot be imported in this process."""
    try:
        return pickle.loads(content)
    except (AttributeError, ImportError, pickle.UnpicklingError) as error:
        raise InputError(
            f"an actor cannot import what the run needs ({typed_line(error)}); define it in a file that can be imported"
        ) from None


def received(
    connections: Mapping[int, Connection], seconds: float, lost: Callable[[int], None]
) -> list[tuple[int, bytes | None]]:
    """Return the answers that have come on connections, after waiting at most so long; None where a connection has ended.

    `lost` is called with an actor whose connection has ended.
    """
    places, found = (
        {id(connection): actor for actor, connection in connections.items()},
        list[tuple[int, bytes | None]](),
    )
    for connection in wait(list(connections.values()), seconds):
        actor = places[id(connection)]
        try:
            found.append((actor, connections[actor].recv_bytes()))
        except (EOFError, OSError):
            lost(actor)
            found.append((actor, None))
    return sorted(found, key=lambda each: each[0])


def serve_pickled(connection: Connection, content: bytes, device: str | None) -> None:
    """Be an actor of a learner that is at the other end of a connection."""
    serve(connection, lambda: unpickled(content).make(device))


def serve(connection: Connection, make: Callable[[], Work]) -> None:
    """Answer the messages of a connection until it ends."""
    torch.set_num_threads(1)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the learner, which gets them too, ends the actors
    attached, answers = Attached(connection.poll), Answers(make)  # a learner that waits for an answer sends nothing
    with suppress(EOFError, OSError, Orphaned):
        connection.send_bytes(answers.ready())
        while True:
            answer = answers.answer(connection.recv_bytes(), attached)
            if answer is not None:
                connection.send_bytes(answer)


@contextmanager
def _set_variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables of the environment for the fork server, if it is started now.

    The number of threads is among them because some libraries make their threads when they are imported.
    """
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
