"""Define the base of rules, and the controllers that ignore measurements. E environments."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from esper.leyline.data.keys import Purpose, key, uniform
from esper.leyline.lifecycle.masks import draw_uniform
from esper.leyline.lifecycle.view import Bools, Floats, View
from esper.leyline.lifecycle.vocabulary import Actions, Head
from esper.leyline.protocols import Controller


class Rule(Controller):
    """Lets runs of a controller that does not learn be resumed. A rule with a state overrides `state` and `load_state`."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Ignore the state."""


class Never(Rule):
    """Decides WAIT always, so the host is trained without growth."""

    def act(self, view: View) -> Actions:
        return Actions.wait(len(view.masks.op))

    def plants(self, view: View) -> Bools:
        """Return no seed, because none will be planted."""
        return np.zeros_like(view.masks.blueprint)


class RandomValid(Rule):
    """Draws an operation uniformly from the valid ones, then each relevant head from its valid choices, in their order."""

    def act(self, view: View) -> Actions:
        """Return one valid decision per environment. A head that the operation does not use is 0."""
        return draw_uniform(view.masks, draws(view))


def draws(view: View, further: int = 0) -> Floats:
    """Draw (heads, E) uniform in [0, 1) for the decisions of a step.

    A draw is a hash of (run seed, number of the environment, episode, step, head), so a decision depends neither on other
    environments, nor on earlier draws, nor on the index of the environment in its population.
    further: number of the decision within the step, from 0.
    """
    space, heads = view.space, np.array(list(Head))[:, None]
    return uniform(
        key(space.seed, Purpose.POLICY, space.number, view.episode, view.step, heads, *([further] if further else []))
    )
