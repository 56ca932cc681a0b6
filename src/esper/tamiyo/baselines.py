"""Controllers that do not look at what they grow, and the choice of valid heads that every rule shares.

E environments, S slots.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from esper.leyline.actions import RELEVANT, Actions, Blend, Head, Ints, Op
from esper.leyline.keys import Purpose, key, uniform
from esper.leyline.view import Bools, Masks, Outcome, Space, View

TEMPO = 2
"""Ramp length of a decision that names none [steps]."""


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

    A draw is a hash of (run seed, environment, episode, step, head), so what an environment does depends neither on the
    others nor on what was drawn before.
    """

    def act(self, view: View) -> Actions:
        """One valid decision per environment; a head that does not matter is 0."""
        space, chosen = view.space, Actions.wait(len(view.masks.op))
        for head in Head:
            valid = choices(view.masks, head, chosen.op, chosen.slot)
            keys = key(space.seed, Purpose.POLICY, np.arange(len(valid)), view.episode, view.step, head)
            rank = np.floor(uniform(keys) * valid.sum(1))  # the rank-th valid choice, counted from 0
            choice = (valid.cumsum(1) > rank[:, None]).argmax(1)
            chosen = chosen._replace(**{head.name.lower(): np.where(RELEVANT[chosen.op, head], choice, 0)})
        return chosen


def choices(masks: Masks, head: Head, op: Ints, slot: Ints) -> Bools:
    """Which choices of a head are valid, given the op and the slot; all of them where the head does not matter.

    op, slot: (E, ...); a head does not read what is chosen after it.  Returns (E, ..., choices of the head).
    """
    assert op.shape == slot.shape, (op.shape, slot.shape)
    env = np.broadcast_to(np.arange(len(op)).reshape(-1, *(1,) * (op.ndim - 1)), op.shape)
    match head:
        case Head.OP:
            return masks.op[env]
        case Head.SLOT:
            valid = masks.slot[env, op]
        case Head.BLUEPRINT:
            valid = masks.blueprint[env, slot]
        case Head.BLEND:
            valid = masks.blend[env, slot]
        case Head.TEMPO:
            valid = masks.tempo[env, op, slot]
        case Head.TARGET:
            valid = masks.target[env, op, slot]
    irrelevant: Bools = ~RELEVANT[op, head][..., None]
    return valid | irrelevant


def defaults(space: Space) -> dict[Head, int]:
    """The choice of each head that a decision leaves open: ADD, a ramp of `TEMPO` steps, and the full dose.

    Where the space lacks that ramp it is the first that is longer than 0; where it lacks dose 1, its largest.
    """
    ramps = space.tempos
    tempo = ramps.index(TEMPO) if TEMPO in ramps else next(i for i, steps in enumerate(ramps) if steps > 0)
    return {Head.BLUEPRINT: 0, Head.BLEND: Blend.ADD, Head.TEMPO: tempo, Head.TARGET: int(np.argmax(space.targets))}


def complete(masks: Masks, op: Ints, slot: Ints, wanted: Mapping[Head, Ints | int]) -> Actions:
    """A decision per environment from its op and slot, (E,), and the wanted choice of each later head, (E,) or for all.

    Where the masks refuse a wanted choice, the first that they allow is taken: a doomed seed is pruned at tempo 0 only.
    A head that does not matter is 0.
    """
    chosen = [op, np.where(op == Op.WAIT, 0, slot)]
    for head in (Head.BLUEPRINT, Head.BLEND, Head.TEMPO, Head.TARGET):
        valid = choices(masks, head, op, slot)
        choice = np.broadcast_to(np.asarray(wanted[head], np.int64), op.shape)
        refused = ~np.take_along_axis(valid, choice[:, None], axis=1)[:, 0]
        chosen.append(np.where(RELEVANT[op, head], np.where(refused, valid.argmax(1), choice), 0))
    return Actions(*chosen)
