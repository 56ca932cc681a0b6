"""Start worker processes and exchange messages with them: on this machine, as ranks of torchrun, or on Ray.

A worker, which messages call an actor, makes its own copy of the work from a specification, and answers messages one by one.
"""

import atexit
import json
import multiprocessing
import os
import pickle
import secrets
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import get_temp_dir
from typing import Any, Protocol

import torch
from torch.distributed.rendezvous import rendezvous

from esper.leyline.distribution import pip_install
from esper.leyline.errors import ActorError, InputError, describe_error, typed_line
from esper.leyline.lifecycle.view import View
from esper.store.tensors import Tree, pack, unpack
from esper.tolaria.play import Observer

_PATIENCE = 5.0  # seconds that a process is given to end

_SOCKET_FOLDER = "ESPER_SOCKET_FOLDER"
"""The variable that names, to a fork server that starts, the folder of its socket."""

if _SOCKET_FOLDER in os.environ:
    # This process is the fork server, which loads this module first. Python leaves the removal of the folder to the process that
    # started the server, which a SIGKILL ends before it can do so. The server ends only after that process and all actors.
    atexit.register(shutil.rmtree, os.environ.pop(_SOCKET_FOLDER), ignore_errors=True)


class Work(Protocol):
    """What an actor computes."""

    facts: Tree
    """What must be the same in every actor and in the learner: data and versions."""

    def load(self, weights: Tree) -> None:
        """Take the weights with which the next parts are played."""

    def play(self, part: Tree, *observers: Observer) -> Tree:
        """Play a part and return its result."""


class Transport(Protocol):
    """Workers of one kind, numbered from 0. Each answers messages one by one, and says `{"ready": ...}` when it has started."""

    size: int

    def start(self, actor: int) -> None:
        """Start an actor; one of the same number must have been lost."""

    def send(self, actor: int, message: bytes) -> None:
        """Send a message to an actor that is not busy. If the actor is lost, `receive` says so."""

    def receive(self, seconds: float) -> list[tuple[int, bytes | None]]:
        """Wait for answers at most so long; return actors with their answers, None of an actor that was lost."""

    def close(self) -> None:
        """End all actors."""


class MessageAnswers:
    """Answer the messages of a learner. Errors are answers too."""

    def __init__(self, make: Callable[[], Work]) -> None:
        self._make = make
        self._work: Work | None = None

    def ready(self) -> bytes:
        """Make the work, and return the first answer."""

        def begin() -> Tree:
            self._work = self._make()
            return {"ready": self._work.facts}

        return self._caught(begin)

    def answer(self, message: bytes, *observers: Observer) -> bytes | None:
        """Return the answer to a message; weights have none, unless they cannot be used."""
        tree = unpack(message)
        assert self._work is not None, "the actor is not ready"
        if "weights" in tree:
            self._work.load(tree["weights"])
            return None
        work = self._work
        return self._caught(lambda: {"result": work.play(tree["part"], *observers)})

    @staticmethod
    def _caught(compute: Callable[[], Tree]) -> bytes:
        try:
            return pack(compute())
        except Exception as error:  # of the user's code as well; the learner raises it again
            trace = "" if isinstance(error, InputError) else traceback.format_exc()
            return pack({"error": {**describe_error(error), "trace": trace}})


class LearnerGone(BaseException):
    """The learner is gone, so the part is not needed any more."""


@dataclass(frozen=True)
class LearnerWatch(Observer):
    """Ends a part whose learner is gone."""

    gone: Callable[[], bool]

    def going(self, view: View) -> bool:
        if self.gone():
            raise LearnerGone
        return True


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


def serve_pickled(connection: Connection, content: bytes, device: str | None, method: str) -> None:
    """Be an actor of a learner at the other end of a connection. Processes that it starts, as to read, begin by `method`."""
    multiprocessing.set_start_method(method, force=True)
    serve(connection, lambda: unpickled(content)(device))


