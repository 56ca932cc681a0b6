"""Compute the two floors of `benchmark_hot_path.py`: what a step's work costs with nothing around it, and what a script costs.

E environments, R rows of the stack (2 at least), n rows with an incubating seed, B examples, D features, K blocks of a host.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from esper.kasmina.blueprints import get_blueprint
from esper.kasmina.stack.rows import Stack
from esper.leyline.data.keys import permutations
from esper.leyline.data.task import AnyTask, Instance
from esper.leyline.lifecycle.vocabulary import LIVE, Actions, Op, Stage, among
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.stacked.data import Format, SharedBatchIterator, stack_splits

Step = Callable[[], None]
Loss = Callable[[Tensor, Tensor], Tensor]  # (R, B, C), (R, B) -> (R, B)
SEED = "bypass-mlp"
"""The blueprint that every case plants: two linear maps that read the stream before a block and write behind it."""


def carry_out(engine: VectorizedEngine, op: Op, slot: int, envs: NDArray[np.int64], seed: str = SEED) -> None:
    """Take one step: some environments (n,) carry out an operation, at once and to the whole dose, and the others wait."""
    actions, space = Actions.wait(engine.config.envs), engine.space
    actions.op[envs], actions.slot[envs] = op, slot
    actions.blueprint[envs] = [entry.name for entry in space.blueprints].index(seed)
    actions.tempo[envs], actions.target[envs] = space.tempos.index(1), space.targets.index(1.0)
    _, outcome = engine.step(actions)
    assert outcome.accepted[envs].all()


def torch_loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the cross-entropy of every example, written with torch's own function as in most scripts."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="none").view(target.shape)


class Layer(NamedTuple):
    """Applies a linear map of every row."""

    weight: Tensor  # (R, O, D)
    bias: Tensor  # (R, O)

    def __call__(self, x: Tensor) -> Tensor:
        """Map (R, B, D) to (R, B, O)."""
        return torch.baddbmm(self.bias.unsqueeze(1), x, self.weight.mT)

    def constant(self, rows: Tensor | None) -> "Layer":
        """Return some rows, or all, as constants of the graph."""
        weight, bias = self.weight.detach(), self.bias.detach()
        return Layer(weight, bias) if rows is None else Layer(weight.index_select(0, rows), bias.index_select(0, rows))


class Block(NamedTuple):
    """Applies two linear maps with max(z, floor) between them: a segment of a host, or a seed."""

    inner: Layer
    outer: Layer
    floor: Tensor | None  # (R, 1, 1); None is a ReLU

    def __call__(self, x: Tensor) -> Tensor:
        """Map (R, B, D) to (R, B, D)."""
        z = self.inner(x)
        return self.outer(torch.relu(z) if self.floor is None else torch.clamp(z, min=self.floor))

    def constant(self, rows: Tensor | None) -> "Block":
        """Return some rows, or all, as constants of the graph."""
        floor = self.floor if rows is None or self.floor is None else self.floor.index_select(0, rows)
        return Block(self.inner.constant(rows), self.outer.constant(rows), floor)


class BareStack:
    """Runs the batches, updates and probe of an engine's steps, written by hand: baddbmm, fused AdamW, and one read.

    It begins with the engine's own parameters, so that `probe` can be held against what the engine measured. Beside the
    host it runs the seeds that are live in every row, their leave-one-out passes in the probe, and the shadow pass of the rows
    that incubate, which shares the prefix and gathers constants of the suffix. What it leaves out is all that
    is not this work: sensors, gradient norms, frozen rows, gates, masks, events.
    """

    def __init__(self, task: AnyTask, engine: VectorizedEngine, loss: Loss) -> None:
        self.loss = loss
        state, config = engine.state, engine.config
        body = engine.population.body
        host, rows = body.host, len(state.instance)
        self.batch, self.batches = config.data.batch_size, config.data.batches_per_step
        params: list[Tensor] = []
        segments = len(body.layout.steps)

        def leaf(value: Tensor) -> Tensor:
            params.append(value.detach().clone(memory_format=torch.contiguous_format).requires_grad_())
            return params[-1]

        def layer(stack: Stack, name: str, rows: int) -> Layer:
            return Layer(*(leaf(stack.parameter(f"{name}.{part}")[:rows]) for part in ("weight", "bias")))

        self.embed, self.head = layer(host, "segments.0", rows), layer(host, f"segments.{segments - 1}", rows)
        self.blocks = [
            Block(
                layer(host, f"segments.{k}.0", rows),
                layer(host, f"segments.{k}.2", rows),
                host.columns.get(f"buffer.segments.{k}.1.floor"),
            )
            for k in range(1, segments - 1)
        ]
        live, incubating = among(state.seeds.stage, LIVE), state.seeds.stage == Stage.TRAINING
        self.live = np.flatnonzero(live.any(0)).tolist()
        self.incubating = np.flatnonzero(incubating.any(0)).tolist()
        assert live[:, self.live].all(), "the floor has live seeds in every row or in none"
        assert len([*self.live[:1], *self.incubating]) <= 1, "seeds are live, or those of one slot incubate"
        planted = {slot: (body.stacks[slot, form], envs) for (slot, form), envs in body.envs.items() if len(envs)}
        self.seeds = {
            slot: Block(layer(stack, "delta.inner", len(envs)), layer(stack, "delta.out", len(envs)), None)
            for slot, (stack, envs) in planted.items()
        }
        self.dose = torch.ones(rows, 1, 1, dtype=body.dtype, device=engine.device)  # of every live seed
        own = planted[self.incubating[0]][1] if self.incubating else np.arange(rows)
        self.rows = torch.from_numpy(own).to(engine.device) if len(own) < rows else None
        self.optimizer = torch.optim.AdamW(params, lr=config.optimizer.lr, weight_decay=0.0, fused=True)
        self.real_outputs: Tensor | None = None
        if (body.table.outputs < task.objective.outputs).any():
            real = np.arange(task.objective.outputs) < body.table.outputs[:, None, None]
            self.real_outputs = torch.from_numpy(real).to(engine.device)
        self._load(task, state.instance, engine.device)

    def _load(self, task: AnyTask, instance: NDArray[np.int64], device: torch.device) -> None:
        """Load the data of every row, padded and pooled, and find where each batch of a step is in a row's order."""
        keys, row = np.unique(instance, return_inverse=True)
        problems = [task.instance(key) for key in keys.tolist()]
        self.shared = all(problem.train.x is problems[0].train.x for problem in problems)
        if self.shared:
            problems, row = problems[:1], np.zeros_like(row)
        scaling = problems[0].scaling
        form = Format(task.inputs, device, scaling=scaling)
        feed = SharedBatchIterator([p.train for p in problems], row, instance, 0, self.batch, form)
        self.x, self.y, self.sizes = feed.x, feed.y.to(torch.int64), feed.orders.sizes
        batch = np.arange(self.batches)[:, None] % feed.orders.batches_per_epoch
        place = batch[..., None] * self.batch + np.arange(self.batch)
        self.place = torch.from_numpy(place).to(device)  # (batches, R, B)
        self.offset = torch.from_numpy(row * int(feed.orders.sizes.max())).to(device)[:, None]
        self.examples = stack_splits([p.probe for p in problems], row, form)
        self.generator = np.random.default_rng(0)

    def forward(self, x: Tensor, leaving: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """Map (R, B, ...) to outputs (R, B, C), and (n, len(leaving) * B, C) of passes that leave at a slot.

        A pass leaves before the live seed of its slot acts, or with the incubating seed of its slot at dose 1. Passes lie
        beside each other as further examples, so that each layer is one product.
        """
        h, extra = self.embed(x), None
        for k, block in enumerate(self.blocks):
            before, h = h, block(h)
            without, before_extra = h, extra
            if extra is not None:
                extra = block.constant(self.rows)(extra)
            if k in self.live:
                h = torch.addcmul(h, self.dose, self.seeds[k](before))
                if extra is not None and before_extra is not None:
                    extra = torch.addcmul(extra, self.dose, self.seeds[k](before_extra))
            if k in leaving:
                new = self._some(without.detach())
                if k in self.incubating:
                    new = new + self.seeds[k](self._some(before.detach()))
                extra = new if extra is None else torch.cat([extra, new], 1)
        output = self._masked(self.head(h), None)
        if extra is None:
            return output, None
        return output, self._masked(self.head.constant(self.rows)(extra), self.rows)

    def _some(self, x: Tensor) -> Tensor:
        return x if self.rows is None else x.index_select(0, self.rows)

    def _masked(self, output: Tensor, rows: Tensor | None) -> Tensor:
        if self.real_outputs is None:
            return output
        real = self.real_outputs if rows is None else self.real_outputs.index_select(0, rows)
        return output.masked_fill(~real, -torch.inf)

    def train(self) -> None:
        """Train on the batches of one step."""
        drawn = self.generator.integers(2**62, size=len(self.sizes))
        order = permutations(drawn, self.sizes, self.x.device)
        for batch in range(self.batches):
            if self.shared:
                start = batch * self.batch % (len(self.y) // self.batch * self.batch)
                index = order[:, start : start + self.batch]
            else:
                index = order.gather(1, self.place[batch]) + self.offset
            x = self.x.index_select(0, index.reshape(-1)).view(*index.shape, *self.x.shape[1:])
            y = self.y.index_select(0, index.reshape(-1)).view(index.shape)
            output, shadow = self.forward(x, self.incubating)
            loss = self.loss(output, y).sum()
            if shadow is not None:
                loss = loss + self.loss(shadow, self._some(y)).sum()
            self.optimizer.zero_grad()
            (loss / self.batch).backward()
            self.optimizer.step()

    @torch.no_grad()
    def probe(self) -> NDArray[np.float64]:
        """Return loss and metric (2, R) of every row, then means and standard errors of the passes beside them, flat."""
        x, y, size, real, _ = self.examples
        leaving = self.live or self.incubating
        output, extra = self.forward(x, leaving)
        measured = self._figures(output, y)  # (2, R, N)
        kept = None if real is None else real.unsqueeze(0)

        def mean(values: Tensor, kept: Tensor | None, size: Tensor) -> Tensor:
            return values.mean(-1) if kept is None else values.masked_fill(~kept, 0).sum(-1) / size[:, 0]

        parts = [mean(measured, kept, size)]
        if extra is not None:
            own, target, size = self._some(measured.transpose(0, 1)).transpose(0, 1), self._some(y), self._some(size)
            kept = None if real is None else self._some(real).unsqueeze(0)
            for branch in extra.split(y.shape[1], dim=1):
                change = self._figures(branch, target) - own
                centre = mean(change, kept, size)
                squares = mean((change - centre[..., None]).square(), kept, size)
                parts += [centre, (squares / (size[:, 0] - 1)).sqrt()]
        return torch.cat([part.reshape(-1) for part in parts]).to(torch.float64).cpu().numpy()

    def _figures(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the loss and whether the prediction is right, (2, R, N), of outputs (R, N, C) and targets (R, N)."""
        loss = self.loss(output, y)
        return torch.stack([loss, (output.argmax(-1) == y).to(loss.dtype)])

    def step(self) -> None:
        """Train for one step and run the probe."""
        self.train()
        self.probe()


class Plain(nn.Module):
    """Computes one network with its seeds, as a script would write it."""

    def __init__(self, problem: Instance, live: Sequence[int], incubating: Sequence[int]) -> None:
        super().__init__()
        host = problem.host()
        self.segments, self.live, self.incubating = host.segments, list(live), list(incubating)
        width = {slot: spec.width for slot, spec in enumerate(host.slots)}
        build = get_blueprint(SEED).build
        self.seeds = nn.ModuleDict({str(slot): build(width[slot], width[slot]) for slot in (*live, *incubating)})

    def forward(self, x: torch.Tensor, toggled: int | None = None) -> torch.Tensor:
        """Map (B, ...) to (B, C) with the live seeds; `toggled` is a slot whose seed is left out, or put in if it incubates."""
        h = x
        for k, segment in enumerate(self.segments):
            before, h = h, segment(h)
            if (k - 1 in self.live) != (k - 1 == toggled):
                h = h + self.seeds[str(k - 1)](before)
        return h


def plain_step(task: AnyTask, engine: VectorizedEngine, envs: int) -> Step:
    """Return a step as a training script does it: a DataLoader, one network after another, `.item()` for the running figures.

    The networks, data, seeds and passes are those of the engine's first `envs` environments.
    """
    torch.manual_seed(0)
    config, seeds, device = engine.config, engine.state.seeds, engine.device
    batch, batches = config.data.batch_size, config.data.batches_per_step
    criterion = nn.CrossEntropyLoss()
    networks = []
    for env in range(envs):
        problem = task.instance(int(engine.space.instance[env]))
        live = np.flatnonzero(among(seeds.stage[env], LIVE)).tolist()
        incubating = np.flatnonzero(seeds.stage[env] == Stage.TRAINING).tolist()
        network = Plain(problem, live, incubating).to(device)
        optimizer = torch.optim.AdamW(network.parameters(), lr=config.optimizer.lr, weight_decay=0.0)
        train, probe = (TensorDataset(problem.read(split.x), split.y) for split in (problem.train, problem.probe))
        train = DataLoader(train, batch_size=batch, shuffle=True, drop_last=True)
        networks.append((network, optimizer, train, DataLoader(probe, batch_size=256)))

    def learn(network: Plain, optimizer: torch.optim.Optimizer, train: DataLoader[tuple[Tensor, ...]]) -> float:
        running, done = 0.0, 0
        while done < batches:
            for x, y in train:
                x, y = x.to(device), y.to(device)
                optimizer.zero_grad()
                loss = criterion(network(x), y)
                loss.backward()
                for slot in network.incubating:
                    own = list(network.seeds[str(slot)].parameters())
                    gradients = torch.autograd.grad(criterion(network(x, slot), y), own)
                    for parameter, gradient in zip(own, gradients, strict=True):
                        parameter.grad = gradient
                optimizer.step()
                running += loss.item()
                done += 1
                if done == batches:
                    break
        return running

    def step() -> None:
        for network, optimizer, train, probe in networks:
            network.train()
            learn(network, optimizer, train)
            network.eval()
            correct = 0
            with torch.no_grad():
                for x, y in probe:
                    for toggled in (None, *network.live, *network.incubating):
                        correct += (network(x.to(device), toggled).argmax(1) == y.to(device)).sum().item()

    return step
