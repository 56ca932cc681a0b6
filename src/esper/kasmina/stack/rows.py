"""Keep the parameters of many copies of a module as rows of one tensor, and run the copies as one.

N rows, B examples; P parameters of one copy.

Streams of several rows are vectors (n, B, C), contiguous, or maps (n, B, C, H, W) with their channels last. Convolutions on a
CPU run fastest on maps in that layout. torch's own row operations would undo it, because they allocate their result in the
default layout. The functions on rows move the channels last, which copies nothing, operate, and move them back. They recognise
maps by the number of axes, as torch's `channels_last` does. The values are the same in any layout.
"""

import copy
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.modules.dropout import _DropoutNd

from esper.kasmina.stack.fused import Layers, layers_of, mark
from esper.kasmina.stack.plan import Indices
from esper.leyline.data.batches import Batch, arguments, first, map_leaves, picked, run, unstacked
from esper.leyline.lifecycle.view import Bools
from esper.leyline.messages import InputError, is_out_of_memory

MAPS = 5  # number of axes of maps with a row axis


def stack_rows(outputs: Sequence[Tensor]) -> Tensor:
    """Stack rows (B, ...) into one stream; a single row is not copied."""
    if len(outputs) == 1:
        return outputs[0].unsqueeze(0)
    if outputs[0].dim() == MAPS - 1:
        return moved_first(torch.stack([output.movedim(1, -1) for output in outputs]))
    return torch.stack(list(outputs))


def channels_last(x: Tensor) -> Tensor:
    """Return the same stream with the channels of maps last in memory."""
    return moved_first(moved_last(x).contiguous()) if x.dim() == MAPS else x


def energy(stream: Tensor) -> Tensor:
    """Compute |h|^2 over examples and features, in float32 at least -> (n,)."""
    wide = stream.to(torch.promote_types(stream.dtype, torch.float32))
    return wide.square().sum(tuple(range(1, stream.dim())))


def moved_last(x: Tensor) -> Tensor:
    """Return a view of a stream with the channels of maps in the last axis."""
    return x.movedim(2, -1) if x.dim() == MAPS else x


def moved_first(x: Tensor) -> Tensor:
    """Return the inverse of `moved_last`."""
    return x.movedim(-1, 2) if x.dim() == MAPS else x


ALIGNED = 16
"""Parameters of a module that runs row by row start at multiples of this many numbers, which are 64 bytes. The rounding of a
kernel may depend on the alignment of its operands, and a row must not depend on its index."""


class ParameterPlace(NamedTuple):
    """Says where one parameter of the module lies in a row."""

    name: str  # its name in the module
    shape: torch.Size  # its shape
    start: int  # index of its first number in a row
    stop: int  # one past the index of its last number
    # the submodules that have it, each with its name there; several if they share the parameter
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
        stored = values.movedim(-3, -1) if len(self.shape) == 4 else values
        return stored.flatten(1) if self.shape else values[:, None]


# A leaf is a view into a row of all parameters, and so is its gradient: torch remarks once that such a gradient is not
# contiguous. The optimizer gains more from one contiguous tensor of all gradients than backward loses.
warnings.filterwarnings("ignore", message="grad and param do not obey the gradient layout contract")

RowMapping = Literal["auto", "vmap", "loop"]
Way = Literal["direct", "vmap", "loop"]
Rows = slice | Indices | Tensor
"""Rows of a stack that a call runs: a slice is a view, indices gather. A compiled pass has them in a tensor (n,) int64."""


class _Part(NamedTuple):
    """Describes a submodule that a call runs: its tensors, parameters and then buffers, and the way to run it."""

    module: nn.Module
    places: tuple[ParameterPlace, ...]
    buffers: tuple[str, ...]  # the column of each buffer
    # for each tensor the submodules inside the part that have it, each with its name there; several if it is shared
    owners: tuple[tuple[tuple[nn.Module, str], ...], ...]
    names: tuple[tuple[str, ...], ...]  # for each tensor its names inside the part
    way: Way
    layers: Layers | None  # what a part that is called directly does, if it is layers that follow each other


