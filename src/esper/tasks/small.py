"""Three classical data sets and hosts that are wide enough for them: the right answer is not to grow."""

from collections.abc import Callable
from typing import Any

import torch

from esper.leyline.task import Task
from esper.tasks.hosts import MLP, VECTOR_MENU
from esper.tasks.objectives import Classification
from esper.tasks.splits import check_examples, split, standardized

_HOST = "an MLP that is wide enough for them"
IRIS = f"150 flowers by 4 measures in 3 classes (Fisher, 1936); {_HOST}"
WINE = f"178 wines by 13 measures in 3 classes (Forina, UCI 1991); {_HOST}"
BREAST_CANCER = f"569 tumours by 30 measures in 2 classes (Wolberg, Mangasarian and Street, UCI 1995); {_HOST}"
WIDTH, HIDDEN = 8, (8, 8)


def iris() -> Task:
    """Fisher's iris flowers: 64 examples train, four batches of 16."""
    from sklearn.datasets import load_iris

    return _task("iris", IRIS, load_iris, sizes=(64, 32, 16, 38), batch=16)


def wine() -> Task:
    """Wines of three growers: 80 examples train, five batches of 16."""
    from sklearn.datasets import load_wine

    return _task("wine", WINE, load_wine, sizes=(80, 32, 16, 50), batch=16)


def breast_cancer() -> Task:
    """Tumours, malignant or benign: 256 examples train, eight batches of 32."""
    from sklearn.datasets import load_breast_cancer

    return _task("breast-cancer", BREAST_CANCER, load_breast_cancer, sizes=(256, 96, 64, 153), batch=32)


def _task(name: str, summary: str, load: Callable[[], Any], *, sizes: tuple[int, int, int, int], batch: int) -> Task:
    """Features standardized by the train split, in torch's default dtype; sizes of train, probe, validation and test."""
    data = load()
    x = torch.from_numpy(data.data).to(torch.get_default_dtype())
    y = torch.from_numpy(data.target).to(torch.int64)
    classes = len(data.target_names)
    check_examples(x, y, classes)
    return Task(
        name=name,
        summary=summary,
        host=MLP(inputs=x.shape[1], width=WIDTH, hidden=HIDDEN, outputs=classes),
        **standardized(split(x, y, sizes=sizes, seed=0))._asdict(),
        objective=Classification(classes),
        menu=VECTOR_MENU,
        defaults={"steps": 24, "data": {"batch": batch, "batches_per_step": 16}},
    )
