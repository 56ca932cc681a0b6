"""How wide the default hosts are, and what static networks of other widths do: `python bench/scripts/study_hosts.py`.

Every network is trained as `esper grow` trains a host, without any growth: the task's own batches, steps, loss and AdamW. The
width and the number of blocks were chosen on the validation split (`--all`). The table of docs/hosts.md is of the test split
(`--part test`), which was read once, with the sizes as they stand.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from esper.kasmina.blueprints import count
from esper.kasmina.host import SegmentedHost
from esper.leyline.config.tree import build_config
from esper.leyline.data.task import Split, Task
from esper.tasks.catalog import TASKS, get_task
from esper.tasks.hosts.factories import CNN, MLP, ResidualCNN, ResidualMLP
from esper.tasks.spirals import run_static, train_static

Factory = Callable[[], SegmentedHost]
TABLES = ("digits", "spirals", "iris", "wine", "breast-cancer")
IMAGES = ("digits-image",)


def static(task: Task, factory: Factory, starts: int, part: Split) -> Tensor:
    """Scores (starts,) on a split of networks that were trained without growth."""
    config = build_config(task.defaults)
    updates = config.steps * config.data.batches_per_step
    host, values = train_static(task, factory, starts, config.data.batch_size, updates)
    with torch.no_grad():
        output = run_static(host, values, task.read(part.x).expand(starts, *[-1] * part.x.dim()))
        return task.objective.score(output, part.y.expand(starts, *part.y.shape)).mean(1)


def opponents(task: Task) -> list[Factory]:
    """The default host, the network without skips of as many parameters, and the host of the test bench on the same data."""
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
    """Residual networks of several sizes, and networks without skips."""
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
