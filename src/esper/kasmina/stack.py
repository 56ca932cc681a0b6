"""N copies of one module as one object. N rows, B examples; P parameters of one copy."""

import copy
import warnings
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.modules.dropout import _DropoutNd

from esper.kasmina.memory import stack_rows
from esper.leyline.batches import Batch, arguments, first, map_leaves, picked, run, unstacked
from esper.leyline.errors import InputError, is_out_of_memory

# A leaf is a view into a row of all parameters, and so is its gradient: torch remarks once that such a gradient is not
# contiguous. The optimizer gains more from one contiguous tensor of all gradients than backward loses.
warnings.filterwarnings("ignore", message="grad and param do not obey the gradient layout contract")

Mapping = Literal["auto", "vmap", "loop"]
Way = Literal["direct", "vmap", "loop"]
Rows = slice | NDArray[np.int64]
"""Which rows of a stack a call runs: a contiguous slice costs nothing, an index array gathers."""


ALIGNED = 16
"""Parameters of a module that convolves start at multiples of so many numbers, 64 bytes: a kernel may round by where in
memory its operands lie, and a row must be the same wherever it stands."""


class _Place(NamedTuple):
    """Where one parameter of the module lives in a row."""

    name: str
    shape: torch.Size
    start: int
    stop: int
    owners: tuple[tuple[nn.Module, str], ...]  # more than one where a parameter is shared inside the module

    def of(self, rows: Tensor) -> Tensor:
        """This parameter of rows (..., P), as a view (..., *shape)."""
        columns = rows[..., self.start : self.stop]
        if len(self.shape) == 4:  # a convolution's, whose layout is that of the maps it reads
            out, channels, *size = self.shape
            stored: Tensor = columns.unflatten(-1, (out, *size, channels))
            return stored.movedim(-1, -3)
        return columns.unflatten(-1, self.shape) if self.shape else columns.squeeze(-1)


class _Part(NamedTuple):
    """A submodule that a call runs, what it holds, and how it is run."""

    prefix: str
    module: nn.Module
    places: tuple[_Place, ...]
    owners: tuple[tuple[tuple[nn.Module, str], ...], ...]  # of each place, those inside the part
    names: tuple[tuple[str, ...], ...]  # of each place, its names inside the part; more than one where it is shared
    buffers: tuple[str, ...]  # names of columns
    way: Way


