"""Training examples that are read when a batch needs them, instead of being held in memory."""

from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from esper.leyline.task import Split

SENSED = 256
"""Training examples that the growth sensors are measured on, the first of the train split [examples]."""


class Source(Protocol):
    """The examples of a train split by their place in it. A place always holds the same example."""

    def __len__(self) -> int:
        """The number of training examples."""
        ...

    def read(self, places: NDArray[np.int64]) -> "Split":
        """The examples at these places (n,), all finite, in the shapes and dtypes of the task's `train`."""
        ...
