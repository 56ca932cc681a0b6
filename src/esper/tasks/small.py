"""Make tasks of scikit-learn's classical data sets, on hosts that are large enough, without skip connections, or too narrow.

On iris, wine and breast cancer the right decision is not to grow: a step trains so long that a host is near its final accuracy
after two steps, before a controller has to decide.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from esper.leyline.data.batches import shape_leaves, shapes
from esper.leyline.data.task import Task
from esper.tasks.hosts.factories import MLP, VECTOR_MENU, ResidualMLP, room_for
from esper.tasks.objectives import Classification
from esper.tasks.splits import scaling_of, split

IRIS = "150 flowers by 4 measures in 3 classes (Fisher, 1936)"
WINE = "178 wines by 13 measures in 3 classes (Forina, UCI 1991)"
BREAST_CANCER = "569 tumours by 30 measures in 2 classes (Wolberg, Mangasarian and Street, UCI 1995)"
DIGITS = "1,797 handwritten digits of 8 x 8 pixels in 10 classes"
SUMMARY = "{}; a residual network"
PLAIN = "{}; an MLP without skips"
WIDTH, HIDDEN = 16, (16, 16)
NARROW = f"{DIGITS}; an MLP that is narrow in two of its three blocks"
DIGITS_SIZES = (1024, 256, 128, 389)  # train, probe, validation, test; 16 batches of 64 are one epoch
DIGITS_HOST = ResidualMLP(inputs=64, width=32, hidden=(32,) * 3, outputs=10)


def digits() -> Task:
    """Make a task of scikit-learn's digits (Alpaydin and Kaynak, UCI 1998): 64 features and 10 classes, on a residual host."""
    from sklearn.datasets import load_digits  # a second of imports that no other task needs

    return table_task(
        "digits", SUMMARY.format(DIGITS), load_digits(), DIGITS_HOST, sizes=DIGITS_SIZES, batches=(64, 16)
    )


def digits_narrow(hidden: tuple[int, ...] = (4, 12, 5), width: int = 16) -> Task:
    """Make `digits` on a damaged host without skip connections in which two blocks are too narrow, to test controllers.

    With the default sizes, bypasses around the first and the last block restore what the host loses, and a bypass around the
    middle block adds almost nothing.
    """
    host = MLP(inputs=64, width=width, hidden=hidden, outputs=10)
    return replace(digits(), name="digits-narrow", summary=NARROW, host=host, room=room_for(host))


def iris() -> Task:
    """Make a task of Fisher's iris flowers. 64 examples train, in four batches of 16; a step is eight epochs."""
    from sklearn.datasets import load_iris

    return _task("iris", IRIS, load_iris(), sizes=(64, 40, 16, 30), batches=(16, 32))


def wine() -> Task:
    """Make a task of wines of three growers. 80 examples train, in five batches of 16; a step is six epochs."""
    from sklearn.datasets import load_wine

    return _task("wine", WINE, load_wine(), sizes=(80, 40, 16, 42), batches=(16, 32))


def breast_cancer() -> Task:
    """Make a task of malignant and benign tumours. 256 examples train, in eight batches of 32; a step is two epochs."""
    from sklearn.datasets import load_breast_cancer

    return _task("breast-cancer", BREAST_CANCER, load_breast_cancer(), sizes=(256, 96, 64, 153), batches=(32, 16))


def _task(name: str, data: str, table: Any, *, sizes: tuple[int, ...], batches: tuple[int, int]) -> Task:
    names = tuple(map(str, table.target_names))
    host = ResidualMLP(inputs=table.data.shape[1], width=WIDTH, hidden=HIDDEN, outputs=len(names))
    return replace(table_task(name, SUMMARY.format(data), table, host, sizes=sizes, batches=batches), classes=names)


def table_task(
    name: str, summary: str, table: Any, host: ResidualMLP, *, sizes: tuple[int, ...], batches: tuple[int, int]
) -> Task:
    """Return a classification from a `Bunch` of scikit-learn, of which hosts read the features standardized by the train split.

    sizes: numbers of examples in train, probe, validation and test, which sum to N.
    batches: examples per batch, and batches per step.
    """
    x = torch.from_numpy(table.data).to(torch.get_default_dtype())
    y = torch.from_numpy(table.target).to(torch.int64)
    splits = split(x, y, sizes=sizes, seed=0)
    return Task(
        name=name,
        summary=summary,
        host=host,
        room=room_for(host),
        **splits._asdict(),
        scaling=scaling_of(splits.train.x),
        objective=Classification(host.outputs),
        menu=VECTOR_MENU,
        defaults={"steps": 24, "data": {"batch_size": batches[0], "batches_per_step": batches[1]}},
    )


def plain(build: Callable[[], Task], data: str) -> Task:
    """Return the task of `build` on a host without skip connections, for studies: "iris" becomes "iris-plain"."""
    task = build()
    (inputs,) = shape_leaves(shapes(task.train.x))[0]
    host = MLP(inputs=inputs, width=WIDTH, hidden=HIDDEN, outputs=task.objective.outputs)
    return replace(task, name=f"{task.name}-plain", summary=PLAIN.format(data), host=host, room=room_for(host))
