"""Let worker processes play the parts of a run: which are asked for, how parts are given to them, and what they are sent.

The learner sends weights and parts, and gets results back. The result of a part depends on the part and the weights alone. It is
therefore the same from any worker, which messages call an actor, and the part of one that was lost is played again by another.
"""

import os
import pickle
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from esper.leyline.data.task import AnyTask
from esper.leyline.errors import (
    ActorError,
    DataFault,
    InputError,
    LearningError,
    OutOfMemory,
    UserCodeError,
    typed_line,
)
from esper.leyline.text import counted
from esper.runs.folder.environment import COMPARED, describe_versions, fingerprint
from esper.runs.workers.transports import ProcessTransport, RayTransport, TorchrunTransport, Transport, world_size
from esper.store.tensors import Tree, pack, unpack
from esper.tolaria.runtime import resolve_device

TRIES = 3
"""Number of times that a part is played, or an actor is started, before the run stops."""

WAIT = 0.5
"""Longest time until an interrupt is seen [seconds]."""

_ERRORS = {kind.__name__: kind for kind in (DataFault, InputError, LearningError, OutOfMemory, UserCodeError)}


class Stop(Exception):
    """An interrupt ended a round early."""


class Workers:
    """The actors of a run. Parts are given to actors as these become free."""

    def __init__(
        self,
        transport: Transport,
        note: Callable[[str], None],
        check: Callable[[Any], None] = lambda ready: None,
        mend: str = "give fewer workers",
        asked: Callable[[], bool] = lambda: False,
    ) -> None:
        """Start the actors, and wait until all are ready or `asked`. check: gets what an actor says about itself."""
        self.transport, self.note, self._check, self._mend = transport, note, check, mend
        self.size = transport.size
        self.lost = 0  # actors that were lost and started again
        self.waiting = 0.0  # seconds that actors did not play in, over all rounds and actors
        self._weights = -1  # number of the present weights
        self._idle: set[int] = set()
        self._known: dict[int, int] = {}  # number of the weights that an actor has
        self._failures = dict.fromkeys(range(transport.size), 0)  # starts in a row that failed
        try:
            for actor in range(transport.size):
                transport.start(actor)
            while len(self._idle) < transport.size:
                if asked():
                    raise KeyboardInterrupt("interrupted while the actors were started")
                for actor, message in transport.receive(WAIT):
                    if message is None:
                        raise InputError(
                            f"actor {actor} ended while it was started, and its own output above says why; a script that calls "
                            "Esper with workers needs its calls under if __name__ == '__main__':"
                        )
                    self._started(actor, unpack(message))
        except BaseException:
            transport.close()
            raise

    def play(
        self,
        weights: Tree,
        parts: Sequence[Tree],
        asked: Callable[[], bool] = lambda: False,
        done: Callable[[int, dict[str, Any]], None] = lambda place, result: None,
    ) -> list[dict[str, Any]]:
        """Return the results of parts played with weights, in their order; the part of an actor that is lost is played
        again.

        `done` is called with the place of a part and its result as soon as there is one. Raises Stop once `asked` says
        so.
        """
        self._weights += 1
        message, results = pack({"weights": weights}), dict[int, Any]()
        left, busy, tries = deque(range(len(parts))), dict[int, int](), [0] * len(parts)
        while len(results) < len(parts):
            if asked():
                self.transport.close()
                raise Stop
            for actor in sorted(self._idle)[: len(left)]:
                # The actor may still have the population of a part that it played in an earlier round.
                own = next((place for place in left if place % self.size == actor), left[0])
                left.remove(own)
                busy[actor] = own
                tries[own] += 1
                self._idle.discard(actor)
                if self._known.get(actor) != self._weights:
                    self.transport.send(actor, message)
                    self._known[actor] = self._weights
                self.transport.send(actor, pack({"part": parts[own]}))
            for actor, answer in self.transport.receive(WAIT):
                if answer is None:
                    again = busy.pop(actor, None)
                    self._replace(actor, again, 0 if again is None else tries[again])
                    if again is not None:
                        left.appendleft(again)
                    continue
                if actor not in busy:  # it was started again
                    self._started(actor, unpack(answer))
                    continue
                place = busy.pop(actor)
                results[place] = _checked(unpack(answer))["result"]
                self._idle.add(actor)
                done(place, results[place])
        return [results[place] for place in range(len(parts))]

    def waited(self, seconds: float, playing: float) -> float:
        """Add and return the time that all actors lost in waiting, of a time of which they played `playing` together [s]."""
        lost = max(self.size * seconds - playing, 0.0)
        self.waiting += lost
        return lost

    def summary(self) -> dict[str, Any]:
        """Return the number of actors, how many were lost and replaced, and the seconds that they waited."""
        return {"workers": self.size, "lost": self.lost, "waiting_seconds": round(self.waiting, 3)}

    def close(self) -> None:
        self.transport.close()

    def _started(self, actor: int, tree: Mapping[str, Any]) -> None:
        if "error" in tree and tree["error"]["type"] != OutOfMemory.__name__:
            error = tree["error"]
            said = error["message"] if error["type"] == InputError.__name__ else f"{error['type']}: {error['message']}"
            raise InputError(
                f"actor {actor} could not be started: {said}; an actor is a process of its own, which must be able to import "
                "the task"
            )
        self._check(_checked(tree)["ready"])
        self._failures[actor] = 0
        self._known.pop(actor, None)
        self._idle.add(actor)

    def _replace(self, actor: int, part: int | None, tried: int) -> None:
        """Start another actor for one that was lost. Raises ActorError after too many attempts."""
        self.lost += 1
        self._idle.discard(actor)
        self._failures[actor] += 1
        if tried >= TRIES or self._failures[actor] >= TRIES:
            what = "it could not be started again" if part is None else f"part {part} was lost with each"
            raise ActorError(
                f"actor {actor} was lost {counted(max(tried, self._failures[actor]), 'time')}, because something ended its "
                f"process, such as a lack of memory, and {what}; {self._mend}"
            )
        self.transport.start(actor)
        self.note(
            f"actor {actor} was lost; another is started{'' if part is None else ', and its part is played again'}"
        )


