"""A task: data in four splits, a host to grow, and what counts as good. E rows, B examples, C outputs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn


class Split(NamedTuple):
    """Examples that are used together."""

    x: Tensor  # (N, ...) floating point
    y: Tensor  # (N,) int64 class labels, or (N, C) floating-point targets


class Objective(Protocol):
    """What is minimised and what is reported, per example and for a stack of rows at once."""

    metric: str  # name of the mean of `score`: 'accuracy', 'r2'
    outputs: int  # C

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """output (E, B, C), target (E, B) or (E, B, C) -> (E, B) losses to minimise."""
        ...

    def score(self, output: Tensor, target: Tensor) -> Tensor:
        """output (E, B, C), target (E, B) or (E, B, C), a whole split -> (E, B) whose mean over B is the metric."""
        ...


@dataclass(frozen=True)
class Task:
    """A host, its data and its menu. `host()` returns a freshly initialised `SegmentedHost` drawn from torch's generator."""

    name: str
    summary: str  # one line for `esper tasks`
    host: Callable[[], nn.Module]
    train: Split  # read by the optimizer
    probe: Split  # read by gates, rewards and attribution
    validation: Split  # read by the selection of models and policies
    test: Split | None  # read by the final evaluation alone; None in the copy that an engine holds
    objective: Objective
    menu: tuple[str, ...]  # names of blueprints
    defaults: Mapping[str, Any] = field(default_factory=dict)  # config that the task sets, under the user's own

    def sealed(self) -> "Task":
        """The same task without its test split: all that an engine is given."""
        return replace(self, test=None)
