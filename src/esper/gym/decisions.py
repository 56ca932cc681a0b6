"""Decisions as one flat choice: a table of all that differ, and which of them the masks allow. E environments, N decisions."""

import itertools
from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from esper.leyline.actions import RELEVANT, Blend, Head, Op
from esper.leyline.errors import InputError
from esper.leyline.view import Bools, Masks, Space
from esper.tamiyo.baselines import choices, defaults


def enumerate_decisions(space: Space, heads: Collection[str] | None = None) -> NDArray[np.int64]:
    """(N, 6) every decision that some state allows, each once, in the order of `Head`; WAIT is the first.

    A head that does not matter for an operation is 0. `heads` names those that are free, op and slot among them; the others
    stay at `defaults`. None frees all: 1 + (S * K * blends * tempos * targets) + 2 S + (S * tempos * targets) + (S * tempos).
    """
    free, fixed = _named(heads), defaults(space)
    sizes = {
        Head.SLOT: len(space.slots),
        Head.BLUEPRINT: len(space.blueprints),
        Head.BLEND: len(Blend),
        Head.TEMPO: len(space.tempos),
        Head.TARGET: len(space.targets),
    }

    def options(op: Op, head: Head) -> Collection[int]:
        if not RELEVANT[op, head]:
            return (0,)
        return range(sizes[head]) if head in free else (fixed[head],)

    table = [
        (op, *rest) for op in Op for rest in itertools.product(*(options(op, head) for head in Head if head != Head.OP))
    ]
    decisions: NDArray[np.int64] = np.array(table, np.int64)
    op, slot, blueprint, _, tempo, _ = decisions.T
    plantable = space.fits[slot, blueprint] & (np.array(space.tempos)[tempo] > 0)
    used = np.logical_or.reduce(space.fits, axis=1)[slot] | (op == Op.WAIT)
    possible: Bools = np.where(op == Op.GERMINATE, plantable, used)
    return decisions[possible]


def allowed_decisions(masks: Masks, decisions: NDArray[np.int64]) -> Bools:
    """(E, N): whether an environment may take a decision now, for all at once; exactly those that an engine accepts."""
    shape = (len(masks.op), len(decisions))
    op, slot = (np.broadcast_to(decisions[:, head], shape) for head in (Head.OP, Head.SLOT))
    allowed = np.ones(shape, bool)
    for head in Head:
        choice = np.broadcast_to(decisions[:, head], shape)[..., None]
        allowed &= np.take_along_axis(choices(masks, head, op, slot), choice, axis=2)[..., 0]
    return allowed


def _named(heads: Collection[str] | None) -> frozenset[Head]:
    if heads is None:
        return frozenset(Head)
    names = [head.name.lower() for head in Head]
    if isinstance(heads, str) or not {"op", "slot"} <= set(heads) <= set(names):
        given = heads if isinstance(heads, str) else ", ".join(map(str, heads))
        raise InputError(f"heads are {given}; give op, slot, and any of {', '.join(names[2:])}, as a list of names")
    return frozenset(Head[name.upper()] for name in heads)