def _checked(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the answer of an actor. Raises the error that it contains, if any."""
    if "error" in tree:
        kind, message, trace = tree["error"]["type"], tree["error"]["message"], tree["error"]["trace"]
        error = _ERRORS.get(kind, ActorError)(message if kind in _ERRORS else f"an actor failed: {kind}: {message}")
        if trace:
            error.add_note(trace)
        raise error
    return tree


CLUSTERS = ("ray", "ray://HOST:PORT", "torchrun")


class WorkerOptions(NamedTuple):
    """The actors that were asked for. By default there are none, and the parts are played in this process."""

    workers: int | None = None  # number of actors; None is one for each device
    # devices of the actors, taken in turn; without any, each has the device of the config
    devices: tuple[str, ...] = ()
    cluster: str | None = None  # 'ray', a `ray://` address, or 'torchrun'; None starts processes on this machine
    # from the name of a task to the task, for actors that are not sent the task itself
    find: Callable[[str], AnyTask] | None = None

    @property
    def any(self) -> bool:
        return self.workers is not None or bool(self.devices) or self.cluster is not None

    @property
    def is_rank(self) -> bool:
        """Whether this process is a rank of torchrun above 0, which is an actor itself."""
        return self.cluster == "torchrun" and os.environ["RANK"] != "0"

    @property
    def size(self) -> int:
        if self.cluster == "torchrun":
            return world_size()
        return self.workers if self.workers is not None else max(len(self.devices), 1)


ALONE = WorkerOptions()


def worker_options(
    workers: Any = None, devices: Any = None, cluster: Any = None, find: Callable[[str], AnyTask] | None = None
) -> WorkerOptions:
    """Return the actors that arguments ask for: a number, names of devices or a text of them, and one of CLUSTERS."""
    count = None
    if workers is not None:
        try:
            count = 0 if isinstance(workers, bool) else int(str(workers))
        except ValueError:
            count = 0
        if count < 1:
            raise InputError(f"workers is {workers!r}; give the number of actors, a whole number of 1 or more")
    listed = devices.split(",") if isinstance(devices, str) else list(devices or ())
    names = tuple(str(name).strip() for name in listed)
    for name in names:
        try:
            resolve_device(name)
        except InputError as error:
            raise InputError(f"devices is {','.join(names)!r}: {error}") from None
    kinds = {resolve_device(name).type for name in names}
    if len(kinds) > 1:
        raise InputError(
            f"devices is {','.join(names)!r}, but a CPU and a GPU round differently, so that results would depend on which actor "
            "was free; give devices of one kind"
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
        if count is not None and count != world_size():
            raise InputError(
                f"workers is {count}, but torchrun started {world_size()} ranks, each an actor; leave workers out"
            )
    return WorkerOptions(count, names, cluster, find)


def start_workers(
    asked: WorkerOptions,
    work: Any,
    note: Callable[[str], None],
    facts: Tree,
    *,
    mend: str = "give fewer workers, or lower envs",
    again: str = "continue with esper resume",
    stop: Callable[[], bool] = lambda: False,
) -> Workers:
    """Start the actors that were asked for, and wait until they are ready, or until `stop`: a KeyboardInterrupt.

    facts: of this process, which those of each actor must equal. mend: what to do if actors are lost for good. again:
    how the run continues after a rank of torchrun was lost.
    """
    devices: Sequence[str | None] = asked.devices or (None,)
    transport: Transport
    if asked.cluster is None:
        transport = ProcessTransport(asked.size, work, devices)
    elif asked.cluster == "torchrun":
        transport = TorchrunTransport(work, devices, again)
    else:
        transport = RayTransport(asked.size, work, devices, None if asked.cluster == "ray" else asked.cluster)
    return Workers(transport, note, partial(check_facts, facts), mend, stop)


class SentTask(NamedTuple):
    """A task on its way to an actor."""

    name: str  # name of the task
    content: bytes | None  # the pickled task; None if the actor builds it from its name
    find: Callable[[str], AnyTask] | None = None  # from the name to the task
    sealed: bool = True  # whether the actor gets the task without its test split

    @classmethod
    def of(cls, task: AnyTask, find: Callable[[str], AnyTask] | None, *, sealed: bool = True) -> "SentTask":
        """Pickle a task, without its test split if `sealed`, or take its name if it can be built from that."""
        try:
            return cls(task.name, pickle.dumps(task.sealed() if sealed else task))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            with suppress(InputError):
                if find is not None:
                    find(task.name)
                    return cls(task.name, None, find, sealed)
            raise InputError(
                f"the task {task.name!r} cannot be sent to an actor ({typed_line(error)}); define its host and its functions at "
                "the top of a module, or name the task as path.py:function"
            ) from None

    def task(self) -> AnyTask:
        """Return the task, in an actor. Raises InputError if it cannot be imported there."""
        if self.content is None:
            assert self.find is not None, "a task without content is found by its name"
            made = self.find(self.name)
            return made.sealed() if self.sealed else made
        try:
            task: AnyTask = pickle.loads(self.content)
        except (AttributeError, ImportError, pickle.UnpicklingError) as error:
            raise InputError(
                f"an actor cannot import the task {self.name!r} ({typed_line(error)}); define it in a file that can be imported, "
                "or name it as path.py:function"
            ) from None
        return task


def shared_facts(tasks: Sequence[AnyTask]) -> Tree:
    """Return what must be the same in every worker and in the learner: digests of the data, and versions of the software."""
    data = {task.name: fingerprint(task) for task in tasks}
    return {"data": data, "versions": describe_versions(COMPARED)}


def check_facts(own: Tree, ready: Tree) -> None:
    """Raise InputError if an actor has other data or other versions than the learner."""
    for name, parts in own["data"].items():
        if ready["data"].get(name) != parts:
            raise InputError(
                f"an actor has other data of task {name!r} than this process; let the function that makes the task return the "
                "same data at every call, and give every machine the same files"
            )
    if ready["versions"] != own["versions"]:
        raise InputError(
            f"an actor runs {ready['versions']}, this process {own['versions']}; install the same versions"
        )
