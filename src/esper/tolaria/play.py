"""Play an episode: a controller decides, the engine steps, and observers follow. E environments."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from esper.leyline.errors import InputError
from esper.leyline.lifecycle.actions import Actions, Op, checked_actions
from esper.leyline.lifecycle.verdicts import Refusal
from esper.leyline.lifecycle.view import Outcome, View
from esper.leyline.protocols import Controller, Judgement, Proposed

if TYPE_CHECKING:
    from esper.tolaria.engine import Engine  # which imports this module

Further = Callable[[View, NDArray[np.int8]], tuple[Actions, Sequence[str | None] | None] | None]
"""From a view and the `Refusal`s (E,) of the last decisions to further decisions of the step with their reasons, or None."""


class Decision(NamedTuple):
    """Holds the decisions of a controller, and its reasons."""

    actions: Actions  # (E,)
    reasons: Sequence[str | None] | None  # (E,), if the controller gives reasons
    judgement: Judgement | None = None  # if the controller is a policy
    sensors: Mapping[Op, Sequence[str]] | None = None  # names of those that the controller looked at


class Step(NamedTuple):
    """Holds one step that was played."""

    view: View  # the view that the decision was based on
    outcome: Outcome
    after: View  # the view for the next decision
    seconds: float  # of the controller and the engine, without observers
    deciding: float  # of the controller alone
    decision: Decision  # the decision whose result is `outcome`
    # further decisions of the step (E,), and a `Refusal` for each
    further: Sequence[tuple[Actions, NDArray[np.int8]]] = ()


class Observer:
    """Follows an episode. Each method does nothing unless a subclass overrides it."""

    def going(self, view: View) -> bool:
        """Return whether the episode goes on, before each decision of an unfinished one; after False no other is asked."""
        return True

    def stepped(self, step: Step) -> None:
        """Follow a step, once the controller has stored its outcome."""

    def failed(self, view: View) -> None:
        """Follow an error of the controller, which is raised again, instead of a decision. The engine is unchanged."""

    def broken(self) -> None:
        """Follow an error of a step of the engine, of which a part may have been done. The error is raised again."""


class Until(Observer):
    """Ends the playing when a function asks for it; `stopped` says whether it did."""

    def __init__(self, asked: Callable[[], bool]) -> None:
        self._asked = asked
        self.stopped = False

    def going(self, view: View) -> bool:
        self.stopped = self._asked()
        return not self.stopped


def planted(step: Step) -> int:
    """Return the number of seeds that a step planted, over all environments."""
    decided = [(step.outcome.actions, step.outcome.refused), *step.further]
    return sum(int(np.sum((refused == Refusal.NONE) & (actions.op == Op.GERMINATE))) for actions, refused in decided)


def decide(client: Controller, view: View, trial: Callable[[Proposed], NDArray[np.float64]] | None = None) -> Decision:
    """Ask a controller, after the trials that it wants. InputError if its answer is malformed, or if no trials can be made."""
    if (proposed := client.proposals(view)) is not None:
        if trial is None:
            raise InputError(
                "a trial needs copies of the network, which are not made here; take the rule without trials"
            )
        client.tried(trial(proposed))
    actions = checked_actions(client.act(view), len(view.host_params))
    sensors = dict(client.sensors_read)  # a plain dict can be sent to other processes
    return Decision(actions, client.reasons(), client.judgement(), sensors)


def play(
    engine: "Engine[Any]", client: Controller, *observers: Observer, first: Decision | None = None
) -> Outcome | None:
    """Play from the present state of the engine to the end of its episode, or until an observer ends the playing.

    `first` is the first decision, if it was made already. Returns the last outcome, or None if no step was taken. The
    controller's `update` is not called.
    """

    def further(view: View, refused: NDArray[np.int8]) -> tuple[Actions, Sequence[str | None] | None] | None:
        more = client.further(view, refused)
        return None if more is None else (more, client.reasons())

    view, outcome = engine.view(), None
    while not engine.over and all(observer.going(view) for observer in observers):
        begin = time.perf_counter()
        decision, first = first, None
        if decision is None:
            try:
                decision = decide(client, view, engine.trial)
            except Exception:  # a controller's code can raise any error, which is raised again below
                for observer in observers:
                    observer.failed(view)
                raise
        engine.sensing = client.sensing()
        decided = time.perf_counter()
        try:
            after, outcome = engine.step(decision.actions, decision.reasons, further)
        except Exception:  # of the data, the loss or the metric of the user, which is raised again below
            for observer in observers:
                observer.broken()
            raise
        told = time.perf_counter()
        client.store(outcome)
        end = time.perf_counter()
        step = Step(view, outcome, after, end - begin, decided - begin + end - told, decision, engine.further)
        for observer in observers:
            observer.stepped(step)
        view = after
    return outcome
