"""Hosts that are trained before a run begins, and the loop that trains them. E networks, B examples."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor
from torch.func import functional_call

from esper.kasmina.blueprints import drawn_with
from esper.kasmina.host import SegmentedHost
from esper.leyline.config.tree import build_config
from esper.leyline.data.task import Task
from esper.tasks.hosts.factories import ResidualMLP, VectorHost, room_for
from esper.tasks.spirals import DATA, spirals

POOL = 16
"""Number of trained hosts; every environment starts from one of them."""
EPOCHS = 24
SMALL = ResidualMLP(inputs=2, width=8, hidden=(4, 4), outputs=2)
SUMMARY = f"{DATA}; a small residual network after {EPOCHS} epochs of training, to be grown further"


class Trained:
    """A factory of hosts that were trained without growth: a call returns one of a pool, drawn from torch's global generator.

    The pool is trained at the first call, with the loss, the batch size and the learning rate of the task. Its weights are the
    same in every process.
    """

    def __init__(self, architecture: VectorHost, task: Task, epochs: int = EPOCHS, pool: int = POOL) -> None:
        self.architecture = architecture  # a saved network names its host by it; the file holds the weights
        self._task, self._epochs, self._pool_size = task, epochs, pool

    def __repr__(self) -> str:
        return f"Trained({self.architecture}, epochs={self._epochs})"

    def __call__(self) -> SegmentedHost:
        """A copy of one of the trained hosts."""
        start = int(torch.randint(self._pool_size, (1,)))
        host = self.architecture()
        host.load_state_dict({name: values[start] for name, values in self._weights.items()})
        return host

    def plain(self, parameters: int) -> Callable[[], SegmentedHost]:
        """A factory of untrained networks without narrow blocks and with at least `parameters` parameters."""
        return self.architecture.plain(parameters)

    @cached_property
    def _weights(self) -> dict[str, Tensor]:
        data = build_config(self._task.defaults).data
        updates = self._epochs * (len(self._task.train.x) // data.batch_size)
        return train_static(self._task, self.architecture, self._pool_size, data.batch_size, updates)[1]


def spirals_trained() -> Task:
    """`spirals` on a trained host that is too small: the task is to grow it further rather than to train a larger one.

    The host is a residual network of 194 parameters, trained without growth for 24 epochs before the run. The run trains for
    12 more epochs. The heuristic widens every block. The rent is low, because under the default rent a seed as large as this
    small host would cost 7 points of accuracy.
    """
    task = spirals()
    return replace(
        task,
        name="spirals-trained",
        summary=SUMMARY,
        host=Trained(SMALL, task),
        room=room_for(SMALL),
        defaults={
            "steps": 24,
            "data": {"batch_size": 64, "batches_per_step": 8},
            "reward": {"rent": 0.02},
            "heuristic": {"plant_below": 1.0, "narrow_from": 0.01, "narrow_blueprints": ("bypass-mlp",)},
        },
    )


def train_static(
    task: Task, factory: Callable[[], SegmentedHost], starts: int, batch: int, updates: int
) -> tuple[SegmentedHost, dict[str, Tensor]]:
    """Train `starts` hosts of a factory without growth, by AdamW at the task's learning rate.

    Every host has its own initial weights and its own order of examples. Returns a host, and the weights of all hosts: every
    parameter with a leading axis, (starts, *shape).
    """
    hosts = []
    for start in range(starts):
        with drawn_with(start):
            hosts.append(factory())
    names = list(dict(hosts[0].named_parameters()))
    values = {name: torch.stack([host.get_parameter(name).detach() for host in hosts]) for name in names}
    for value in values.values():
        value.requires_grad_()
    optimizer = torch.optim.AdamW(values.values(), lr=build_config(task.defaults).optimizer.lr, weight_decay=0)
    x = task.read(task.train.x)
    assert isinstance(x, Tensor)
    for index in _batches(len(x), starts, batch, updates):
        loss = task.objective.loss(run_static(hosts[0], values, x[index]), task.train.y[index]).mean(1).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return hosts[0], {name: value.detach() for name, value in values.items()}


def run_static(host: SegmentedHost, values: dict[str, Tensor], x: Tensor) -> Tensor:
    """Outputs (E, B, C) of E hosts on x (E, B, ...). `values` holds every parameter with a leading axis E."""
    if host.stacks:
        y: Tensor = functional_call(host, values, (x,))
        return y
    rows = [{name: value[row] for name, value in values.items()} for row in range(len(x))]
    return torch.stack([functional_call(host, row, (examples,)) for row, examples in zip(rows, x, strict=True)])


def _batches(examples: int, starts: int, batch: int, total: int) -> Iterator[Tensor]:
    """`total` batches of indices (starts, batch). Every start goes through permutations of all examples, one after another."""
    generator = torch.Generator().manual_seed(0)
    at, order = 0, torch.empty(starts, 0, dtype=torch.int64)
    for _ in range(total):
        if at + batch > order.shape[1]:
            at, order = 0, torch.stack([torch.randperm(examples, generator=generator) for _ in range(starts)])
        yield order[:, at : at + batch]
        at += batch
