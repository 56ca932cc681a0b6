"""Learn streams: one network for each stream, with a controller, and what some methods add.

N streams, B examples of a batch, D features, C classes.
"""

from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from esper_bench.streams.alarm import Alarm, InputShift, heard, silent
from esper_bench.streams.bank import HEAD_PART
from esper_bench.streams.data import Floats, Ints, StreamSet
from esper_bench.streams.decisions import KEEP, NEW, Operation, StreamController, StreamDecision, StreamView
from esper_bench.streams.network import HEAD, TRUNK, Bools, Rows, TrunkAndHead


class Price(IntEnum):
    """Names what multiply-adds are spent on.

    Attributes:
        PREDICT: the forward pass whose outputs are scored
        TRAIN: backward passes, at twice a forward pass, and further forward passes for training
        CONSULT: the outputs of stored heads or of other members, by which one is chosen
    """

    PREDICT = 0
    TRAIN = 1
    CONSULT = 2


class BatchScores(NamedTuple):
    """Holds loss [nats] and accuracy of one batch, (N,) each."""

    loss: Floats
    accuracy: Floats


def scored(logits: Tensor, y: Tensor) -> BatchScores:
    """Score predictions (N, B, C) of labels (N, B)."""
    with torch.no_grad():
        loss = cross_entropy(logits, y)
        right = (logits.argmax(-1) == y).double().mean(-1)
        packed = torch.stack([loss.double(), right]).numpy()
    return BatchScores(packed[0], packed[1])


