"""Read the host once, plant all seeds in the first step, and keep them: controllers of this kind.

E environments, S slots, P choices.
"""

from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from esper.leyline.lifecycle.masks import complete, defaults
from esper.leyline.lifecycle.view import Bools, Floats, Outcome, View, sensor
from esper.leyline.lifecycle.vocabulary import Actions, Head, Ints, Op, Refusal
from esper.leyline.messages import nothing_planted
from esper.tamiyo.policy.packages import inner_slots
from esper.tamiyo.rules.base import Rule
from esper_bench.controllers.plans import BYPASS, HERE, MIXED, UNIFORM, Placed, Plan, stream_slots, wished

DROP = 0.5
"""A participation that falls below this share of the participation in front of the segment is a drop."""
CUT = 0.7
"""A block in which a larger share of the units is dead is damaged."""
RISE = 0.3
"""A rise of the drift behind one segment by more than this is damage."""
NARROW, DEAD = 0.5, 0.02
"""Bounds of `participation_inner` at which a block is narrow or dead."""
DONE = 2**20  # more than any number of choices
ONCE = 2**31 - 1
"""`sensors_every` of a controller that reads sensors at the first decision alone [steps]."""


class Picks(NamedTuple):
    """Says what is planted in each environment.

    Attributes:
        plans (E Plans): the plan of each environment
        slot ((E,) or (E, n) int64): the slot that the plan is for, or the slots; -1 for one that has no slot, and behind the last
        reasons (E texts): why, in one clause; empty where something else decides
    """

    plans: Sequence[Plan]
    slot: Ints
    reasons: Sequence[str]


class Choice(NamedTuple):
    """Holds one of several plans that an environment may get.

    Attributes:
        plan (Plan): the plan
        slot (int): the slot that it is for; -1 for one that has no slot
        reason (str): why, in one clause
    """

    plan: Plan
    slot: int
    reason: str


Ranking = Sequence[Sequence[Choice]]
"""For each environment what may be planted, the best first."""


