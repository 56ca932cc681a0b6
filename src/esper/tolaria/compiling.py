"""Training passes that torch.compile has compiled, one for each plan. n rows, B examples."""

import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from esper.kasmina.body import PLANS, Body
from esper.kasmina.plan import PlanCache, Route
from esper.kasmina.stack import Stack
from esper.leyline.batches import Batch
from esper.leyline.config import Config
from esper.leyline.errors import InputError
from esper.store.cache import cache_root
from esper.store.disk import write_atomic
from esper.tolaria.compilations import graphs
from esper.tolaria.gradients import Total
from esper.tolaria.pieces import Piece, pieces

TotalOf = Callable[..., Total]
Columns = list[dict[str, Tensor]]
"""The columns of the stacks that a pass reads or writes, by stack and name."""

MEASURED = 5
"""Passes of each way whose median `auto` compares."""

WORTH = 60.0
"""With `auto`, a plan is compiled if its passes may take at least so many seconds until the end of the episode."""


def check_compiler(mode: str, device: torch.device) -> None:
    """Raise InputError if passes are to be compiled and torch finds no compiler for the device."""
    if mode == "off":
        return
    if device.type == "cpu" and not any(map(shutil.which, _compilers())):
        raise InputError(
            f"compile is {mode}, which needs a C++ compiler, and none of {', '.join(_compilers())} was found; install g++, "
            "name one in the environment variable CXX, or set compile to off"
        )


def _compilers() -> list[str]:
    from torch._inductor import config

    found = config.cpp.cxx
    return [name for name in (found if isinstance(found, list | tuple) else [found]) if name]


@dataclass
class Compiled:
    """What was compiled and how often it ran.

    plans: plans that were compiled. seconds: time that compiling and measuring took [s]. passes: compiled passes that ran.
    eager: passes that ran uncompiled. looped: plans that are not compiled, because their modules run in a loop over the rows.
    short, slower: plans that `auto` left uncompiled, because the rest of the episode is too short to gain from compiling, or
    because the compiled pass is no faster.
    """

    plans: int = 0
    seconds: float = 0.0
    passes: int = 0
    eager: int = 0
    looped: int = 0
    short: int = 0
    slower: int = 0


