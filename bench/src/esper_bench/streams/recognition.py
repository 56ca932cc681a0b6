"""Recognise contexts by their inputs, before a batch is predicted. N streams, K contexts, D features."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from esper_bench.streams.data import Floats, Ints

FLOOR = 0.05
"""Added to the variance of every feature, which has a variance of about 1, so that constant features count too."""


class InputMeans:
    """Holds the mean of the inputs of each context that a stream remembers.

    Attributes:
        mean (Tensor): (N, K, D) float64
        seen (Tensor): (N, K) float64 examples behind each mean; 0 where there is none
    """

    def __init__(self, count: int, contexts: int, inputs: int) -> None:
        self.mean = torch.zeros(count, contexts, inputs, dtype=torch.float64)
        self.seen = torch.zeros(count, contexts, dtype=torch.float64)

    def shifts(self, x: Tensor) -> Floats:
        """Measure how far a batch x (N, B, D) is from every mean, (N, K): about 0.7 in the same context, nan without a mean.

        It is the mean over features of (m_x - m)^2 / ((v + FLOOR) (1 / B + 1 / n)), with mean and variance m_x, v of the batch.
        """
        wide = x.double()
        scale = (1 / x.shape[1] + 1 / self.seen)[..., None] * (wide.var(1, correction=0) + FLOOR)[:, None]
        far = ((wide.mean(1)[:, None] - self.mean).square() / scale).mean(-1)
        return np.asarray(torch.where(self.seen > 0, far, torch.nan).numpy())

    def add(self, x: Tensor, context: Ints) -> None:
        """Count a batch x (N, B, D) in one context (N,) of each stream."""
        rows, at = torch.arange(len(x)), torch.from_numpy(context)
        self.seen[rows, at] += x.shape[1]
        share = (x.shape[1] / self.seen[rows, at])[:, None]
        self.mean[rows, at] += share * (x.double().mean(1) - self.mean[rows, at])

    def follow(self, row: int, order: Ints) -> None:
        """Reorder the contexts of a row: context i is now what order[i] was; -1 for nothing."""
        gone = torch.from_numpy(order < 0)
        self.mean[row], self.seen[row] = self.mean[row][order], self.seen[row][order].masked_fill(gone, 0)

    def snapshot(self) -> dict[str, Any]:
        """Return everything."""
        return {"mean": self.mean, "seen": self.seen}

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `snapshot` returned."""
        self.mean, self.seen = state["mean"], state["seen"]


def nearest(shifts: Floats) -> tuple[Ints, Floats]:
    """Return (N,) the context of the least shift (N, K), and that shift; infinite where there is none."""
    known = np.where(np.isnan(shifts), np.inf, shifts)
    return known.argmin(1), known.min(1)
