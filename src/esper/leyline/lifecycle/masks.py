"""Answer questions about masks: which choices of a head are valid, which decisions are allowed, and how one is put together.

`kasmina/lifecycle.py::legal` makes the `Masks` of a state; every question about them is answered here. E environments.
"""

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from esper.leyline.lifecycle.view import Bools, Floats, Masks, Space
from esper.leyline.lifecycle.vocabulary import RELEVANT, Actions, Blend, Head, Ints, Op

TEMPO = 2
"""Ramp length of a decision that names none [steps]."""

DEPENDS: dict[Head, tuple[Head, ...]] = {
    Head.OP: (),
    Head.SLOT: (Head.OP,),
    Head.BLUEPRINT: (Head.SLOT,),
    Head.BLEND: (Head.SLOT,),
    Head.TEMPO: (Head.OP, Head.SLOT),
    Head.TARGET: (Head.OP, Head.SLOT),
}
"""The earlier choices that index the mask of a head. The fields of `Masks` are in the order of `Head`."""

OPEN = (Head.BLUEPRINT, Head.BLEND, Head.TEMPO, Head.TARGET)
"""The heads that follow once the operation and the slot are chosen."""


def choices(masks: Masks, head: Head, op: Ints, slot: Ints) -> Bools:
    """Return which choices of a head are valid, given the op and the slot; all of them where the head does not matter.

    op, slot: (E, ...); a head does not read what is chosen after it.  Returns (E, ..., choices of the head).
    """
    assert op.shape == slot.shape, (op.shape, slot.shape)
    chosen = {Head.OP: op, Head.SLOT: slot}
    env = np.broadcast_to(_environments(masks, op.ndim), op.shape)
    valid = masks[head][(env, *(chosen[earlier] for earlier in DEPENDS[head]))]
    irrelevant: Bools = ~RELEVANT[op, head][..., None]
    return valid | irrelevant


def offered(masks: Masks, actions: Actions) -> tuple[Bools, ...]:
    """Return, by head, (E, choices of the head): what was valid, given the choices that the decisions (E,) made before."""
    return tuple(choices(masks, head, actions.op, actions.slot) for head in Head)


def allowed(masks: Masks, actions: Actions, free: Bools | None = None) -> Bools:
    """Return (E,): whether the masks allow the decision, head by head; a choice out of range is not allowed.

    Decisions may be (E, ...), or (1, ...) for all environments. Of a head that is `free`, (6, 1, ...), any valid choice will do.
    """
    env = _environments(masks, actions.op.ndim)
    chosen = [np.clip(choice, 0, mask.shape[-1] - 1) for choice, mask in zip(actions, masks, strict=True)]
    found: Bools = np.ones((1,) * actions.op.ndim, bool)
    for head in Head:
        place = (env, *(chosen[earlier] for earlier in DEPENDS[head]))
        valid = masks[head][(*place, chosen[head])] & (chosen[head] == actions[head])
        if free is not None:
            valid = np.where(free[head], np.logical_or.reduce(masks[head], axis=-1)[place], valid)
        found = found & (valid | ~RELEVANT[chosen[Head.OP], head])
    return found


def allowed_of(masks: Masks, decisions: Ints, free: Bools | None = None) -> Bools:
    """Return (E, N) which decisions of a table (N, 6) each environment may take; any valid choice will do for a `free` head."""
    return allowed(masks, Actions(*decisions.T[:, None]), None if free is None else free.T[:, None])


def chosen_in_turn(masks: Masks, choose: Callable[[Head, Bools, Actions], Ints]) -> Actions:
    """Return a decision per environment, head after head; a head that does not matter is 0.

    choose(head, valid, actions) -> (E,) int64 gets what is valid of a head, (E, choices of the head), given the actions so far.
    """
    actions = Actions.wait(len(masks.op))
    for head in Head:
        choice = choose(head, choices(masks, head, actions.op, actions.slot), actions)
        op = choice if head == Head.OP else actions.op
        actions = actions._replace(**{head.name.lower(): np.where(RELEVANT[op, head], choice, 0)})
    return actions


def draw_uniform(masks: Masks, draws: Floats) -> Actions:
    """Return a valid decision per environment, uniform over operations, then over each head; draws: (heads, E) in [0, 1)."""

    def choose(head: Head, valid: Bools, actions: Actions) -> Ints:
        rank = np.floor(draws[head] * valid.sum(1))  # the rank-th valid choice, counted from 0
        return (valid.cumsum(1) > rank[:, None]).argmax(1)

    return chosen_in_turn(masks, choose)