class Passes:
    """Adds the gradients of batches to those of the rows, by eager or by compiled passes.

    A plan is compiled before its first pass. A pass whose modules run in a loop over the rows (convolutions on a CPU,
    recurrences, dropout) is never compiled. `counts` says what was compiled, and
    `recompiled` how often torch compiled a graph that it had before, which does not happen as long as shapes stay the same.
    """

    def __init__(self, body: Body, total: TotalOf, config: Config, products: torch.dtype | None) -> None:
        """Raises InputError if `config.compile` needs a compiler that is not there."""
        check_compiler(config.compile, body.device)
        self.body, self.total, self.mode = body, total, config.compile
        self.counts = Compiled()
        self._microbatch = config.data.microbatch
        self._salt = f"{products} {config.optimizer.accumulation_steps}"
        self._known: PlanCache[Any, Callable[..., Any] | None] = PlanCache(PLANS)
        self._graphs = graphs()

    @property
    def recompiled(self) -> int:
        """Graphs that torch compiled since this object was made, beyond one for each plan."""
        return max(0, graphs() - self._graphs - self.counts.plans)

    def backward(
        self,
        route: Route,
        x: Batch,
        y: Tensor,
        weights: Tensor | None,
        factors: Tensor | None,
        keys: Any,
        remaining: int = 0,
    ) -> Tensor:
        """Compute the losses (n,) of a part of the rows on a batch, and add their gradients to those of the rows.

        The arguments are those of the function of `gradients.total_of`; `remaining` batches come after this one. The batch
        is divided by `data.microbatch`.
        """
        mean: Tensor | None = None
        for piece in pieces(self._microbatch, x, y, weights, factors, keys, self.body.dtype):
            own = self._backward(route, piece, remaining * math.ceil(1 / piece.share))
            if piece.share < 1:
                own = piece.share * own
            mean = own if mean is None else mean + own
        assert mean is not None, "a batch has examples"
        return mean

    def _backward(self, route: Route, piece: Piece, remaining: int) -> Tensor:
        """Do the same with one piece of a batch."""
        batch = piece.x, piece.y, piece.weights, piece.factors
        if self.mode != "off":
            found = self._compiled(route, *batch, remaining)
            if found is not None:
                self.counts.passes += 1
                tensors, _ = _tensors(route, *batch)
                with torch.no_grad():
                    losses: Tensor = found(_columns(self._stacks(route)), tensors)
                return losses
            self.counts.eager += 1
        total, losses = self.total(route, *batch, piece.keys)
        if total is not None:
            total.backward()
        return losses

    def _compiled(self, route: Route, *batch: Any) -> Callable[..., Any] | None:
        """Return the compiled pass of a route, which may be compiled now; None if it runs eagerly."""
        *inputs, remaining = batch
        tensors, _ = _tensors(route, *inputs)
        key = (route.plan, _shapes(tensors), _shapes(_columns(self._stacks(route))))
        return self._known.get(key, lambda _: self._prepared(route, key, inputs, remaining))

    def _prepared(self, route: Route, key: Any, inputs: list[Any], remaining: int) -> Callable[..., Any] | None:
        begin = time.perf_counter()
        found = None
        if self._loops(route, inputs):
            self.counts.looped += 1
        else:
            found = self._make(route, key, inputs, remaining)
        self.counts.seconds += time.perf_counter() - begin
        return found

    def _loops(self, route: Route, inputs: list[Any]) -> bool:
        """Return whether a module of the pass runs in a loop over the rows, which a first pass finds out."""
        stacks = self._stacks(route)
        if not any(stack.loops for stack in stacks):
            self._trial(route, inputs)
        return any(stack.loops for stack in stacks)

    def _make(self, route: Route, key: Any, inputs: list[Any], remaining: int) -> Callable[..., Any] | None:
        if self.mode == "on":
            return self._compile(route, inputs)
        eager = self._time(lambda: self._trial(route, inputs))
        if eager * remaining < WORTH:
            self.counts.short += 1
            return None
        record = Measured(self._digest(key))
        if record.known is not None:
            gain = (record.known["eager"] - record.known["compiled"]) * remaining
            if gain > record.known["compiling"]:
                return self._compile(route, inputs)
            self.counts.slower += 1
            return None
        begin = time.perf_counter()
        found = self._compile(route, inputs)
        compiling = time.perf_counter() - begin
        trial, (tensors, _) = _copies(_columns(self._stacks(route))), _tensors(route, *inputs)
        with torch.no_grad():
            compiled = self._time(lambda: found(trial, tensors))
        record.write({"eager": eager, "compiled": compiled, "compiling": compiling})
        if compiled < eager:
            return found
        self.counts.slower += 1
        return None

    def _compile(self, route: Route, inputs: list[Any]) -> Callable[..., Any]:
        """Compile the pass of a route: (columns, tensors) -> losses (n,), with the gradients added to the columns."""
        self.counts.plans += 1
        found = compiled_pass(self.traced(route, *inputs))
        with torch.no_grad():  # torch compiles at the first call
            found(_copies(_columns(self._stacks(route))), _tensors(route, *inputs)[0])
        return found

    def traced(
        self, route: Route, x: Batch, y: Tensor, weights: Tensor | None, factors: Tensor | None = None
    ) -> torch.fx.GraphModule:
        """Return the graph of a pass, with all of its operations, those of the backward pass among them."""
        from torch.fx.experimental.proxy_tensor import make_fx  # takes a second to load

        stacks = self._stacks(route)
        tensors, spec = _tensors(route, x, y, weights, factors)

        def step(columns: Columns, given: list[Tensor]) -> Tensor:
            doses, *batch = pytree.tree_unflatten(_merged(spec, given), spec.tree)
            with _Bound(stacks, columns) as bound:
                total, losses = self.total(Route(route.plan, doses), *batch, None)
                if total is not None:
                    bound.add_gradients(total)
            return losses

        with torch.autograd.set_multithreading_enabled(False):
            traced: torch.fx.GraphModule = make_fx(step)(_copies(_columns(stacks)), tensors)
        return traced

    def _trial(self, route: Route, inputs: list[Any]) -> None:
        """Run an eager pass that leaves every column as it was."""
        with _Bound(stacks := self._stacks(route), _copies(_columns(stacks))) as bound:
            total, _ = self.total(route, *inputs, None)
            if total is not None:
                bound.add_gradients(total)

    def _stacks(self, route: Route) -> list[Stack]:
        calls = [call for calls in (*route.plan.base, *route.plan.branch) for call in calls]
        places = sorted({(call.slot, call.form) for call in calls})
        return [self.body.host, *(self.body.stacks[at] for at in places)]

    def _time(self, run: Callable[[], object]) -> float:
        """Return the median seconds of a call; on a GPU, until the device has done it."""
        times = []
        for _ in range(MEASURED):
            begin = time.perf_counter()
            run()
            if self.body.device.type == "cuda":
                torch.cuda.synchronize(self.body.device)
            times.append(time.perf_counter() - begin)
        return median(times)

    def _digest(self, key: Any) -> str:
        device = self.body.device
        machine = (
            torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
        )
        modules = [str(stack.template) for stack in (self.body.host, *self.body.stacks.values())]
        text = repr((machine, torch.get_num_threads(), torch.__version__, self._salt, key, modules))
        return hashlib.sha256(text.encode()).hexdigest()