class Placement(Rule):
    """Chooses at the first decision of an episode, plants in that step, and keeps what it planted: a base of controllers.

    Each environment plants the first choice of every slot that the engine accepts. Seeds are advanced and fossilized as soon as
    their gates pass. The decisions of all slots are made in one step (`Controller.further`); where a loop does not ask for
    further decisions, they are made one a step.
    """

    sensors_every = ONCE
    sensors_read: Mapping[Op, Sequence[str]] = MappingProxyType({})
    sensor_families: Sequence[str] = ()  # empty for all

    def __init__(self) -> None:
        self._wish: Ints | None = (
            None  # (E, S, P) indices into the menu, in the order in which they are tried; -1 at the end
        )
        self._reasons: Sequence[str] = []
        self._next: Ints | None = None  # (E, S) the choice that is tried next
        self._last: Actions | None = None  # decisions whose verdicts were not heard yet
        self._why: list[str | None] = []

    @abstractmethod
    def pick(self, view: View) -> Picks:
        """Pick what is planted where, from the view before the first step."""

    def ranking(self, view: View) -> Ranking:
        """Rank what may be planted, first what `pick` plants: that alone, at its first slot, in rules that compare no places."""
        picks = self.pick(view)
        slots = picks.slot.reshape(len(picks.plans), -1)[:, 0].tolist()
        return [[Choice(*choice)] for choice in zip(picks.plans, slots, picks.reasons, strict=True)]

    def act(self, view: View) -> Actions:
        """Return the first decision of a step."""
        if view.step == 0 or self._wish is None:
            self._begin(view, self.pick(view) if self.chooses(view) else self.unplaced(view))
        return self._decide(view)

    def chooses(self, view: View) -> bool:
        """Return whether there are places to choose from: a rule on sensors compares slots in front of the last layer."""
        return not self.sensors_every or stream_slots(view.space) > 0

    def unplaced(self, view: View) -> Picks:
        """Pick UNIFORM in every environment, for hosts without places to choose from."""
        envs = len(view.masks.op)
        why = "no slot lies in front of the last layer, so every block gets a bypass"
        return Picks([UNIFORM] * envs, np.full(envs, -1), [why] * envs)

    def further(self, view: View, refused: NDArray[np.int8]) -> Actions | None:
        """Return the next decisions of the step; None where no environment has any."""
        if self._last is not None:
            # What was carried out may be the decision of another, which this controller teaches.
            envs, last = np.arange(len(refused)), self._last
            there = view.seeds.blueprint[envs, last.slot] == last.blueprint
            self._hear(refused, np.asarray((refused != Refusal.NONE) | there))
        actions = self._decide(view)
        return actions if (actions.op != Op.WAIT).any() else None

    def store(self, outcome: Outcome) -> None:
        """Note which decisions were refused, if `further` was not asked."""
        if self._last is not None:
            own = [mine == done for mine, done in zip(self._last, outcome.actions, strict=True)]
            self._hear(outcome.refused, np.logical_and.reduce(own))

    def reasons(self) -> Sequence[str | None]:
        """Return for each environment why the seed of the last decision was planted; None for other decisions."""
        return self._why

    def explain(self) -> list[str]:
        """Return the reasons of the environments in which nothing was to be planted."""
        if self._wish is None:
            return []
        nothing = np.flatnonzero((self._wish < 0).all((1, 2))).tolist()
        whys = Counter(self._reasons[env] for env in nothing if self._reasons[env])
        return [f"{nothing_planted(count, len(self._wish))}: {why}" for why, count in whys.items()]

    def state(self) -> dict[str, Any]:
        """Return what is to be planted, and how far it is."""
        return {"wish": self._wish, "reasons": list(self._reasons), "next": self._next}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`."""
        self._wish, self._reasons, self._next = state.get("wish"), state.get("reasons", []), state.get("next")

    def package(self, view: View) -> Ints:
        """Return (E,) the blueprint that is still to be planted in every inner slot that the masks allow, and nowhere else.

        -1 where something else, or nothing, is to be planted. Inner slots are those of `plans.inner_slots`.
        """
        choice, plants = self._next_choices(view)
        index = np.where(plants, choice, -1).max(1)
        allowed = np.take_along_axis(view.masks.blueprint, np.maximum(index, 0)[:, None, None], 2)[..., 0]
        whole = (plants == (inner_slots(view.space) & allowed)) & (~plants | (choice == index[:, None]))
        return np.where(whole.all(1), index, -1)

    def _next_choices(self, view: View) -> tuple[Ints, Bools]:
        """Return (E, S) the choice that is tried next at each slot, and whether the masks allow it."""
        assert self._wish is not None, "act comes before it"
        assert self._next is not None, "act comes before it"
        at = np.minimum(self._next, self._wish.shape[2] - 1)[..., None]
        choice = np.take_along_axis(self._wish, at, 2)[..., 0]
        fits = np.take_along_axis(view.masks.blueprint, np.maximum(choice, 0)[..., None], 2)[..., 0]
        return choice, (self._next < self._wish.shape[2]) & (choice >= 0) & fits

    def _begin(self, view: View, picks: Picks) -> None:
        """Note what is to be planted."""
        self._wish = _wished(view, picks)
        self._reasons = _reasons(view, picks, self._wish)
        self._next = np.zeros(self._wish.shape[:2], np.int64)

    def _hear(self, refused: NDArray[np.int8], own: Bools) -> None:
        """Go on to the next choice of a slot after a refused GERMINATE, and past the last one after an accepted one.

        own: (E,) whether what was carried out was the decision of this controller.
        """
        assert self._next is not None, "act comes before it"
        assert self._last is not None
        actions, self._last = self._last, None
        for planted, move in ((refused != Refusal.NONE, 1), (refused == Refusal.NONE, DONE)):
            rows = np.flatnonzero((actions.op == Op.GERMINATE) & planted & own)
            self._next[rows, actions.slot[rows]] += move

    def _decide(self, view: View) -> Actions:
        """Decide one operation per environment: FOSSILIZE, else ADVANCE, else plant the next choice of the dearest slot."""
        envs = np.arange(len(view.masks.op))
        choice, plants = self._next_choices(view)
        cost = np.broadcast_to(view.space.cost, view.masks.blueprint.shape)
        price = np.take_along_axis(cost, np.maximum(choice, 0)[..., None], 2)[..., 0]
        op, slot = np.zeros(len(envs), np.int64), np.zeros(len(envs), np.int64)
        for kind, where in (
            (Op.GERMINATE, plants),
            (Op.ADVANCE, view.masks.slot[:, Op.ADVANCE]),
            (Op.FOSSILIZE, view.masks.slot[:, Op.FOSSILIZE]),
        ):
            some = where.any(1)
            op, slot = np.where(some, kind, op), np.where(some, (where * (1 + price)).argmax(1), slot)
        wanted: dict[Head, Ints | int] = {**defaults(view.space), Head.BLUEPRINT: np.maximum(choice[envs, slot], 0)}
        actions = complete(view.masks, op, slot, wanted)
        planted = (op == Op.GERMINATE).tolist()
        self._why = [self._reasons[env] if plants else None for env, plants in enumerate(planted)]
        self._last = actions
        return actions


class Uniform(Placement):
    """Plants a bypass of rank 1 around every block, as far as the budget of parameters allows."""

    sensors_every = 0

    def pick(self, view: View) -> Picks:
        """Pick UNIFORM in every environment."""
        envs = len(view.masks.op)
        return Picks([UNIFORM] * envs, np.full(envs, -1), ["every block gets a bypass"] * envs)


class Fixed(Placement):
    """Plants given plans whatever the host is, each in an equal share of the environments."""

    sensors_every = 0

    def __init__(self, plans: Sequence[Placed]) -> None:
        super().__init__()
        self.plans = plans

    def pick(self, view: View) -> Picks:
        """Pick the plan of each share, in order."""
        each, rest = divmod(len(view.masks.op), len(self.plans))
        assert not rest, "the environments cannot be shared equally"
        of_env = [placed for placed in self.plans for _ in range(each)]
        slots = padded([placed.slots for placed in of_env])
        return Picks([placed.plan for placed in of_env], slots, ["the plan is fixed"] * len(of_env))


class ParticipationDrop(Placement):
    """Plants a bypass behind the segment where the participation of the stream drops most, and else around every block.

    The drop of a slot is the participation of the stream there over that in front of its segment. The rule concentrates where
    the smallest drop of the host is below DROP.
    """

    sensors_read = MappingProxyType({Op.GERMINATE: ("participation", "participation_before")})
    sensor_families = ("participation",)

    def pick(self, view: View) -> Picks:
        """Pick the first of the ranking."""
        return first(self.ranking(view))

    def ranking(self, view: View) -> Ranking:
        """Rank by the ratio of `participation` to `participation_before`, behind segments that keep the width of the stream."""
        ratio = sensor(view, "participation") / np.maximum(sensor(view, "participation_before"), 1e-9)
        ratio = np.where(inner_slots(view.space), ratio, np.nan)
        return ranked(
            view, ratio, DROP, MIXED, "the participation of the stream falls to {:.0%} of that in front of {}"
        )


class Collapse(Placement):
    """Plants a bypass around a block whose units are dead, else where the participation drops, and else around every block.

    Units are dead where the share `dead` is above CUT; the block with the largest share is taken. Otherwise the rule is
    `ParticipationDrop`.
    """

    sensors_read = MappingProxyType({Op.GERMINATE: ("dead", "participation", "participation_before")})
    sensor_families = ("participation", "dead")

    def pick(self, view: View) -> Picks:
        """Pick the first of the ranking."""
        return first(self.ranking(view))

    def ranking(self, view: View) -> Ranking:
        """Rank as `ParticipationDrop`, but put the block with the most dead units first if its `dead` is above CUT."""
        drops = ParticipationDrop().ranking(view)
        alive = np.where(inner_slots(view.space), 1 - sensor(view, "dead"), np.nan)
        cut = ranked(view, alive, 1 - CUT, MIXED, "only {:.0%} of the inner units are active in front of {}")
        return [
            [own[0], *(choice for choice in others if choice[:2] != own[0][:2])] if own[0].slot >= 0 else others
            for own, others in zip(cut, drops, strict=True)
        ]


class InnerUse(Placement):
    """Plants a bypass around a narrow or a dead block, the one with the thinnest stream first, and else around every block.

    A block is narrow where at least NARROW of the width of its inner features is in use (`participation_inner`), and dead where
    less than DEAD is. The rule was found on untrained networks with narrow blocks (`repair`).
    """

    sensors_read = MappingProxyType({Op.GERMINATE: ("participation_inner", "participation")})
    sensor_families = ("participation", "inner")

    def pick(self, view: View) -> Picks:
        """Pick the first of the ranking."""
        return first(self.ranking(view))

    def ranking(self, view: View) -> Ranking:
        """Rank narrow and dead blocks (`participation_inner`) by the `participation` of their stream, the thinnest first."""
        inner, stream = sensor(view, "participation_inner"), sensor(view, "participation")
        thin = np.where((inner >= NARROW) | (inner < DEAD), stream, np.nan)
        return ranked(
            view, thin, np.inf, BYPASS, "the block is narrow or dead, and its stream uses {:.0%} of its width, at {}"
        )


class DriftRise(Placement):
    """Plants a bypass where the activations begin to differ from those of the intact network.

    The rise of a slot is the drift of the stream there less that in front of its segment. The largest rise above RISE names the
    damaged segment. Where there is none, the inputs may differ from those of the intact network by more than RISE: the bypass is
    then planted around the first segment that a slot has, an input adapter. Otherwise the network computes what it did, so the
    head is corrected. Without an intact network (the task `heal-taught` has one), the rule plants around every block.
    """

    sensors_read = MappingProxyType({Op.GERMINATE: ("drift", "drift_before")})
    sensor_families = ("drift",)

    def pick(self, view: View) -> Picks:
        """Pick by the sensors `drift` and `drift_before`."""
        slots, names = stream_slots(view.space), view.space.slots
        before = sensor(view, "drift_before")[:, :slots]
        rise = sensor(view, "drift")[:, :slots] - before
        measured: Bools = np.asarray(np.isfinite(rise).any(1))
        rise, given = np.where(np.isnan(rise), -np.inf, rise), np.nan_to_num(before[:, 0])
        at, most, last = rise.argmax(1), rise.max(1), slots - 1
        choices: list[tuple[Plan, int, str]] = []
        for env in range(len(rise)):
            if not measured[env]:
                choice = UNIFORM, -1, "the task has no intact network to compare with, so every block gets a bypass"
            elif most[env] > RISE:
                choice = (
                    MIXED,
                    int(at[env]),
                    f"the drift from the intact network rises by {most[env]:.0%} at {names[at[env]]}",
                )
            elif given[env] > RISE:
                choice = BYPASS, 0, f"the inputs differ from those of the intact network by {given[env]:.0%}"
            else:
                choice = HERE, last, "the activations are those of the intact network, so the last layer is corrected"
            choices.append(choice)
        return Picks(
            [plan for plan, _, _ in choices], np.array([slot for _, slot, _ in choices]), [why for _, _, why in choices]
        )


def ranked(view: View, ratio: Floats, bound: float, plan: Plan, reason: str) -> Ranking:
    """Rank the plan at every slot, the smallest ratio (E, S) first, with UNIFORM behind the slots whose ratio is below a bound.

    A slot whose ratio is nan is left out. `reason` is formatted with the ratio and the name of the slot.
    """
    known = np.where(np.isfinite(ratio), ratio, np.inf)
    marks = np.concatenate([np.full((len(known), 1), bound), known], 1)
    order = marks.argsort(1, kind="stable").tolist()
    everywhere = Choice(UNIFORM, -1, "no block stands out, so every block gets a bypass")
    return [
        [
            Choice(plan, at - 1, reason.format(row[at - 1], view.space.slots[at - 1])) if at else everywhere
            for at in places
            if at == 0 or row[at - 1] < np.inf
        ]
        for row, places in zip(known.tolist(), order, strict=True)
    ]


def first(ranking: Ranking) -> Picks:
    """Pick the first choice of each environment."""
    plans, slots, reasons = zip(*(choices[0] for choices in ranking), strict=True)
    return Picks(plans, np.array(slots), reasons)


def padded(slots: Sequence[tuple[int, ...]]) -> Ints:
    """Pad the slots of the environments with -1 to one length, (E, n)."""
    return np.array(list(zip_longest(*slots, fillvalue=-1)), np.int64).T


def _wished(view: View, picks: Picks) -> Ints:
    """Return (E, S, P) what the picks plant: indices into the menu in the order in which they are tried, -1 at the end."""
    plans = list(dict.fromkeys(picks.plans))
    each = [wished(view.space, plan, picks.slot) for plan in plans]
    most = max(wish.shape[2] for wish in each)
    whole = np.full((*each[0].shape[:2], most), -1)
    for plan, wish in zip(plans, each, strict=True):
        rows = np.array([own == plan for own in picks.plans])
        whole[rows, :, : wish.shape[2]] = wish[rows]
    return whole


def _reasons(view: View, picks: Picks, wish: Ints) -> list[str]:
    """Return the reasons of the picks; where nothing can be planted, each says what is missing."""
    menu, reasons = [entry.name for entry in view.space.blueprints], list(picks.reasons)
    for env in np.flatnonzero((wish < 0).all((1, 2))).tolist():
        names = list(dict.fromkeys((*picks.plans[env].here, *picks.plans[env].others)))
        if names:
            fits = any(name in menu for name in names)
            reasons[env] += f", but {'no slot fits' if fits else 'the menu has no'} {' or '.join(names)}"
    return reasons
