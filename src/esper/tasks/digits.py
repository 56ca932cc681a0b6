"""Handwritten digits: on a residual host, and on a host with two narrow blocks."""

from dataclasses import replace

from esper.leyline.data.task import Task
from esper.tasks.hosts.factories import MLP, ResidualMLP, room_for
from esper.tasks.small import table_task

_DATA = "1,797 handwritten digits of 8 x 8 pixels in 10 classes"
SUMMARY = f"{_DATA}; a residual network"
NARROW = f"{_DATA}; an MLP that is narrow in two of its three blocks"
SIZES = (1024, 256, 128, 389)  # train, probe, validation, test; 16 batches of 64 are one epoch
HOST = ResidualMLP(inputs=64, width=32, hidden=(32,) * 3, outputs=10)


def digits() -> Task:
    """Scikit-learn's digits (Alpaydin and Kaynak, UCI 1998): 64 features and 10 classes, on a residual host."""
    from sklearn.datasets import load_digits  # a second of imports that no other task needs

    return table_task("digits", SUMMARY, load_digits(), HOST, sizes=SIZES, batches=(64, 16))


def digits_narrow(hidden: tuple[int, ...] = (4, 12, 5), width: int = 16) -> Task:
    """`digits` on a damaged host without skip connections in which two blocks are too narrow: a test of controllers.

    With the default sizes, bypasses around the first and the last block restore what the host loses, and a bypass around the
    middle block adds almost nothing.

    Raises InputError if a width is under 1.
    """
    host = MLP(inputs=64, width=width, hidden=hidden, outputs=10)
    return replace(digits(), name="digits-narrow", summary=NARROW, host=host, room=room_for(host))