class Measured:
    """What an earlier run measured of a plan on this machine [s], in a file of the user's cache folder.

    known: seconds of an `eager` and of a `compiled` pass and of `compiling`; None if nothing was measured.
    """

    def __init__(self, digest: str) -> None:
        self.path: Path = cache_root() / "compiled-1" / f"{digest}.json"
        self.known: dict[str, float] | None = None
        if self.path.is_file():
            try:
                read = json.loads(self.path.read_text("utf-8"))
                self.known = {name: float(read[name]) for name in ("eager", "compiled", "compiling")}
            except (ValueError, KeyError, TypeError) as error:
                raise InputError(f"{self.path} is damaged; delete it, and the plan is measured again") from error

    def write(self, seconds: dict[str, float]) -> None:
        """Store what was measured."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self.path, json.dumps(seconds).encode())


class _Bound:
    """Within the context, calls of stacks read and write other columns than their own."""

    def __init__(self, stacks: list[Stack], columns: Columns) -> None:
        self.stacks, self.columns = stacks, columns

    def __enter__(self) -> "_Bound":
        self._own = [stack.bind(columns) for stack, columns in zip(self.stacks, self.columns, strict=True)]
        return self

    def __exit__(self, *error: object) -> None:
        for stack, own in zip(self.stacks, self._own, strict=True):
            stack.unbind(own)

    def add_gradients(self, total: Tensor) -> None:
        """Add the gradients of a number to those of the leaves that it was computed from."""
        leaves = [leaf for stack in self.stacks for leaf in stack.leaves if leaf.requires_grad]
        for leaf, gradient in zip(leaves, torch.autograd.grad(total, leaves, allow_unused=True), strict=True):
            if gradient is not None:
                assert leaf.grad is not None
                leaf.grad.add_(gradient)


class _Spec(NamedTuple):
    """How to put the tensors of a route and a batch together again."""

    tree: pytree.TreeSpec
    rest: tuple[Any, ...]  # of every leaf that is no tensor, the leaf; of a tensor, `_TENSOR`


_TENSOR = object()


def _tensors(
    route: Route, x: Batch, y: Tensor, weights: Tensor | None, factors: Tensor | None
) -> tuple[list[Tensor], _Spec]:
    """Return the tensors that vary between passes of one plan. Arrays of the doses become tensors on the device."""
    found, tree = pytree.tree_flatten((route.doses, x, y, weights, factors))
    device = y.device
    found = [torch.from_numpy(leaf).to(device) if isinstance(leaf, np.ndarray) else leaf for leaf in found]
    rest = tuple(_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in found)
    return [leaf for leaf in found if isinstance(leaf, Tensor)], _Spec(tree, rest)


def _merged(spec: _Spec, given: list[Tensor]) -> list[Any]:
    tensors = iter(given)
    return [next(tensors) if leaf is _TENSOR else leaf for leaf in spec.rest]


def _columns(stacks: list[Stack]) -> Columns:
    return [{name: stack.columns[name] for name in ("value", "gradient", *stack.buffers)} for stack in stacks]


def _copies(columns: Columns) -> Columns:
    return [{name: column.clone() for name, column in of.items()} for of in columns]


def _shapes(tensors: Any) -> tuple[Any, ...]:
    return tuple((tuple(t.shape), t.stride(), t.dtype) for t in pytree.tree_leaves(tensors))


def compiled_pass(traced: torch.fx.GraphModule) -> Callable[..., Any]:
    """Compile a graph as a whole, for the shapes that it was traced with."""
    compiled: Callable[..., Any] = torch.compile(traced, fullgraph=True, dynamic=False)
    return compiled
