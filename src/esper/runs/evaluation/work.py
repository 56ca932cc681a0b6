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
from contextlib import contextmanager, nullcontext
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
from esper.runs.evaluation.contenders import Contender, Say, tell
from esper.runs.folder.interrupt import Interrupt
from esper.runs.workers.transports import pickled, unpickled
from esper.runs.workers.workers import SentTask, Stop, WorkerOptions, WorkerPool, shared_facts, start_workers
from esper.store.disk import DiskRetry, file_name, write_atomic
from esper.store.tensors import Tree
from esper.tolaria.play import Observer

Arrays = Mapping[str, NDArray[Any]]


class Kept(NamedTuple):
    """Stores arrays of populations on `data`, the fingerprint of a task, in a folder if there is one; reads them."""

    folder: Path | None
    data: Mapping[str, str]
    # told if the disk is full; `faults.disk_seconds` of a population's config says how long to wait then
    note: Callable[[str], None] = lambda line: None

    def look(self, who: Sequence[str], config: Config, needed: Collection[str]) -> Arrays | None:
        """Return the stored arrays of `who` under a config, among which `needed` must be; None if there are none."""
        if self.folder is None or not (path := self._path(self.folder, who, config)).exists():
            return None
        try:
            with zipfile.ZipFile(path) as parts:
                if sum(part.file_size for part in parts.infolist()) > 2**30:
                    raise ValueError("more than any figures")
            with np.load(path, allow_pickle=False) as arrays:
                found = dict(arrays)
            if set(needed) - set(found):
                raise KeyError("some figures")
        except (OSError, ValueError, KeyError, MemoryError, zipfile.BadZipFile, zlib.error):
            raise InputError(f"{path} cannot be read as kept figures; remove it, and they are grown again") from None
        return found

    def store(self, who: Sequence[str], config: Config, made: Arrays) -> None:
        """Store arrays of `who` under a config, if there is a folder."""
        if self.folder is not None:
            path, content = self._path(self.folder, who, config), io.BytesIO()
            np.savez_compressed(content, allow_pickle=False, **made)
            retry = disk_retry(config, self.note, self.folder)
            retry(path, lambda: write_atomic(path, content.getvalue()))

    def _path(self, folder: Path, who: Sequence[str], config: Config) -> Path:
        asked = json.dumps([*who, config.model_dump(mode="json"), self.data], sort_keys=True)
        tag = hashlib.sha256(asked.encode()).hexdigest()[:16]
        name = f"{file_name(config.task)}-{file_name(who[0])[-40:]}-s{config.seed}-{config.first_instance}-{tag}.npz"
        return folder / name


def disk_retry(config: Config, note: Callable[[str], None], folder: Path) -> DiskRetry:
    """Return what waits for room on a full disk while an evaluation is written to a folder."""
    again = "give the same command again, which goes on from what was grown"
    return DiskRetry(config.faults.disk_seconds, note, folder, lambda: False, further=again)


class EvaluationPart(NamedTuple):
    """Describes a population of an evaluation or of a search."""

    kept: Kept  # the stored results
    task: AnyTask  # the task, with its test split
    who: Sequence[str]  # what makes the result, in the key of the stored one
    config: Config  # of the population
    needed: Collection[str]  # arrays that a result must have
    # from the task, the config and observers to the arrays; workers get it pickled
    compute: Callable[..., Arrays | Absent]
    said: str = ""  # the line of progress when it is done; none if empty


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


