"""Three classical data sets and hosts that are wide enough for them: the right answer is not to grow.

A step trains long enough that a host is near its ceiling after two of them, before a controller has to decide.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from esper.leyline.task import Task
from esper.tasks.hosts import MLP, VECTOR_MENU, ResidualMLP, roomy
from esper.tasks.objectives import Classification
from esper.tasks.splits import check_examples, scaling_of, split

IRIS = "150 flowers by 4 measures in 3 classes (Fisher, 1936)"
WINE = "178 wines by 13 measures in 3 classes (Forina, UCI 1991)"
BREAST_CANCER = "569 tumours by 30 measures in 2 classes (Wolberg, Mangasarian and Street, UCI 1995)"
SUMMARY = "{}; a residual network"
PLAIN = "{}; an MLP without skips"
WIDTH, HIDDEN = 16, (16, 16)


def iris() -> Task:
    """Fisher's iris flowers. 64 of them train, in four batches of 16; eight epochs make a step."""
    from sklearn.datasets import load_iris

    return _task("iris", IRIS, load_iris, sizes=(64, 40, 16, 30), batches=(16, 32))


def wine() -> Task:
    """Wines of three growers. 80 of them train, in five batches of 16; six epochs make a step."""
    from sklearn.datasets import load_wine

    return _task("wine", WINE, load_wine, sizes=(80, 40, 16, 42), batches=(16, 32))


def breast_cancer() -> Task:
    """Tumours, malignant or benign. 256 of them train, in eight batches of 32; two epochs make a step."""
    from sklearn.datasets import load_breast_cancer

    return _task("breast-cancer", BREAST_CANCER, load_breast_cancer, sizes=(256, 96, 64, 153), batches=(32, 16))


def _task(
    name: str, data: str, load: Callable[[], Any], *, sizes: tuple[int, int, int, int], batches: tuple[int, int]
) -> Task:
    """sizes: examples in train, probe, validation and test; batches: examples in a batch, and batches in a step.

    Hosts read the features standardized by the train split. They have torch's default dtype.
    """
    table = load()
    x = torch.from_numpy(table.data).to(torch.get_default_dtype())
    y = torch.from_numpy(table.target).to(torch.int64)
    names = tuple(map(str, table.target_names))
    check_examples(x, y, len(names))
    splits = split(x, y, sizes=sizes, seed=0)
    host = ResidualMLP(inputs=x.shape[1], width=WIDTH, hidden=HIDDEN, outputs=len(names))
    return Task(
        name=name,
        summary=SUMMARY.format(data),
        host=host,
        room=roomy(host),
        **splits._asdict(),
        scaling=scaling_of(splits.train.x),
        classes=names,
        objective=Classification(len(names)),
        menu=VECTOR_MENU,
        defaults={"steps": 24, "data": {"batch_size": batches[0], "batches_per_step": batches[1]}},
    )


def plain(build: Callable[[], Task], data: str) -> Task:
    """One of these tasks on a host without skips, for studies: "iris" becomes "iris-plain"."""
    task = build()
    host = MLP(inputs=task.train.x.shape[1], width=WIDTH, hidden=HIDDEN, outputs=task.objective.outputs)
    return replace(task, name=f"{task.name}-plain", summary=PLAIN.format(data), host=host, room=roomy(host))
