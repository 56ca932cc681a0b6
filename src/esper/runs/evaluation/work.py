"""Compute the parts of an evaluation, which are populations, in this process or by workers. E environments.

What a part is follows from the evaluation, and not from the number of workers, so the results do not depend on it.
"""

import hashlib
import io
import json
import time
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from esper.kasmina.network.static import Absent
from esper.leyline.config.tree import Config
from esper.leyline.data.task import AnyTask
from esper.leyline.errors import InputError
from esper.leyline.progress import Pace
from esper.runs.evaluation.contenders import Contender, Say, unheard
from esper.runs.folder.environment import fingerprint
from esper.runs.folder.interrupt import Interrupt
from esper.runs.workers.transports import pickled, unpickled
from esper.runs.workers.workers import SentTask, Stop, WorkerOptions, WorkerPool, shared_facts, start_workers
from esper.store.disk import DiskRetry, file_name, write_atomic
from esper.store.tensors import Tree
from esper.tolaria.play import Observer

Arrays = Mapping[str, NDArray[Any]]


class EvaluationPart(NamedTuple):
    """Describes a population of an evaluation or of a search."""

    task: AnyTask  # the task, with its test split
    who: Sequence[str]  # what makes the result, in the key of the stored one
    config: Config  # of the population
    needed: Collection[str]  # arrays that a result must have
    # from the task, the config and observers to the arrays; workers get it pickled
    compute: Callable[..., Arrays | Absent]
    said: str = ""  # the line of progress when it is done; none if empty


def disk_retry(config: Config, note: Say, folder: Path) -> DiskRetry:
    """Return what waits for room on a full disk while an evaluation is written to a folder."""
    again = "give the same command again, which goes on from what was grown"
    return DiskRetry(config.faults.disk_seconds, note, folder, lambda: False, further=again)


class EvaluationPlayer:
    """Computes the parts of an evaluation in a worker: of its tasks, with their test splits, and those of references."""

    def __init__(self, tasks: Sequence[SentTask], device: str | None) -> None:
        """Make the tasks in this process. Parts are computed on the device, or on that of their config if it is None."""
        self._tasks, self._device = [sent.task() for sent in tasks], device
        self.facts = shared_facts(self._tasks)

    def play(self, part: Tree, *observers: Observer) -> Tree:
        """Compute a part. Returns its arrays, or the reason why it is absent, and its duration [seconds]."""
        begin = time.perf_counter()
        config, compute = unpickled(part["content"].tobytes())  # from the process that started this one
        if self._device is not None:
            config = config.model_copy(update={"device": self._device})
        made = compute(self._tasks[part["task"]], config, *observers)
        result = {"absent": made.reason} if isinstance(made, Absent) else {"arrays": dict(made)}
        return {**result, "seconds": time.perf_counter() - begin}


