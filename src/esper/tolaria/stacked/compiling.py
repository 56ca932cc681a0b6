"""Run the forward and backward passes of training: in microbatches, and compiled on request. n rows, B examples."""

import hashlib
import json
import math
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.utils import _pytree as pytree

from esper.kasmina.stack.body import Body
from esper.kasmina.stack.plan import Indices, Route, plan_of
from esper.kasmina.stack.rows import Stack
from esper.kasmina.stack.tape import PassTape
from esper.leyline.config.tree import Config, DataConfig
from esper.leyline.data.batches import Batch, map_leaves, picked
from esper.leyline.data.keys import key
from esper.leyline.messages import GrowthWarning, InputError, kind_of, warn
from esper.store.disk import write_atomic
from esper.store.files import cache_root


class PassBatch(NamedTuple):
    """Holds a batch of n rows, and what a pass takes beside it."""

    x: Batch  # leaves (n, B, ...)
    y: Tensor  # (n, B, ...)
    weights: Tensor | None = None  # (n, B) of the examples
    factors: Tensor | None = None  # (n,) of the gradients of each row
    keys: Indices | None = None  # (n,) of dropout


class PassLoss(NamedTuple):
    """Holds the loss of a pass, as its gradients. A tape takes them on to the parameters, or autograd does."""

    tape: PassTape | None
    gradients: list[tuple[Tensor, Tensor]]  # results of the pass, each with its gradient; none if nothing in it trains

    def backward(self) -> None:
        """Add the gradients of all parameters to their `.grad`."""
        if self.tape is not None:
            self.tape.backward(self.gradients)
        elif self.gradients:
            results, gradients = zip(*self.gradients, strict=True)
            torch.autograd.backward(results, gradients)


LossOf = Callable[[Route, PassBatch], tuple[PassLoss, Tensor]]
"""Computes the loss of a pass, and the losses (n,) of its rows."""

PLANS = 256
"""Number of plans whose compiled passes are kept."""

MEASURED = 5
"""Passes of each way whose median `auto` compares."""

WORTH = 60.0
"""With `auto`, a plan is compiled if its passes may take at least this many seconds until the end of the episode."""


_TENSOR = object()
"""Stands for a tensor among what else a pass takes."""


