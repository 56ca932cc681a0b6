"""What rules have in common, and the controllers that do not look at what they grow. E environments."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from esper.leyline.actions import Actions, Head
from esper.leyline.keys import Purpose, key, uniform
from esper.leyline.masks import draw_uniform
from esper.leyline.view import Floats, Outcome, View


class Rule:
    """A controller that learns nothing: `act` is all there is to it. One that remembers says so in `state`."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def store(self, outcome: Outcome) -> None:
        """Nothing is kept."""

    def update(self) -> Mapping[str, float]:
        """Nothing is learnt."""
        return {}

    def state(self) -> dict[str, Any]:
        """Nothing is remembered."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Nothing to go on from."""


class Never(Rule):
    """WAIT, always: the host alone."""

    def act(self, view: View) -> Actions:
        """WAIT for every environment."""
        return Actions.wait(len(view.masks.op))


class RandomValid(Rule):
    """Uniform over the valid operations, then over the valid choices of each head that matters, in the order of `Head`.

    A draw is a hash of (run seed, number of the environment, episode, step, head), so what an environment does depends neither
    on the others nor on what was drawn before.
    """

    def act(self, view: View) -> Actions:
        """One valid decision per environment; a head that does not matter is 0."""
        return draw_uniform(view.masks, draws(view))


def draws(view: View) -> Floats:
    """(heads, E) in [0, 1) for the decisions of a step, keyed by the number of each environment.

    So what an environment does depends neither on the others nor on its place in a population.
    """
    space, heads = view.space, np.array(list(Head))[:, None]
    return uniform(key(space.seed, Purpose.POLICY, space.number, view.episode, view.step, heads))
