"""The one loop that plays: a controller decides, the engine steps, and observers follow. E environments."""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from esper.leyline.actions import Actions, Op, checked_actions
from esper.leyline.protocols import Explains, Judgement, Judges, PolicyClient
from esper.leyline.view import Outcome, View

if TYPE_CHECKING:
    from esper.tolaria.engine import Engine


class Decision(NamedTuple):
    """What a controller decided, and why."""

    actions: Actions  # (E,)
    reasons: Sequence[str | None] | None  # (E,), where the controller explains itself
    judgement: Judgement | None = None  # where the controller is a policy


class Step(NamedTuple):
    """One step that was played."""

    view: View  # what the decision was based on
    outcome: Outcome
    after: View  # what the next decision may be based on
    seconds: float  # of the controller and the engine; what observers do is not counted
    deciding: float  # those of them that the controller took
    decision: Decision  # of which `outcome` is the result


class Observer:
    """Follows an episode. Every method may be left as it is here, where it does nothing."""

    def going(self, view: View) -> bool:
        """Asked before each decision of an episode that is not over; False ends the playing, and nobody else is asked."""
        return True

    def stepped(self, step: Step) -> None:
        """A step is done, and the controller has been told its outcome."""

    def failed(self, view: View) -> None:
        """The controller raised an error instead of a decision; the engine is as it was before, and the error goes on."""


class Until(Observer):
    """Ends the playing where someone asks for an end; `stopped` says whether it did."""

    def __init__(self, asked: Callable[[], bool]) -> None:
        self._asked = asked
        self.stopped = False

    def going(self, view: View) -> bool:
        """Whether nobody asks."""
        self.stopped = self._asked()
        return not self.stopped


def planted(outcome: Outcome) -> int:
    """Seeds that a step planted, over all environments."""
    return int(np.sum(outcome.accepted & (outcome.actions.op == Op.GERMINATE)))


def decide(client: PolicyClient, view: View) -> Decision:
    """Ask a controller. Raises InputError if its answer is not one whole number per environment and head."""
    actions = checked_actions(client.act(view), len(view.host_params))
    return Decision(
        actions,
        client.reasons() if isinstance(client, Explains) else None,
        client.judgement() if isinstance(client, Judges) else None,
    )


def play(
    engine: "Engine[Any]", client: PolicyClient, *observers: Observer, first: Decision | None = None
) -> Outcome | None:
    """Play from where the engine is to the end of its episode, or until an observer does not want to go on.

    `first` is the first decision, where it was made already. Returns the last outcome, None where no step was taken. The
    controller is not asked to learn.
    """
    view, outcome = engine.view(), None
    while not engine.over and all(observer.going(view) for observer in observers):
        begin = time.perf_counter()
        decision, first = first, None
        if decision is None:
            try:
                decision = decide(client, view)
            except Exception:  # whatever a controller's code raises; it goes on below
                for observer in observers:
                    observer.failed(view)
                raise
        decided = time.perf_counter()
        after, outcome = engine.step(decision.actions, decision.reasons)
        told = time.perf_counter()
        client.store(outcome)
        end = time.perf_counter()
        step = Step(view, outcome, after, end - begin, decided - begin + end - told, decision)
        for observer in observers:
            observer.stepped(step)
        view = after
    return outcome
