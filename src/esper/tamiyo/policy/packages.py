"""Plant packages: by one decision of a policy, a blueprint in every slot whose segment keeps the width of the stream.

A policy with packages chooses among the blueprints of the menu and the packages, which come after them. E environments, S slots,
K blueprints of the menu, P packages.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from esper.leyline.lifecycle.view import Bools, Floats, Masks, Space, View, choose
from esper.leyline.lifecycle.vocabulary import Actions, Ints, Op

INNER = "bypass-rank-1"
"""Its price at a slot tells whether the segment before the slot keeps the width of the stream."""


def indices(space: Space, names: Sequence[str]) -> list[int]:
    """Return the indices of blueprints in the menu, in the order of the names; those that the menu lacks are left out."""
    menu = [blueprint.name for blueprint in space.blueprints]
    return [menu.index(name) for name in names if name in menu]


def inner_slots(space: Space) -> Bools:
    """Return (E, S): slots behind a segment that keeps the width of the stream, by the price of a bypass of rank 1 there."""
    choice = indices(space, (INNER,))
    if not choice:
        return np.zeros(space.width.shape, bool)
    cost = np.broadcast_to(space.cost[..., choice[0]], space.width.shape)
    return space.fits[:, choice[0]] & (cost == 2 * space.width)


class Opened(NamedTuple):
    """Lists packages that were chosen and are not planted completely."""

    slots: Bools  # (E, S) the slots that are still to be planted
    seed: Actions  # (E,) the decision whose blueprint, blend, tempo and target the seeds get

    @classmethod
    def none(cls, envs: int, slots: int) -> "Opened":
        return cls(np.zeros((envs, slots), bool), Actions.wait(envs))

    @property
    def rows(self) -> Bools:
        """(E,): whether a package of the environment has slots that are still to be planted."""
        return np.logical_or.reduce(self.slots, axis=1)


def package_slots(masks: Masks, space: Space, names: Sequence[str]) -> Bools:
    """Return (E, S, P): the slots that each package would plant now."""
    return masks.blueprint[..., indices(space, names)] & inner_slots(space)[..., None]


def with_packages(masks: Masks, space: Space, names: Sequence[str]) -> Masks:
    """Add packages to the masks as further choices of a blueprint, (E, S, K + P). A package is valid at each of its slots."""
    if not names:
        return masks
    return masks._replace(blueprint=np.concatenate([masks.blueprint, package_slots(masks, space, names)], 2))


def package_costs(view: View, names: Sequence[str]) -> Floats:
    """Compute (E, S, P) ln(1 + parameters of all seeds that the package would plant now / host parameters), at every slot."""
    cost = np.broadcast_to(view.space.cost, view.masks.blueprint.shape)[..., indices(view.space, names)]
    whole = (cost * package_slots(view.masks, view.space, names)).sum(1, keepdims=True)
    return np.broadcast_to(np.log1p(whole / view.host_params[:, None, None]), cost.shape)


def unpacked(
    view: View, chosen: Actions, names: Sequence[str], opened: Opened
) -> tuple[Actions, Opened, list[str | None]]:
    """Return what is carried out, the packages that are planted afterwards, and in words to which one a planting belongs.

    An environment with an opened package plants its next slot, the dearest first. Another one carries out what was `chosen`; of a
    package the first seed goes to the chosen slot.
    """
    space, envs = view.space, np.arange(len(view.masks.op))
    size, menu = len(space.blueprints), np.array(indices(space, names))
    opens: Bools = (chosen.op == Op.GERMINATE) & (chosen.blueprint >= size)
    package = np.where(opens, chosen.blueprint - size, 0)
    first = chosen._replace(blueprint=np.where(opens, menu[package], chosen.blueprint))
    others = package_slots(view.masks, space, names)[envs, :, package]
    others[envs, chosen.slot] = False

    goes_on, seed = opened.rows, opened.seed
    cost = np.broadcast_to(space.cost, view.masks.blueprint.shape)[envs, :, seed.blueprint]
    place = (opened.slots * (1 + cost)).argmax(1)
    more = seed._replace(op=np.full(len(envs), int(Op.GERMINATE)), slot=place)
    left = opened.slots & (np.arange(len(space.slots)) != place[:, None])
    carried: Actions = choose(goes_on, more, first)
    reasons = [
        f"{'a further' if further else 'the first'} seed of the package {space.blueprints[at].name}, one decision for every slot"
        if further or package_opens
        else None
        for package_opens, further, at in zip(opens.tolist(), goes_on.tolist(), carried.blueprint.tolist(), strict=True)
    ]
    return carried, choose(opens, Opened(others, first), Opened(left, seed)), reasons


def as_package(view: View, actions: Actions, names: Sequence[str], blueprint: Ints) -> Actions:
    """Return the decisions (E,) of a teacher, with a package where it is about to plant every slot of one with its blueprint.

    blueprint: (E,) the index into the menu that all slots of the package are to be planted with, -1 where there is none
    (`Controller.package`).
    """
    for number, at in enumerate(indices(view.space, names)):
        packs = (actions.op == Op.GERMINATE) & (actions.blueprint == at) & (blueprint == at)
        actions = actions._replace(blueprint=np.where(packs, len(view.space.blueprints) + number, actions.blueprint))
    return actions