def complete(masks: Masks, op: Ints, slot: Ints, wanted: Mapping[Head, Ints | int]) -> Actions:
    """Return a decision per environment from its op and slot, (E,), and the wanted choice of each later head, (E,) or for all.

    Where the masks refuse a wanted choice, the first that they allow is taken: a doomed seed is pruned at tempo 0 only.
    A head that does not matter is 0.
    """

    def choose(head: Head, valid: Bools, actions: Actions) -> Ints:
        if head in (Head.OP, Head.SLOT):
            return op if head == Head.OP else slot
        choice = np.broadcast_to(np.asarray(wanted[head], np.int64), op.shape)
        refused = ~np.take_along_axis(valid, choice[:, None], axis=1)[:, 0]
        return np.where(refused, valid.argmax(1), choice)

    return chosen_in_turn(masks, choose)


def barred(masks: Masks, op: Op, rows: Bools) -> Masks:
    """Return the masks with an operation forbidden in some rows, (E,) bool."""
    ops = masks.op.copy()
    ops[rows, op] = False
    return masks._replace(op=ops)


def only_wait(masks: Masks, rows: Bools) -> Masks:
    """Return the masks with WAIT as the only valid operation of some rows, (E,) bool."""
    ops = masks.op.copy()
    ops[rows] = np.arange(ops.shape[1]) == Op.WAIT
    return masks._replace(op=ops)


def without_blueprints(masks: Masks, forbidden: Bools) -> Masks:
    """Return the masks with blueprints forbidden at slots, (E, S, K) bool, and GERMINATE where none is left."""
    blueprint, slot, op = masks.blueprint & ~forbidden, masks.slot.copy(), masks.op.copy()
    slot[:, Op.GERMINATE] &= blueprint.any(2)
    op[:, Op.GERMINATE] &= slot[:, Op.GERMINATE].any(1)
    return masks._replace(op=op, slot=slot, blueprint=blueprint)


def defaults(space: Space) -> dict[Head, int]:
    """Return the choices that a decision leaves open: ADD, a ramp of `TEMPO` steps or the first above 0, and the largest dose."""
    ramps = space.tempos
    tempo = ramps.index(TEMPO) if TEMPO in ramps else next(i for i, steps in enumerate(ramps) if steps > 0)
    return {Head.BLUEPRINT: 0, Head.BLEND: Blend.ADD, Head.TEMPO: tempo, Head.TARGET: int(np.argmax(space.targets))}


def choices_of(space: Space) -> dict[Head, Sequence[Any]]:
    """Return what each head but the operation chooses among, in the order of its indices."""
    menu = [blueprint.name for blueprint in space.blueprints]
    return dict(zip(list(Head)[1:], (space.slots, menu, list(Blend), space.tempos, space.targets), strict=True))


def every_decision(space: Space, free: Collection[Head] = tuple(Head)) -> Ints:
    """Return (N, 6) every decision that some state allows, each once, in the order of `Head`; WAIT is the first.

    A head that does not matter for an operation is 0. OP, SLOT and the heads in `free` take every value; the others stay at
    `defaults`. All free: 1 + (S * K * blends * tempos * targets) + 2 S + (S * tempos * targets) + (S * tempos).
    """
    fixed = {head: choice for head, choice in defaults(space).items() if head not in free}
    every = choices_of(space)

    def values(op: Op, head: Head) -> Collection[int]:
        if not RELEVANT[op, head]:
            return (0,)
        return (fixed[head],) if head in fixed else range(len(every[head]))

    table = [(op, *rest) for op in Op for rest in itertools.product(*(values(op, head) for head in every))]
    decisions: Ints = np.array(table, np.int64)
    op, slot, blueprint, _, tempo, _ = decisions.T
    plantable = space.fits[slot, blueprint] & (np.array(space.tempos)[tempo] > 0)
    used = np.logical_or.reduce(space.fits, axis=1)[slot] | (op == Op.WAIT)
    possible: Bools = np.where(op == Op.GERMINATE, plantable, used)
    return decisions[possible]


def _environments(masks: Masks, dims: int) -> Ints:
    """Return (E, 1, ...) the index of each environment."""
    return np.arange(len(masks.op)).reshape(-1, *(1,) * (dims - 1))
