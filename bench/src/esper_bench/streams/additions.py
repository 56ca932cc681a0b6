"""Add known methods to the training of a network: replay, elastic weight consolidation, replacement of units. N streams."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from esper.leyline.data import keys
from esper.leyline.data.keys import Purpose
from esper_bench.streams.data import Floats, Ints
from esper_bench.streams.learner import NetworkLearner, Price, cross_entropy
from esper_bench.streams.network import Weights

DARKEST, BRIGHTEST = -1.5, 3.0
"""Range of the features that a replay buffer stores as bytes."""


class Replay:
    """Trains on each batch together with examples of the past, from a reservoir of bytes.

    Of every batch the first `offered` examples enter the reservoir, as Vitter, "Random sampling with a reservoir", 1985,
    algorithm R. Features are stored as one byte each, labels as one byte.
    """

    offered = 8

    def __init__(self, learner: NetworkLearner, *, capacity: int, drawn: int) -> None:
        """`capacity` is the number of stored examples, `drawn` the number of them in each step of training."""
        self.capacity, self.drawn, self.seen = capacity, drawn, 0
        self.keys = learner.rows.keys
        inputs = learner.rows.stack.places[0].shape[1]
        self.x = torch.zeros(len(self.keys), capacity, inputs, dtype=torch.uint8)
        self.y = torch.zeros(len(self.keys), capacity, dtype=torch.uint8)

    def loss(self, learner: NetworkLearner, x: Tensor, y: Tensor, own: Tensor) -> Tensor:
        """Return the mean loss (N,) over the batch and the examples that are drawn from the reservoir."""
        filled = min(self.seen, self.capacity)
        if not filled:
            return own
        place = torch.from_numpy((self._uniform(learner.update, self.drawn) * filled).astype(np.int64))
        rows = torch.arange(len(place))[:, None]
        past = self.x[rows, place].float() * ((BRIGHTEST - DARKEST) / 255) + DARKEST
        every = slice(0, len(place))
        logits = learner.rows.logits(learner.rows.features(past, every), every)
        learner.price[:, Price.TRAIN] += 3 * learner.cost * self.drawn
        batch = y.shape[1]
        return (batch * own + self.drawn * cross_entropy(logits, self.y[rows, place].long())) / (batch + self.drawn)

    def before_step(self, learner: NetworkLearner) -> None:
        """Leave the gradients as they are."""

    def after_step(self, learner: NetworkLearner, x: Tensor, y: Tensor) -> None:
        """Offer examples of the batch to the reservoir."""
        coded = ((x[:, : self.offered] - DARKEST) * (255 / (BRIGHTEST - DARKEST))).round().clamp(0, 255).to(torch.uint8)
        chance = self._uniform(learner.update, self.drawn + coded.shape[1])[:, self.drawn :]
        for index in range(coded.shape[1]):
            place = np.full(len(self.keys), self.seen)
            if self.seen >= self.capacity:
                place = (chance[:, index] * (self.seen + 1)).astype(np.int64)
            rows = np.nonzero(place < self.capacity)[0]
            self.x[rows, place[rows]] = coded[rows, index]
            self.y[rows, place[rows]] = y[rows, index].to(torch.uint8)
            self.seen += 1

    def _uniform(self, update: int, count: int) -> Floats:
        return keys.uniform(keys.key(Purpose.STREAM, self.keys[:, None], Weights.REPLAY, update, np.arange(count)))

    def snapshot(self) -> dict[str, Any]:
        """Return the reservoir."""
        return {"x": self.x, "y": self.y, "seen": self.seen}

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `snapshot` returned."""
        self.x, self.y, self.seen = state["x"], state["y"], state["seen"]


