"""Define the base class of controllers, and the protocol of rewards."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from esper.leyline.lifecycle.view import Outcome, View
from esper.leyline.lifecycle.vocabulary import Actions, Op
from esper.leyline.messages import InputError, kind_of, with_article


class Controller(ABC):
    """Decides what grows, as a rule, a learner or a replay. A subclass defines `act`, and of the rest what it needs.

    Attributes:
        sensors_every (int): steps between measurements of the growth sensors that it needs, used if `probe.sensors_every` is
            null; 0 for none [steps]
        sensor_families (sequence of str): families of sensors that it reads, of those of `probe.sensors`, so that the others are
            not computed; used if that and `probe.sensors_every` are null; empty for all
        sensors_read (mapping): by operation, the names of the sensors of the slot that its decisions depend on, whose values the
            events keep
        digest (str): SHA-256 of the fitted arrays that decide, which the summary of a run keeps as `controller_digest`; empty
            for none
    """

    sensors_every: int = 0
    sensor_families: Sequence[str] = ()
    sensors_read: Mapping[Op, Sequence[str]] = MappingProxyType({})
    digest: str = ""

    @abstractmethod
    def act(self, view: View) -> Actions:
        """Decide once per environment. A decision that the masks forbid is refused and changes nothing."""

    def store(self, outcome: Outcome) -> None:  # noqa: B027 -- a default, which does nothing
        """Receive the result of the last decisions."""

    def update(self) -> Mapping[str, float]:
        """Learn from the stored outcomes after a round. Returns figures for telemetry."""
        return {}

    def state(self) -> dict[str, Any] | None:
        """Return the whole state: nested dicts and lists of arrays, tensors and plain values; None if runs cannot be resumed."""
        return None

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state` returned. Raises ValueError or InputError if it does not fit."""
        raise InputError(
            f"the controller is {kind_of(self)}, which cannot be resumed; give it the methods state and load_state"
        )

    def reasons(self) -> Sequence[str | None] | None:
        """Return the reason of each environment's last GERMINATE, PRUNE or FOSSILIZE, in one clause; None for other decisions."""
        return None

    def explain(self) -> Sequence[str]:
        """Return why nothing was planted so far: one sentence per reason, with the config key to change."""
        return ()

    def sensing(self) -> bool:
        """Return whether it reads growth sensors at a later decision of the episode. Called after `act`."""
        return True

    def plants(self, view: View) -> NDArray[np.bool_] | None:
        """Return (E, S, K): the seeds that it may still plant in this episode, whatever is measured from now on; None for any.

        `esper.Growth` stops measuring where no seed is under way and no such seed fits into the budget. Called after `act`.
        """
        return None

    def further(self, view: View, refused: NDArray[np.int8]) -> Actions | None:
        """Decide once more in this step, for example to plant several seeds at once; None begins the training of the step.

        view: the view after the last decisions; its measurements are those before the step. refused: (E,) a `Refusal` for each
        environment, of the last decisions of this step.
        """
        return None

    def proposals(self, view: View) -> "Proposed | None":
        """Return what to try in copies of the environments before the next decision; None for nothing. Called before `act`."""
        return None

    def tried(self, worth: NDArray[np.float64]) -> None:  # noqa: B027 -- a default, which does nothing
        """Receive (n,) J on the probe split of the copies after the trial. Called before `act`."""

    def package(self, view: View) -> NDArray[np.int64] | None:
        """Return (E,) the index of the blueprint still to be planted in each slot whose segment keeps the width of the stream.

        -1 where something else, or nothing, is to be planted. Called after `act`. Decisions of a controller that returns None
        are not imitated as packages (`ppo.packages`).
        """
        return None

    def judgement(self) -> "Judgement | None":
        """Return how likely the last decisions were, if it is a policy. Called after `act`."""
        return None


def as_controller(made: Any, subject: str = "controller is") -> Controller:
    """Return the controller, or add the defaults to an object with `act`, `store` and `update`. InputError for another."""
    if isinstance(made, Controller):
        return made
    cls = type(made)
    lacking = [name for name in ("act", "store", "update") if not callable(getattr(cls, name, None))]
    if lacking or isinstance(made, type):
        flaw = (
            f"the class {made.__name__}"
            if isinstance(made, type)
            else f"{with_article(cls.__name__)} without {' and '.join(lacking)}"
        )
        raise InputError(
            f"{subject} {flaw}; give an object with the methods act(view), store(outcome) and update(), or the name of a "
            "controller (`esper docs own-controller`)"
        )
    # The same attributes under a subclass of the same name, so that messages and saved states name the class of the user.
    of = type(cls.__name__, (cls, Controller), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})
    controller: Controller = object.__new__(of)
    controller.__dict__ = vars(made)
    return controller


class Proposed(NamedTuple):
    """Holds candidates that are tried before a decision. An environment may have several.

    Attributes:
        env ((n,) int64): the environment that each candidate is for
        client (Controller): decides for the n copies, in this order
        steps (int): length of the trial [steps]
    """

    env: NDArray[np.int64]
    client: Controller
    steps: int


class Judgement(NamedTuple):
    """Says what a policy thought of its last decisions. The heads are in the order of `Head`.

    Attributes:
        probability ((E, heads) float64): probability of the choice of each head; nan where the operation does not read the head
        entropy ((E, heads) float64): entropy of the distribution of each head; nan where the probability is [nats]
        value ((E,) float64): return that the policy expects from this step on
    """

    probability: NDArray[np.float64]
    entropy: NDArray[np.float64]
    value: NDArray[np.float64]


class Reward(Protocol):
    """Computes the reward of a step from its outcome."""

    def __call__(self, outcome: Outcome) -> Mapping[str, NDArray[np.float64]]:
        """Return the named components, each (E,) float64, whose sum is the reward."""
