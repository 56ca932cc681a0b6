"""The protocols of controllers and rewards."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from esper.leyline.actions import Actions, Op
from esper.leyline.view import Outcome, View


@runtime_checkable
class PolicyClient(Protocol):
    """A controller, such as a rule, a learner or a replay. The engine calls these three methods and no others."""

    def act(self, view: View) -> Actions:
        """Decide once per environment. A decision that the masks forbid is refused and changes nothing."""
        ...

    def store(self, outcome: Outcome) -> None:
        """Receive the result of the last decisions."""
        ...

    def update(self) -> Mapping[str, float]:
        """Learn from the stored outcomes after a round. Returns figures for telemetry."""
        ...


@runtime_checkable
class Resumable(Protocol):
    """A controller whose runs can be resumed."""

    def state(self) -> dict[str, Any]:
        """The whole state: nested dicts and lists of arrays, tensors and plain values."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state` returned. Raises ValueError or InputError if it does not fit."""
        ...


@runtime_checkable
class Senses(Protocol):
    """A controller that reads the growth sensors, `Measurements.sensors`."""

    sensors_every: int  # steps between measurements that it needs; used if `probe.sensors_every` is null [steps]


@runtime_checkable
class SelectsSensors(Protocol):
    """A controller that reads some families of growth sensors and no others, so that the others are not computed for it."""

    sensor_families: Sequence[
        str
    ]  # those of `probe.sensors`; used if that and `probe.sensors_every` are null; empty for all


@runtime_checkable
class EndsSensing(Protocol):
    """A controller that may have read all growth sensors that it needs in an episode, so that they are not measured again."""

    def sensing(self) -> bool:
        """Whether it reads sensors at a later decision of the episode. Called after `act`."""
        ...


@runtime_checkable
class Cites(Protocol):
    """A controller that says which growth sensors its decisions depend on, so that the events hold their values."""

    sensors_read: Mapping[Op, Sequence[str]]  # names of sensors of the slot, by operation


@runtime_checkable
class Extends(Protocol):
    """A controller that makes several decisions for an environment in one step, for example to plant several seeds at once."""

    def further(self, view: View, refused: NDArray[np.int8]) -> Actions | None:
        """The next decisions of this step, or None to begin the training of the step.

        view: the view after the last decisions; its measurements are those before the step. refused: (E,) a `Refusal` for each
        environment, of the last decisions of this step.
        """
        ...


class Proposed(NamedTuple):
    """Candidates that are tried before a decision. An environment may have several.

    Attributes:
        env ((n,) int64): the environment that each candidate is for
        client (PolicyClient): decides for the n copies, in this order
        steps (int): length of the trial [steps]
    """

    env: NDArray[np.int64]
    client: PolicyClient
    steps: int


@runtime_checkable
class Tries(Protocol):
    """A controller that has candidates tried in copies of the environments before it decides."""

    def proposals(self, view: View) -> Proposed | None:
        """What is tried before the next decision; None for nothing. Called before every `act`."""
        ...

    def tried(self, worth: NDArray[np.float64]) -> None:
        """Receive (n,) J on the probe split of the copies after the trial. Called before `act`."""
        ...


@runtime_checkable
class Explains(Protocol):
    """A controller that gives reasons for its decisions."""

    def reasons(self) -> Sequence[str | None]:
        """The reason of each environment's last GERMINATE, PRUNE or FOSSILIZE, in one clause; None for other decisions."""
        ...

    def explain(self) -> Sequence[str]:
        """Why nothing was planted so far: one sentence per reason, with the config key to change."""
        ...


class Judgement(NamedTuple):
    """What a policy thought of its last decisions. The heads are in the order of `Head`.

    Attributes:
        probability ((E, heads) float64): probability of the choice of each head; nan where the operation does not read the head
        entropy ((E, heads) float64): entropy of the distribution of each head; nan likewise [nats]
        value ((E,) float64): return that the policy expects from this step on
    """

    probability: NDArray[np.float64]
    entropy: NDArray[np.float64]
    value: NDArray[np.float64]


@runtime_checkable
class Judges(Protocol):
    """A controller that tells how likely its decisions were."""

    def judgement(self) -> Judgement:
        """That of the last decisions. Called after `act`."""
        ...


class Reward(Protocol):
    """A function from the outcome of a step to its reward."""

    def __call__(self, outcome: Outcome) -> Mapping[str, NDArray[np.float64]]:
        """Named components, each (E,) float64, whose sum is the reward."""
        ...
