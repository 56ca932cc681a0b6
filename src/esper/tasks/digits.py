"""Handwritten digits: on a residual host, and on one with two narrow blocks."""

from dataclasses import replace

import torch

from esper.leyline.task import Task
from esper.tasks.hosts import MLP, VECTOR_MENU, ResidualMLP, roomy
from esper.tasks.objectives import Classification
from esper.tasks.splits import check_examples, scaling_of, split

_DATA = "1,797 handwritten digits of 8 x 8 pixels in 10 classes"
SUMMARY = f"{_DATA}; a residual network"
NARROW = f"{_DATA}; an MLP that is narrow in two of its three blocks"
SIZES = (1024, 256, 128, 389)  # train, probe, validation, test; 16 batches of 64 are one epoch
HOST = ResidualMLP(inputs=64, width=32, hidden=(32,) * 3, outputs=10)


def digits() -> Task:
    """Scikit-learn's digits (Alpaydin and Kaynak, UCI 1998): 64 features and 10 classes, on a residual host.

    Hosts read the features standardized by the train split. They have torch's default dtype, and the splits are the same in
    every run.
    """
    from sklearn.datasets import load_digits  # a second of imports that no other task needs

    data = load_digits()
    x = torch.from_numpy(data.data).to(torch.get_default_dtype())
    y = torch.from_numpy(data.target).to(torch.int64)
    check_examples(x, y, classes=10)
    splits = split(x, y, sizes=SIZES, seed=0)
    return Task(
        name="digits",
        summary=SUMMARY,
        host=HOST,
        room=roomy(HOST),
        **splits._asdict(),
        scaling=scaling_of(splits.train.x),
        objective=Classification(10),
        menu=VECTOR_MENU,
        defaults={"steps": 24, "data": {"batch_size": 64, "batches_per_step": 16}},
    )


def digits_narrow(hidden: tuple[int, ...] = (4, 12, 5), width: int = 16) -> Task:
    """`digits` on a damaged host, a test bench for controllers: no skips, and two blocks that are too narrow.

    With the default sizes, bypasses around the first and the last block repair what the host loses, and one around the
    middle block adds next to nothing.

    Raises InputError where a width is under 1.
    """
    host = MLP(inputs=64, width=width, hidden=hidden, outputs=10)
    return replace(digits(), name="digits-narrow", summary=NARROW, host=host, room=roomy(host))
