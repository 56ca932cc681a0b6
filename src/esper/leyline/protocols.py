"""What the parts ask of each other."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from esper.leyline.actions import Actions
from esper.leyline.slots import SlotSpec
from esper.leyline.view import Outcome, View


@runtime_checkable
class PolicyClient(Protocol):
    """A controller: a rule, a learner, a replay. The engine knows nothing else of it."""

    def act(self, view: View) -> Actions:
        """One decision per environment; what the masks refuse becomes a refused action, and changes nothing."""
        ...

    def store(self, outcome: Outcome) -> None:
        """The result of the decisions just made."""
        ...

    def update(self) -> Mapping[str, float]:
        """Learn, after a round. Returns figures for telemetry."""
        ...


@runtime_checkable
class Resumable(Protocol):
    """What can be taken up again: a controller whose run is to be resumed is one."""

    def state(self) -> dict[str, Any]:
        """All that it remembers: nested dicts and lists of arrays, tensors and plain values."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave. ValueError or InputError where it does not fit."""
        ...


@runtime_checkable
class Senses(Protocol):
    """A controller that reads the growth sensors, `Measurements.sensors`."""

    sensors_every: int  # cadence at which it needs them, where `probe.sensors_every` is null [steps]


@runtime_checkable
class Explains(Protocol):
    """A controller that says why it did what it did, and why not."""

    def reasons(self) -> Sequence[str | None]:
        """For each environment, why the last `act` decided to GERMINATE, PRUNE or FOSSILIZE, in one clause; None where it did
        not, or does not say.
        """
        ...

    def explain(self) -> Sequence[str]:
        """What kept it from planting so far, a sentence each, with the config key that changes it; none where nothing did."""
        ...


class Host(Protocol):
    """A network in segments with named slots between them; `esper.kasmina.SegmentedHost` is one."""

    @property
    def segments(self) -> Iterable[nn.Module]:
        """Run one after the other; segment k maps (B, ...) to (B, ...)."""
        ...

    @property
    def slots(self) -> Sequence[SlotSpec]:
        """In the order in which the network meets them."""
        ...

    def forward(self, x: Tensor) -> Tensor: ...


class Reward(Protocol):
    """What a step was worth."""

    def __call__(self, outcome: Outcome) -> Mapping[str, NDArray[np.float64]]:
        """Named components, each (E,), whose sum is the reward."""
        ...
