"""Play `grow-unknown`: plans, and rules by narrow blocks, gradients, examples seen and the slope of the loss.

E environments, S slots.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from esper.leyline.lifecycle.masks import complete, defaults
from esper.leyline.lifecycle.view import Bools, Floats, View, sensor
from esper.leyline.lifecycle.vocabulary import IN_BUDGET, Actions, Head, Ints, Op, Refusal, Stage, among
from esper.tamiyo.rules.base import Rule
from esper_bench.controllers.placement import ONCE


class Planting(Rule):
    """Plants seeds which act at once, and keeps them: a base of controllers.

    A subclass says in `wish` what is to be planted now. Of several slots the one with the least `order` comes first, and what
    the engine refuses is not tried again in the episode.
    """

    def __init__(self) -> None:
        self._refused: Bools = np.zeros((0, 0), bool)  # (E, S)
        self._last = Actions.wait(0)

    @abstractmethod
    def wish(self, view: View) -> Ints:
        """Return (E, S) the index of the blueprint that is to be planted in each slot now; -1 for none."""

    def order(self, view: View) -> Floats:
        """Return (E, S): the slot of the least value is planted first."""
        return np.broadcast_to(np.arange(float(view.seeds.stage.shape[1])), view.seeds.stage.shape)

    def begin(self, view: View) -> None:
        """Forget the last episode."""
        self._refused = np.zeros(view.seeds.stage.shape, bool)

    def act(self, view: View) -> Actions:
        """Return the first decision of a step."""
        if view.step == 0 or self._refused.shape != view.seeds.stage.shape:
            self.begin(view)
        return self._decide(view)

    def further(self, view: View, refused: NDArray[np.int8]) -> Actions | None:
        """Return the next decisions of the step; None where no environment has any."""
        rows = np.flatnonzero((self._last.op == Op.GERMINATE) & (refused != Refusal.NONE))
        self._refused[rows, self._last.slot[rows]] = True
        actions = self._decide(view)
        return actions if (actions.op != Op.WAIT).any() else None

    def state(self) -> dict[str, Any]:
        """Return the slots where the engine refused a seed."""
        return {"refused": self._refused}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`."""
        self._refused = state["refused"]

    def _decide(self, view: View) -> Actions:
        wish, may = self.wish(view), view.masks.slot
        plant = (wish >= 0) & may[:, Op.GERMINATE] & ~self._refused
        keep = may[:, Op.FOSSILIZE]
        first = np.where(plant, self.order(view), np.inf).argmin(1)
        op = np.where(plant.any(1), Op.GERMINATE, np.where(keep.any(1), Op.FOSSILIZE, Op.WAIT))
        slot = np.where(plant.any(1), first, keep.argmax(1))
        blueprint = np.maximum(wish[np.arange(len(slot)), slot], 0)
        at_once = view.space.tempos.index(0)
        wanted: dict[Head, Ints | int] = {**defaults(view.space), Head.BLUEPRINT: blueprint, Head.TEMPO: at_once}
        self._last = complete(view.masks, op.astype(np.int64), slot, wanted)
        return self._last


class Planned(Planting):
    """Plants a blueprint in some slots from a step on, the same in every environment."""

    def __init__(self, blueprint: str, slots: tuple[int, ...], at: int) -> None:
        super().__init__()
        self.blueprint, self.slots, self.at = blueprint, slots, at

    def __repr__(self) -> str:
        return f"{self.blueprint} at {', '.join(map(str, self.slots))} from step {self.at}"

    def wish(self, view: View) -> Ints:
        """Return the blueprint in the slots of the plan from its step on."""
        here = np.isin(np.arange(view.seeds.stage.shape[1]), self.slots) & (view.step >= self.at)
        return np.broadcast_to(np.where(here, _index(view, self.blueprint), -1), view.seeds.stage.shape)


