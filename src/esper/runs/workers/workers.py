"""Start the workers of a run: which are asked for, what they are sent, how an evaluation gives them parts, and how those of a
training meet.

The result of a part of an evaluation depends on the part alone. It is therefore the same from any worker, and the part of one
that was lost is played again by another. The workers of a training are equals (`esper.simic.exchange`). The first of them is the
process that started the others, and what it holds is all that they need to begin again.
"""

import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from esper.leyline.config.tree import FaultsConfig
from esper.leyline.data.task import AnyTask
from esper.leyline.messages import (
    DataFault,
    InputError,
    LearningError,
    OutOfMemory,
    UserCodeError,
    WorkerError,
    amended,
    counted,
)
from esper.runs.folder.environment import COMPARED, describe_versions, fingerprint
from esper.runs.workers import transports
from esper.simic.exchange import Exchange, ExchangeError
from esper.store.background import Background
from esper.store.tensors import Tree, pack, unpack
from esper.tolaria.runtime import resolve_device

TRIES = 3
"""Number of times that a part is played, or a worker is started, before the run stops."""

WAIT = 0.5
"""Longest time until an interrupt is seen [seconds]."""

QUIET = 60.0
"""How long a busy worker gives no sign before a line says so [seconds]."""

_ERRORS = {kind.__name__: kind for kind in (DataFault, InputError, LearningError, OutOfMemory, UserCodeError)}


class Stop(Exception):
    """Says that an interrupt ended a round early."""


class Workers:
    """Starts worker processes that answer messages."""

    first = 0  # number of the first of them
    waiting = 0.0  # seconds that workers lost in waiting, all together
    patience = FaultsConfig().worker_seconds  # after which a worker that gives no sign is ended; 0 never ends it [s]

    def __init__(
        self,
        transport: transports.ProcessTransport | transports.RayTransport,
        note: Callable[[str], None],
        check: Callable[[Any], None] = lambda ready: None,
        mend: str = "give fewer workers",
        asked: Callable[[], bool] = lambda: False,
    ) -> None:
        """Start the workers, and wait until all are ready or `asked`. check: gets what a worker says about itself."""
        self.transport, self.note, self._check, self._mend, self._asked = transport, note, check, mend, asked
        self.lost = 0  # workers that were lost and started again
        self._idle: set[int] = set()
        self._told: set[int] = set()  # workers of whose silence a line has said
        try:
            if (gone := self._start(transport.numbers)) is not None:
                raise InputError(
                    f"worker {gone} ended while it was started, and its own output above says why; a script that calls Esper "
                    "with workers needs its calls under if __name__ == '__main__':"
                )
        except BaseException:
            transport.close()
            raise

    @property
    def size(self) -> int:
        """The number of workers, with this process if it is one."""
        return self.first + len(self.transport.numbers)

    def summary(self) -> dict[str, Any]:
        """Return the number of workers, how many were lost and replaced, and the seconds that they waited."""
        return {"number": self.size, "lost": self.lost, "waiting_seconds": round(self.waiting, 3)}

    def close(self) -> None:
        """End the workers."""
        self.transport.close()

    def hear(self, seconds: float = WAIT) -> list[tuple[int, bytes | None]]:
        """Wait for answers at most so long; return them as `ProcessTransport.receive`.

        A line says which worker has given no sign for a minute, and it is ended after `patience`, which may be shorter. Where
        several are silent, that is the one which has been so for the longest time, because others may wait for it.
        """
        found, silent = self.transport.receive(seconds), self.transport.silent()
        longest = min(QUIET, self.patience or QUIET)
        quiet = {worker: since for worker, since in silent.items() if since >= longest}
        self._told &= set(quiet)
        if quiet:
            worker = max(quiet, key=quiet.__getitem__)
            ends = ""
            if self.patience:
                ends = f"; after {self.patience:g} s it is ended, and another plays its part again"
            if 0 < self.patience <= quiet[worker]:
                self.note(f"worker {worker} gave no sign for {quiet[worker]:.0f} s, and is ended")
                self.transport.end(worker)
            elif worker not in self._told:
                self._told.add(worker)
                self.note(
                    f"worker {worker} has given no sign for {quiet[worker]:.0f} s: a step takes long, its process is stopped, or "
                    f"its data or its environment blocks{ends} (faults.worker_seconds)"
                )
        return found

    def _start(self, numbers: Sequence[int]) -> int | None:
        """Start workers, and return the number of one that ended while it was started, if any."""
        self._idle.clear()
        for worker in numbers:
            self.transport.start(worker)
        while len(self._idle) < len(numbers):
            if self._asked():
                raise KeyboardInterrupt("interrupted while the workers were started")
            for worker, message in self.hear():
                if message is None:
                    return worker
                self._ready(worker, message)
        return None

    def _ready(self, worker: int, message: bytes) -> None:
        tree = unpack(message)
        if "error" in tree and tree["error"]["type"] != OutOfMemory.__name__:
            error = tree["error"]
            said = error["message"] if error["type"] == InputError.__name__ else f"{error['type']}: {error['message']}"
            raise InputError(
                f"worker {worker} could not be started: {said}; a worker is a process of its own, which must be able to import "
                "the task"
            )
        self._check(_checked(tree)["ready"])
        self._idle.add(worker)

    def _give_up(self, worker: int, times: int, what: str) -> None:
        """Raise WorkerError if a worker was lost too often."""
        if times >= TRIES:
            raise WorkerError(
                f"worker {worker} was lost {counted(times, 'time')}, because something ended its process, such as a lack of "
                f"memory, and {what}; {self._mend}"
            )