class CompiledInputs(NamedTuple):
    """Holds what a pass over some stacks takes, as a list of tensors and what puts them together again."""

    body: Body
    stacks: Sequence[Stack]
    # values and buffers of the stacks, outputs that rows do not have, the tensors of the arguments
    tensors: list[Tensor]
    tree: pytree.TreeSpec  # the structure of all
    rest: tuple[Any, ...]  # for every leaf of the structure, the leaf if it is no tensor
    state: int  # how many of the tensors come from the body

    @classmethod
    def of(cls, body: Body, stacks: Sequence[Stack], *arguments: Any) -> "CompiledInputs":
        """Flatten the arguments of a pass. Arrays among them become tensors on the device."""
        columns = [{name: stack.columns[name] for name in ("value", *stack.buffers)} for stack in stacks]
        state = columns, body.real_outputs
        leaves, tree = pytree.tree_flatten((state, arguments))
        leaves = [
            torch.from_numpy(leaf).to(body.device, non_blocking=True) if isinstance(leaf, np.ndarray) else leaf
            for leaf in leaves
        ]
        rest = tuple(_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        own = sum(map(len, columns)) + (body.real_outputs is not None)
        return cls(body, stacks, [leaf for leaf in leaves if isinstance(leaf, Tensor)], tree, rest, own)

    @property
    def shapes(self) -> tuple[Any, ...]:
        return tuple((tuple(t.shape), t.stride(), t.dtype) for t in self.tensors)

    def copies(self) -> list[Tensor]:
        """Return the tensors, with copies of those of the body."""
        return [t.clone() for t in self.tensors[: self.state]] + self.tensors[self.state :]

    @contextmanager
    def bound(self, tensors: Sequence[Tensor], *, backward: bool = False) -> Iterator[Any]:
        """Let passes read and write other tensors than those of the body within the context; gives the arguments.

        backward: whether the passes add gradients; those of the body stay as they are.
        """
        given = iter(tensors)
        leaves = [next(given) if leaf is _TENSOR else leaf for leaf in self.rest]
        (columns, outputs), arguments = pytree.tree_unflatten(leaves, self.tree)
        with ExitStack() as bindings:
            for stack, own in zip(self.stacks, columns, strict=True):
                if backward:
                    own["gradient"] = torch.zeros_like(stack.columns["gradient"])
                bindings.enter_context(stack.bound(own))
            bindings.callback(setattr, self.body, "real_outputs", self.body.real_outputs)
            self.body.real_outputs = outputs
            yield arguments


def traced(inputs: CompiledInputs, run: Callable[..., Sequence[Tensor]]) -> torch.fx.GraphModule:
    """Return the graph of a pass, backward passes of `run` included, as a function of the tensors of its inputs."""
    from torch.fx.experimental.proxy_tensor import make_fx  # takes a second to load

    def call(*tensors: Tensor) -> list[Tensor]:
        with inputs.bound(tensors) as arguments:
            return list(run(*arguments))

    with torch.autograd.set_multithreading_enabled(False):
        graph: torch.fx.GraphModule = make_fx(call)(*inputs.copies())
    for node in graph.graph.nodes:
        node.meta.pop("val", None)  # tensors of a mode of their own, which the compiler does not mix with its own
        node.meta.pop("tensor_meta", None)
    return graph


class ColumnRun(NamedTuple):
    """Names neighbouring columns of some rows of a stack."""

    stack: int
    rows: slice
    columns: slice


def gradients(
    stacks: Sequence[Stack], results: Sequence[tuple[Tensor, Tensor]]
) -> tuple[list[ColumnRun], list[Tensor]]:
    """Return the gradients of leaves from those of results that were computed from them: (n, p) for each run of columns.

    A graph that returns them is fast: one that added them to views of the gradients of the stacks would write the whole column
    once for each view.
    """
    if not results:
        return [], []
    leaves = [(at, *leaf) for at, stack in enumerate(stacks) for leaf in stack.leaves if leaf[0].requires_grad]
    outputs, given = zip(*results, strict=True)
    found = torch.autograd.grad(outputs, [leaf for _, leaf, _, _ in leaves], given, allow_unused=True)
    parts = [
        (ColumnRun(at, rows, slice(place.start, place.stop)), place.flat(gradient))
        for (at, _, rows, place), gradient in zip(leaves, found, strict=True)
        if gradient is not None
    ]
    parts.sort(key=lambda part: (part[0].stack, part[0].rows.start, part[0].rows.stop, part[0].columns.start))
    runs, groups = list[ColumnRun](), list[list[Tensor]]()
    for run, gradient in parts:
        if runs and (runs[-1].stack, runs[-1].rows, runs[-1].columns.stop) == (run.stack, run.rows, run.columns.start):
            runs[-1] = run._replace(columns=slice(runs[-1].columns.start, run.columns.stop))
            groups[-1].append(gradient)
        else:
            runs.append(run)
            groups.append([gradient])
    return runs, [torch.cat(group, 1) for group in groups]


Playback = tuple[Callable[[], None], Sequence[Tensor]]
"""What repeats a recorded call, and the tensors into which it writes its results."""


def recorded(run: Callable[..., Sequence[Tensor]], tensors: Sequence[Tensor], pool: Any) -> Playback:
    """Record a call that has run once, to warm up, as a CUDA graph in the memory `pool`; its kernels are launched together."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        results = run(*tensors)
    return graph.replay, results


class CudaGraphPass:
    """Records a compiled pass at its first call, and plays it back at every other.

    Tensors of the body are read and written where they are, and the pass is recorded anew if one of them has moved. Those of a
    batch are copied to where the record reads them. Results are overwritten by the next call, but for the first, the losses.
    """

    def __init__(
        self,
        run: Callable[..., Sequence[Tensor]],
        state: int,
        record: Callable[..., Playback] = recorded,
        pool: Any = None,
    ) -> None:
        """state: how many of the tensors come from the body. pool: as for `torch.cuda.graph`."""
        self.run, self.state, self.record, self.pool = run, state, record, pool
        self.records = 0
        self._places: list[int] = []
        self._batch: list[Tensor] = []
        self._playback: Playback

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        own, batch = tensors[: self.state], tensors[self.state :]
        places = [tensor.data_ptr() for tensor in own]
        if not self.records or places != self._places:
            self._batch = [tensor.clone() for tensor in batch]
            self.run(*(tensor.clone() for tensor in own), *self._batch)
            self._playback = self.record(self.run, [*own, *self._batch], self.pool)
            self._places, self.records = places, self.records + 1
        for kept, given in zip(self._batch, batch, strict=True):
            kept.copy_(given, non_blocking=True)
        play, (losses, *others) = self._playback
        play()
        return [losses.clone(), *others]


def compiled(graph: torch.fx.GraphModule, tensors: Sequence[Tensor]) -> Callable[..., Sequence[Tensor]]:
    """Compile a graph for the shapes of these tensors, without Dynamo, whose guards would be checked at each call."""
    import torch._inductor as inductor  # takes seconds to load

    with shielded():
        found: Callable[..., Sequence[Tensor]] = inductor.compile(graph, list(tensors))
    return found


@contextmanager
def shielded() -> Iterator[None]:
    """Keep Ctrl-C from processes that are started within the context; it takes effect here, behind the context.

    A terminal sends SIGINT to all processes that it runs. A C++ compiler that is ended by it would make the run fail, where it
    is to be interrupted. Processes and threads inherit the signals that are blocked.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def microbatches(size: int, dtype: torch.dtype, batch: PassBatch) -> Iterator[tuple[float, PassBatch]]:
    """Divide a batch into microbatches of at most `size` examples, each with its share of the batch; 0 leaves it whole.

    The factors of a microbatch contain its share, so that the gradients of all sum to those of the mean over the batch; new
    factors have `dtype`. Each has keys of its own, because otherwise all would draw the same numbers.
    """
    x, y, weights, factors, keys = batch
    examples = y.shape[1]
    if not 0 < size < examples:
        yield 1.0, batch
        return
    for index, start in enumerate(range(0, examples, size)):
        cut = (slice(None), slice(start, start + size))
        share = len(y[0, cut[1]]) / examples
        piece = PassBatch(
            map_leaves(Tensor.contiguous, picked(x, cut)),
            y[cut].contiguous(),
            None if weights is None else weights[cut],
            torch.full((len(y),), share, dtype=dtype, device=y.device) if factors is None else factors * share,
            None if keys is None else key(keys, index),
        )
        yield share, piece


def check_divisible(body: Body, config: DataConfig) -> None:
    """Raise InputError if batches are divided and a module computes with more than one example at a time."""
    if not 0 < config.microbatch < config.batch_size:
        return
    body.train(True)
    for name, part in body.host.module.named_modules():
        if part.training and (
            isinstance(part, _BatchNorm) or (isinstance(part, _NormBase) and part.track_running_stats)
        ):
            raise InputError(
                f"data.microbatch is {config.microbatch}, but {name} of the host is {kind_of(part)}, whose statistics "
                "are those of a whole batch; set data.microbatch to 0, or normalise each example by itself, as LayerNorm does"
            )


def check_compiler(mode: str, device: torch.device) -> None:
    """Raise InputError if passes are to be compiled and torch finds no compiler for the device."""
    if mode == "off":
        return
    from torch._inductor import config

    cxx = config.cpp.cxx
    names = [name for name in (cxx if isinstance(cxx, list | tuple) else [cxx]) if name]
    if device.type == "cpu" and not any(map(shutil.which, names)):
        raise InputError(
            f"compile is {mode}, which needs a C++ compiler, and none of {', '.join(names)} was found; install g++, "
            "name one in the environment variable CXX, or set compile to off"
        )


@dataclass
class CompileCounts:
    """Counts what was compiled and how often it ran."""

    plans: int = 0  # plans that were compiled
    seconds: float = 0.0  # time that compiling and measuring took [s]
    passes: int = 0  # compiled passes that ran
    eager: int = 0  # passes that ran uncompiled
    looped: int = 0  # plans that are not compiled, because their modules run in a loop over the rows
    # plans that `auto` left uncompiled, because the rest of the episode is too short to gain from compiling
    short: int = 0
    slower: int = 0  # the same, because the compiled pass is no faster


class CompiledPass(NamedTuple):
    """Holds a compiled pass, and the columns whose gradients it returns behind the losses."""

    run: Callable[..., Sequence[Tensor]]
    runs: list[ColumnRun]

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

    def __init__(self, body: Body, loss_of: LossOf, config: Config, products: torch.dtype | None) -> None:
        """Raises InputError if `config.compile` needs a compiler that is not there."""
        check_compiler(config.compile, body.device)
        self.body, self.loss_of, self.mode = body, loss_of, config.compile
        self.counts = CompileCounts()
        self._microbatch = config.data.microbatch
        self._salt = f"{products} {config.optimizer.accumulation_steps}"
        # the last route, which has many batches, and its plan
        self._planned: tuple[Route | None, Any] = None, None
        self._known: dict[Any, CompiledPass | None] = {}  # the one that was used last is the last
        self._made: set[int] = set()
        self._pool: Any = None  # the memory that CUDA graphs share

    def follow(self, earlier: "Passes") -> None:
        """Go on with the counts of the passes of a narrower body."""
        self.counts, self._made = earlier.counts, earlier._made

    @property
    def recompiled(self) -> int:
        """Passes that were compiled more than once."""
        return self.counts.plans - len(self._made)

    def forward_backward(self, route: Route, batch: PassBatch, remaining: int = 0) -> Tensor:
        """Compute the losses (n,) of a part of the rows on a batch, and add their gradients to those of the rows.

        `remaining` batches come after this one.
        """
        mean: Tensor | None = None
        for share, piece in microbatches(self._microbatch, self.body.dtype, batch):
            own = self._forward_backward(route, piece, remaining * math.ceil(1 / share))
            if share < 1:
                own = share * own
            mean = own if mean is None else mean + own
        assert mean is not None, "a batch has examples"
        return mean

    def _forward_backward(self, route: Route, batch: PassBatch, remaining: int) -> Tensor:
        if self.mode == "off":
            return self._eager(route, batch)
        inputs = self.inputs(route, batch)
        if self._planned[0] is not route:
            self._planned = route, plan_of(route)
        key = self._planned[1], inputs.shapes
        found = self._known.pop(key) if key in self._known else self._prepared(inputs, key, remaining)
        self._known[key] = found
        if len(self._known) > PLANS:
            del self._known[next(iter(self._known))]
        if found is not None:
            self.counts.passes += 1
            return found(inputs.stacks, inputs.tensors)
        self.counts.eager += 1
        return self._eager(route, batch)

    def _eager(self, route: Route, batch: PassBatch) -> Tensor:
        loss, losses = self.loss_of(route, batch)
        loss.backward()
        return losses

    def inputs(self, route: Route, batch: PassBatch) -> CompiledInputs:
        """Return what the pass of a route over a batch takes, without keys of dropout."""
        places = sorted({(call.slot, call.form) for calls in (*route.base, *route.branch) for call in calls})
        stacks = [self.body.host, *(self.body.stacks[at] for at in places)]
        return CompiledInputs.of(self.body, stacks, route, batch._replace(keys=None))

    def traced(self, inputs: CompiledInputs) -> tuple[torch.fx.GraphModule, list[ColumnRun]]:
        """Return the graph of the passes of a plan, and the columns whose gradients it returns behind the losses."""
        runs: list[ColumnRun] = []

        def step(route: Route, batch: PassBatch) -> list[Tensor]:
            loss, losses = self.loss_of(route, batch)
            runs[:], found = gradients(inputs.stacks, loss.gradients)
            return [losses, *found]

        return traced(inputs, step), runs

    def _prepared(self, inputs: CompiledInputs, key: Any, remaining: int) -> CompiledPass | None:
        """Return a compiled pass, or None where it is not to be compiled; counts which, and the seconds that it took."""
        begin = time.perf_counter()
        # Whether a module runs in a loop over the rows is known once a pass has run.
        if not any(stack.loops for stack in inputs.stacks):
            self._time_eager(inputs, runs=1)
        try:
            if any(stack.loops for stack in inputs.stacks):
                self.counts.looped += 1
                return None
            if self.mode == "on":
                return self._compile(inputs, key)
            eager = self._time_eager(inputs)
            if eager * remaining < WORTH:
                self.counts.short += 1
                return None
            path = cache_root() / "compiled-2" / f"{self._digest(key)}.json"
            known = known_timing(path)
            if known is not None and (known["eager"] - known["compiled"]) * remaining > known["compiling"]:
                return self._compile(inputs, key)
            if known is None:
                started = time.perf_counter()
                found = self._compile(inputs, key)
                compiling = time.perf_counter() - started
                with inputs.bound(tensors := inputs.copies(), backward=True):
                    own = self._time(lambda: found(inputs.stacks, tensors))
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(path, json.dumps({"eager": eager, "compiled": own, "compiling": compiling}))
                if own < eager:
                    return found
            self.counts.slower += 1
            return None
        finally:
            self.counts.seconds += time.perf_counter() - begin

    def _time_eager(self, inputs: CompiledInputs, runs: int = MEASURED) -> float:
        """Return the median seconds of an uncompiled pass, which leaves every column as it was."""
        with inputs.bound(inputs.copies(), backward=True) as arguments:
            return self._time(lambda: self._eager(*arguments), runs)

    def _compile(self, inputs: CompiledInputs, key: Any) -> CompiledPass:
        self.counts.plans += 1
        self._made.add(hash((self.body.host.size, key)))
        graph, runs = self.traced(inputs)
        run = compiled(graph, inputs.tensors)
        if self.body.device.type == "cuda":
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            run = CudaGraphPass(run, inputs.state, pool=self._pool)
        return CompiledPass(run, runs)

    def _time(self, run: Callable[[], object], runs: int = MEASURED) -> float:
        """Return the median seconds of a call; on a GPU, until the device has done it."""
        times = []
        for _ in range(runs):
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


def known_timing(path: Path) -> dict[str, float] | None:
    """Return the seconds of an `eager` and of a `compiled` pass and of `compiling` that an earlier run measured on this machine.

    The file is in the user's cache folder; None if nothing was measured.
    """
    if not path.is_file():
        return None
    try:
        read = json.loads(path.read_text("utf-8"))
        return {name: float(read[name]) for name in ("eager", "compiled", "compiling")}
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is damaged; delete it, and the plan is measured again") from error


class Compilations:
    """Counts the graphs that torch compiles, and empties its caches before it gives up on a network that changes too often.

    torch runs a function uncompiled for good once it has compiled it `torch._dynamo.config.recompile_limit` times. Graphs of a
    network as it was before a change of its seeds are of no use, so the caches are emptied ahead of that.

    changes: changes of the graph by growing. emptied: how often the caches were emptied.
    """

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self.changes, self.emptied = 0, 0
        self._first = self._last = graphs()
        self._usual = 2  # graphs between two changes, as one for training and one for evaluation
        self._since = 0  # graphs since the caches were emptied
        self._warned = False

    @property
    def graphs(self) -> int:
        """Graphs that this process has compiled since this object was made, of this network and of others."""
        return graphs() - self._first

    def changed(self) -> None:
        self.changes += 1
        new, self._last = graphs() - self._last, graphs()
        if not new:
            return
        self._since += new
        self._usual = max(self._usual, new)
        # torch has compiled the forward pass of the network itself as often as it ever does.
        from torch._dynamo.eval_frame import _debug_get_cache_entry_list

        forward: Any = type(self.network).forward
        if not self._warned and len(_debug_get_cache_entry_list(forward.__code__)) >= _limit():
            self._warned = True
            warn(
                f"torch.compile reached its limit of {_limit()} graphs for the forward pass of the {type(self.network).__name__} "
                "between two changes of its seeds, and runs other ones uncompiled; make Growth with mode='reserve', or raise "
                "torch._dynamo.config.recompile_limit",
                GrowthWarning,
            )
        if self._since + self._usual >= _limit():
            torch.compiler.reset()
            self.emptied, self._since = self.emptied + 1, 0


def graphs() -> int:
    """Count the graphs that torch.compile has made in this process; 0 where it was never loaded."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])


def _limit() -> int:
    config: Any = sys.modules["torch._dynamo.config"]
    return int(config.recompile_limit)
