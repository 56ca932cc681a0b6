"""Training passes that torch's compiler has compiled, one for each plan. n rows, B examples."""

import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from esper.kasmina.body import PLANS, Body
from esper.kasmina.plan import Doses, Plan, PlanCache, Route
from esper.kasmina.stack import Stack
from esper.leyline.batches import Batch
from esper.leyline.config import Config
from esper.leyline.errors import InputError
from esper.store.cache import cache_root
from esper.store.disk import write_atomic
from esper.tolaria.gradients import Total
from esper.tolaria.pieces import Piece, pieces
from esper.tolaria.tracing import Inputs, Recorded, Run, bound, compiled, gradients, traced

TotalOf = Callable[..., Total]

MEASURED = 5
"""Passes of each way whose median `auto` compares."""

WORTH = 60.0
"""With `auto`, a plan is compiled if its passes may take at least this many seconds until the end of the episode."""


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


class Ready(NamedTuple):
    """A compiled pass, and the columns whose gradients it returns behind the losses."""

    run: Callable[..., Sequence[Tensor]]
    runs: list[Run]

    @torch.no_grad()
    def __call__(self, stacks: Sequence[Stack], tensors: Sequence[Tensor]) -> Tensor:
        """Return the losses (n,), and add the gradients to those of the stacks."""
        losses, *found = self.run(*tensors)
        for (at, rows, columns), gradient in zip(self.runs, found, strict=True):
            stacks[at].columns["gradient"][rows, columns].add_(gradient)
        return losses


class Passes:
    """Adds the gradients of batches to those of the rows, by eager or by compiled passes.

    A plan is compiled before its first pass. A pass whose modules run in a loop over the rows (convolutions on a CPU,
    recurrences, dropout) is never compiled. `counts` says what was compiled, and `recompiled` how often that was compiled
    again, which happens only after more than `PLANS` other plans.
    """

    def __init__(self, body: Body, total: TotalOf, config: Config, products: torch.dtype | None) -> None:
        """Raises InputError if `config.compile` needs a compiler that is not there."""
        check_compiler(config.compile, body.device)
        self.body, self.total, self.mode = body, total, config.compile
        self.counts = Compiled()
        self._microbatch = config.data.microbatch
        self._salt = f"{products} {config.optimizer.accumulation_steps}"
        self._known: PlanCache[Any, Ready | None] = PlanCache(PLANS)
        self._made: set[int] = set()
        self._pool: Any = None  # the memory that CUDA graphs share

    @property
    def recompiled(self) -> int:
        """Passes that were compiled more than once."""
        return self.counts.plans - len(self._made)

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
        if self.mode != "off":
            stacks, inputs = self._stacks(route.plan), self.inputs(route, *piece[1:5])
            key = route.plan, inputs.shapes
            found = self._known.get(key, lambda _: self._prepared(route.plan, key, inputs, remaining))
            if found is not None:
                self.counts.passes += 1
                return found(stacks, inputs.tensors)
            self.counts.eager += 1
        return self._eager(route, *piece[1:])

    def inputs(self, route: Route, x: Batch, y: Tensor, weights: Tensor | None, factors: Tensor | None) -> Inputs:
        """Return what a pass takes; the arguments are those of `backward`."""
        return Inputs.of(self.body, self._stacks(route.plan), route.doses, x, y, weights, factors)

    def traced(self, plan: Plan, inputs: Inputs) -> tuple[torch.fx.GraphModule, list[Run]]:
        """Return the graph of the passes of a plan, and the columns whose gradients it returns behind the losses."""
        stacks = self._stacks(plan)
        runs: list[Run] = []

        def step(doses: Doses, *batch: Any) -> list[Tensor]:
            total, losses = self.total(Route(plan, doses), *batch, None)
            if total is None:
                return [losses]
            runs[:], found = gradients(stacks, total)
            return [losses, *found]

        return traced(self.body, stacks, inputs, step), runs

    def _eager(self, route: Route, *batch: Any) -> Tensor:
        total, losses = self.total(route, *batch)
        if total is not None:
            total.backward()
        return losses

    def _prepared(self, plan: Plan, key: Any, inputs: Inputs, remaining: int) -> Ready | None:
        begin = time.perf_counter()
        found = None
        if self._loops(plan, inputs):
            self.counts.looped += 1
        else:
            found = self._make(plan, key, inputs, remaining)
        self.counts.seconds += time.perf_counter() - begin
        return found

    def _loops(self, plan: Plan, inputs: Inputs) -> bool:
        """Return whether a module of the pass runs in a loop over the rows, which a first pass finds out."""
        stacks = self._stacks(plan)
        if not any(stack.loops for stack in stacks):
            with self._aside(stacks, inputs) as arguments:
                self._eager(Route(plan, arguments[0]), *arguments[1:], None)
        return any(stack.loops for stack in stacks)

    def _make(self, plan: Plan, key: Any, inputs: Inputs, remaining: int) -> Ready | None:
        if self.mode == "on":
            return self._compile(plan, key, inputs)
        stacks = self._stacks(plan)
        with self._aside(stacks, inputs) as arguments:
            eager = self._time(lambda: self._eager(Route(plan, arguments[0]), *arguments[1:], None))
        if eager * remaining < WORTH:
            self.counts.short += 1
            return None
        record = Measured(self._digest(key))
        if record.known is not None:
            gain = (record.known["eager"] - record.known["compiled"]) * remaining
            if gain > record.known["compiling"]:
                return self._compile(plan, key, inputs)
            self.counts.slower += 1
            return None
        begin = time.perf_counter()
        found = self._compile(plan, key, inputs)
        compiling = time.perf_counter() - begin
        with self._aside(stacks, inputs):
            tensors = inputs.copies()
            own = self._time(lambda: found(stacks, tensors))
        record.write({"eager": eager, "compiled": own, "compiling": compiling})
        if own < eager:
            return found
        self.counts.slower += 1
        return None

    def _compile(self, plan: Plan, key: Any, inputs: Inputs) -> Ready:
        self.counts.plans += 1
        self._made.add(hash(key))
        graph, runs = self.traced(plan, inputs)
        run = compiled(graph, inputs.tensors)
        if self.body.device.type == "cuda":
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            run = Recorded(run, inputs.state, pool=self._pool)
        return Ready(run, runs)

    @contextmanager
    def _aside(self, stacks: list[Stack], inputs: Inputs) -> Iterator[Any]:
        """Let eager passes leave every column as it was; gives the arguments of the inputs."""
        (columns, outputs), arguments = inputs.merged(inputs.copies())
        for stack, own in zip(stacks, columns, strict=True):
            own["gradient"] = torch.zeros_like(stack.columns["gradient"])
        with bound(self.body, stacks, columns, outputs):
            yield arguments

    def _stacks(self, plan: Plan) -> list[Stack]:
        calls = [call for calls in (*plan.base, *plan.branch) for call in calls]
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
        self.path: Path = cache_root() / "compiled-2" / f"{digest}.json"
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
