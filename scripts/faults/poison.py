"""Put NaN into one row, and check that no other row changes. E rows, S slots."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from esper.kasmina.stack.rows import Stack
from esper.leyline.data.batches import Batch
from esper.tolaria.engine import VectorizedEngine

Fault = Literal["loss", "gradient", "seed gradient", "parameter", "data"]
"""Where NaN is injected; 'seed gradient' has an effect only if the row has a seed that trains."""
FAULTS: tuple[Fault, ...] = get_args(Fault)


class _Around:
    """Replaces some methods of an object; everything else is that of the object."""

    def __init__(self, inner: Any, **methods: Any) -> None:
        self.__dict__.update(methods)
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@contextmanager
def poisoned(engine: VectorizedEngine, row: int, kind: Fault, batch: int = 0) -> Iterator[None]:
    """Put NaN into one row at one batch, in the step that is taken inside the block."""
    population = engine.population
    feed, optimizer, objective, host = population.feed, population.optimizer, population.objective, population.body.host
    served, part = -1, slice(0, 0)  # the index of the current batch in the step, and the rows that asked for it last

    def advance() -> None:
        nonlocal served
        feed.advance()
        served += 1

    def of(rows: slice) -> tuple[Batch, Tensor]:
        nonlocal part
        part, (x, y) = rows, feed.of(rows)
        if kind == "data" and hit():
            assert isinstance(x, Tensor), "one tensor is poisoned"
            x = x.clone()
            x[row - part.start, 0] = torch.nan
        return x, y

    def hit() -> bool:
        return served == batch and part.start <= row < part.stop

    lost = False

    def loss(output: Tensor, target: Tensor) -> Tensor:
        nonlocal lost
        found = objective.loss(output, target)
        if lost or not hit():
            return found
        lost = True  # the first call with a batch is for the networks, the second for their branches
        factor = torch.ones(len(found), 1, dtype=found.dtype, device=found.device)
        factor[row - part.start] = torch.nan
        return found * factor

    def begin(stack: Stack, rows: slice) -> Any:
        updates = optimizer(stack, rows)
        own = _training_seed(engine, row, stack) if kind == "seed gradient" else row if stack is host else None

        def spoiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
            def call(*arguments: Any) -> Tensor:
                if own is not None and served == batch:
                    stack.columns["gradient"][own, 0] = torch.nan
                return function(*arguments)

            return call

        return _Around(updates, step=spoiled(updates.step), norm=spoiled(updates.norm))

    replaced: dict[str, Any] = {"feed": _Around(feed, advance=advance, of=of)}
    if kind == "loss":
        replaced["objective"] = _Around(objective, loss=loss, differentiated=None)
    elif kind in ("gradient", "seed gradient"):
        replaced["optimizer"] = begin
    elif kind == "parameter":
        host.columns["value"][row, 0] = torch.nan
    vars(population).update(replaced)
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
    records = [*state.seeds, *state.scores, *engine.masks]
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
