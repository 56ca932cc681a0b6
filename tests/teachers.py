"""Decide several times in one step by a rule, for the tests of policies that do so too."""

import numpy as np

from esper.leyline.lifecycle.masks import complete, defaults
from esper.leyline.lifecycle.vocabulary import Actions, Head, Op, Refusal
from esper.tamiyo.policy.packages import INNER, indices
from esper.tamiyo.rules.base import Rule


class Everywhere(Rule):
    """Plants a bypass of rank 1 in every slot where one fits, all in the first step of an episode."""

    def act(self, view):
        self.refused = np.full(view.masks.blueprint.shape[:2], view.step > 0)
        return self.plant(view)

    def further(self, view, refused):
        self.refused[refused != Refusal.NONE] = True
        actions = self.plant(view)
        return actions if (actions.op != Op.WAIT).any() else None

    def package(self, view):
        return np.where(self.left(view).any(1), indices(view.space, [INNER])[0], -1)

    def left(self, view):
        return view.masks.blueprint[..., indices(view.space, [INNER])[0]] & ~self.refused

    def plant(self, view):
        left = self.left(view)
        choices = {**defaults(view.space), Head.BLUEPRINT: indices(view.space, [INNER])[0]}
        planting = complete(view.masks, np.full(len(left), Op.GERMINATE), left.argmax(1), choices)
        waiting = Actions.wait(len(left))
        return Actions(*(np.where(left.any(1), *pair) for pair in zip(planting, waiting, strict=True)))