class Stack:
    """Copies of a module whose parameters live in one (capacity, P) tensor, a row a copy.

    `columns` holds everything that has a row axis: `value` and `gradient` (capacity, P), the module's buffers, what an
    optimizer adds, and, where some row has parameters that never train, `fixed` (capacity, P), which says where. Row surgery
    (`write`, `copy`, `arrange`) treats all columns alike, so whatever is added later is snapshotted, moved and freed with the
    rest. Parameters that train in no row come last, after the first `trained` columns.

    A call runs the module over rows in the fastest way that the module allows; the stored numbers are the same for all:
    'direct' calls the module once with stacked parameters, when every operation of it acts on trailing axes, each example
    by itself (`module.stacks`); 'vmap' maps any module in one call; 'loop' runs replicas whose parameters are views of the rows,
    which also allows dropout, and is faster for convolutions on a CPU.
    """

    def __init__(
        self,
        module: nn.Module,
        capacity: int,
        *,
        mapping: Mapping = "auto",
        moments: Sequence[str] = (),
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> None:
        """Room for `capacity` rows, all zero; `moments` names further columns of the shape of `value`.

        Raises InputError where `mapping` is 'vmap' and the module has dropout.
        """
        self.template = copy.deepcopy(module).to(device=device, dtype=dtype)
        self.module = copy.deepcopy(self.template)  # the copy that calls rebind to the rows
        self.random = any(isinstance(part, _DropoutNd) and part.p > 0 for part in self.module.modules())
        self.convolves = any(isinstance(part, nn.modules.conv._ConvNd) for part in self.module.modules())
        self.draws = self.random or bool(getattr(module, "draws", True))
        self.mapping = mapping
        if mapping == "vmap" and self.random:
            raise InputError("mapping 'vmap' cannot draw dropout by key; set mapping to 'loop' or 'auto'")
        named = sorted(self.module.named_parameters(), key=lambda pair: not pair[1].requires_grad)
        places, start, aligned = [], 0, ALIGNED if self.convolves else 1
        for name, parameter in named:
            owners = tuple(
                (owner, own)
                for owner in self.module.modules()
                for own, p in owner._parameters.items()
                if p is parameter
            )
            places.append(_Place(name, parameter.shape, start, start + parameter.numel(), owners))
            start += -(-parameter.numel() // aligned) * aligned
        self.places: tuple[_Place, ...] = tuple(places)
        self.size = start
        self.trained = max(
            (place.stop for place, (_, p) in zip(places, named, strict=True) if p.requires_grad), default=0
        )
        self.dtype = named[0][1].dtype if named else torch.get_default_dtype()
        self.device = torch.device(device)
        self.buffers = {f"buffer.{name}": value for name, value in self.module.named_buffers()}
        self.columns: dict[str, Tensor] = {
            name: torch.zeros(capacity, start, dtype=self.dtype, device=self.device)
            for name in ("value", "gradient", *moments)
        }
        for name, value in self.buffers.items():
            self.columns[name] = value.expand(capacity, *value.shape).clone()
        self.steps = np.zeros(capacity, np.int64)  # optimizer steps that each row has taken
        self._leaves: dict[tuple[str, int, int, bool], list[Tensor]] = {}
        self._replicas: dict[bool, list[nn.Module]] = {}
        self._parts: dict[str, _Part] = {}

    @property
    def capacity(self) -> int:
        """Rows there is room for."""
        return len(self.columns["value"])

    def part(self, path: str) -> _Part:
        """A submodule by its dotted path ('' is the whole module), looked up once."""
        found = self._parts.get(path)
        if found is None:
            prefix = f"{path}." if path else ""
            module = self.module.get_submodule(path)
            inside = {part: f"{name}." if name else "" for name, part in module.named_modules()}
            # By owner and not by name: a parameter that several segments share has the name of the first alone.
            owned = [(place, tuple(pair for pair in place.owners if pair[0] in inside)) for place in self.places]
            owned = [(place, owners) for place, owners in owned if owners]
            found = self._parts[path] = _Part(
                prefix,
                module,
                tuple(place for place, _ in owned),
                tuple(owners for _, owners in owned),
                tuple(tuple(inside[owner] + name for owner, name in owners) for _, owners in owned),
                tuple(name for name in self.buffers if name.startswith(f"buffer.{prefix}")),
                self._way(module),
            )
        return found

    def _way(self, part: nn.Module) -> Way:
        if self.mapping != "auto":
            return self.mapping
        if self.random or (self.convolves and self.device.type == "cpu"):
            return "loop"
        return "direct" if getattr(self.module, "stacks", False) or getattr(part, "stacks", False) else "vmap"

    def __call__(
        self, x: Batch, rows: Rows, *, part: str = "", frozen: bool = False, keys: NDArray[np.int64] | None = None
    ) -> Tensor:
        """Run the module, or the submodule named `part`, over rows: leaves x (n, B, ...) -> (n, B, ...).

        With `frozen`, parameters are constants of the graph while gradients still flow through x, and the module is in
        evaluation mode, so that no buffer changes. `keys` (n,) seeds what each row draws in training mode. A single row is
        run beside a ghost of itself, because a product of one row
        takes another kernel than one of several, and a row's numbers must not depend on its neighbours.
        """
        what = self.part(part)
        if what.way == "loop":
            return self._loop(x, rows, part, frozen, keys)
        if frozen and self.module.training and what.way == "vmap":
            self.module.eval()
            try:
                return self(x, rows, part=part, frozen=True)
            finally:
                self.module.train()
        tensors = self._parameters(what, rows, frozen)
        at = rows if isinstance(rows, slice) else self._index(rows)
        kept = {name: self.columns[name][at] for name in what.buffers}
        buffers, single = kept, len(first(x)) == 1
        # x becomes a node of its own in either case: the module's gradients for it are then summed before they meet those of
        # its other users, and the order of a sum, which decides its last bit, does not depend on the number of rows.
        x = map_leaves(_twice if single else _node, x)
        if single:
            tensors = [torch.cat([t, t]) for t in tensors]
            buffers = {name: torch.cat([b, b]) for name, b in kept.items()}
        if what.way == "direct":
            # Products of a row depend in their last bit on whether its first element lies on a multiple of 16 bytes, so on
            # where the row stands; repeats of an example behind the last one put every row of any width on such a multiple.
            examples = first(x).shape[1]
            if examples % 4:
                x = map_leaves(_with_repeats, x)
            self._bind(what, tensors, buffers)
            y = run(what.module, x)[:, :examples] if examples % 4 else run(what.module, x)
        else:
            start = len(what.prefix) + len("buffer.")
            inner = {name: t for names, t in zip(what.names, tensors, strict=True) for name in names}
            inner |= {name[start:]: b for name, b in buffers.items()}
            try:
                y = vmap(lambda p, v: functional_call(what.module, p, *arguments(v), tie_weights=False))(inner, x)
            except RuntimeError as error:
                if self.mapping == "vmap" or is_out_of_memory(error):
                    raise
                # What vmap cannot map (recurrences, draws, branches on data), a loop runs, or says what is wrong with it.
                self._parts[part] = what._replace(way="loop")
                return self._loop(picked(x, slice(0, 1)) if single else x, rows, part, frozen, keys)
        if single:
            y = y[:1]
            for name, buffer in kept.items():
                buffer.copy_(buffers[name][:1])
        return y

    def train(self, mode: bool) -> None:
        """Training or evaluation mode of the module, as nn.Module.train; frozen calls are in evaluation mode always."""
        self.module.train(mode)
        for replica in self._replicas.get(False, []):
            replica.train(mode)

    # Row surgery.

    @torch.no_grad()
    def write(self, row: int, module: nn.Module) -> None:
        """Put a fresh module into a row: its parameters and buffers in the leading corner, everything else 0."""
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
        """Fill a module of the same form, or a smaller one, from the leading corner of a row; returns it."""
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
        """Make a row equal to another, in every column."""
        for column in self.columns.values():
            column[target] = column[source]
        self.steps[target] = self.steps[source]

    @torch.no_grad()
    def clear(self, row: int) -> None:
        """Empty a row, in every column."""
        for column in self.columns.values():
            column[row] = 0
        self.steps[row] = 0

    @torch.no_grad()
    def arrange(self, rows: NDArray[np.int64]) -> None:
        """Move rows so that row i becomes what row rows[i] was; rows past len(rows) are free."""
        if np.array_equal(rows, np.arange(len(rows))):
            return
        index = self._index(rows)
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
        self._leaves.clear()
        self._replicas.clear()

    def state(self) -> dict[str, Any]:
        """All that a later call or step of the optimizer depends on, as a tree of arrays; tensors share memory.

        Gradients are left out: they are 0 between two steps wherever the optimizer still goes.
        """
        return {
            "columns": {name: column for name, column in self.columns.items() if name != "gradient"},
            "steps": self.steps,
            "ways": {path: part.way for path, part in self._parts.items()},
        }

    @torch.no_grad()
    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave, of a stack of the same module and capacity. ValueError where it was another."""
        columns = state["columns"]
        if "fixed" in columns and "fixed" not in self.columns:
            self.columns["fixed"] = torch.zeros_like(self.columns["value"], dtype=torch.bool)
        known = {name: column for name, column in self.columns.items() if name != "gradient"}
        _check_alike(columns, known)
        for name, column in known.items():
            column.copy_(columns[name])
        self.columns["gradient"].zero_()
        self.steps = state["steps"]
        for path, way in state["ways"].items():  # what vmap failed on is not tried again
            self._parts[path] = self.part(path)._replace(way=way)

    def parameter(self, name: str, column: str = "value") -> Tensor:
        """One parameter of every row, (capacity, *shape), as a view of a column."""
        return next(place for place in self.places if place.name == name).of(self.columns[column])

    # How the ways of running get at the rows.

    def _parameters(self, what: _Part, rows: Rows, frozen: bool) -> list[Tensor]:
        if isinstance(rows, slice):
            start, stop, _ = rows.indices(self.capacity)
            return self._views(what, start, stop, frozen)
        index = self._index(rows)
        return [leaf.index_select(0, index) for leaf in self._views(what, 0, self.capacity, frozen)]

    def _views(self, what: _Part, start: int, stop: int, frozen: bool) -> list[Tensor]:
        """The parameters of a run of rows as leaves whose .grad are views of the gradient column, made once."""
        key = (what.prefix, start, stop, frozen)
        found = self._leaves.get(key)
        if found is None:
            value, gradient = self.columns["value"][start:stop], self.columns["gradient"][start:stop]
            found = []
            for place in what.places:
                leaf = place.of(value).detach()
                if place.stop <= self.trained and not frozen:
                    leaf.requires_grad_()
                    leaf.grad = place.of(gradient).detach()
                found.append(leaf)
            self._leaves[key] = found
        return found

    def _bind(self, what: _Part, tensors: list[Tensor], buffers: dict[str, Tensor]) -> None:
        """Give the module stacked parameters; cheaper than functional_call, and nobody else holds this copy."""
        for owners, tensor in zip(what.owners, tensors, strict=True):
            for owner, name in owners:
                owner._parameters[name] = tensor  # type: ignore[assignment]
        for name, buffer in buffers.items():
            path, _, own = name.removeprefix("buffer.").rpartition(".")
            self.module.get_submodule(path)._buffers[own] = buffer

    def _index(self, rows: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(rows).to(self.device)

    def _loop(self, x: Batch, rows: Rows, part: str, frozen: bool, keys: NDArray[np.int64] | None) -> Tensor:
        chosen = range(self.capacity)[rows] if isinstance(rows, slice) else rows
        replicas = self._replica_rows(frozen)
        parts = [replicas[row].get_submodule(part) for row in chosen]
        values = unstacked(x)
        if frozen or not self.module.training:
            return stack_rows([run(module, v) for module, v in zip(parts, values, strict=True)])
        assert keys is not None or not self.random, "dropout in training mode is drawn by key"
        if keys is None or not self.draws:
            return stack_rows([run(module, v) for module, v in zip(parts, values, strict=True)])
        outputs, generator = [], self._generator()
        state = generator.get_state()
        try:
            for module, v, key in zip(parts, values, (keys & ((1 << 63) - 1)).tolist(), strict=True):
                generator.manual_seed(key)  # of the one device that draws; torch.manual_seed costs twenty times as much
                outputs.append(run(module, v))
        finally:
            generator.set_state(state)
        return stack_rows(outputs)

    def _generator(self) -> torch.Generator:
        """The generator that modules on the stack's device draw from."""
        if self.device.type != "cuda":
            return torch.default_generator
        index = self.device.index if self.device.index is not None else torch.cuda.current_device()
        return torch.cuda.default_generators[index]

    def _replica_rows(self, frozen: bool) -> list[nn.Module]:
        """One module a row whose parameters and buffers are views of the row, made once."""
        if frozen not in self._replicas:
            replicas = []
            value, gradient = self.columns["value"], self.columns["gradient"]
            for row in range(self.capacity):
                replica = copy.deepcopy(self.template)
                for place, shared in zip(self.places, self._sites(replica), strict=True):
                    leaf = place.of(value[row]).detach()
                    if place.stop <= self.trained and not frozen:
                        leaf.requires_grad_()
                        leaf.grad = place.of(gradient[row]).detach()
                    for owner, name in shared:
                        owner._parameters[name] = leaf  # type: ignore[assignment]
                for name in self.buffers:
                    path, _, own = name.removeprefix("buffer.").rpartition(".")
                    replica.get_submodule(path)._buffers[own] = self.columns[name][row]
                replica.train(self.module.training and not frozen)
                replicas.append(replica)
            self._replicas[frozen] = replicas
        return self._replicas[frozen]

    def _sites(self, replica: nn.Module) -> list[list[tuple[nn.Module, str]]]:
        """The owners of every place, in a copy of the module."""
        path = {module: name for name, module in self.module.named_modules()}
        return [[(replica.get_submodule(path[owner]), name) for owner, name in place.owners] for place in self.places]


def _twice(x: Tensor) -> Tensor:
    return torch.cat([x, x])


def _node(x: Tensor) -> Tensor:
    return x.view_as(x)


def _with_repeats(x: Tensor) -> Tensor:
    """(n, B, ...) with the first example behind the last one, as often as makes B a multiple of 4."""
    return torch.cat([x, x[:, :1].detach().expand(-1, -x.shape[1] % 4, *x.shape[2:])], 1)


def _check_alike(given: dict[str, Tensor], known: dict[str, Tensor]) -> None:
    """ValueError naming the first tensor that is missing, unknown, or of another shape or type."""
    for name in {**known, **given}:
        one, other = (
            None if name not in side else (tuple(side[name].shape), side[name].dtype) for side in (given, known)
        )
        if one != other:
            raise ValueError(f"{name} is {one}, where {other} was expected")


def _corner(target: Tensor, source: Tensor) -> None:
    target[tuple(slice(0, k) for k in source.shape)] = source
