"""Fault injection: put NaN into one row, and check that no other row changes. E rows, S slots."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from esper.kasmina.stack.rows import Stack
from esper.leyline.data.batches import Batch
from esper.leyline.data.task import Objective
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.stacked.data import SharedBatchIterator
from esper.tolaria.stacked.optimizer import StackedOptimizer, Updates

Fault = Literal["loss", "gradient", "seed gradient", "parameter", "data"]
"""Where NaN is injected; 'seed gradient' has an effect only if the row has a seed that trains."""
FAULTS: tuple[Fault, ...] = get_args(Fault)


class _Feed:
    """A feed whose batch number `at` has a NaN in the inputs of one row; it also tracks the current batch and rows."""

    def __init__(self, feed: SharedBatchIterator, row: int, at: int, *, taints: bool) -> None:
        self._feed, self._row, self._at, self._taints = feed, row, at, taints
        self.served = -1  # index of the current batch in the step
        self.part = slice(0, 0)  # the rows of the last call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._feed, name)

    def advance(self) -> None:
        self._feed.advance()
        self.served += 1

    def of(self, part: slice) -> tuple[Batch, Tensor]:
        self.part = part
        x, y = self._feed.of(part)
        if self._taints and self.now and part.start <= self._row < part.stop:
            assert isinstance(x, Tensor), "one tensor is poisoned"
            x = x.clone()
            x[self._row - part.start, 0] = torch.nan
        return x, y

    @property
    def now(self) -> bool:
        return self.served == self._at


class _Loss:
    """An objective whose losses of one row in one training batch are NaN."""

    def __init__(self, objective: Objective, feed: _Feed, row: int) -> None:
        self._objective, self._feed, self._row = objective, feed, row
        self._done = False

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        found, part = self._objective.loss(output, target), self._feed.part
        if self._done or not self._feed.now or not part.start <= self._row < part.stop:
            return found
        self._done = True  # the first call with a batch is for the networks, the second for their branches
        factor = torch.ones(len(found), 1, dtype=found.dtype, device=found.device)
        factor[self._row - part.start] = torch.nan
        return found * factor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objective, name)


class _Optimizer:
    """An optimizer that puts NaN into one gradient in one step: that of the row of a stack that `place` returns."""

    def __init__(self, optimizer: StackedOptimizer, feed: _Feed, place: Callable[[Stack], int | None]) -> None:
        self._optimizer, self._feed, self._place = optimizer, feed, place

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def begin(self, stack: Stack, rows: slice) -> "_Updates":
        return _Updates(self._optimizer.begin(stack, rows), self._feed, stack, self._place(stack))


class _Updates:
    """The updates of such an optimizer."""

    def __init__(self, updates: Updates, feed: _Feed, stack: Stack, row: int | None) -> None:
        self._updates, self._feed, self._stack, self._row = updates, feed, stack, row

    def __getattr__(self, name: str) -> Any:
        return getattr(self._updates, name)

    def step(self, parts: Tensor | None = None) -> Tensor:
        self._poison()
        return self._updates.step(parts)

    def norm(self, scale: Tensor | None = None) -> Tensor:
        self._poison()
        return self._updates.norm(scale)

    def _poison(self) -> None:
        if self._row is not None and self._feed.now:
            self._stack.columns["gradient"][self._row, 0] = torch.nan


@contextmanager
def poisoned(engine: VectorizedEngine, row: int, kind: Fault, batch: int = 0) -> Iterator[None]:
    """Put NaN into one row at one batch, in the step that is taken inside the block."""
    population = engine.population
    feed, optimizer, objective = population.feed, population.optimizer, population.objective
    watched = _Feed(feed, row, batch, taints=kind == "data")
    population.feed = watched  # type: ignore[assignment]
    if kind == "loss":
        population.objective = _Loss(objective, watched, row)
    elif kind == "gradient":
        host = population.body.host
        population.optimizer = _Optimizer(optimizer, watched, lambda stack: row if stack is host else None)  # type: ignore[assignment]
    elif kind == "seed gradient":
        population.optimizer = _Optimizer(optimizer, watched, lambda stack: _training_seed(engine, row, stack))  # type: ignore[assignment]
    elif kind == "parameter":
        population.body.host.columns["value"][row, 0] = torch.nan
    try:
        yield
    finally:
        population.feed, population.optimizer, population.objective = feed, optimizer, objective


def fingerprints(engine: VectorizedEngine) -> list[str]:
    """Return the sha256 of the state and the measurements of each row, environments first and then twins."""
    state = engine.state
    digests = [hashlib.sha256() for _ in range(engine.rows)]
    body = engine.population.body
    stacks = [(body.host, np.arange(engine.rows))]
    stacks += [(stack, body.envs[at]) for at, stack in sorted(body.stacks.items(), key=lambda item: item[0])]
    for stack, owners in stacks:
        for name in sorted(stack.columns.keys() - {"gradient"}):
            column = stack.columns[name].cpu().numpy()
            for place, row in enumerate(owners.tolist()):
                if row < engine.rows:
                    digests[row].update(column[place].tobytes() + stack.steps[place].tobytes())
    estimates = [field for name, field in state.measurements._asdict().items() if name != "sensor_age"]
    records = [*state.seeds, *state.scores, *state.masks]
    arrays = [*records, *(a for field in estimates for a in (field if isinstance(field, tuple) else (field,)))]
    for array in arrays:
        for row, digest in enumerate(digests):
            digest.update(np.ascontiguousarray(array[row]).tobytes())
    return [digest.hexdigest() for digest in digests]


def _training_seed(engine: VectorizedEngine, row: int, stack: Stack) -> int | None:
    """Return the row of a stack with a seed of a population row that the optimizer updates now; None if there is none."""
    body = engine.population.body
    for at, runs in body.trainable(engine.state.seeds).items():
        if body.stacks[at] is stack:
            for run in runs:
                found = np.flatnonzero(body.envs[at][run] == row).tolist()
                if found:
                    return int(run.start) + int(found[0])
    return None