def serve(connection: Connection, make: Callable[[], Work]) -> None:
    """Answer the messages of a connection until it ends."""
    torch.set_num_threads(1)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the learner, which gets them too, ends the actors
    attached = LearnerWatch(connection.poll)  # a learner that waits for an answer sends nothing
    answers = MessageAnswers(make)
    with suppress(EOFError, OSError, LearnerGone):
        connection.send_bytes(answers.ready())
        while True:
            answer = answers.answer(connection.recv_bytes(), attached)
            if answer is not None:
                connection.send_bytes(answer)


class ProcessTransport:
    """Processes on this machine, which Python's fork server starts."""

    def __init__(self, size: int, work: object, devices: Sequence[str | None]) -> None:
        """work: makes a `Work` from a device. devices: each actor's, taken in turn."""
        self.size, self._devices = size, devices
        self._content = pickled(work)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__, "esper.runs.training.cohort"])  # what every worker needs
        self.connections: dict[int, Connection] = {}
        self._processes: dict[int, BaseProcess] = {}

    def start(self, actor: int) -> None:
        self._end([actor])
        ours, theirs = self._context.Pipe()
        device = self._devices[actor % len(self._devices)]
        process = self._context.Process(
            target=serve_pickled,
            args=(theirs, self._content, device, multiprocessing.get_start_method()),
            name=f"actor-{actor}",
        )
        # For the fork server, if it is started now. Some libraries make their threads when they are imported.
        variables = {"OMP_NUM_THREADS": "1", _SOCKET_FOLDER: get_temp_dir()}
        before = {name: os.environ.pop(name) for name in variables if name in os.environ}
        os.environ.update(variables)
        try:
            process.start()
        finally:
            for name in variables:
                del os.environ[name]
            os.environ.update(before)
        theirs.close()  # so that the end of the process ends the connection
        self.connections[actor], self._processes[actor] = ours, process

    def send(self, actor: int, message: bytes) -> None:
        with suppress(OSError):  # of a connection that is broken, as `receive` will say
            self.connections[actor].send_bytes(message)

    def receive(self, seconds: float) -> list[tuple[int, bytes | None]]:
        """Wait for answers. An actor whose connection has ended, as that of a process that ended, is lost."""
        connections = self.connections.copy()  # a thread of `TorchrunTransport` adds some
        ready, found = wait(list(connections.values()), seconds), list[tuple[int, bytes | None]]()
        for actor, connection in sorted(connections.items()):
            if connection in ready:
                try:
                    found.append((actor, connection.recv_bytes()))
                except (EOFError, OSError):
                    self.connections.pop(actor).close()
                    found.append((actor, None))
        return found

    def close(self) -> None:
        self._end([*self.connections, *self._processes])

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


ACTOR = "actor"
"""The status that a training or an evaluation returns in a rank that was an actor; it writes nothing."""

_KEY = "esper/actors"


def world_size() -> int:
    """Return the number of ranks."""
    return int(os.environ["WORLD_SIZE"])


def _store() -> Any:
    return next(iter(rendezvous("env://")))[0]


class TorchrunTransport(ProcessTransport):
    """All ranks of torchrun, as rank 0 sees them: actor 0 is a process beside it, and every other rank is an actor itself."""

    def __init__(self, work: object, devices: Sequence[str | None], again: str) -> None:
        """again: how the run continues after a rank was lost."""
        super().__init__(world_size(), work, devices)
        self._again = again
        secret = secrets.token_hex(32)
        listener = Listener(("", 0), backlog=self.size, authkey=secret.encode())
        self._store = _store()
        _, port = listener.address  # of a TCP socket
        self._store.set(_KEY, json.dumps([port, secret]))
        self._started: set[int] = set()
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()  # a rank may never come

    def start(self, actor: int) -> None:
        """Start the actor beside this process; other ranks connect by themselves. Raises ActorError for a rank that was lost."""
        if actor == 0:
            super().start(0)
        elif actor in self._started:
            raise ActorError(f"rank {actor} was lost, and torchrun does not start a single rank again; {self._again}")
        self._started.add(actor)

    def _accept(self, listener: Listener) -> None:
        """Take the connections of all other ranks; what does not know the secret is no rank."""
        ranks = set[int]()
        with listener:
            while len(ranks) < self.size - 1:
                with suppress(AuthenticationError, EOFError, ConnectionError):
                    connection = listener.accept()
                    rank = int(connection.recv_bytes())
                    ranks.add(rank)
                    self.connections[rank] = connection


