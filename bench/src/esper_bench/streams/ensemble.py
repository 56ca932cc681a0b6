"""Let the one of a stream's small networks with the least recent loss predict and learn: ensembles with a gate.

N streams, M members.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from esper_bench.streams.alarm import Alarm, heard, silent
from esper_bench.streams.data import Floats, Ints, StreamSet
from esper_bench.streams.decisions import Operation
from esper_bench.streams.learner import BatchScores, Price, cross_entropy, share_left
from esper_bench.streams.network import HEAD, TRUNK, Rows, TrunkAndHead
from esper_bench.streams.recognition import InputMeans, nearest


class EnsembleLearner:
    """Trains M networks for each stream and a gate, which follows their losses on all batches.

        e_m = memory e_m + (1 - memory) L_m

    The member of least e before a batch predicts it; the one of least e after the batch trains on it. The learning rate of a
    member halves with every `halving` updates that it has trained for, down to the share `least`; with 0 it stays.

    With `same` above 0 the gate recognises contexts by their inputs: if those of a batch are farther than `away` from the mean
    of what the chosen member has trained on, and nearer than `same` to that of another one, the nearest member predicts.
    """

    def __init__(
        self,
        streams: StreamSet,
        module: TrunkAndHead,
        *,
        members: int,
        lr: float | Floats,
        memory: float | Floats,
        decay: float = 0.01,
        head_rate: float | Floats = 1.0,
        halving: float | Floats = 0.0,
        least: float | Floats = 1.0,
        same: float | Floats = 0.0,
        away: float | Floats = 0.0,
    ) -> None:
        """Draw the networks. Numbers that may be arrays (N,) differ between streams."""
        count = len(streams.keys)
        self.members, self.lr, self.decay, self.head_rate = members, lr, decay, head_rate
        self.memory, self.halving, self.least = np.reshape(memory, (-1, 1)), halving, least
        self.same, self.away = same, away
        self.inputs = InputMeans(count, members, streams.inputs) if np.any(self.same) else None
        self.rows = Rows(module, streams.keys, members=members)
        self.recent = np.full((count, members), np.log(streams.classes))
        self.alarm: Alarm = silent(count)
        self.alarms = np.zeros(count, bool)
        self.done = np.zeros((count, len(Operation)), np.int64)
        self.price = np.zeros((count, len(Price)), np.int64)
        self.cost = sum(place.shape.numel() for place in self.rows.stack.places if len(place.shape) == 2)

    def predict(self, x: Tensor) -> Tensor:
        """Return the logits (N, B, C) of x (N, B, D) by the chosen members."""
        every = self._every(x)
        self.logits = every.view(len(x), self.members, *every.shape[1:])
        self.price[:, Price.PREDICT] += self.cost * x.shape[1]
        self.price[:, Price.CONSULT] += (self.members - 1) * self.cost * x.shape[1]
        chosen = self.recent.argmin(1)
        if self.inputs is not None:
            shifts = self.inputs.shifts(x)
            place, near = nearest(shifts)
            moved = ~(shifts[np.arange(len(x)), chosen] <= self.away)
            chosen = np.where(moved & (near < self.same), place, chosen)
            self.price[:, Price.CONSULT] += self.inputs.mean[0].numel()
        return self.logits[torch.arange(len(x)), chosen]

    def learn(self, x: Tensor, y: Tensor, scores: BatchScores) -> None:
        """Update the gate with the losses of all members, and train the best one."""
        loss = cross_entropy(self.logits, y[:, None].expand(self.logits.shape[:-1])).double().numpy()
        del self.logits
        self.recent = self.memory * self.recent + (1 - self.memory) * loss
        self.alarm, self.alarms = heard(self.alarm, scores.loss)
        member = self.recent.argmin(1)
        best = np.arange(len(x)) * self.members + member
        logits = self.rows.logits(self.rows.features(x, best), best)
        cross_entropy(logits, y).sum().backward()
        rate = np.zeros((len(self.rows.keys), 2))
        rate[best, TRUNK] = self.lr * share_left(self.rows.age[best], self.halving, self.least)
        rate[best, HEAD] = rate[best, TRUNK] * self.head_rate
        self.rows.step(rate, self.decay)
        self.rows.age[best] += 1
        if self.inputs is not None:
            self.inputs.add(x, member)
        self.price[:, Price.TRAIN] += 2 * self.cost * x.shape[1]

    def recall(self, x: Tensor, y: Tensor, unlabelled: Tensor) -> Tensor:
        """Return logits (N, B', C) of unlabelled examples by the member whose loss on labelled examples is least."""
        every, wanted = (each.view(len(x), self.members, *each.shape[1:]) for each in map(self._every, (x, unlabelled)))
        best: Tensor = cross_entropy(every, y[:, None].expand(every.shape[:-1])).argmin(1)
        return wanted[torch.arange(len(x)), best]

    @torch.no_grad()
    def _every(self, x: Tensor) -> Tensor:
        """Compute the logits of all members, (N M, B, C)."""
        rows: Ints | slice = slice(0, len(self.rows.keys))
        return self.rows.logits(self.rows.features(x.repeat_interleave(self.members, 0), rows), rows)

    def snapshot(self) -> dict[str, Any]:
        """Return everything that later updates depend on."""
        own = {name: getattr(self, name) for name in _STATE}
        known = {} if self.inputs is None else self.inputs.snapshot()
        return {**own, "rows": self.rows.snapshot(), "alarm": self.alarm._asdict(), "inputs": known}

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `snapshot` returned."""
        for name in _STATE:
            setattr(self, name, state[name])
        self.rows.load(state["rows"])
        self.alarm = Alarm(**state["alarm"])
        if self.inputs is not None:
            self.inputs.load(state["inputs"])


_STATE = ("recent", "alarms", "done", "price")