def stacks_directly(host: nn.Module, part: nn.Module, layers: Layers | None) -> bool:
    """Return whether a part of a host is called once for all rows: it says that it stacks, or is layers of `layers_of`."""
    said = [getattr(each, "stacks", None) for each in (host, part)]
    return True in said or (layers is not None and False not in said)


def picked_columns(columns: dict[str, Tensor], rows: Indices) -> dict[str, Tensor]:
    """Return some rows (n,) of columns, without those of gradients, which are 0 between steps."""
    index = torch.from_numpy(rows).to(columns["value"].device, non_blocking=True)
    return {name: column.index_select(0, index) for name, column in columns.items() if name != "gradient"}


class Columns:
    """Keeps several tensors of N rows each, and writes all that belongs to a row at once: its weights, moments and buffers."""

    columns: dict[str, Tensor]  # (N, ...) by name
    steps: Indices  # (N,) how many optimizer steps each row has taken

    @torch.no_grad()
    def put(self, rows: Indices, columns: dict[str, Tensor], steps: Indices) -> None:
        """Set everything of some rows (n,): a column that is not given, and the gradient, is 0 there."""
        every = np.array_equal(rows, np.arange(len(self.steps)))
        for name, column in columns.items():
            if name not in self.columns and name != "gradient":
                self.columns[name] = column.new_zeros(len(self.steps), *column.shape[1:])
        index = torch.from_numpy(rows).to(self.columns["value"].device, non_blocking=True)
        for name, own in self.columns.items():
            given = None if name == "gradient" else columns.get(name)
            if given is None:
                own.index_fill_(0, index, 0)
            elif every:
                own.copy_(given)
            else:
                own.index_copy_(0, index, given)
        self.steps[rows] = steps