class WorkerPool(Workers):
    """Gives the parts of an evaluation to workers as these become free."""

    def play(self, parts: Sequence[Tree]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the place of each part and its result as soon as there is one; the part of a lost worker is played again.

        Raises Stop once `asked`.
        """
        left, busy = deque(range(len(parts))), dict[int, int]()  # parts, and those that are played, by worker
        tries, failures = [0] * len(parts), Counter[int]()
        while left or busy:
            if self._asked():
                self.transport.close()
                raise Stop
            for worker in sorted(self._idle)[: len(left)]:
                place = busy[worker] = left.popleft()
                tries[place] += 1
                self._idle.discard(worker)
                self.transport.send(worker, pack({"part": parts[place]}))
            for worker, answer in self.hear():
                if answer is None:
                    self.lost += 1
                    self._idle.discard(worker)
                    failures[worker] += 1
                    again, sentence = busy.pop(worker, None), f"worker {worker} was lost; another is started"
                    self._give_up(worker, failures[worker], "it could not be started again")
                    if again is not None:
                        self._give_up(worker, tries[again], f"part {again} was lost with each")
                        left.appendleft(again)
                        sentence += ", and its part is played again"
                    self.transport.start(worker)
                    self.note(sentence)
                elif worker in busy:
                    place, result = busy.pop(worker), _checked(unpack(answer))["result"]
                    self._idle.add(worker)
                    yield place, result
                else:  # it was started again
                    self._ready(worker, answer)
                    failures[worker] = 0


class ShardPool(Workers):
    """Lets the workers of a growth, each of which holds a shard of its rows, carry out commands in lockstep.

    A command is a mapping with the number of a `population`. The commands that change a worker are kept, so that the worker that
    is started in place of a lost one carries them out again, and then holds what the lost one held.
    """

    devices: Sequence[str | None] = (None,)  # of the workers, taken in turn; None is that of the config

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._kept: dict[int, list[Tree]] = {worker: [] for worker in self.transport.numbers}
        self._later: dict[int, list[Tree]] = {worker: [] for worker in self.transport.numbers}
        self._busy = set[int]()  # workers whose answer is awaited
        self._starting = set[int]()  # those of them that have not said yet that they are ready

    def ask(self, asked: Mapping[int, Sequence[Tree]]) -> dict[int, Any]:
        """Let workers carry out their commands at the same time; return by worker the result of its last command.

        Raises the error of a worker once all have answered.
        """
        self._collect({})  # of a question that an interrupt has ended
        for worker, commands in asked.items():
            self._send(worker, [*self._later[worker], *commands])
            self._later[worker] = []
        found = {worker: _checked(tree)["result"] for worker, tree in self._collect(asked).items()}
        for worker, commands in asked.items():
            self._kept[worker] += [command for command in commands if command["kept"]]
        slowest = max((answer["seconds"] for answer in found.values()), default=0.0)
        self.waiting += sum(slowest - answer["seconds"] for answer in found.values())
        return {worker: answer["value"] for worker, answer in found.items()}

    def forget(self, population: int) -> None:
        """Let the workers free a population before their next command, and do not carry out its commands again."""
        for worker, commands in self._kept.items():
            self._kept[worker] = [command for command in commands if command["population"] != population]
            self._later[worker].append({"population": population, "name": "close", "arguments": [], "kept": False})

    def _send(self, worker: int, commands: Sequence[Tree]) -> None:
        content = np.frombuffer(transports.pickled(list(commands), "a command of the run"), np.uint8)
        self._busy.add(worker)
        self.transport.send(worker, pack({"part": {"commands": content}}))

    def _collect(self, asked: Mapping[int, Sequence[Tree]]) -> dict[int, Tree]:
        """Wait until no worker is busy; return the answers of those that were asked. A lost worker is started again."""
        found, losses = dict[int, Tree](), Counter[int]()
        while self._busy:
            for worker, answer in self.hear():
                if answer is None:
                    self.lost += 1
                    losses[worker] += 1
                    self._give_up(worker, losses[worker], "its environments were lost with each")
                    self.transport.start(worker)
                    self._busy.add(worker)
                    self._starting.add(worker)
                    self.note(
                        f"worker {worker} was lost; another is started, and plays its environments again up to here"
                    )
                elif worker in self._starting:
                    self._ready(worker, answer)
                    self._starting.discard(worker)
                    self._send(worker, [*self._kept[worker], *asked.get(worker, ())])
                else:
                    self._busy.discard(worker)
                    found[worker] = unpack(answer)
        return {worker: found[worker] for worker in asked}


class Peers(Workers):
    """Starts the other workers of a training, and exchanges with them, as the first worker."""

    first = 1
    _gone: int | None = None  # a worker that was lost
    _losses = 0  # since a round was finished
    _watch = ExitStack()  # ends the thread that hears the workers while this one takes part in rounds
    _heard: Sequence[tuple[int, bytes | None]] = ()  # by the thread

    def join(self, part: Mapping[str, Any], owners: Sequence[int], gpu: torch.device | None = None) -> Exchange:
        """Give all workers their parts, and return the exchange with them. Raises ExchangeError if one is lost.

        part: what they begin with. owners: rank of the worker that has each shard. gpu: that of this worker, if gradients go
        through NCCL.
        """
        store, meeting = self.transport.meeting()
        for rank in self.transport.numbers:
            given = {**part, "meeting": meeting, "owners": list(owners), "rank": rank, "size": self.size}
            self.transport.send(rank, pack({"part": given}))
        thread = Background()  # because a worker that is lost before it has come would be waited for
        found = thread.submit(partial(Exchange.joined, store, owners, 0, self.size, meeting["interface"], gpu))
        thread.close(lambda: None)
        while True:
            with suppress(TimeoutError):
                exchange = found.result(WAIT)
                self._begin_watch()
                return exchange
            if self._asked():
                raise KeyboardInterrupt("interrupted while the workers met")
            for rank, answer in self.hear(0.0):
                self._gone = rank
                if answer is not None:
                    _checked(unpack(answer))
                raise ExchangeError(f"worker {rank} was lost")

    def finished(self, waiting: float) -> None:
        """Note the end of a round, in which all workers waited so long together [s]."""
        self.waiting += waiting
        self._losses = 0

    def _begin_watch(self) -> None:
        """Hear the workers in a thread, as this process may wait for one that is silent in a call that nothing interrupts.

        If that worker is ended, the call raises an error.
        """
        ended = threading.Event()
        self._heard = heard = list[tuple[int, bytes | None]]()

        def watch() -> None:
            while not ended.is_set():
                heard.extend(self.hear())

        thread = threading.Thread(target=watch, name="watch", daemon=True)
        thread.start()
        self._watch = ExitStack()
        self._watch.callback(thread.join)
        self._watch.callback(ended.set)  # which is called before

    def close(self) -> None:
        self._watch.close()
        super().close()

    def restart(self) -> None:
        """Start all workers again after one was lost. Raises the error of a worker that failed, or WorkerError."""
        self._watch.close()
        told = set[int]()  # those that have heard of the loss
        while self._gone is None:
            if self._asked():
                raise KeyboardInterrupt("interrupted after a worker was lost")
            heard, self._heard = self._heard or self.hear(), ()
            for worker, answer in heard:
                tree = {} if answer is None else unpack(answer)
                if "error" in tree and tree["error"]["type"] != ExchangeError.__name__:
                    _checked(tree)
                told.add(worker)
                if answer is None or len(told) == len(self.transport.numbers):  # else the connection itself was lost
                    self._gone = worker
        while self._gone is not None:
            self.lost += 1
            self._losses += 1
            self._give_up(self._gone, self._losses, "the round was lost with each")
            self.note(f"worker {self._gone} was lost; the workers are started again, and the round is played again")
            self._gone = self._start(sorted(self.transport.numbers, key=lambda worker: worker != self._gone))


def _checked(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the answer of a worker. Raises the error that it contains, if any."""
    if "error" in tree:
        kind, message, trace = tree["error"]["type"], tree["error"]["message"], tree["error"]["trace"]
        error = _ERRORS.get(kind, WorkerError)(message if kind in _ERRORS else f"a worker failed: {kind}: {message}")
        if trace:
            error.add_note(trace)
        raise error
    return tree


Kind = TypeVar("Kind", bound=Workers)

CLUSTERS = ("ray", "ray://HOST:PORT", "torchrun")


class WorkerOptions(NamedTuple):
    """Says which workers were asked for. By default this process plays all parts."""

    workers: int | None = None  # number of workers; None is one for each device
    # devices of the workers, taken in turn; without any, each has the device of the config
    devices: tuple[str, ...] = ()
    cluster: str | None = None  # 'ray', a `ray://` address, or 'torchrun'; None starts processes on this machine
    # from the name of a task to the task, for workers that are not sent the task itself
    find: Callable[[str], AnyTask] | None = None

    def maker(self, name: str) -> Callable[[], AnyTask] | None:
        """Return what makes the task of a name; None where tasks have none."""
        return None if self.find is None else partial(self.find, name)

    @property
    def any(self) -> bool:
        return self.workers is not None or bool(self.devices) or self.cluster is not None

    @property
    def is_rank(self) -> bool:
        """Whether this process is a rank of torchrun above 0, which is a worker itself."""
        return self.cluster == "torchrun" and os.environ["RANK"] != "0"

    @property
    def size(self) -> int:
        if self.cluster == "torchrun":
            return transports.world_size()
        return self.workers if self.workers is not None else max(len(self.devices), 1)


ALONE = WorkerOptions()


def worker_options(
    workers: Any = None, devices: Any = None, cluster: Any = None, find: Callable[[str], AnyTask] | None = None
) -> WorkerOptions:
    """Return the workers that arguments ask for: a number, names of devices, and one of CLUSTERS.

    A text of devices may have several names, with commas or spaces between them.
    """
    count = None
    if workers is not None:
        count = int(str(workers)) if str(workers).isdecimal() else 0
        if count < 1:
            raise InputError(f"workers is {workers!r}; give the number of workers, a whole number of 1 or more")
    listed = [devices] if isinstance(devices, str) else list(devices or ())
    names = tuple(name for each in listed for name in str(each).replace(",", " ").split())
    with amended(f"devices is {','.join(names)!r}: "):
        kinds = {resolve_device(name).type for name in names}
    if len(kinds) > 1:
        raise InputError(
            f"devices is {','.join(names)!r}, but a CPU and a GPU round differently, so that results would depend on the worker; "
            "give devices of one kind"
        )
    if count is not None and len(names) > count:
        raise InputError(
            f"devices names {counted(len(names), 'device')}, but workers is {count}; give a worker to each device"
        )
    if cluster is not None and not (cluster in ("ray", "torchrun") or str(cluster).startswith("ray://")):
        raise InputError(f"cluster is {cluster!r}; give one of {', '.join(CLUSTERS)}")
    if cluster == "torchrun":
        if "RANK" not in os.environ:
            raise InputError(
                "cluster is torchrun, but torchrun did not start this process; give torchrun --nproc-per-node N -m -- "
                "esper train|eval ... --cluster torchrun"
            )
        if count is not None and count != transports.world_size():
            raise InputError(
                f"workers is {count}, but torchrun started {transports.world_size()} ranks, each a worker; leave workers out"
            )
    return WorkerOptions(count, names, cluster, find)


def start_workers(
    kind: type[Kind],
    asked: WorkerOptions,
    work: Any,
    note: Callable[[str], None],
    facts: Tree,
    *,
    mend: str = "give fewer workers, or lower envs",
    again: str = "continue with esper resume",
    stop: Callable[[], bool] = lambda: False,
) -> Kind:
    """Start the workers that were asked for, and wait until they are ready, or until `stop`: a KeyboardInterrupt.

    facts: of this process, which those of each worker must equal. mend: what to do if workers are lost for good. again:
    how the run continues after a rank of torchrun was lost.
    """
    devices: Sequence[str | None] = asked.devices or (None,)
    numbers = range(kind.first, asked.size)
    transport: transports.ProcessTransport | transports.RayTransport
    if asked.cluster is None:
        transport = transports.ProcessTransport(numbers, work, devices)
    elif asked.cluster == "torchrun":
        transport = transports.TorchrunTransport(numbers, work, devices, again)
    else:
        transport = transports.RayTransport(numbers, work, devices, None if asked.cluster == "ray" else asked.cluster)
    return kind(transport, note, partial(check_facts, facts), mend, stop)


def sent(task: AnyTask, find: Callable[[], AnyTask] | None, *, sealed: bool = True) -> Callable[[], AnyTask]:
    """Return what makes a task in a worker, without its test split if `sealed`: from its bytes, or else by `find`.

    Raises InputError if the task cannot be pickled and `find` is None or cannot make it.
    """
    what = f"the task {task.name!r}"
    mend = "define its host and its functions at the top of a module, or name the task as path.py:function"
    try:
        content = transports.pickled(task.sealed() if sealed else task, what, mend)
    except InputError:
        with suppress(InputError):
            if find is not None:
                find()
                return partial(_found, find, sealed)
        raise
    return partial(
        transports.unpickled, content, what, "define it in a file that can be imported, or name it as path.py:function"
    )


def _found(find: Callable[[], AnyTask], sealed: bool) -> AnyTask:
    return find().sealed() if sealed else find()


def shared_facts(tasks: Sequence[AnyTask]) -> Tree:
    """Return what must be the same in all workers and in the process that started them: digests of the data, and versions."""
    data = {task.name: fingerprint(task) for task in tasks}
    return {"data": data, "versions": describe_versions(COMPARED)}


def check_facts(own: Tree, ready: Tree) -> None:
    """Raise InputError if a worker has other data or other versions than the process that started it."""
    for name, parts in own["data"].items():
        if ready["data"].get(name) != parts:
            raise InputError(
                f"a worker has other data of task {name!r} than this process; let the function that makes the task return the "
                "same data at every call, and give every machine the same files"
            )
    if ready.get("policy") != own.get("policy"):  # in a training alone
        raise InputError(
            f"the policy of a worker is on {ready['policy']}, that of this process on {own['policy']}, and devices of two kinds "
            "round differently; give ppo.device=cpu, or devices of one kind"
        )
    if ready["versions"] != own["versions"]:
        raise InputError(
            f"a worker runs {ready['versions']}, this process {own['versions']}; install the same versions"
        )