def share_left(age: Ints, halving: float | Floats, least: float | Floats) -> Floats:
    """Return (N,) max(least, 2^-floor(age / halving)), the share of a learning rate at an age [updates]; 1 if halving is 0."""
    halves = np.where(np.asarray(halving) > 0, age // np.maximum(halving, 1), 0)
    return np.where(np.asarray(halving) > 0, np.maximum(least, 0.5**halves), 1.0)


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Average -ln softmax(logits)[y] over B: (..., B, C) and (..., B) -> (...)."""
    return -F.log_softmax(logits, -1).gather(-1, y[..., None])[..., 0].mean(-1)


class Learner(Protocol):
    """Runs N learners side by side. `predict` and `learn` take turns."""

    price: Ints  # (N, prices) multiply-adds so far
    alarms: Bools  # (N,) at the last batch
    done: Ints  # (N, operations) operations so far

    def predict(self, x: Tensor) -> Tensor:
        """Return the logits (N, B, C) of x (N, B, D), before the labels are known."""
        ...

    def learn(self, x: Tensor, y: Tensor, scores: BatchScores) -> None:
        """Train on the batch that was predicted. Its scores were taken before."""
        ...

    def recall(self, x: Tensor, y: Tensor, unlabelled: Tensor) -> Tensor:
        """Return the logits of unlabelled examples (N, B', D) of the context of a few labelled ones; nothing is trained."""
        ...

    def snapshot(self) -> dict[str, Any]:
        """Return everything that later updates depend on."""
        ...

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `snapshot` returned."""
        ...


class Addition(Protocol):
    """Adds to training what a method has: a replay buffer, a penalty, a replacement of units."""

    def loss(self, learner: "NetworkLearner", x: Tensor, y: Tensor, own: Tensor) -> Tensor:
        """Return the loss (N,) that is differentiated in place of `own` (N,), that of the batch."""
        ...

    def before_step(self, learner: "NetworkLearner") -> None:
        """Change the gradients."""
        ...

    def after_step(self, learner: "NetworkLearner", x: Tensor, y: Tensor) -> None:
        """Change the parameters, or remember the batch."""
        ...

    def snapshot(self) -> dict[str, Any]:
        """Return the memory as a tree of arrays."""
        ...

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `snapshot` returned."""
        ...


class NetworkLearner:
    """Trains one network for each stream. Its controller decides at every batch, mostly where an alarm is raised."""

    def __init__(
        self,
        streams: StreamSet,
        module: TrunkAndHead,
        controller: StreamController,
        *,
        lr: float | Floats,
        head_rate: float | Floats = 1.0,
        decay: float = 0.01,
        halving: float | Floats = 0.0,
        least: float | Floats = 1.0,
        trunk_halving: float | Floats = 0.0,
        trunk_least: float | Floats = 1.0,
        restarts: bool = False,
        recognise: Callable[[Floats], Ints] | None = None,
        to_first: bool = False,
        bank: int = 0,
        holds: int = HEAD_PART,
        addition: Callable[["NetworkLearner"], Addition] | None = None,
    ) -> None:
        """Draw the networks.

        The learning rate of the trunk is `lr`, that of the parts that the bank `holds` is `head_rate * lr`. The latter halves
        whenever the parts have trained for another `halving` updates, down to the share `least`; with 0 it stays. That of the
        trunk falls likewise with the updates since its blocks were drawn, by `trunk_halving` and `trunk_least`. With
        `restarts`, both count the updates since the last alarm instead. These numbers may be arrays (N,). A head that the bank
        does not hold learns with the trunk.
        `recognise` is asked before every prediction. It gets how far the inputs are from those of each place and of the active
        parts (N, M + 1), as `InputMeans.shifts`, and returns the places to activate, KEEP for none.
        With `to_first`, weights decay to their first values, else to 0.
        """
        count = len(streams.keys)
        self.rows = Rows(module, streams.keys, bank=bank, holds=holds)
        self.controller, self.lr, self.head_rate, self.decay = controller, lr, head_rate, decay
        self.halving, self.least = halving, least
        self.trunk_halving, self.trunk_least, self.restarts = trunk_halving, trunk_least, restarts
        self.recognise, self.recognised = recognise, np.zeros(count, bool)
        self.first = self.rows.value.clone() if to_first else None
        self.update = 0
        self.alarm: Alarm = silent(count)
        self.shift = InputShift(count, streams.inputs)
        self.trunk_rate, self.trunk_age = np.ones(count), np.zeros(count, np.int64)
        self.alarms = np.zeros(count, bool)
        self.done = np.zeros((count, len(Operation)), np.int64)
        self.price = np.zeros((count, len(Price)), np.int64)
        weights = [(place.shape.numel(), place.start) for place in self.rows.stack.places if len(place.shape) == 2]
        self.head_cost = module.head.weight.numel()
        # those of a stored one that acts too
        self.seed_cost = sum(size for size, start in weights if start > self.rows.trunk)
        self.cost = sum(size for size, _ in weights)  # multiply-adds of a forward pass of one example
        self.features: Tensor
        self.logits: Tensor
        self.addition = None if addition is None else addition(self)

    def predict(self, x: Tensor) -> Tensor:
        """Return the logits (N, B, C) of x (N, B, D), whose graph `learn` uses."""
        if self.recognise is not None:
            self._recognise(x, self.recognise)
        every = slice(0, len(self.alarms))
        self.features = self.rows.features(x, every)
        self.logits = self.rows.logits(self.features, every)
        self.price[:, Price.PREDICT] += self.costs(every) * x.shape[1]
        return self.logits.detach()

    def _recognise(self, x: Tensor, recognise: Callable[[Floats], Ints]) -> None:
        """STORE the active parts and ACTIVATE others where the inputs are those of their context."""
        place = recognise(self.rows.bank.inputs.shifts(x))
        self.recognised = place != KEEP
        found = np.nonzero(self.recognised)[0]
        self.price[:, Price.CONSULT] += self.rows.bank.inputs.mean[0].numel()
        if len(found):
            self.rows.store_and_activate(found, np.ones(len(found), bool), place[found], self.update)
            self.rows.forget(found)
            self.done[found, Operation.STORE] += 1
            self.done[found, Operation.ACTIVATE] += 1

    def learn(self, x: Tensor, y: Tensor, scores: BatchScores) -> None:
        """Ask the controller, carry out its decisions, and train on the batch."""
        view = self.look(x, y, scores)
        decision = self.controller.act(view)
        changed = self.carry_out(decision)
        own = cross_entropy(self.logits, y)
        if len(changed):  # their graph is that of parameters that are gone
            again = cross_entropy(self._forward(x[changed], changed), y[changed])
            own = own.index_put((torch.from_numpy(changed),), again)
            self.price[changed, Price.TRAIN] += self.costs(changed) * x.shape[1]
        loss = own if self.addition is None else self.addition.loss(self, x, y, own)
        loss.sum().backward()
        del self.features, self.logits
        self.price[:, Price.TRAIN] += 2 * self.costs(slice(0, len(y))) * x.shape[1]
        if self.addition is not None:
            self.addition.before_step(self)
        if self.recognise is not None:
            self.rows.bank.inputs.add(x, np.full(len(y), -1))
        self.rows.step(self.rates(), self.decay, self.first)
        self.trunk_age += 1
        self.rows.age += 1
        self.update += 1
        if self.addition is not None:
            self.addition.after_step(self, x, y)

    def rates(self) -> Floats:
        """Return (N, parts) the learning rates."""
        trunk, head = (self.alarm.since,) * 2 if self.restarts else (self.trunk_age, self.rows.age)
        rate = np.empty((len(self.trunk_rate), len(self.rows.parts)))
        rate[:, TRUNK] = self.lr * self.trunk_rate * share_left(trunk, self.trunk_halving, self.trunk_least)
        rate[:, HEAD:] = (self.lr * self.head_rate * share_left(head, self.halving, self.least))[:, None]
        if not self.rows.bank.holds & HEAD_PART:
            rate[:, HEAD] = rate[:, TRUNK]
        return rate

    def costs(self, rows: Ints | slice) -> Ints:
        """Count (n,) the multiply-adds of a forward pass of one example, with the stored seeds that act."""
        acting = self.rows.bank.dose[rows, -1, :-1].count_nonzero(1).numpy()
        return np.asarray(self.cost + acting * self.seed_cost)

    def look(self, x: Tensor, y: Tensor, scores: BatchScores) -> StreamView:
        """Return the view of a batch that was predicted, and take note of its alarms."""
        before, since = self.alarm.mean, self.alarm.since
        self.alarm, self.alarms = heard(self.alarm, scores.loss)
        shift = self.shift.measure(x)
        self.shift.add(x, self.alarms | self.recognised)
        stored = self.rows.bank.held != 0
        stored_loss = np.full(stored.shape, np.nan)
        asked = np.nonzero(self.alarms & stored.any(1))[0]
        if len(asked):
            logits = self.rows.stored_logits(x[asked], self.features.detach()[asked], asked)
            loss = cross_entropy(logits, y[asked][:, None].expand(logits.shape[:-1])).double().numpy()
            stored_loss[asked] = np.where(stored[asked], loss, np.nan)
            each = self.cost if self.rows.slots else self.head_cost
            self.price[asked, Price.CONSULT] += stored[asked].sum(1) * each * x.shape[1]
        seen = torch.zeros(len(y), self.logits.shape[-1], dtype=torch.bool).scatter_(1, y, True).sum(1).numpy()
        return StreamView(
            update=self.update,
            loss=scores.loss,
            accuracy=scores.accuracy,
            alarm=self.alarms,
            before=before,
            since=since,
            input_shift=shift,
            classes=seen,
            stored=stored,
            stored_loss=stored_loss,
            trunk_rate=self.trunk_rate.copy(),
            trunk_age=self.trunk_age.copy(),
            recognised=self.recognised,
        )

    def carry_out(self, decision: StreamDecision) -> Ints:
        """Change the networks. Returns the streams whose weights have changed."""
        self.done += decision.operations()
        shrinks, resets = decision.keep < 1, decision.reset
        moves = np.nonzero((decision.place >= 0) | decision.store)[0]
        if len(moves):
            store, place, parts = decision.store[moves], decision.place[moves], decision.parts[moves]
            self.rows.store_and_activate(moves, store, place, self.update, parts)
        starts = np.nonzero(decision.place == NEW)[0]
        if len(starts):
            self.rows.new(starts, self.update, decision.parts[starts])
        if resets.any():
            self.rows.redraw_blocks(np.nonzero(resets)[0], self.update)
        if shrinks.any():
            self.rows.shrink(np.nonzero(shrinks)[0], decision.keep[shrinks], self.update)
        changed = (decision.place != KEEP) | resets | shrinks
        if decision.dose is not None:
            changed = changed | self.rows.bank.set_doses(decision.dose)
        forgets = np.nonzero(changed | decision.forget)[0]
        if len(forgets):
            self.rows.forget(forgets)
        drawn = resets | shrinks
        self.trunk_age[drawn], self.trunk_rate[drawn] = 0, 1.0
        self.trunk_rate = np.where(np.isnan(decision.trunk_rate), self.trunk_rate, decision.trunk_rate)
        return np.nonzero(changed)[0]

    @torch.no_grad()
    def recall(self, x: Tensor, y: Tensor, unlabelled: Tensor) -> Tensor:
        """Return logits of unlabelled examples by the active or stored parts that have the least loss on the labelled ones."""
        every = np.arange(len(x))
        features = self.rows.features(x, slice(0, len(x)))
        active = cross_entropy(self.rows.logits(features, slice(0, len(x))), y)
        logits = self.rows.stored_logits(x, features, every)
        stored = cross_entropy(logits, y[:, None].expand(logits.shape[:-1]))
        stored = torch.where(torch.from_numpy(self.rows.bank.held != 0), stored, torch.inf)
        best = torch.cat([active[:, None], stored], 1).argmin(1)
        features = self.rows.features(unlabelled, slice(0, len(x)))
        own = self.rows.logits(features, slice(0, len(x)))[:, None]
        each = torch.cat([own, self.rows.stored_logits(unlabelled, features, every)], 1)
        return each[torch.arange(len(x)), best]

    def _forward(self, x: Tensor, rows: Ints) -> Tensor:
        return self.rows.logits(self.rows.features(x, rows), rows)

    def snapshot(self) -> dict[str, Any]:
        """Return everything that later updates depend on."""
        own = {name: getattr(self, name) for name in _STATE}
        return {
            **own,
            "rows": self.rows.snapshot(),
            "alarm": self.alarm._asdict(),
            "shift": {"sums": self.shift.sums, "seen": self.shift.seen},
            "controller": self.controller.snapshot(),
            "addition": {} if self.addition is None else self.addition.snapshot(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `snapshot` returned."""
        for name in _STATE:
            setattr(self, name, state[name])
        self.rows.load(state["rows"])
        self.alarm = Alarm(**state["alarm"])
        self.shift.sums, self.shift.seen = state["shift"]["sums"], state["shift"]["seen"]
        self.controller.load(state["controller"])
        if self.addition is not None:
            self.addition.load(state["addition"])


_STATE = ("update", "trunk_rate", "trunk_age", "alarms", "done", "price")
