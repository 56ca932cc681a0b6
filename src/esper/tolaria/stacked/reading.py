"""Read the batches of a train split before training needs them: in a thread, or in worker processes. E rows, B batch."""

import atexit
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, wait
from functools import partial
from threading import Event, Lock
from time import perf_counter, thread_time
from weakref import WeakSet, finalize

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.leyline.data.batches import Batch, map_leaves
from esper.leyline.data.task import Source, Split
from esper.leyline.data.workers import read_by_workers
from esper.leyline.messages import RunWarning, UserCodeError, counted, warn
from esper.store.background import Background
from esper.tolaria.runtime import Waits

Order = Callable[[int], Tensor]

SLOW = 10.0
"""How long training waits for a batch before a warning says what it waits for [seconds]."""

LOOKED = 32
"""After how many batches it is looked at whether a thread that reads may slow the training."""
SHARE, LEAST = 0.2, 0.005
"""Processor time in which a thread reads a batch, as a share of the time that a batch takes in all, and in seconds, above both of
which a warning names the workers; what a process sends costs about a millisecond a batch."""

_READING = Lock()
"""Held by the thread that reads: a Dataset need not be made for several threads, and the copies of a trial read the same one."""


_READERS: "WeakSet[BatchReader]" = WeakSet()
_THREADS: WeakSet[Background] = WeakSet()
PATIENCE = 5.0
"""How long the exit of the process waits for a batch that is being read [seconds]."""


SourceBatch = tuple[Batch, Tensor, Tensor]
"""A batch of every row, on the CPU: leaves x (n, ...) and y (n, ...) of the examples that the rows need, each once, and (E, B)
int64 the place of each row's examples among them."""


class BatchReader:
    """Reads batches in order, some of them ahead of the one that is taken.

    A thread reads, or receives what the workers of the source read. With `ahead` 0 the thread that trains reads each batch, when
    it takes it. An error of a batch is raised when the batch is taken, not before.
    """

    def __init__(
        self, source: Source, lay_out: Callable[[Split], Split], *, ahead: int, batches: int, pinned: bool
    ) -> None:
        """lay_out: makes of examples what the device receives. batches: number of an episode, after which none is read.

        pinned: whether batches are in pinned memory, from which copies to a GPU do not block.
        """
        self.waits = Waits()
        self._ahead, self._last = ahead, batches
        self._batches = partial(_batches, source, lay_out, pinned, batches)
        self._name = source.name
        self._thread = Background()
        self._readings: list[_BatchReader] = []  # the present one, if any
        self._told = False
        self._looked = not ahead or bool(source.workers)  # only a thread that reads by itself is looked at
        # holds what the workers are reached by, which otherwise could be collected in any order with a reader in a cycle
        self._end = finalize(self, _end, self._thread, self._readings)
        self._end.atexit = False  # `_leave` comes then
        _READERS.add(self)
        _THREADS.add(self._thread)

    def take(self, batch: int, order: Order) -> SourceBatch:
        """Return a batch, and begin to read those that follow it. Warns once if one takes longer than `SLOW`.

        order: from the number of a batch to the examples (E, B) of every row, as places in the source. One thread calls it at a
        time, with numbers that rise. Before another order is given, `forget` must be called.
        """
        assert batch < self._last, "the episode has no such batch"
        begin = perf_counter()
        if not self._readings or self._readings[0].next != batch:
            self.forget()
            self._readings.append(_BatchReader(self._batches(order, batch), batch))
        (reading,) = self._readings
        try:
            if self._ahead:
                while len(reading.jobs) <= min(self._ahead, self._last - 1 - batch):
                    reading.jobs.append(self._thread.submit(reading.read))
                job = reading.jobs.popleft()
                if not self._told and not wait((job,), SLOW).done:
                    self._tell(batch)
                found = job.result()
            else:
                found = self._watched(reading.read, batch)
        except BaseException:
            self.forget()
            raise
        reading.next += 1
        if not self._looked and reading.next - reading.first == LOOKED:
            self._look(reading)
        if reading.next == self._last:
            self.forget()  # nothing follows, and the workers end
        self.waits.add(perf_counter() - begin)
        return found

    def forget(self) -> None:
        """Forget what was read ahead; the workers end. Does not wait for a batch that is being read."""
        _forget(self._thread, self._readings)

    def close(self) -> None:
        """End the thread and the workers."""
        self._end()

    def _watched(self, read: Callable[[], SourceBatch], number: int) -> SourceBatch:
        """Read a batch, while the thread watches the time."""
        done = Event()

        def watch() -> None:
            if not (self._told or done.wait(SLOW)):
                self._tell(number)

        self._thread.submit(watch)
        try:
            return read()
        finally:
            done.set()

    def _look(self, reading: "_BatchReader") -> None:
        """Warn if reading takes much of the processor of Python, which a thread shares with the training."""
        self._looked = True
        own, whole = reading.seconds / LOOKED, (perf_counter() - reading.begun) / LOOKED
        if own > max(LEAST, SHARE * whole):
            warn(
                f"a thread takes {1000 * own:.1f} ms of processor time to read a batch of the {self._name}, beside the training, "
                f"which takes {1000 * whole:.1f} ms a batch; where the Dataset computes in Python, the training waits for the "
                "thread: give the task workers=2, which read in processes of their own",
                RunWarning,
            )

    def _tell(self, batch: int) -> None:
        self._told = True
        warn(
            f"training has waited {SLOW:.0f} seconds for batch {batch} of the {self._name}, and goes on when it is read; "
            "if reading is slow throughout, give the task more workers",
            RunWarning,
        )


