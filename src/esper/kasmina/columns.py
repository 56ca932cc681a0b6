"""Parameters of many copies of a module as rows of one tensor. N rows; P parameters of one copy."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from esper.leyline.view import Bools

ALIGNED = 16
"""Parameters of a module that runs row by row start at multiples of this many numbers, which are 64 bytes. The rounding of a
kernel may depend on the alignment of its operands, and a row must not depend on its index."""


class Place(NamedTuple):
    """The place of one parameter of the module in a row.

    Attributes:
        name (str): its name in the module
        shape (torch.Size): its shape
        start (int): index of its first number in a row
        stop (int): one past the index of its last number
        owners (tuple): the submodules that have it, each with its name there; several if they share the parameter
    """

    name: str
    shape: torch.Size
    start: int
    stop: int
    owners: tuple[tuple[nn.Module, str], ...]

    def of(self, rows: Tensor) -> Tensor:
        """Return this parameter of rows (..., P), as a view (..., *shape)."""
        columns = rows[..., self.start : self.stop]
        if len(self.shape) == 4:  # convolution weights keep the memory layout of the maps that they read
            out, channels, *size = self.shape
            stored: Tensor = columns.unflatten(-1, (out, *size, channels))
            return stored.movedim(-1, -3)
        return columns.unflatten(-1, self.shape) if self.shape else columns.squeeze(-1)

    def flat(self, values: Tensor) -> Tensor:
        """Return this parameter of rows (n, *shape) as their columns (n, stop - start); the inverse of `of`."""
        return (
            (values.movedim(-3, -1) if len(self.shape) == 4 else values).flatten(1) if self.shape else values[:, None]
        )


class Columns:
    """The parameters of copies of a module in one (capacity, P) tensor with one row per copy, and all other per-row state.

    `columns` holds everything that has a row axis: `value` and `gradient` (capacity, P), the module's buffers, the
    moments of an optimizer, and `fixed` (capacity, P), which marks parameters that never train, if a row has any. Row
    operations (`write`, `copy`, `arrange`) treat all columns alike, so a column that is added later is snapshotted,
    moved and freed with the rest. Parameters that train in no row come last, after the first `trained` columns. `steps`
    (capacity,) counts the optimizer steps that each row has taken.
    """

    def __init__(
        self, module: nn.Module, capacity: int, moments: Sequence[str], device: torch.device | str, apart: bool
    ) -> None:
        """Make room for `capacity` rows, all zero; `moments` names further columns of the shape of `value`."""
        named = sorted(module.named_parameters(), key=lambda pair: not pair[1].requires_grad)
        places, start, aligned = [], 0, ALIGNED if apart else 1
        for name, parameter in named:
            owners = tuple(
                (owner, own) for owner in module.modules() for own, p in owner._parameters.items() if p is parameter
            )
            places.append(Place(name, parameter.shape, start, start + parameter.numel(), owners))
            start += -(-parameter.numel() // aligned) * aligned
        self.places: tuple[Place, ...] = tuple(places)
        self.size = start
        self.trained = max(
            (place.stop for place, (_, p) in zip(places, named, strict=True) if p.requires_grad), default=0
        )
        self.dtype = named[0][1].dtype if named else torch.get_default_dtype()
        self.device = torch.device(device)
        self.buffers = {f"buffer.{name}": value for name, value in module.named_buffers()}
        self.columns: dict[str, Tensor] = {
            name: torch.zeros(capacity, start, dtype=self.dtype, device=self.device)
            for name in ("value", "gradient", *moments)
        }
        for name, value in self.buffers.items():
            self.columns[name] = value.expand(capacity, *value.shape).clone()
        self.steps = np.zeros(capacity, np.int64)

    @property
    def trained_places(self) -> tuple[Place, ...]:
        """The parameters that train in some row."""
        return tuple(place for place in self.places if place.stop <= self.trained)

    def frozen(self) -> Bools:
        """(capacity,) whether no parameter of a row trains. It reads the device if rows differ in what trains."""
        if "fixed" not in self.columns or not self.trained:
            return np.full(self.capacity, not self.trained)
        starts = [place.start for place in self.trained_places]
        found: Bools = self.columns["fixed"][:, starts].all(1).cpu().numpy()
        return found

    @property
    def capacity(self) -> int:
        """Number of rows that fit."""
        return self.columns["value"].shape[0]

    @torch.no_grad()
    def write(self, row: int, module: nn.Module) -> None:
        """Write a new module into a row: its parameters and buffers in the leading corner, and 0 everywhere else."""
        self.clear(row)
        fixed = {name for name, p in module.named_parameters() if not p.requires_grad}
        if fixed and "fixed" not in self.columns:
            self.columns["fixed"] = torch.zeros_like(self.columns["value"], dtype=torch.bool)
        for place in self.places:
            if place.name in fixed:
                self.columns["fixed"][row, place.start : place.stop] = True
        parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
        for place in self.places:
            _corner(place.of(self.columns["value"][row]), parameters[place.name])
        for name in self.buffers:
            _corner(self.columns[name][row], buffers[name.removeprefix("buffer.")])

    @torch.no_grad()
    def read(self, row: int, module: nn.Module) -> nn.Module:
        """Fill a module of the same form, or a smaller one, from the leading corner of a row; return it."""
        parameters = dict(module.named_parameters())
        for place in self.places:
            parameter = parameters[place.name]
            stored = place.of(self.columns["value"][row])
            parameter.copy_(stored[tuple(slice(0, k) for k in parameter.shape)])
        buffers = dict(module.named_buffers())
        for name in self.buffers:
            target = buffers[name.removeprefix("buffer.")]
            target.copy_(self.columns[name][row][tuple(slice(0, k) for k in target.shape)])
        return module

    @torch.no_grad()
    def copy(self, source: int, target: int) -> None:
        """Copy every column of one row to another."""
        for column in self.columns.values():
            column[target] = column[source]
        self.steps[target] = self.steps[source]

    @torch.no_grad()
    def clear(self, row: int) -> None:
        """Set every column of a row to 0."""
        for column in self.columns.values():
            column[row] = 0
        self.steps[row] = 0

    @torch.no_grad()
    def arrange(self, rows: NDArray[np.int64]) -> None:
        """Move rows so that row i becomes the former row rows[i]; rows from len(rows) on are free."""
        if np.array_equal(rows, np.arange(len(rows))):
            return
        index = torch.from_numpy(rows).to(self.device, non_blocking=True)
        for column in self.columns.values():
            column[: len(rows)] = column[index]
        self.steps[: len(rows)] = self.steps[rows]

    @torch.no_grad()
    def reserve(self, capacity: int) -> None:
        """Make room for at least `capacity` rows."""
        if capacity <= self.capacity:
            return
        extra = max(capacity, 2 * self.capacity) - self.capacity
        for name, column in self.columns.items():
            self.columns[name] = torch.cat([column, column.new_zeros(extra, *column.shape[1:])])
        self.steps = np.concatenate([self.steps, np.zeros(extra, np.int64)])

    def state(self) -> dict[str, Any]:
        """Return everything that a later step depends on, as a tree of arrays that share memory with the columns.

        Gradients are left out, because they are 0 between two steps wherever the optimizer runs.
        """
        return {
            "columns": {name: column for name, column in self.columns.items() if name != "gradient"},
            "steps": self.steps,
        }

    @torch.no_grad()
    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned. Raises ValueError if it came from a stack of another module or capacity."""
        columns = state["columns"]
        if "fixed" in columns and "fixed" not in self.columns:
            self.columns["fixed"] = torch.zeros_like(self.columns["value"], dtype=torch.bool)
        known = {name: column for name, column in self.columns.items() if name != "gradient"}
        _check_alike(columns, known)
        for name, column in known.items():
            column.copy_(columns[name])
        self.columns["gradient"].zero_()
        self.steps = state["steps"]

    def parameter(self, name: str, column: str = "value") -> Tensor:
        """Return one parameter of every row, (capacity, *shape), as a view of a column."""
        return next(place for place in self.places if place.name == name).of(self.columns[column])


def _check_alike(given: dict[str, Tensor], known: dict[str, Tensor]) -> None:
    """Raise ValueError naming the first tensor that is missing, unknown, or of another shape or dtype."""
    for name in {**known, **given}:
        one, other = (
            None if name not in side else (tuple(side[name].shape), side[name].dtype) for side in (given, known)
        )
        if one != other:
            raise ValueError(f"{name} is {one}, where {other} was expected")


def _corner(target: Tensor, source: Tensor) -> None:
    target[tuple(slice(0, k) for k in source.shape)].copy_(source, non_blocking=True)