class Stack(Columns):
    """Keeps copies of a module in one (capacity, P) tensor with one row per copy, and runs them as one.

    `columns` holds everything that has a row axis: `value` and `gradient` (capacity, P), the module's buffers, the moments of an
    optimizer, and `fixed` (capacity, P), which marks parameters that never train, if a row has any. Row operations (`write`,
    `arrange`) treat all columns alike, so a column that is added later is snapshotted, moved and freed with the rest. Parameters
    that train in no row come last, after the first `trained` columns. `steps` (capacity,) counts the optimizer steps that each
    row has taken.

    A call runs the module over rows in the fastest way that the module allows; the results are the same for all ways.
    'direct' calls the module once with stacked parameters; every operation of the module must act on trailing axes,
    each example by itself (`module.stacks`). 'vmap' maps any module in one call. 'loop' runs replicas whose parameters
    are views of the rows; it also allows dropout, and is faster for convolutions on a CPU.
    """

    def __init__(
        self,
        module: nn.Module,
        capacity: int,
        *,
        mapping: RowMapping = "auto",
        moments: Sequence[str] = (),
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        aligned: bool = False,
    ) -> None:
        """Make room for `capacity` rows, all zero; `moments` names further columns of the shape of `value`.

        `aligned` starts parameters, and the inputs of rows that run in a loop, at multiples of 64 bytes, as modules with
        convolutions always do. Raises InputError if `mapping` is 'vmap' and the module has dropout.
        """
        self.template = copy.deepcopy(module).to(device=device, dtype=dtype, non_blocking=True)
        self.module = copy.deepcopy(self.template)  # calls bind the parameters of this copy to rows
        inside = list(self.module.modules())
        self.random = any(isinstance(part, _DropoutNd) and part.p > 0 for part in inside)
        self.convolves, self.aligned = convolves(self.module), aligned
        # A module that runs stacked would draw once for all rows.
        self.draws = self.random or bool(getattr(module, "draws", not getattr(module, "stacks", False)))
        self.mapping = mapping
        if mapping == "vmap" and self.random:
            raise InputError("mapping 'vmap' cannot draw dropout by key; set mapping to 'loop' or 'auto'")
        named = sorted(self.module.named_parameters(), key=lambda pair: not pair[1].requires_grad)
        places, start, unit = [], 0, ALIGNED if self.convolves or aligned else 1
        for name, parameter in named:
            owners = tuple((owner, own) for owner in inside for own, p in owner._parameters.items() if p is parameter)
            places.append(ParameterPlace(name, parameter.shape, start, start + parameter.numel(), owners))
            start += -(-parameter.numel() // unit) * unit
        self.places = tuple(places)
        trained = (place.stop for place, (_, p) in zip(places, named, strict=True) if p.requires_grad)
        self.size, self.trained = start, max(trained, default=0)
        self.dtype = named[0][1].dtype if named else torch.get_default_dtype()
        self.device = torch.device(device)
        self.buffers = {f"buffer.{name}": value for name, value in self.module.named_buffers()}
        self.columns: dict[str, Tensor] = {
            name: torch.zeros(capacity, start, dtype=self.dtype, device=self.device)
            for name in ("value", "gradient", *moments)
        }
        for name, value in self.buffers.items():
            self.columns[name] = value.expand(capacity, *value.shape).clone()
        self.steps = np.zeros(capacity, np.int64)
        self._leaves: dict[tuple[str, int, int, bool], list[Tensor]] = {}
        self._replicas: dict[bool, list[nn.Module]] = {}
        self._parts: dict[str, _Part] = {}
        # Setting the mode of each module takes a fifth of the time of nn.Module.train; a module may have its own.
        self._plain = inside if all(type(each).train is nn.Module.train for each in inside) else []
        self.traced = False  # whether `bound` has given it columns without gradients

    def part(self, path: str) -> _Part:
        """Return a submodule by its dotted path, looked up once; '' is the whole, "segments.i:j" the segments i to j in order."""
        found = self._parts.get(path)
        if found is None:
            if ":" in path:
                parent, _, run = path.rpartition(".")
                start, last = map(int, run.split(":"))
                module: nn.Module = nn.Sequential(*list(self.module.get_submodule(parent).children())[start : last + 1])
            else:
                module = self.module.get_submodule(path)
            inside = {part: f"{name}." if name else "" for name, part in module.named_modules()}
            # Parameters are found by owner, because one that several segments share has only the name in the first.
            owned = [(place, tuple(pair for pair in place.owners if pair[0] in inside)) for place in self.places]
            owned = [(place, owners) for place, owners in owned if owners]
            places, owners = tuple(place for place, _ in owned), [own for _, own in owned]
            buffers = []
            for name in self.buffers:
                owner_path, _, own = name.removeprefix("buffer.").rpartition(".")
                if (owner := self.module.get_submodule(owner_path)) in inside:
                    buffers.append(name)
                    owners.append(((owner, own),))
            names = tuple(tuple(inside[owner] + name for owner, name in each) for each in owners)
            layers = layers_of(module, names)
            way = self._way(module, layers)
            found = self._parts[path] = _Part(module, places, tuple(buffers), tuple(owners), names, way, layers)
        return found

    def _way(self, part: nn.Module, layers: Layers | None) -> Way:
        if self.mapping != "auto":
            return self.mapping
        if self.random or (self.convolves and self.device.type == "cpu"):
            return "loop"
        return "direct" if stacks_directly(self.module, part, layers) else "vmap"

    def __call__(
        self, x: Batch, rows: Rows, *, part: str = "", frozen: bool = False, keys: Indices | None = None
    ) -> Tensor:
        """Run the module, or the submodule named `part`, over rows: leaves x (n, B, ...) -> (n, B, ...).

        With `frozen`, parameters are constants of the graph while gradients still flow through x, and the module is in
        evaluation mode, so that no buffer changes. `keys` (n,) seeds what each row draws in training mode. A single row
        is run beside a ghost of itself where it could be rounded differently than among several, as the numbers of a row
        must not depend on the other rows.
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
        given, index = self.given(part, rows, frozen)
        given = given if index is None else [each.index_select(0, index) for each in given]
        # A row has the same bits alone as among others on a CPU, where `product` computes all products.
        eager = not self.traced and not torch.is_autocast_enabled(self.device.type)
        alike = what.way == "direct" and self.device.type == "cpu" and eager
        tensors, single = given, first(x).shape[0] == 1 and not alike
        # x becomes a node of its own in either case. The gradients of the module for x are then summed before those of
        # other users of x are added, so the order of the sum, which decides its last bit, is the same for any number of rows.
        # Fused layers are one node anyway.
        fused = what.way == "direct" and what.layers is not None and isinstance(x, Tensor) and not self.traced
        if single or not fused:
            x = map_leaves(lambda leaf: torch.cat([leaf, leaf]) if single else leaf.view_as(leaf), x)
        if single:
            tensors = [torch.cat([t, t]) for t in given]
        if what.way == "direct":
            y = self._direct(what, x, tensors)
        else:
            named = {name: t for names, t in zip(what.names, tensors, strict=True) for name in names}
            try:
                y = vmap(lambda p, v: functional_call(what.module, p, *arguments(v), tie_weights=False))(named, x)
            except RuntimeError as error:
                if self.mapping == "vmap" or is_out_of_memory(error):
                    raise
                # A loop runs what vmap cannot map (recurrences, draws, branches on data), or raises the error of the module.
                self._parts[part] = what._replace(way="loop")
                return self._loop(picked(x, slice(0, 1)) if single else x, rows, part, frozen, keys)
        if single:
            y = y[:1]
            for buffer, own in zip(given[len(what.places) :], tensors[len(what.places) :], strict=True):
                buffer.copy_(own[:1])
        return y

    def _direct(self, what: _Part, x: Batch, tensors: list[Tensor]) -> Tensor:
        # The last bit of a row's products depends on whether its first element lies on a multiple of 16 bytes, so on the
        # index of the row. Repeats of an example behind the last one align every row of any width.
        examples = first(x).shape[1]
        if examples % 4:
            x = map_leaves(lambda x: torch.cat([x, x[:, :1].detach().expand(-1, -examples % 4, *x.shape[2:])], 1), x)
        if what.layers is not None:
            y = what.layers(first(x), tensors, not self.traced)
        else:
            # Binding is cheaper than functional_call, and nothing else uses this copy of the module.
            for owners, tensor in zip(what.owners, tensors, strict=True):
                for owner, name in owners:
                    table: dict[str, Any] = owner._parameters if name in owner._parameters else owner._buffers
                    table[name] = tensor
            y = run(what.module, x)
        return y[:, :examples] if examples % 4 else y

    def train(self, mode: bool) -> None:
        """Set the module to training or evaluation mode, as nn.Module.train; frozen calls always run in evaluation mode."""
        for each in self._plain:
            each.training = mode
        if not self._plain:
            self.module.train(mode)
        for replica in self._replicas.get(False, []):
            replica.train(mode)

    # The rows.

    @property
    def trained_places(self) -> tuple[ParameterPlace, ...]:
        return tuple(place for place in self.places if place.stop <= self.trained)

    def frozen(self) -> Bools:
        """Return (capacity,) whether no parameter of a row trains. It reads the device if rows differ in what trains."""
        if "fixed" not in self.columns or not self.trained:
            return np.full(self.capacity, not self.trained)
        starts = [place.start for place in self.trained_places]
        return self.columns["fixed"][:, starts].all(1).cpu().numpy()

    @property
    def capacity(self) -> int:
        return self.columns["value"].shape[0]

    def _tensors(self, row: int, module: nn.Module, columns: dict[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the parameters and buffers of a module of the same form, or a smaller one, each with its corner of a row."""
        parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
        pairs: list[tuple[Tensor, Tensor]]
        pairs = [(parameters[place.name], place.of(columns["value"][row])) for place in self.places]
        pairs += [(buffers[name.removeprefix("buffer.")], columns[name][row]) for name in self.buffers]
        for tensor, stored in pairs:
            yield tensor, stored[tuple(slice(0, k) for k in tensor.shape)]

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
        self.fill(row, module, self.columns)

    @torch.no_grad()
    def fill(self, row: int, module: nn.Module, columns: dict[str, Tensor]) -> None:
        """Write the parameters and buffers of a module into the leading corner of a row of columns like those of the stack."""
        for tensor, stored in self._tensors(row, module, columns):
            stored.copy_(tensor, non_blocking=True)

    @torch.no_grad()
    def read(self, row: int, module: nn.Module, columns: dict[str, Tensor] | None = None) -> nn.Module:
        """Fill a module of the same form, or a smaller one, from the leading corner of a row; return it."""
        for tensor, stored in self._tensors(row, module, self.columns if columns is None else columns):
            tensor.copy_(stored)
        return module

    @torch.no_grad()
    def clear(self, row: int) -> None:
        for column in self.columns.values():
            column[row] = 0
        self.steps[row] = 0

    @torch.no_grad()
    def arrange(self, rows: Indices) -> None:
        """Move rows so that row i becomes the former row rows[i]; rows from len(rows) on are free."""
        if np.array_equal(rows, np.arange(len(rows))):
            return
        index = torch.from_numpy(rows).to(self.device, non_blocking=True)
        for column in self.columns.values():
            column[: len(rows)] = column[index]
        self.steps[: len(rows)] = self.steps[rows]

    @torch.no_grad()
    def reserve(self, capacity: int) -> None:
        if capacity <= self.capacity:
            return
        extra = max(capacity, 2 * self.capacity) - self.capacity
        for name, column in self.columns.items():
            self.columns[name] = torch.cat([column, column.new_zeros(extra, *column.shape[1:])])
        self.steps = np.concatenate([self.steps, np.zeros(extra, np.int64)])
        self._leaves.clear()
        self._replicas.clear()

    def state(self) -> dict[str, Any]:
        """Return everything that a later step depends on, as a tree of arrays that share memory with the columns.

        Gradients are left out, because they are 0 between two steps wherever the optimizer runs.
        """
        columns = {name: column for name, column in self.columns.items() if name != "gradient"}
        ways = {path: part.way for path, part in self._parts.items()}
        return {"columns": columns, "steps": self.steps, "ways": ways}

    @torch.no_grad()
    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned. Raises ValueError if it came from a stack of another module or capacity."""
        columns = state["columns"]
        if "fixed" in columns and "fixed" not in self.columns:
            self.columns["fixed"] = torch.zeros_like(self.columns["value"], dtype=torch.bool)
        known = {name: column for name, column in self.columns.items() if name != "gradient"}
        for name in {**known, **columns}:
            one, other = (
                None if name not in side else (tuple(side[name].shape), side[name].dtype) for side in (columns, known)
            )
            if one != other:
                raise ValueError(f"{name} is {one}, where {other} was expected")
        self.put(np.arange(self.capacity), columns, state["steps"])
        for path, way in state["ways"].items():  # a part that vmap failed on is not tried again
            self._parts[path] = self.part(path)._replace(way=way)

    def parameter(self, name: str, column: str = "value") -> Tensor:
        """Return one parameter of every row, (capacity, *shape), as a view of a column."""
        return next(place for place in self.places if place.name == name).of(self.columns[column])

    # Access of each way of running to the rows.

    @contextmanager
    def bound(self, columns: dict[str, Tensor]) -> Iterator[None]:
        """Let calls read and write other columns of the same shapes within the context.

        Without a column `gradient`, the leaves have no .grad, and autograd differentiates every operation, so that a graph
        can be traced.
        """
        own = self.columns, self._leaves, self._replicas
        self.columns, self._leaves, self._replicas = columns, {}, {}
        self.traced = "gradient" not in columns
        try:
            yield
        finally:
            self.columns, self._leaves, self._replicas = own
            self.traced = False

    @property
    def leaves(self) -> list[tuple[Tensor, slice, ParameterPlace]]:
        """The parameters that calls have read, as leaves of the graph, each with its rows and its place."""
        return [
            (leaf, slice(start, stop), place)
            for (path, start, stop, _), leaves in self._leaves.items()
            for leaf, place in zip(leaves, self.part(path).places, strict=True)
        ]

    @property
    def loops(self) -> bool:
        """Whether a part runs in a loop, as far as calls have shown."""
        return self.random or any(part.way == "loop" for part in self._parts.values())

    def layers_of(self, path: str) -> Layers | None:
        """Return the layers of a submodule; None where it is anything else, or is not called directly, or traced."""
        part = self.part(path)
        return part.layers if part.way == "direct" and not self.traced else None

    def given(self, path: str, rows: Rows, frozen: bool) -> tuple[list[Tensor], Tensor | None]:
        """Return what the layers of a submodule are given, parameters as leaves and then buffers, and an index to gather them by.

        The index (n,) is None where they are those of the rows already, which is the case for a slice.
        """
        what, run, index = self.part(path), rows, None
        if not isinstance(run, slice):
            run = slice(0, self.capacity)
            index = rows if isinstance(rows, Tensor) else torch.from_numpy(rows).to(self.device, non_blocking=True)
        start, stop, _ = run.indices(self.capacity)
        buffers = [self.columns[name][start:stop] for name in what.buffers]
        # The parameters are leaves whose .grad are views of the gradient column; made once.
        key = (path, start, stop, frozen)
        found = self._leaves.get(key)
        if found is None:
            found = self._leaves[key] = [self._leaf(place, slice(start, stop), frozen) for place in what.places]
            for leaf in found if not self.traced else ():
                if leaf.grad is not None:
                    mark(leaf)
        return [*found, *buffers], index

    def _leaf(self, place: ParameterPlace, rows: slice | int, frozen: bool) -> Tensor:
        """Return a parameter of some rows as a leaf, whose .grad is a view of the gradient column if there is one."""
        leaf = place.of(self.columns["value"][rows]).detach()
        if place.stop <= self.trained and not frozen:
            leaf.requires_grad_()
            if "gradient" in self.columns:
                leaf.grad = place.of(self.columns["gradient"][rows]).detach()
        return leaf

    def _loop(self, x: Batch, rows: Rows, part: str, frozen: bool, keys: Indices | None) -> Tensor:
        chosen = range(self.capacity)[rows] if isinstance(rows, slice) else rows
        replicas = self._replica_rows(frozen)
        parts = [replicas[row].get_submodule(part) for row in chosen]
        values = unstacked(x)
        if self.aligned:
            values = [map_leaves(lambda x: x if x.data_ptr() % 64 == 0 else x.clone(), value) for value in values]
        drawing = self.module.training and not frozen
        assert keys is not None or not (drawing and self.random), "dropout in training mode needs keys"
        if keys is None or not (drawing and self.draws):
            return stack_rows([run(module, v) for module, v in zip(parts, values, strict=True)])
        outputs, generator = [], torch.default_generator
        if self.device.type == "cuda":
            index = self.device.index if self.device.index is not None else torch.cuda.current_device()
            generator = torch.cuda.default_generators[index]
        state = generator.get_state()
        try:
            for module, v, key in zip(parts, values, (keys & ((1 << 63) - 1)).tolist(), strict=True):
                generator.manual_seed(key)  # seeds only the device in use; torch.manual_seed takes twenty times as long
                outputs.append(run(module, v))
        finally:
            generator.set_state(state)
        return stack_rows(outputs)

    def _replica_rows(self, frozen: bool) -> list[nn.Module]:
        """Return one module for each row, whose parameters and buffers are views of the row; made once."""
        if frozen not in self._replicas:
            replicas = []
            path_of = {module: name for name, module in self.module.named_modules()}
            for row in range(self.capacity):
                replica = copy.deepcopy(self.template)
                for place in self.places:
                    leaf = self._leaf(place, row, frozen)
                    for owner, name in place.owners:
                        replica.get_submodule(path_of[owner])._parameters[name] = leaf  # type: ignore[assignment]
                for name in self.buffers:
                    path, _, own = name.removeprefix("buffer.").rpartition(".")
                    replica.get_submodule(path)._buffers[own] = self.columns[name][row]
                replica.train(self.module.training and not frozen)
                replicas.append(replica)
            self._replicas[frozen] = replicas
        return self._replicas[frozen]


def convolves(module: nn.Module) -> bool:
    """Return whether a module has convolutions."""
    return any(isinstance(part, nn.modules.conv._ConvNd) for part in module.modules())