class EvaluationPool:
    """Gives the parts of an evaluation to workers, and counts what they did."""

    def __init__(self, pool: WorkerPool, tasks: Sequence[AnyTask], interrupt: Interrupt) -> None:
        """`play` raises Stop once the interrupt was asked for."""
        self.pool, self._interrupt = pool, interrupt
        self._places = {id(task): place for place, task in enumerate(tasks)}
        self._begin, self._playing = time.perf_counter(), 0.0

    def play(self, parts: Sequence[EvaluationPart], done: Callable[[int, Arrays | Absent, float], None]) -> None:
        """Let the workers compute parts. `done` gets the place of a part, its result, and its duration [seconds]."""

        def returned(place: int, result: Mapping[str, Any]) -> None:
            self._playing += result["seconds"]
            absent = result.get("absent")
            done(place, result["arrays"] if absent is None else Absent(absent), result["seconds"])

        sent = []
        self.pool.patience = max((part.config.faults.worker_seconds for part in parts), default=self.pool.patience)
        for part in parts:
            content = pickled((part.config, part.compute), f"the controller {part.who[0]!r}")
            sent.append({"task": self._places[id(part.task)], "content": np.frombuffer(content, np.uint8)})
        self.pool.play(sent, lambda: self._interrupt.asked, returned)

    def summary(self) -> dict[str, Any]:
        """Return the number of workers, how many were lost, and the seconds that they waited, all together."""
        whole = self.pool.size * (time.perf_counter() - self._begin)
        self.pool.waiting += max(whole - self._playing, 0.0)
        return self.pool.summary()


References = Sequence[tuple[AnyTask, Callable[[], AnyTask]]]
"""The tasks of references, each with the function that makes it."""

_AGAIN = "what was grown is stored where there is a folder, and the same command goes on from it"


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
    watch: Say | None,
) -> Iterator[EvaluationPool | None]:
    """Start the workers that were asked for, and end them afterwards; None if none were asked for."""
    if not asked.any:
        try:
            yield None
        except KeyboardInterrupt:
            tell(watch, f"interrupted; {_AGAIN}")
            raise
        return
    for contender in contenders:
        pickled(contender, f"the controller {contender.name!r}")
    every = [*tasks, *(task for task, _ in references)]
    interrupt = Interrupt()  # torchrun ends all ranks if one is lost, and rank 0 is to say so first
    with interrupt if asked.cluster == "torchrun" else nullcontext():
        try:
            pool = start_workers(
                WorkerPool,
                asked,
                evaluation_work(asked, tasks, references),
                partial(tell, watch),
                shared_facts(every),
                mend=f"give fewer workers; {_AGAIN}",
                again=_AGAIN,
                stop=lambda: interrupt.asked,
            )
        except KeyboardInterrupt:
            tell(watch, f"interrupted while the workers were started; {_AGAIN}")
            raise
        try:
            yield EvaluationPool(pool, every, interrupt)
        except Stop:
            tell(watch, f"interrupted; {_AGAIN}")
            raise KeyboardInterrupt(f"the evaluation was interrupted; {_AGAIN}") from None
        finally:
            pool.close()


def play_parts(
    parts: Sequence[EvaluationPart],
    pool: EvaluationPool | None = None,
    watch: Say | None = None,
    pace: Pace | None = None,
) -> list[Arrays | Absent]:
    """Return the results of parts in their order, computed by workers or in this process. Stored results are reused."""
    found: dict[int, Arrays | Absent] = {}

    def done(place: int, made: Arrays | Absent, seconds: float | None) -> None:
        part = parts[place]
        if seconds is not None and not isinstance(made, Absent):
            part.kept.store(part.who, part.config, made)
        found[place] = made
        if pace is not None:
            hands = 1 if pool is None else pool.pool.size
            pace.add(part.config.envs, None if seconds is None else seconds / hands)
        if part.said and not isinstance(made, Absent):
            tell(watch, part.said)

    missing = []
    for place, part in enumerate(parts):
        stored = part.kept.look(part.who, part.config, part.needed)
        if stored is not None:
            done(place, stored, None)
        elif pool is not None:
            missing.append(place)
        else:
            begin = time.perf_counter()
            made = part.compute(part.task, part.config)
            done(place, made, time.perf_counter() - begin)
    if pool is not None and missing:
        pool.play([parts[place] for place in missing], lambda at, made, seconds: done(missing[at], made, seconds))
    return [found[place] for place in range(len(parts))]


def computed(parts: Sequence[EvaluationPart], **how: Any) -> list[Arrays]:
    """Return the results of parts of which none can be absent, as those of static networks can, by `play_parts`."""
    return [each for each in play_parts(parts, **how) if not isinstance(each, Absent)]
