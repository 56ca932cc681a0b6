"""Start worker processes and exchange messages with them: on this machine, as ranks of torchrun, or on Ray.

A worker makes its own copy of the work from a specification, and answers messages one by one.
"""

import atexit
import json
import multiprocessing
import os
import pickle
import secrets
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import get_temp_dir
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, Store, TCPStore  # torch.distributed exports them without their types
from torch.distributed.rendezvous import rendezvous

from esper.leyline.distribution import pip_install
from esper.leyline.messages import InputError, WorkerError, describe_error, typed_line
from esper.store.tensors import Tree, pack, unpack

_PATIENCE = 5.0  # seconds that a process is given to end
_SIGN = b""  # the message by which a busy worker says that it is at work
_BETWEEN = 2.0  # seconds between two of them

_SOCKET_FOLDER = "ESPER_SOCKET_FOLDER"
"""The variable that names, to a fork server that starts, the folder of its socket."""

if _SOCKET_FOLDER in os.environ:
    # This process is the fork server, which loads this module first. Python leaves the removal of the folder to the process that
    # started the server, which a SIGKILL ends before it can do so. The server ends only after that process and all workers.
    atexit.register(shutil.rmtree, os.environ.pop(_SOCKET_FOLDER), ignore_errors=True)


Sign = Callable[[], bool]
"""Says that a worker is at work, and returns False: the worker goes on, also where it plays `Until(sign)`."""


class Work(Protocol):
    """Computes what a worker is given."""

    facts: Tree
    """What must be the same in every worker and in the process that started them: data and versions."""

    def play(self, part: Tree, sign: Sign) -> Tree:
        """Play a part and return its result. sign: is called again and again meanwhile."""


def store_of(meeting: Tree, size: int) -> Store:
    """Return the store of a meeting to one of the workers that come to it, which are `size` in all."""
    if "file" in meeting:
        return FileStore(meeting["file"], size)
    return TCPStore(meeting["host"], meeting["port"], is_master=False)


def _open_meeting(host: str) -> tuple[Store, Tree]:
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False)  # at a port that is free
    return store, {"host": host, "port": store.port, "interface": None}


class MessageAnswers:
    """Answers the messages of the process that started this worker. Errors are answers too."""

    def __init__(self, make: Callable[[], Work]) -> None:
        self._make = make
        self._work: Work | None = None

    def answer(self, message: bytes | None, sign: Sign = lambda: False) -> bytes:
        """Return the answer to a message. The first is None, on which the work is made."""
        try:
            if self._work is None:
                self._work = self._make()
                return pack({"ready": self._work.facts})
            assert message is not None, "the worker is ready"
            return pack({"result": self._work.play(unpack(message)["part"], sign)})
        except Exception as error:  # of the user's code as well; the process that started the worker raises it again
            trace = "" if isinstance(error, InputError) else traceback.format_exc()
            return pack({"error": {**describe_error(error), "trace": trace}})


class StarterGone(BaseException):
    """Says that the process that started this worker is gone, so that the part is not needed any more."""


def pickled(
    work: object, name: str = "the run", mend: str = "define functions and classes of your own at the top of a module"
) -> bytes:
    """Return what workers are sent as bytes. Raises InputError, with a name for it and what to do, if it cannot be pickled."""
    try:
        return pickle.dumps(work)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise InputError(f"{name} cannot be sent to a worker ({typed_line(error)}); {mend}") from None


def unpickled(
    content: bytes, name: str = "what the run needs", mend: str = "define it in a file that can be imported"
) -> Any:
    """Return what was pickled. Raises InputError, likewise, if what it names cannot be imported in this process."""
    try:
        return pickle.loads(content)
    except (AttributeError, ImportError, pickle.UnpicklingError) as error:
        raise InputError(f"a worker cannot import {name} ({typed_line(error)}); {mend}") from None


def serve_pickled(connection: Connection, content: bytes, device: str | None, method: str) -> None:
    """Be a worker of the process at the other end of a connection. Processes that it starts, as to read, begin by `method`."""
    multiprocessing.set_start_method(method, force=True)
    serve(connection, lambda: unpickled(content)(device))


