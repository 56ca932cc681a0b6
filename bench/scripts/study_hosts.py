"""Measure how wide the default hosts are, and what static networks of other widths do: `python bench/scripts/study_hosts.py`.

Every network is trained as `esper grow` trains a host, without any growth: the task's own batches, steps, loss and AdamW. The
width and the number of blocks were chosen on the validation split (`--all`). The table of docs/hosts.md is of the test split
(`--part test`), which was read once, with the sizes as they stand.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.func import functional_call

from esper.kasmina.blueprints import count, drawn_with
from esper.kasmina.host import SegmentedHost
from esper.leyline.config.tree import build_config
from esper.leyline.data.task import Split, Task
from esper.tasks.catalog import TASKS, get_task
from esper.tasks.hosts import CNN, MLP, ResidualCNN, ResidualMLP

Factory = Callable[[], SegmentedHost]
TABLES = ("digits", "spirals", "iris", "wine", "breast-cancer")
IMAGES = ("digits-image",)


def static(task: Task, factory: Factory, starts: int, part: Split) -> Tensor:
    """Train networks without growth, and return their scores (starts,) on a split."""
    config = build_config(task.defaults)
    updates = config.steps * config.data.batches_per_step
    host, values = train_static(task, factory, starts, config.data.batch_size, updates)
    with torch.no_grad():
        output = run_static(host, values, task.read(part.x).expand(starts, *[-1] * part.x.dim()))
        return task.objective.score(output, part.y.expand(starts, *part.y.shape)).mean(1)


def train_static(
    task: Task, factory: Callable[[], SegmentedHost], starts: int, batch: int, updates: int
) -> tuple[SegmentedHost, dict[str, Tensor]]:
    """Train `starts` hosts of a factory by AdamW, each with its own initial weights and its own order of examples.

    Returns a host, and the weights of all hosts: every parameter with a leading axis, (starts, *shape).
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
    """Compute outputs (E, B, C) of E hosts on x (E, B, ...). `values` holds every parameter with a leading axis E."""
    if host.stacks:
        return functional_call(host, values, (x,))
    rows = [{name: value[row] for name, value in values.items()} for row in range(len(x))]
    return torch.stack([functional_call(host, row, (examples,)) for row, examples in zip(rows, x, strict=True)])


def _batches(examples: int, starts: int, batch: int, total: int) -> Iterator[Tensor]:
    """Yield `total` batches of indices (starts, batch). Every start goes through permutations of all examples in turn."""
    generator = torch.Generator().manual_seed(0)
    at, order = 0, torch.empty(starts, 0, dtype=torch.int64)
    for _ in range(total):
        if at + batch > order.shape[1]:
            at, order = 0, torch.stack([torch.randperm(examples, generator=generator) for _ in range(starts)])
        yield order[:, at : at + batch]
        at += batch


def opponents(task: Task) -> list[Factory]:
    """List the default host, the network without skips of as many parameters, and the host of the test bench on the same data."""
    host = task.host
    parameters = count(host())
    if isinstance(host, ResidualCNN):
        plain: Factory = CNN(host.inputs, host.channels, host.outputs).plain(parameters)
    else:
        assert isinstance(host, ResidualMLP)
        plain = MLP(host.inputs, host.width, host.hidden, host.outputs).plain(parameters)
    bench = [get_task(name).host for name in TASKS if name == f"{task.name}-narrow"]
    return [host, plain, *bench]


def candidates(task: Task) -> list[Factory]:
    """List residual networks of several sizes, and networks without skips."""
    host = task.host
    if isinstance(host, ResidualCNN):
        wide = [ResidualCNN(host.inputs, (w, 2 * w), host.outputs) for w in (4, 8, 16, 24)]
        return [*wide, *(CNN(host.inputs, (w, 2 * w), host.outputs) for w in (8, 16, 24))]
    assert isinstance(host, ResidualMLP)
    sizes = [(width, blocks) for blocks in (2, 3) for width in (16, 32, 64)]
    residual = [replace(host, width=w, hidden=(w,) * b) for w, b in sizes]
    return [*residual, *(MLP(host.inputs, w, (w,) * 3, host.outputs) for w in (32,))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tasks", nargs="*", default=[*TABLES, *IMAGES])
    parser.add_argument("--starts", type=int, default=24, help="networks of each size")
    parser.add_argument("--part", choices=("validation", "test"), default="validation", help="split that is scored")
    parser.add_argument("--all", action="store_true", help="networks of other sizes, too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"| task | network | parameters | {arguments.part} | seconds |\n|---|---|---|---|---|")
    for name in arguments.tasks:
        task = get_task(name)
        assert isinstance(task, Task)
        for factory in candidates(task) if arguments.all else opponents(task):
            begin = time.perf_counter()
            scores = static(task, factory, arguments.starts, getattr(task, arguments.part))
            error = float(scores.std() / len(scores) ** 0.5)
            print(
                f"| {name} | {factory} | {count(factory()):,} | {float(scores.mean()):.4f} ± {error:.4f} "
                f"| {time.perf_counter() - begin:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