def serve_rank(make: Callable[[str | None], Work], devices: Sequence[str | None]) -> dict[str, Any]:
    """Be the actor of a rank above 0 until the learner ends. Returns the summary of this process."""
    port, secret = json.loads(_store().get(_KEY))
    rank = int(os.environ["RANK"])
    device = devices[int(os.environ.get("LOCAL_RANK", "0")) % len(devices)]
    with Client((os.environ["MASTER_ADDR"], port), authkey=secret.encode()) as connection:
        connection.send_bytes(str(rank).encode())
        serve(connection, lambda: make(device))
    return {"status": ACTOR}


class RayTransport:
    """Ray actors, each with one CPU, and with a GPU where its device is one."""

    def __init__(self, size: int, work: object, devices: Sequence[str | None], address: str | None) -> None:
        """address: of a cluster; None is that of RAY_ADDRESS, or a local cluster that ends with the run."""
        try:
            import ray
        except ImportError:
            raise InputError(f"cluster is ray, which is not installed; give {pip_install('ray')}") from None
        self.size, self._devices, self._ray = size, devices, ray
        self._content = pickled(work)
        self._actors: dict[int, Any] = {}
        self._answers: dict[Any, int] = {}  # actors by the answers that are awaited
        self._own = not ray.is_initialized()
        if self._own:
            local = address is None and "RAY_ADDRESS" not in os.environ
            options = {"num_cpus": size, "include_dashboard": False} if local else {"address": address or "auto"}
            try:
                ray.init(log_to_driver=False, logging_level="ERROR", **options)
            except (ConnectionError, RuntimeError, ValueError) as error:
                where = address or os.environ.get("RAY_ADDRESS", "this machine")
                raise InputError(
                    f"no Ray cluster can be reached at {where} ({error}); start one, or leave the address out"
                ) from None

    def start(self, actor: int) -> None:
        device = self._devices[actor % len(self._devices)]
        gpus = 1 if (device or "").startswith("cuda") else 0
        options = self._ray.remote(num_cpus=1, num_gpus=gpus, max_restarts=0)
        # Ray shows each actor its own GPU alone, as cuda:0
        self._actors[actor] = options(RayActor).remote(self._content, "cuda:0" if gpus else device, sys.path)
        self._answers[self._actors[actor].ready.remote()] = actor

    def send(self, actor: int, message: bytes) -> None:
        """Send a message. Ray delivers messages in order."""
        self._answers[self._actors[actor].answer.remote(message)] = actor

    def receive(self, seconds: float) -> list[tuple[int, bytes | None]]:
        """Wait for answers. An actor whose process or machine has ended is lost."""
        done, _ = self._ray.wait(list(self._answers), num_returns=1, timeout=seconds)
        if not done:
            return []
        actor = self._answers.pop(done[0])
        try:
            answer = self._ray.get(done[0])
        except self._ray.exceptions.RayActorError:
            self._answers = {each: its for each, its in self._answers.items() if its != actor}
            return [(actor, None)]
        return [] if answer is None else [(actor, answer)]  # weights have no answer

    def close(self) -> None:
        for actor in self._actors.values():
            self._ray.kill(actor)
        self._actors.clear()
        self._answers.clear()
        if self._own and self._ray.is_initialized():
            self._ray.shutdown()


class RayActor(MessageAnswers):
    """The class of the Ray actors."""

    def __init__(self, content: bytes, device: str | None, path: Sequence[str]) -> None:
        torch.set_num_threads(1)
        sys.path.extend(each for each in path if each not in sys.path)
        super().__init__(lambda: unpickled(content)(device))