class Consolidation:
    """Pulls weights that mattered before an alarm back to their values there: elastic weight consolidation.

        g += strength * F * (p - anchor),   F = .9 F + mean over the updates between two alarms of B * g^2

    Kirkpatrick et al., "Overcoming catastrophic forgetting in neural networks", 2017, equation 3, in the online
    form of Schwarz et al., "Progress & Compress", 2018, section 3.2. B * g^2, of the gradient of a batch of B, stands for the
    Fisher information.
    """

    fading = 0.9

    def __init__(self, learner: NetworkLearner, *, strength: float) -> None:
        self.strength, self.batch = strength, 0
        value = learner.rows.value
        self.anchor, self.importance, self.squares = (torch.zeros_like(value) for _ in range(3))
        self.count = torch.zeros(len(value), 1)

    def loss(self, learner: NetworkLearner, x: Tensor, y: Tensor, own: Tensor) -> Tensor:
        """Return the loss of the batch; the penalty acts on the gradient."""
        self.batch = y.shape[1]
        return own

    @torch.no_grad()
    def before_step(self, learner: NetworkLearner) -> None:
        """Consolidate where an alarm was raised, note the squares of the gradient, and add the gradient of the penalty."""
        ended = torch.from_numpy(learner.alarms)
        if ended.any():
            mean = self.squares[ended] / self.count[ended].clamp(min=1)
            self.importance[ended] = self.fading * self.importance[ended] + mean
            self.anchor[ended] = learner.rows.value[ended]
            self.squares[ended], self.count[ended] = 0, 0
        gradient = learner.rows.gradient
        self.squares += gradient.square() * self.batch
        self.count += 1
        gradient += (learner.rows.value - self.anchor) * self.importance * self.strength

    def after_step(self, learner: NetworkLearner, x: Tensor, y: Tensor) -> None:
        """Leave the parameters as they are after a step."""

    def snapshot(self) -> dict[str, Any]:
        """Return anchors and importances."""
        return {name: getattr(self, name) for name in ("anchor", "importance", "squares", "count", "batch")}

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `snapshot` returned."""
        for name, value in state.items():
            setattr(self, name, value)


class Replacement:
    """Draws hidden units of little use anew, at `rate` units for each unit and update: continual backpropagation.

    The utility of a unit is a running mean of |activation| times the sum of |outgoing weights|. Only units that are older than 30
    updates are replaced. A new unit has no effect: its outgoing weights are 0, and the mean effect of the old unit goes to the
    bias. Dohare et al., "Loss of plasticity in deep continual learning", Nature 632, 2024, algorithm 1.
    """

    mature, memory = 30, 0.95

    def __init__(self, learner: NetworkLearner, *, rate: float) -> None:
        self.rate, self.credit = rate, 0.0
        names = [place.name for place in learner.rows.stack.places]
        maps = [name.removesuffix(".weight") for name in names if name.count(".") == 3 and name.endswith(".weight")]
        self.blocks = list(zip(maps[::2], maps[1::2], strict=True))  # the first and the second map of each block
        hidden = learner.rows.stack.parameter(f"{maps[0]}.bias").shape[1]
        shape = (len(self.blocks), len(learner.rows.keys), hidden)
        self.utility, self.age = torch.zeros(shape), torch.zeros(shape)

    def loss(self, learner: NetworkLearner, x: Tensor, y: Tensor, own: Tensor) -> Tensor:
        """Return the loss of the batch."""
        return own

    def before_step(self, learner: NetworkLearner) -> None:
        """Leave the gradients as they are."""

    @torch.no_grad()
    def after_step(self, learner: NetworkLearner, x: Tensor, y: Tensor) -> None:
        """Update utilities, and replace the least useful mature unit of every block as often as the rate says."""
        stack, every = learner.rows.stack, slice(0, len(learner.rows.keys))
        units = self._activations(learner, x)
        self.age += 1
        for block, (_, second) in enumerate(self.blocks):
            effect = units[block].abs().mean(1) * stack.parameter(f"{second}.weight").abs().sum(1)
            self.utility[block] = self.memory * self.utility[block] + (1 - self.memory) * effect
        self.credit += self.rate * self.utility.shape[-1]
        while self.credit >= 1:
            self.credit -= 1
            for block in range(len(self.blocks)):
                ranked = torch.where(self.age[block] > self.mature, self.utility[block], torch.inf)
                rows = np.arange(every.stop)[torch.isfinite(ranked).any(1).numpy()]
                self._replace(learner, block, rows, ranked.argmin(1).numpy()[rows], units[block].mean(1))

    def _activations(self, learner: NetworkLearner, x: Tensor) -> list[Tensor]:
        """Compute the hidden units of every block, (N, B, hidden) each."""
        stack, every, found = learner.rows.stack, slice(0, len(learner.rows.keys)), list[Tensor]()
        h = stack(x, every, part="trunk.0", frozen=True)
        for first, _ in self.blocks:
            block, _, index = first.rpartition(".")
            inner = stack(h, every, part=f"{block}.0", frozen=True) if index == "1" else h  # behind a normalisation
            found.append(stack(inner, every, part=first, frozen=True).relu())
            h = stack(h, every, part=block, frozen=True)
        return found

    def _replace(self, learner: NetworkLearner, block: int, rows: Ints, unit: Ints, mean: Tensor) -> None:
        """Draw one unit of a block anew in some rows."""
        stack = learner.rows.stack
        first, second = self.blocks[block]
        value = {name: stack.parameter(name).data for name in (f"{first}.weight", f"{second}.weight", f"{second}.bias")}
        out = value[f"{second}.weight"]
        value[f"{second}.bias"][rows] += mean[rows, unit][:, None] * out[rows, :, unit]
        out[rows, :, unit] = 0
        inputs = value[f"{first}.weight"].shape[2]
        value[f"{first}.weight"][rows, unit] = self._drawn(learner, block, rows, unit, inputs)
        stack.parameter(f"{first}.bias").data[rows, unit] = 0
        for column in ("first_moment", "second_moment"):
            stack.parameter(f"{second}.weight", column)[rows, :, unit] = 0
            stack.parameter(f"{first}.weight", column)[rows, unit] = 0
            stack.parameter(f"{first}.bias", column)[rows, unit] = 0
        self.utility[block][rows, unit], self.age[block][rows, unit] = 0, 0

    def _drawn(self, learner: NetworkLearner, block: int, rows: Ints, unit: Ints, inputs: int) -> Tensor:
        """Draw (n, inputs) fresh incoming weights, normal with variance 2 / inputs (Box and Muller, 1958)."""
        stream, index = learner.rows.keys[rows][:, None], np.arange(inputs)
        u, v = (
            keys.uniform(
                keys.key(Purpose.STREAM, stream, Weights.UNIT, learner.update, block, unit[:, None], half, index)
            )
            for half in (0, 1)
        )
        normal = np.sqrt(-2 * np.log1p(-u)) * np.cos(2 * np.pi * v)
        return torch.from_numpy(normal * np.sqrt(2 / inputs)).float()

    def snapshot(self) -> dict[str, Any]:
        """Return utilities and ages."""
        return {"utility": self.utility, "age": self.age, "credit": self.credit}

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `snapshot` returned."""
        self.utility, self.age, self.credit = state["utility"], state["age"], state["credit"]
