"""Raise alarms where the data of a stream have changed, from the losses of batches before training on them. N streams."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from esper_bench.streams.data import Floats, Ints
from esper_bench.streams.network import Bools

LEAST, DEVIATIONS = 0.6, 3.0  # nats, and standard deviations
MEMORY = 0.7
REST = 4


class Alarm(NamedTuple):
    """Tracks the loss of each stream since its last alarm.

    An alarm is a loss above the running mean e by more than max(.6, 3 sqrt(v)). With the factor b = .7,

        v = b (v + (1 - b) (L - e)^2)        e = b e + (1 - b) L

    which is the exponentially weighted variance (Finch, "Incremental calculation of weighted mean and variance", 2009,
    section 9). After an alarm, mean and variance start again, and the next four losses raise none.

    Attributes:
        mean (Floats): (N,) e, nan before the first loss
        variance (Floats): (N,) v
        since (Ints): (N,) losses since the last alarm
    """

    mean: Floats
    variance: Floats
    since: Ints


def silent(count: int) -> Alarm:
    """Return the state before the first loss."""
    return Alarm(np.full(count, np.nan), np.zeros(count), np.zeros(count, np.int64))


def heard(alarm: Alarm, loss: Floats) -> tuple[Alarm, Bools]:
    """Take the next loss (N,) of every stream. Returns the new state, and which streams raise an alarm, (N,)."""
    first = np.isnan(alarm.mean)
    above = np.where(first, 0.0, loss - alarm.mean)
    rings = (above > np.maximum(LEAST, DEVIATIONS * np.sqrt(alarm.variance))) & (alarm.since >= REST)
    mean = np.where(first, loss, alarm.mean + (1 - MEMORY) * above)
    variance = MEMORY * (alarm.variance + (1 - MEMORY) * above**2)
    return (
        Alarm(
            np.where(rings, np.nan, mean),
            np.where(first | rings, 0.0, variance),
            np.where(rings, 0, alarm.since + 1),
        ),
        rings,
    )


class InputShift:
    """Measures how far the mean of a batch is from that of inputs since the last alarm, for N streams of D features."""

    def __init__(self, count: int, inputs: int) -> None:
        self.sums = torch.zeros(2, count, inputs, dtype=torch.float64)  # of x and of x^2
        self.seen = torch.zeros(count, dtype=torch.float64)

    def measure(self, x: Tensor) -> Floats:
        """Return the shift of a batch x (N, B, D), as `StreamView.input_shift`; features that were constant are left out."""
        mean, square = self.sums / self.seen[:, None]
        variance = (square - mean.square()).clamp(min=0) * (1 / x.shape[1] + 1 / self.seen[:, None])
        varies = variance > 1e-6
        ratio = torch.where(varies, (x.double().mean(1) - mean).square() / variance, 0.0)
        return np.asarray((ratio.sum(1) / varies.sum(1)).numpy())

    def add(self, x: Tensor, alarms: Bools) -> None:
        """Count a batch; where an alarm was raised, it is the first one."""
        again = torch.from_numpy(alarms)
        self.sums[:, again], self.seen[again] = 0, 0
        wide = x.double()
        self.sums += torch.stack([wide.sum(1), wide.square().sum(1)])
        self.seen += x.shape[1]