class Narrowest(Planting):
    """Widens one block after another, first the one that loses the most directions before the first step: a base of rules.

    How many directions a stream has is its participation ratio (`participation`). A block of few hidden units leaves few of those
    that it reads.
    """

    sensors_every = ONCE
    sensor_families = ("participation",)

    def __init__(self, blueprint: str) -> None:
        super().__init__()
        self.blueprint = blueprint
        # (E, S) share of the directions that a block leaves, before the first step
        self._left: Floats = np.zeros((0, 0))

    @abstractmethod
    def due(self, view: View) -> Bools:
        """Return (E, S) whether a slot may be planted now."""

    def begin(self, view: View) -> None:
        """Read the sensors of the fresh network."""
        super().begin(view)
        before = np.maximum(sensor(view, "participation_before"), 1e-9)
        self._left = np.nan_to_num(sensor(view, "participation") / before, nan=1.0)

    def order(self, view: View) -> Floats:
        """Return the share of the directions that each block leaves: the narrowest comes first."""
        return self._left

    def wish(self, view: View) -> Ints:
        """Return the blueprint in every slot that is due."""
        return np.where(self.due(view), _index(view, self.blueprint), -1)

    def state(self) -> dict[str, Any]:
        """Return the slots where a seed was refused, and what the sensors showed."""
        return {**super().state(), "left": self._left}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`."""
        super().load_state(state)
        self._left = state["left"]


class WidenNarrow(Narrowest):
    """Widens the blocks that leave less than a share of the directions that they read, in the first step."""

    def __init__(self, blueprint: str = "bypass-mlp-2", below: float = 0.5) -> None:
        super().__init__(blueprint)
        self.below = below

    def __repr__(self) -> str:
        return f"{self.blueprint} where a block leaves less than {self.below:g} of the directions"

    def due(self, view: View) -> Bools:
        """Return the narrow blocks in the first step, and none later."""
        return (self._left < self.below) & (view.step == 0)


class WidenByGradient(Planting):
    """Widens one block every few steps, the one where new units have the largest gradient, until `count` are widened.

    The gradient is that of a zero linear map around the block (`map_gradient_before`). In a fresh network it says little of the
    place, and after some steps of training more.
    """

    sensors_every = 1
    sensor_families = ("gradient",)

    def __init__(self, blueprint: str, first: int, every: int, count: int) -> None:
        super().__init__()
        self.blueprint, self.first, self.every, self.count = blueprint, first, every, count

    def __repr__(self) -> str:
        steps = [self.first + self.every * number for number in range(self.count)]
        return f"{self.blueprint} at the largest gradient, in steps {', '.join(map(str, steps))}"

    def order(self, view: View) -> Floats:
        """Return the gradient with its sign changed: the largest comes first."""
        return -sensor(view, "map_gradient_before")

    def wish(self, view: View) -> Ints:
        """Return the blueprint in every free slot at the steps of the rule, as long as no seed was planted in the step."""
        seeds = view.seeds
        there = among(seeds.stage, IN_BUDGET)
        due = (there.sum(1) < self.count) & ~(there & (seeds.life == 0)).any(1)
        due &= (view.step >= self.first) & ((view.step - self.first) % self.every == 0)
        return np.where(due[:, None] & ~there, _index(view, self.blueprint), -1)


class WidenByExamples(Narrowest):
    """Widens the next block once the network has seen a number of examples for each of its parameters."""

    def __init__(self, blueprint: str, per_parameter: float, examples_per_step: int) -> None:
        super().__init__(blueprint)
        self.per_parameter, self.examples_per_step = per_parameter, examples_per_step

    def __repr__(self) -> str:
        return f"{self.blueprint} at {self.per_parameter:g} examples a parameter"

    def due(self, view: View) -> Bools:
        """Return every slot of a network that has seen enough examples."""
        size = view.host_params + view.added_params
        seen = view.step * self.examples_per_step
        return np.broadcast_to((seen >= self.per_parameter * size)[:, None], view.seeds.stage.shape)


class WidenBySlope(Narrowest):
    """Widens the next block when the probe loss has fallen by less than a share in the last `patience` steps.

    `patience` steps pass before the first planting and between two.
    """

    def __init__(self, blueprint: str, fall: float, patience: int = 3) -> None:
        super().__init__(blueprint)
        self.fall, self.patience = fall, patience
        self._losses: list[Floats] = []  # (E,) before each step

    def __repr__(self) -> str:
        return f"{self.blueprint} where the loss falls by less than {self.fall:g} in {self.patience} steps"

    def begin(self, view: View) -> None:
        """Forget the losses."""
        super().begin(view)
        self._losses = []

    def due(self, view: View) -> Bools:
        """Return every free slot of a network whose loss hardly falls and whose seeds are at least `patience` steps old."""
        self._losses = [*self._losses[: view.step], view.measurements.loss]  # the last is given again within a step
        shape = view.seeds.stage.shape
        if view.step < self.patience:
            return np.zeros(shape, bool)
        flat = self._losses[-1] > (1 - self.fall) * self._losses[-1 - self.patience]
        young = (among(view.seeds.stage, IN_BUDGET) & (view.seeds.life < self.patience)).any(1)
        return np.broadcast_to((flat & ~young)[:, None], shape) & (view.seeds.stage == Stage.DORMANT)

    def state(self) -> dict[str, Any]:
        """Return the slots where a seed was refused, what the sensors showed, and the losses."""
        return {**super().state(), "losses": list(self._losses)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`."""
        super().load_state(state)
        self._losses = list(state["losses"])


def _index(view: View, blueprint: str) -> int:
    return [each.name for each in view.space.blueprints].index(blueprint)
