"""Evaluate prequentially: each batch is scored before it is trained on. N streams, T updates."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from esper_bench.streams.data import Floats, Ints, StreamSet
from esper_bench.streams.learner import Learner, scored
from esper_bench.streams.network import Bools

SUPPORT, TESTED = 32, 128
"""Labelled examples of a context by which a learner may choose among what it stored, and test examples that are scored."""


class Played(NamedTuple):
    """Says what became of N streams.

    Attributes:
        accuracy (NDArray): (T, N) float32 accuracy of every batch before training on it
        loss (NDArray): (T, N) float32 cross-entropy of every batch before training on it [nats]
        alarms (Bools): (T, N) whether the learner raised an alarm
        retention (Floats): (N,) accuracy at the end on test examples of every context of the stream, a mean over contexts
        operations (Ints): (N, operations) how often each `Operation` was carried out
        price (Ints): (N, prices) multiply-adds by `Price`
    """

    accuracy: NDArray[np.float32]
    loss: NDArray[np.float32]
    alarms: Bools
    retention: Floats
    operations: Ints
    price: Ints

    @property
    def returned(self) -> Floats:
        """(N,) the return of a whole stream: its mean accuracy over all updates."""
        return np.asarray(self.accuracy.mean(0, dtype=np.float64))


class Player:
    """Plays streams to their end, or to any update from which another player goes on."""

    def __init__(self, streams: StreamSet, learner: Learner) -> None:
        self.streams, self.learner = streams, learner
        shape = (streams.updates, len(streams.keys))
        self.update = 0
        self.accuracy, self.loss = (np.zeros(shape, np.float32) for _ in range(2))
        self.alarms = np.zeros(shape, bool)

    def play(self, until: int | None = None, watch: Callable[[int], None] | None = None) -> None:
        """Score and then train on each batch up to update `until`; `watch` is called after each."""
        for update in range(self.update, self.streams.updates if until is None else until):
            x, y = self.streams.batch(update)
            scores = scored(self.learner.predict(x), y)
            self.loss[update], self.accuracy[update] = scores
            self.learner.learn(x, y, scores)
            self.alarms[update] = self.learner.alarms
            self.update = update + 1
            if watch is not None:
                watch(self.update)

    def result(self) -> Played:
        """Return what became of the streams. Must be called at the end, because it measures what is retained."""
        assert self.update == self.streams.updates, (self.update, self.streams.updates)
        learner = self.learner
        retained = retention(self.streams, learner)
        return Played(self.accuracy, self.loss, self.alarms, retained, learner.done.copy(), learner.price.copy())

    def snapshot(self) -> dict[str, Any]:
        """Return everything that the rest of the play depends on, and what was measured so far."""
        return {
            "update": self.update,
            "accuracy": self.accuracy,
            "loss": self.loss,
            "alarms": self.alarms,
            "learner": self.learner.snapshot(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `snapshot` returned, for the same streams and a learner of the same method."""
        for name in ("update", "accuracy", "loss", "alarms"):
            setattr(self, name, state[name])
        self.learner.load(state["learner"])


def retention(streams: StreamSet, learner: Learner) -> Floats:
    """Measure (N,) the accuracy on test examples of every context that a stream has had, as a mean over its contexts.

    The learner sees 32 labelled examples of a context, and is scored on 128 others. It is not told which context it is.
    """
    contexts = [sorted({segment.context for segment in each}) for each in streams.segments]
    total, count = np.zeros(len(contexts)), np.array([len(each) for each in contexts])
    for index in range(count.max()):
        context = np.array([each[min(index, len(each) - 1)] for each in contexts])
        x, y = streams.test(context, SUPPORT + TESTED)
        logits = learner.recall(x[:, :SUPPORT], y[:, :SUPPORT], x[:, SUPPORT:])
        total += np.where(index < count, scored(logits, y[:, SUPPORT:]).accuracy, 0.0)
    return np.asarray(total / count)


def segment_accuracy(streams: StreamSet, accuracy: NDArray[np.float32]) -> list[Floats]:
    """Average the accuracy (T, N) over every segment of each stream."""
    return [
        np.array([accuracy[start:stop, n].mean(dtype=np.float64) for start, stop, _ in each])
        for n, each in enumerate(streams.segments)
    ]