@atexit.register
def _leave() -> None:
    """Let the threads end before the interpreter, which aborts where it ends one within torch."""
    for reader in list(_READERS):
        reader.close()
    for thread in list(_THREADS):
        thread.join(PATIENCE)


class _BatchReader:
    """Reads batches one after the other, in one thread at a time."""

    def __init__(self, batches: Generator[SourceBatch, None, None], first: int) -> None:
        # `next` is the number of the batch that is taken next
        self.batches, self.first, self.next = batches, first, first
        self.begun, self.seconds = perf_counter(), 0.0  # of the processor, in the thread that reads
        self.jobs: deque[Future[SourceBatch]] = deque()
        self.stopped = False

    def read(self) -> SourceBatch:
        if self.stopped:
            raise RuntimeError("the batch was forgotten")
        begin = thread_time()
        try:
            return next(self.batches)
        finally:
            self.seconds += thread_time() - begin


def _forget(thread: Background, readings: list[_BatchReader]) -> None:
    while readings:
        reading = readings.pop()
        reading.stopped = True
        thread.submit(reading.batches.close)


def _end(thread: Background, readings: list[_BatchReader]) -> None:
    _forget(thread, readings)
    thread.close(lambda: None)


def _batches(
    source: Source, lay_out: Callable[[Split], Split], pinned: bool, last: int, order: Order, first: int
) -> Generator[SourceBatch, None, None]:
    """Read batches from number `first` on; an example that several rows need is read once."""
    indices: deque[Tensor] = deque()

    def requests() -> Iterator[NDArray[np.int64]]:
        for batch in range(first, last):
            wanted = order(batch)
            places, index = np.unique(wanted.numpy(), return_inverse=True)
            indices.append(torch.from_numpy(index.reshape(wanted.shape)))
            yield places

    def read_here(places: NDArray[np.int64]) -> Split:
        with _READING:
            try:
                return read(places)
            except UserCodeError as error:
                if "thread" not in str(error):
                    raise
                mend = "set data.read_ahead to 0 if it must be read in the thread that made it"
                raise UserCodeError(f"{error}; {mend}") from error.__cause__

    # Workers lay the examples out too: what this process does beside the training slows it, as they share the interpreter.
    read, done = partial(_read, source, lay_out), partial(counted, noun="batch", plural="batches")
    wanted, workers = requests(), source.workers
    splits = read_by_workers(read, wanted, workers, source.name, done) if workers else map(read_here, wanted)
    for split in splits:
        batch = split.x, split.y, indices.popleft()
        x, y, place = (map_leaves(Tensor.pin_memory, each) for each in batch) if pinned else batch
        yield x, y, place


def _read(source: Source, lay_out: Callable[[Split], Split], places: NDArray[np.int64]) -> Split:
    return lay_out(source.read(places))