class Runner:
    """Computes parts, by workers or in this process. Results are stored in a folder, if there is one, and reused."""

    def __init__(
        self,
        folder: Path | None = None,
        watch: Say = unheard,
        pool: WorkerPool | None = None,
        tasks: Sequence[AnyTask] = (),
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Let the workers of a pool, which have the `tasks`, compute parts. `play` raises Stop there once `stop` returns True."""
        self.folder, self.watch, self.pool, self._stop = folder, watch, pool, stop
        self.pace: Pace | None = None  # counts what was computed
        self._data: dict[int, tuple[AnyTask, Mapping[str, str]]] = {}  # tasks and their fingerprints, by id
        self._places = {id(task): place for place, task in enumerate(tasks)}
        self._begin, self._playing = time.perf_counter(), 0.0

    def play(self, parts: Sequence[EvaluationPart]) -> list[Arrays | Absent]:
        """Return the results of parts in their order."""
        found: dict[int, Arrays | Absent] = {}
        missing: list[int] = []  # places of the parts that workers compute

        def done(place: int, made: Arrays | Absent, seconds: float | None) -> None:
            part, found[place] = parts[place], made
            if seconds is not None and self.folder is not None and not isinstance(made, Absent):
                path, content = self._path(self.folder, part), io.BytesIO()
                np.savez_compressed(content, allow_pickle=False, **made)
                retry = disk_retry(part.config, self.watch, self.folder)
                retry(path, lambda: write_atomic(path, content.getvalue()))
            if self.pace is not None:
                hands = 1 if self.pool is None else self.pool.size
                self.pace.add(part.config.envs, None if seconds is None else seconds / hands)
            if part.said and not isinstance(made, Absent):
                self.watch(part.said)

        def returned(at: int, result: Mapping[str, Any]) -> None:
            self._playing += result["seconds"]
            made = Absent(result["absent"]) if "absent" in result else result["arrays"]
            done(missing[at], made, result["seconds"])

        for place, part in enumerate(parts):
            if (stored := self._stored(part)) is not None:
                done(place, stored, None)
            elif self.pool is not None:
                missing.append(place)
            else:
                begin = time.perf_counter()
                made = part.compute(part.task, part.config)
                done(place, made, time.perf_counter() - begin)
        if self.pool is not None and missing:
            sent = []
            self.pool.patience = max(parts[place].config.faults.worker_seconds for place in missing)
            for part in (parts[place] for place in missing):
                content = pickled((part.config, part.compute), f"the controller {part.who[0]!r}")
                sent.append({"task": self._places[id(part.task)], "content": np.frombuffer(content, np.uint8)})
            self.pool.play(sent, self._stop, returned)
        return [found[place] for place in range(len(parts))]

    def _stored(self, part: EvaluationPart) -> Arrays | None:
        """Return the stored result of a part; None if there is none."""
        if self.folder is None or not (path := self._path(self.folder, part)).exists():
            return None
        try:
            with zipfile.ZipFile(path) as files:
                if sum(file.file_size for file in files.infolist()) > 2**30:
                    raise ValueError("more than any figures")
            with np.load(path, allow_pickle=False) as arrays:
                found = dict(arrays)
            if set(part.needed) - set(found):
                raise KeyError("some figures")
        except (OSError, ValueError, KeyError, MemoryError, zipfile.BadZipFile, zlib.error):
            raise InputError(f"{path} cannot be read as kept figures; remove it, and they are grown again") from None
        return found

    def _path(self, folder: Path, part: EvaluationPart) -> Path:
        """Return the file of the result of a part. A task is hashed once, which takes seconds for a large one."""
        task, config = part.task, part.config
        if id(task) not in self._data:
            self._data[id(task)] = task, fingerprint(task)
        asked = json.dumps([*part.who, config.model_dump(mode="json"), self._data[id(task)][1]], sort_keys=True)
        tag = hashlib.sha256(asked.encode()).hexdigest()[:16]
        who = file_name(part.who[0])[-40:]
        return folder / f"{file_name(config.task)}-{who}-s{config.seed}-{config.first_instance}-{tag}.npz"

    def summary(self) -> dict[str, Any]:
        """Return what the record says of the workers: their number, how many were lost, and the seconds that they waited."""
        if self.pool is None:
            return {}
        whole = self.pool.size * (time.perf_counter() - self._begin)
        self.pool.waiting += max(whole - self._playing, 0.0)
        return {"workers": self.pool.summary()}


References = Sequence[tuple[AnyTask, Callable[[], AnyTask]]]
"""The tasks of references, each with the function that makes it."""


def evaluation_work(
    asked: WorkerOptions, tasks: Sequence[AnyTask], references: References
) -> Callable[[str | None], EvaluationPlayer]:
    """Return what makes the player of a worker, from its device. Raises InputError if a task cannot be sent to workers."""
    sent = [SentTask.of(task, asked.find, sealed=False) for task in tasks]
    sent += [SentTask.of(task, partial(_made, make), sealed=False) for task, make in references]
    return partial(EvaluationPlayer, sent)


def _made(make: Callable[[], AnyTask], name: str) -> AnyTask:
    """Make the task of a reference, which has no name that a catalog knows."""
    return make()


@contextmanager
def hired(
    asked: WorkerOptions,
    tasks: Sequence[AnyTask],
    references: References,
    contenders: Sequence[Contender],
    folder: Path | None,
    watch: Say,
) -> Iterator[Runner]:
    """Start the workers that were asked for, if any, and end them afterwards."""
    again = "what was grown is stored where there is a folder, and the same command goes on from it"
    every = [*tasks, *(task for task, _ in references)]
    interrupt = Interrupt()  # torchrun ends all ranks if one is lost, and rank 0 is to say so first
    with ExitStack() as stack:
        begun = not asked.any
        try:
            if begun:
                yield Runner(folder, watch)
                return
            for contender in contenders:
                pickled(contender, f"the controller {contender.name!r}")
            if asked.cluster == "torchrun":
                stack.enter_context(interrupt)
            pool = start_workers(
                WorkerPool,
                asked,
                evaluation_work(asked, tasks, references),
                watch,
                shared_facts(every),
                mend=f"give fewer workers; {again}",
                again=again,
                stop=lambda: interrupt.asked,
            )
            stack.callback(pool.close)
            begun = True
            yield Runner(folder, watch, pool, every, lambda: interrupt.asked)
        except (KeyboardInterrupt, Stop):
            said = f"interrupted{'' if begun else ' while the workers were started'}; {again}"
            watch(said)
            raise KeyboardInterrupt(said) from None
