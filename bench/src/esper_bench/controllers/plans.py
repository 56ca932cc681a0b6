"""Name ways to place seeds in a trained host, of which a controller chooses one. E environments, S slots, P choices.

A plan is free of the size of the host: it names what it plants relative to one slot or several, or at all slots.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from esper.leyline.lifecycle.view import Space
from esper.leyline.lifecycle.vocabulary import Ints
from esper.tamiyo.policy.packages import indices, inner_slots

RANKS = ("bypass-rank-8", "bypass-rank-4", "bypass-rank-2", "bypass-rank-1")
"""Bypasses from the largest to the smallest: a plan takes the first that the budget of parameters allows."""


class Plan(NamedTuple):
    """Says what to plant.

    Attributes:
        name (str): name of the plan
        here (names): choices for the slots that the plan is for, in the order in which they are tried
        others (names): choices for the other slots whose segments keep the width of the stream, after those of these slots
        everywhere (bool): whether `here` is for every slot that it fits, instead of those that keep the width, if the plan
            has no slot
    """

    name: str
    here: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    everywhere: bool = False


NONE = Plan("none")
UNIFORM = Plan("uniform", ("bypass-rank-1",), ("bypass-rank-1",))
BYPASS = Plan("bypass", RANKS)
"""The largest bypass at one slot: around the embedding it is an input adapter."""
MIXED = Plan("bypass and uniform", RANKS[1:], ("bypass-rank-1",))
SEVERAL = Plan("rank 2 and uniform", RANKS[2:], ("bypass-rank-1",))
"""Bypasses of rank 2 at several slots; a larger one at the first would leave too little for the others."""
HERE = Plan("low rank", ("low-rank",))
"""A linear map of rank 2 of the stream: before the last layer it corrects the head."""

UNIFORM_2 = Plan("uniform of rank 2", RANKS[2:], RANKS[2:])
"""A bypass of rank 2 around every block, as far as the cap allows."""
UNIFORM_8 = Plan("uniform of rank 8", RANKS, RANKS)
"""The largest bypass around every block."""
UNIFORM_MLP = Plan("uniform of hidden layers", ("bypass-mlp-small",), ("bypass-mlp-small",))
SPARSE_ROWS = Plan("sparse rows", ("sparse-rows",))
"""Rows of the embedding, for the slot behind it."""
SPARSE_HEAD = Plan("sparse head", ("sparse-head",))
"""Rows of the head, for the slot behind it."""
FULL_HEAD = Plan("full head", ("full-head",))
LOW_RANK_HEAD = Plan("low rank head", RANKS)
"""The largest bypass around the last layer, for the slot behind it."""
LOGITS = Plan("map of the logits", ("low-rank",))
"""A linear map of rank 2 of the outputs, for the slot behind the head."""
UNIFORM_HEAD = Plan("uniform and head", UNIFORM.here, UNIFORM.others)
"""A bypass of rank 1 around every block, and around the last layer."""
UNIFORM_ENDS = Plan("uniform at every slot", UNIFORM.here, everywhere=True)
HERE_MIXED = Plan("low rank and uniform", HERE.here, UNIFORM.others)
SPARSE_ROWS_MIXED = Plan("sparse rows and uniform", SPARSE_ROWS.here, UNIFORM.others)
LOW_RANK_HEAD_MIXED = Plan("low rank head and uniform", RANKS[1:], UNIFORM.others)
LOGITS_MIXED = Plan("map of the logits and uniform", LOGITS.here, UNIFORM.others)
SPARSE_HEAD_MIXED = Plan("sparse head and uniform", SPARSE_HEAD.here, UNIFORM.others)
FULL_HEAD_MIXED = Plan("full head and uniform", FULL_HEAD.here, UNIFORM.others)
LINEAR = Plan("linear bypass", ("bypass-linear",))
HIDDEN = Plan("hidden bypass", ("bypass-mlp",))
SKIP = Plan("skip from the input", ("skip-mlp",))
"""For the last slot: it goes around all blocks at once."""

PLACED = (NONE, BYPASS, MIXED, HERE)
"""The plans that trees choose from beside UNIFORM: NONE has no slot, and HERE takes the last in front of the last layer."""
PACKAGES = (UNIFORM_2, UNIFORM_ENDS)
"""Further plans without a slot."""
AT_EMBEDDING = (SPARSE_ROWS, SPARSE_ROWS_MIXED)
AT_HEAD = (
    LOW_RANK_HEAD,
    LOW_RANK_HEAD_MIXED,
    LOGITS,
    LOGITS_MIXED,
    UNIFORM_HEAD,
    FULL_HEAD,
    FULL_HEAD_MIXED,
    SPARSE_HEAD,
    SPARSE_HEAD_MIXED,
)
FURTHER = (*PACKAGES, HERE_MIXED, *AT_EMBEDDING, *AT_HEAD)
"""Further plans for hosts with a slot behind the last layer: `heal-full`."""
LARGER = (LINEAR, HIDDEN)
"""Plans with seeds of more parameters, for hosts that train."""


def wished(space: Space, plan: Plan, slot: Ints) -> Ints:
    """Return (E, S, P) what the plan plants for the slots (E,) or (E, n), -1 for none: indices into the menu, -1 at the end."""
    here, others = indices(space, plan.here), indices(space, plan.others)
    size = max(len(here), len(others), 1)
    inner = inner_slots(space)
    blueprint = np.full((*inner.shape, size), -1)
    unplaced = np.ones_like(inner) if plan.everywhere else inner
    slots = slot.reshape(len(slot), -1, 1)
    own = np.where((slots < 0).all(1), unplaced, (np.arange(inner.shape[1]) == slots).any(1))
    for where, choices in ((inner, others), (own, here)):
        blueprint[where] = [*choices, *[-1] * (size - len(choices))]
    return blueprint


class Placed(NamedTuple):
    """Holds a plan at a slot.

    Attributes:
        plan (Plan): the plan
        slot (int): index of the slot; -1 for a plan that has no slot
        further (ints): indices of further slots that the plan is for
    """

    plan: Plan
    slot: int = -1
    further: tuple[int, ...] = ()

    @property
    def slots(self) -> tuple[int, ...]:
        """Indices of all slots that the plan is for; -1 alone for a plan that has none."""
        return (self.slot, *self.further)

    @property
    def name(self) -> str:
        """The name of the plan, with the indices of its slots."""
        return self.plan.name if self.slot < 0 else f"{self.plan.name} at {' and '.join(map(str, self.slots))}"

    def words(self, space: Space) -> str:
        """Name the plan and its slots in words."""
        names = (space.slots[slot] for slot in self.slots)
        return self.plan.name if self.slot < 0 else f"{self.plan.name} at {' and '.join(names)}"

    def plants(self, space: Space) -> str:
        """Say what the plan plants where. Of several blueprints, it plants the first that the budget of parameters allows."""
        here, others = " or ".join(self.plan.here), " or ".join(self.plan.others)
        if not here:
            return "nothing"
        if self.slot < 0:
            return f"{here} at every slot that {'it fits' if self.plan.everywhere else 'keeps the width of the stream'}"
        return f"{here} at {space.slots[self.slot]}{f', and {others} at the other slots' if others else ''}"


def stream_slots(space: Space) -> int:
    """Count the slots in front of the last layer, which come first."""
    return len(space.slots) - space.heads


def places(plan: Plan, slots: int, heads: int) -> Sequence[int]:
    """List the slots that a plan may be for, on a host with `slots` in front of the last layer and `heads` behind it.

    -1 stands for no slot. A plan of AT_HEAD has no place on a host without a slot behind the last layer.
    """
    if plan in (NONE, UNIFORM, *PACKAGES):
        return [-1]
    if plan in AT_HEAD:
        return range(slots, slots + heads)
    if plan in AT_EMBEDDING:
        return range(1)
    return range(slots - 1 if plan in (HERE, HERE_MIXED) else 0, slots)


def placed_plans(slots: int, heads: int = 0) -> list[Placed]:
    """List UNIFORM and PLACED at each of their places, and FURTHER as well where a slot lies behind the last layer."""
    plans = (NONE, UNIFORM, *PLACED[1:], *(FURTHER if heads else ()))
    return [Placed(plan, slot) for plan in plans for slot in places(plan, slots, heads)]


def choices_of(space: Space) -> list[Placed]:
    """List the plans that rules and trees choose from (`placed_plans`), without those that plant the same as one before."""
    return _different(space, placed_plans(stream_slots(space), space.heads))


def plans_of(space: Space) -> list[Placed]:
    """List every plan of the menu: `choices_of`, then each blueprint at each slot that it fits, and each at every such slot."""
    slots = range(len(space.slots))
    singles, packages = [], []
    for index, blueprint in enumerate(space.blueprints):
        plan = Plan(blueprint.name, (blueprint.name,))
        singles += [Placed(plan, slot) for slot in slots if space.fits[slot, index]]
        packages.append(Placed(Plan(f"{blueprint.name} everywhere", (blueprint.name,), everywhere=True)))
    return _different(space, [*choices_of(space), *singles, *packages])


def _different(space: Space, plans: Sequence[Placed]) -> list[Placed]:
    """Drop each plan that plants the same as one before it, at every slot that they fit, in all environments."""
    found: dict[bytes, Placed] = {}
    size = len(space.blueprints)
    for placed in plans:
        wish = wished(space, placed.plan, np.tile(placed.slots, (len(space.width), 1)))  # (E, S, P)
        fits = np.broadcast_to(space.fits, (*wish.shape[:2], size))
        able = np.take_along_axis(fits, np.maximum(wish, 0), 2) & (wish >= 0)
        last = np.where(able, 0, 1).argsort(2, kind="stable")  # what fits comes first, in its order
        kept = np.take_along_axis(np.where(able, wish, -1), last, 2)
        whole = np.pad(kept, ((0, 0), (0, 0), (0, max(size - kept.shape[2], 0))), constant_values=-1)
        found.setdefault(whole[:, :, :size].tobytes(), placed)
    return list(found.values())
