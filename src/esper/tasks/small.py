"""Make tasks of scikit-learn's classical data sets, on hosts that are large enough, without skip connections, or too narrow.

On iris, wine and breast cancer the right decision is not to grow: a step trains so long that a host is near its final accuracy
after two steps, before a controller has to decide.
"""

from dataclasses import replace
from typing import Any

import torch

from esper.leyline.data.task import Task
from esper.tasks.hosts import MLP, VECTOR_MENU, ResidualMLP, VectorHost
from esper.tasks.objectives import Classification
from esper.tasks.splits import cut, dealt, scaling_of

DIGITS = "1,797 handwritten digits of 8 x 8 pixels in 10 classes"
SUMMARY = f"{DIGITS}; a residual network"
WIDTH, HIDDEN = 16, (16, 16)
NARROW = f"{DIGITS}; an MLP that is narrow in two of its three blocks"
DIGITS_SIZES = (1024, 256, 128, 389)  # train, probe, validation, test; 16 batches of 64 are one epoch
DIGITS_HOST = ResidualMLP(inputs=64, width=32, hidden=(32,) * 3, outputs=10)

BREAST_CANCER = "569 tumours by 30 measures in 2 classes (Wolberg, Mangasarian and Street, UCI 1995)"
CLASSICAL = {  # a step is eight epochs of iris, six of wine, and two of breast-cancer
    "iris": ("150 flowers by 4 measures in 3 classes (Fisher, 1936)", (64, 40, 16, 30), (16, 32)),
    "wine": ("178 wines by 13 measures in 3 classes (Forina, UCI 1991)", (80, 40, 16, 42), (16, 32)),
    "breast-cancer": (BREAST_CANCER, (256, 96, 64, 153), (32, 16)),
}
"""The classical data sets by name: a description, and the `sizes` and `batches` of their `table_task`."""
CLASSICAL_SUMMARIES = {
    name + end: f"{data}; {host}"
    for name, (data, _, _) in CLASSICAL.items()
    for end, host in (("", "a residual network"), ("-plain", "an MLP without skips"))
}
"""Summaries of the tasks that `classical` makes. Those without skip connections are for studies."""


def digits() -> Task:
    """Make a task of scikit-learn's digits (Alpaydin and Kaynak, UCI 1998): 64 features and 10 classes, on a residual host."""
    from sklearn.datasets import load_digits  # a second of imports that no other task needs

    x, y = load_digits(return_X_y=True)
    return table_task("digits", SUMMARY, x, y, DIGITS_HOST, sizes=DIGITS_SIZES, batches=(64, 16))


def digits_narrow(hidden: tuple[int, ...] = (4, 12, 5), width: int = 16) -> Task:
    """Make `digits` on a damaged host without skip connections in which two blocks are too narrow, to test controllers.

    With the default sizes, bypasses around the first and the last block restore what the host loses, and a bypass around the
    middle block adds almost nothing.
    """
    host = MLP(inputs=64, width=width, hidden=hidden, outputs=10)
    return replace(digits(), name="digits-narrow", summary=NARROW, host=host, room=host.room())


def classical(name: str) -> Task:
    """Make a task of a classical data set, such as "iris", or "iris-plain" on a host without skip connections."""
    import sklearn.datasets

    table_name = name.removesuffix("-plain")
    _, sizes, batches = CLASSICAL[table_name]
    table = getattr(sklearn.datasets, f"load_{table_name.replace('-', '_')}")()
    names = tuple(map(str, table.target_names))
    host_class = ResidualMLP if name == table_name else MLP
    host = host_class(inputs=table.data.shape[1], width=WIDTH, hidden=HIDDEN, outputs=len(names))
    task = table_task(name, CLASSICAL_SUMMARIES[name], table.data, table.target, host, sizes=sizes, batches=batches)
    return replace(task, classes=names)


def table_task(
    name: str, summary: str, x: Any, y: Any, host: VectorHost, *, sizes: tuple[int, ...], batches: tuple[int, int]
) -> Task:
    """Return a classification of a table, of which hosts read the features standardized by the train split.

    x, y: arrays or tensors of features (N, F) and labels (N,).
    sizes: numbers of examples in train, probe, validation and test, which sum to N.
    batches: examples per batch, and batches per step.
    """
    x = torch.as_tensor(x, dtype=torch.get_default_dtype())
    y = torch.as_tensor(y, dtype=torch.int64)
    splits = cut(x, y, dealt(y, sizes, seed=0))
    return Task(
        name=name,
        summary=summary,
        host=host,
        room=host.room(),
        **splits._asdict(),
        scaling=scaling_of(splits.train.x),
        objective=Classification(host.outputs),
        menu=VECTOR_MENU,
        defaults={"steps": 24, "data": {"batch_size": batches[0], "batches_per_step": batches[1]}},
    )