def serve(connection: Connection, make: Callable[[], Work]) -> None:
    """Answer the messages of a connection until it ends."""
    torch.set_num_threads(1)
    for number in (signal.SIGINT, signal.SIGHUP):
        # the process that started the workers gets them too, and ends the workers
        signal.signal(number, signal.SIG_IGN)
    answers, said = MessageAnswers(make), 0.0

    def sign() -> bool:
        """Give a sign to the process that started this worker, a few seconds after the last. Raises StarterGone."""
        nonlocal said
        if connection.poll():  # who waits for an answer sends nothing
            raise StarterGone
        if time.monotonic() - said >= _BETWEEN:
            said = time.monotonic()
            connection.send_bytes(_SIGN)
        return False

    with suppress(EOFError, OSError, StarterGone):
        message = None
        while True:
            connection.send_bytes(answers.answer(message, sign))
            message = connection.recv_bytes()


class ProcessTransport:
    """Starts processes on this machine by Python's fork server. Each says `{"ready": ...}`, and then answers messages."""

    def __init__(self, numbers: Sequence[int], work: object, devices: Sequence[str | None]) -> None:
        """work: makes a `Work` from a device. devices: each worker's, taken in turn."""
        self.numbers, self._devices = numbers, devices
        self._content = pickled(work)
        self._context = multiprocessing.get_context("forkserver")
        # what every worker needs; the optimizers of torch import dynamo
        self._context.set_forkserver_preload([__name__, "esper.runs.train", "torch._dynamo"])
        self.connections: dict[int, Connection] = {}
        self._processes: dict[int, BaseProcess] = {}
        self._cut: list[int] = []  # workers that `end` has left
        self._signs: dict[int, float] = {}  # when the workers whose answer is awaited gave their last sign [s]

    def start(self, worker: int) -> None:
        """Start a worker; one of the same number is ended."""
        self._end([worker])
        ours, theirs = self._context.Pipe()
        device = self._devices[worker % len(self._devices)]
        process = self._context.Process(
            target=serve_pickled,
            args=(theirs, self._content, device, multiprocessing.get_start_method()),
            name=f"worker-{worker}",
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
        self.connections[worker], self._processes[worker] = ours, process
        self._signs[worker] = time.monotonic()

    def send(self, worker: int, message: bytes) -> None:
        """Send a message to a worker that is not busy. If the worker is lost, `receive` says so."""
        self._signs[worker] = time.monotonic()
        with suppress(OSError):  # of a connection that is broken, as `receive` will say
            self.connections[worker].send_bytes(message)

    def meeting(self) -> tuple[Store, Tree]:
        """Return a store where workers publish their addresses, and how they reach it: a file beside the fork server's socket."""
        path = os.path.join(get_temp_dir(), f"meeting-{secrets.token_hex(8)}")  # a file that exists has old addresses
        return FileStore(path, len(self.numbers) + 1), {"file": path, "interface": "127.0.0.1"}

    def receive(self, seconds: float) -> list[tuple[int, bytes | None]]:
        """Wait for answers at most so long; return workers with them, None of one whose connection has ended: it is lost."""
        connections = self.connections.copy()  # a thread of `TorchrunTransport` adds some
        found: list[tuple[int, bytes | None]] = [(worker, None) for worker in self._cut]
        self._cut.clear()
        ready = wait(list(connections.values()), 0.0 if found else seconds)
        for worker, connection in sorted(connections.items()):
            if connection not in ready:
                continue
            answer: bytes | None = None
            try:
                answer = connection.recv_bytes()
            except (EOFError, OSError):
                self.connections.pop(worker).close()
            if answer == _SIGN:
                self._signs[worker] = time.monotonic()
            else:
                self._signs.pop(worker, None)
                found.append((worker, answer))
        return found

    def silent(self) -> dict[int, float]:
        """Return how long each worker whose answer is awaited has given no sign [seconds]."""
        return {worker: time.monotonic() - sign for worker, sign in self._signs.copy().items()}

    def end(self, worker: int) -> None:
        """End a worker that gives no sign; `receive` then says that it is lost."""
        self._signs.pop(worker, None)
        if worker in self._processes:
            self._processes[worker].kill()  # also one that is stopped, which no other signal reaches
        else:
            self._cut.append(worker)  # a rank of torchrun is no process of this one
            if (connection := self.connections.pop(worker, None)) is not None:
                connection.close()

    def close(self) -> None:
        self._end([*self.connections, *self._processes])

    def _end(self, workers: Sequence[int]) -> None:
        for worker in workers:
            self._signs.pop(worker, None)
            if (connection := self.connections.pop(worker, None)) is not None:
                connection.close()
            if worker in self._processes:
                self._processes[worker].terminate()
        for worker in workers:
            if (process := self._processes.pop(worker, None)) is not None:
                process.join(_PATIENCE)
                if process.is_alive():
                    process.kill()
                    process.join()
                process.close()


WORKER = "worker"
"""The status that a training or an evaluation returns in a rank above 0; it writes nothing."""

_KEY = "esper/workers"


def world_size() -> int:
    """Return the number of ranks."""
    return int(os.environ["WORLD_SIZE"])


def _store() -> Any:
    port = os.environ["MASTER_PORT"]
    if not (port.isdecimal() and int(port) < 2**16):
        raise InputError(
            f"MASTER_PORT is {port!r}; give the number of a port that no other program uses, below {2**16:,}"
        )
    address = os.environ["MASTER_ADDR"]
    try:
        socket.getaddrinfo(address, int(port))
    except OSError as error:  # torch would look for it for minutes, and no signal would end that
        raise InputError(
            f"MASTER_ADDR is {address!r}, which is no address of a machine ({typed_line(error)}); give that of rank 0"
        ) from None
    try:
        return next(iter(rendezvous("env://")))[0]
    except dist.DistNetworkError as error:
        rank, what, mend = os.environ["RANK"], "reach rank 0", "check MASTER_ADDR and MASTER_PORT"
        if rank == "0":
            what, mend = "listen", "give a MASTER_PORT that no other program uses"
        raise InputError(f"rank {rank} cannot {what} at {address}:{port} ({typed_line(error)}); {mend}") from None


class TorchrunTransport(ProcessTransport):
    """Connects rank 0 of torchrun with the other ranks, which are workers. Worker 0, if asked for, is a process beside it."""

    def __init__(self, numbers: Sequence[int], work: object, devices: Sequence[str | None], again: str) -> None:
        """again: how the run continues after a rank was lost."""
        super().__init__(numbers, work, devices)
        self._again = again
        secret = secrets.token_hex(32)
        listener = Listener(("", 0), backlog=world_size(), authkey=secret.encode())
        self._store = _store()
        _, port = listener.address  # of a TCP socket
        self._store.set(_KEY, json.dumps([port, secret]))
        self._started: set[int] = set()
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()  # a rank may never come

    def meeting(self) -> tuple[Store, Tree]:
        return _open_meeting(os.environ["MASTER_ADDR"])

    def start(self, worker: int) -> None:
        """Start the worker beside this process; others connect by themselves. Raises WorkerError for a rank that was lost."""
        if worker == 0:
            super().start(0)
        elif worker in self._started:
            raise WorkerError(f"rank {worker} was lost, and torchrun does not start a single rank again; {self._again}")
        self._started.add(worker)
        self._signs[worker] = time.monotonic()

    def _accept(self, listener: Listener) -> None:
        """Take the connections of all other ranks; what does not know the secret is no rank."""
        ranks = set[int]()
        with listener:
            while len(ranks) < world_size() - 1:
                with suppress(AuthenticationError, EOFError, ConnectionError):
                    connection = listener.accept()
                    rank = int(connection.recv_bytes())
                    ranks.add(rank)
                    self.connections[rank] = connection


def serve_rank(make: Callable[[str | None], Work], devices: Sequence[str | None]) -> dict[str, Any]:
    """Be the worker of a rank above 0 until rank 0 ends. Returns the summary of this process."""
    port, secret = json.loads(_store().get(_KEY))
    rank = int(os.environ["RANK"])
    device = devices[int(os.environ.get("LOCAL_RANK", "0")) % len(devices)]
    with Client((os.environ["MASTER_ADDR"], port), authkey=secret.encode()) as connection:
        connection.send_bytes(str(rank).encode())
        serve(connection, lambda: make(device))
    return {"status": WORKER}


class RayTransport:
    """Starts Ray workers, each with one CPU, and with a GPU where its device is one."""

    def __init__(
        self, numbers: Sequence[int], work: object, devices: Sequence[str | None], address: str | None
    ) -> None:
        """address: of a cluster; None is that of RAY_ADDRESS, or a local cluster that ends with the run."""
        try:
            import ray
        except ImportError:
            raise InputError(f"cluster is ray, which is not installed; give {pip_install('ray')}") from None
        self.numbers, self._devices, self._ray = numbers, devices, ray
        self._content = pickled(work)
        self._actors: dict[int, Any] = {}
        self._answers: dict[Any, int] = {}  # workers by the answers that are awaited
        self._own = not ray.is_initialized()
        if self._own:
            local = address is None and "RAY_ADDRESS" not in os.environ
            options = (
                {"num_cpus": len(numbers), "include_dashboard": False} if local else {"address": address or "auto"}
            )
            try:
                ray.init(log_to_driver=False, logging_level="ERROR", **options)
            except (ConnectionError, RuntimeError, ValueError) as error:
                where = address or os.environ.get("RAY_ADDRESS", "this machine")
                raise InputError(
                    f"no Ray cluster can be reached at {where} ({error}); start one, or leave the address out"
                ) from None

    def start(self, worker: int) -> None:
        if worker in self._actors:
            self._ray.kill(self._actors[worker])
            self._answers = {each: its for each, its in self._answers.items() if its != worker}
        device = self._devices[worker % len(self._devices)]
        gpus = 1 if (device or "").startswith("cuda") else 0
        options = self._ray.remote(num_cpus=1, num_gpus=gpus, max_restarts=0)
        # Ray shows each worker its own GPU alone, as cuda:0
        self._actors[worker] = options(RayActor).remote(self._content, "cuda:0" if gpus else device, sys.path)
        self._answers[self._actors[worker].answer.remote(None)] = worker

    def send(self, worker: int, message: bytes) -> None:
        """Send a message. Ray delivers messages in order."""
        self._answers[self._actors[worker].answer.remote(message)] = worker

    def receive(self, seconds: float) -> list[tuple[int, bytes | None]]:
        """Wait for answers. A worker whose process or machine has ended is lost."""
        done, _ = self._ray.wait(list(self._answers), num_returns=1, timeout=seconds)
        if not done:
            return []
        worker = self._answers.pop(done[0])
        try:
            answer = self._ray.get(done[0])
        except self._ray.exceptions.RayWorkerError:
            self._answers = {each: its for each, its in self._answers.items() if its != worker}
            return [(worker, None)]
        return [(worker, answer)]

    def silent(self) -> dict[int, float]:
        """Return no worker: a Ray worker cannot give a sign before its answer."""
        return {}

    def end(self, worker: int) -> None:
        self._ray.kill(self._actors[worker])

    def meeting(self) -> tuple[Store, Tree]:
        return _open_meeting(self._ray.util.get_node_ip_address())

    def close(self) -> None:
        for worker in self._actors.values():
            self._ray.kill(worker)
        self._actors.clear()
        self._answers.clear()
        if self._own and self._ray.is_initialized():
            self._ray.shutdown()


class RayActor(MessageAnswers):
    """Answers messages as a Ray worker."""

    def __init__(self, content: bytes, device: str | None, path: Sequence[str]) -> None:
        torch.set_num_threads(1)
        sys.path.extend(each for each in path if each not in sys.path)
        super().__init__(lambda: unpickled(content)(device))
