"""The default rule: plant early where the host is narrow, and keep what brings in more than it costs.

E environments, S slots, K blueprints.
"""

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from esper.leyline.actions import Actions, Head, Ints, Op
from esper.leyline.config import GatesConfig, HeuristicConfig
from esper.leyline.masks import complete, defaults
from esper.leyline.stages import Stage
from esper.leyline.view import Bools, Floats, Outcome, View
from esper.tamiyo.baselines import Rule

DEAD = 0.02
"""Relative participation under which the inner features of a segment pass on nothing."""


class Obstacle(IntEnum):
    """Why the rule did not plant at a decision at which it might have."""

    NONE = 0
    LATE = 1  # too few steps are left
    UNMEASURED = 2  # the metric is nan
    REACHED = 3  # the metric is not below `plant_below`
    EVEN = 4  # no segment is narrow, and a seed incubates or the metric is not below `weak_below`


class _Trials(NamedTuple):
    """What the seeds on trial bring in and cost, (E, S); nan compares False with everything."""

    worth: Floats  # contribution to what J is made of
    error: Floats  # its standard error
    price: Floats  # the share of its rent that a seed must exceed
    keep: Bools  # may be fossilized, and pays
    unpaid: Bools  # was on trial for long enough, does not pay, and no other seed is on its way in
    holding: Bools  # is on trial
    refused: Bools  # its gate refused it for as long as the patience lasts


class _Plans(NamedTuple):
    """Where to plant, and what stands against it."""

    where: Bools  # (E, S) candidates, all alike narrow or all alike weak
    score: Floats  # (E, S) the largest is planted first
    blueprint: Ints  # (E, S)
    obstacle: NDArray[np.int8]  # (E,) an Obstacle; NONE where something is planted, or the masks forbid it
    share: Floats  # (E,) how far the metric has come from the best constant prediction to a perfect one
    narrow: Bools  # (E, S) narrow segments
    inner: Floats  # (E, S) participation_inner
    blind: Bools  # (E,) no segment shows its inner features


class Heuristic(Rule):
    """One operation per environment and step; several seeds may be under way. The first of these that applies:

    1. FOSSILIZE the holding seed of the largest contribution, where the mask allows it and the contribution is above
       `keep` times its rent.
    2. ADVANCE the trained seed of the largest incubation gain, if it can still be fossilized in this episode.
    3. PRUNE the seed of the lowest contribution among those that were on trial for `gates.min_holding_steps` steps and do not
       bring in that much while no other seed incubates or blends, and those whose gate could have let them through at
       `patience` decisions, `training_patience` of an incubating one, and does not now.
    4. GERMINATE behind a *narrow* segment, if the metric has covered less than `plant_below` of the way from the best
       constant prediction to a perfect one. A segment is narrow where nearly all of its few inner units are in use, their
       relative participation ratio `narrow_from` or more, or none of them is, the ratio under .02. Of several, the slot of
       the lowest participation of the stream.
    5. GERMINATE at the slot of the lowest participation of the stream where no other segment is narrow, no seed incubates,
       and the metric has covered less than `weak_below` of that way. So a host that stays weak behind the seeds of 4 gets a
       hidden layer too. Where no segment shows its inner features, the limits are those of 4, and slots within `tie` times
       the lowest count as lowest: the first of them is the cause.
       This compares the slots of one host: a ratio is 1 / width at the least, so that no fixed bound holds for all widths.
    6. WAIT.

    It plants only while there is time to fossilize and `slack` steps more, and only blueprints that fit the slot: the first
    of `narrow_blueprints` or `weak_blueprints` that does, else the cheapest bypass, else the cheapest. What was not measured
    satisfies no condition; where the range of a metric is not known, the metric is no obstacle.
    """

    sensors_every = 4

    def __init__(self, config: HeuristicConfig, gates: GatesConfig) -> None:
        self.config = config
        self.gates = gates
        self._why: list[str | None] = []  # of the last decision
        self._planted: Bools | None = None  # (E,) in this episode
        self._obstacle: NDArray[np.int8] | None = None  # (E,) the last one, LATE only where there was no other
        self._share: Floats | None = None  # (E,) how far the metric had come then
        self._steps = 0
        self._blind = False  # whether it chose among slots none of which has inner features

    def act(self, view: View) -> Actions:
        """One decision per environment, from its own row of the view alone."""
        may = view.masks.slot
        usual = defaults(view.space)
        trial = view.space.tempos[usual[Head.TEMPO]] + self.gates.min_holding_steps + 1
        trials, plans = self._judge(view), self._plan(view, trial)
        advance = may[:, Op.ADVANCE] & (view.steps - view.step >= trial)
        prune = may[:, Op.PRUNE] & (trials.unpaid | trials.refused)

        envs = len(view.seeds.stage)
        op, slot = np.zeros(envs, np.int64), np.zeros(envs, np.int64)
        for choice, candidates, score in (  # last first: each overrules those before it
            (Op.GERMINATE, plans.where, plans.score),
            (Op.PRUNE, prune, -trials.worth),
            (Op.ADVANCE, advance, view.measurements.gain.mean),
            (Op.FOSSILIZE, trials.keep, trials.worth),
        ):
            any_candidate = candidates.any(1)
            op = np.where(any_candidate, choice, op)
            slot = np.where(any_candidate, _best(candidates, score), slot)
        self._remember(view, plans)
        self._why = [
            self._why_planted(plans, view, env, at)
            if choice == Op.GERMINATE
            else self._why_judged(trials, env, Op(choice), at)
            for env, (choice, at) in enumerate(zip(op.tolist(), slot.tolist(), strict=True))
        ]
        return complete(view.masks, op, slot, {**usual, Head.BLUEPRINT: plans.blueprint[np.arange(envs), slot]})

    def store(self, outcome: Outcome) -> None:
        """Remember where something was planted."""
        assert self._planted is not None, "act comes before store"
        self._planted = self._planted | (outcome.accepted & (outcome.actions.op == Op.GERMINATE))

    def reasons(self) -> Sequence[str | None]:
        """For each environment, why the last decision was GERMINATE, PRUNE or FOSSILIZE; None where it was another."""
        return self._why

    def explain(self) -> list[str]:
        """Which of its conditions kept it from planting anything, a sentence each with the number of environments.

        A further sentence says where it could not recognise narrow segments.
        """
        if self._planted is None or self._obstacle is None or self._share is None:
            return []
        sentences = []
        for obstacle in list(Obstacle)[1:]:
            where = ~self._planted & (self._obstacle == obstacle)
            if where.any():
                count = f"{int(where.sum())} of {len(where)} environment{'s' * (len(where) > 1)}"
                sentences.append(f"nothing was planted in {count}: {self._sentence(obstacle, self._share[where])}")
        if self._blind:
            sentences.append(
                "no segment of the host has inner features that can be measured (SlotSpec.inner), so the heuristic did not "
                "recognise narrow segments and chose slots by the stream alone"
            )
        return sentences

    def state(self) -> dict[str, Any]:
        """What kept it from planting so far."""
        return {
            "planted": self._planted,
            "obstacle": self._obstacle,
            "share": self._share,
            "steps": self._steps,
            "blind": self._blind,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave. A state without these figures is of a rule that kept none, and begins anew."""
        self._planted, self._obstacle = state.get("planted"), state.get("obstacle")
        self._share, self._steps = state.get("share"), state.get("steps", 0)
        self._blind = bool(state.get("blind", False))

    def _judge(self, view: View) -> _Trials:
        """Hold what every seed brings in against its rent."""
        gates, stage, age, may = self.gates, view.seeds.stage, view.seeds.age, view.masks.slot
        measured = view.measurements
        found = measured.contribution if view.space.objective == "metric" else measured.contribution_loss
        price = self.config.keep_above * _rent(view)
        pays = found.mean > price
        holding, training = stage == Stage.HOLDING, stage == Stage.TRAINING
        keep = may[:, Op.FOSSILIZE] & pays
        # Of two bottlenecks each hides what the other's bypass is worth, so no seed is judged while another is on its way in.
        coming = ((stage == Stage.TRAINING) | (stage == Stage.BLENDING)) & ~view.seeds.doomed
        alone = ~coming.any(1, keepdims=True)
        unpaid = holding & alone & (age >= gates.min_holding_steps) & (found.mean <= price)
        unkept = holding & ~may[:, Op.FOSSILIZE] & (age - gates.min_holding_steps + 1 >= self.config.holding_patience)
        untrained = (
            training & ~may[:, Op.ADVANCE] & (age - gates.min_training_steps + 1 >= self.config.training_patience)
        )
        return _Trials(found.mean, found.se, price, keep, unpaid, holding, unkept | untrained)

    def _plan(self, view: View, trial: int) -> _Plans:
        """Where to plant: at narrow slots, or where there are none, at the weakest."""
        config, measured, space = self.config, view.measurements, view.space
        may: Bools = np.asarray(view.masks.blueprint.any(2))
        share = reached(measured.metric, space.floor, space.ceiling)[:, None]
        inner = _sensor(view, "participation_inner")
        blind: Bools = np.asarray(np.isnan(inner).all(1, keepdims=True))
        if may.any() and not np.isnan(_sensor(view, "participation")).all():
            self._blind = bool(blind.all())
        narrow = may & ((inner >= config.narrow_from) | (inner < DEAD))
        none = ~narrow.any(1, keepdims=True)
        # A seed planted now trains from the next step on, and its FOSSILIZE takes a decision of its own.
        timely = view.steps - view.step >= 1 + self.gates.min_training_steps + trial + config.spare_steps

        rank = measured.participation
        lowest = np.where(may & ~np.isnan(rank), rank, np.inf).min(1, keepdims=True)
        # A stream stays thin behind the slot where it became so, hence of about equals the first is the cause.
        about = np.where(blind, rank <= config.tie_ratio * lowest, rank <= lowest) | np.isinf(lowest)
        # What a seed brings in shows from its ramp on; while one incubates, the host may be weak for want of that alone.
        waiting = (view.seeds.stage == Stage.TRAINING).any(1, keepdims=True)
        needy = np.where(blind, share < config.plant_below, (share < config.weak_below) & ~waiting)
        weak = may & none & about & needy
        where: Bools = timely & ((narrow & (share < config.plant_below)) | weak)

        score = np.where(none, 0.0, -rank)
        blueprint: Ints = np.where(
            narrow,
            _first_that_fits(config.narrow_blueprints, view),
            _first_that_fits(config.weak_blueprints, view),
        )
        share = share[:, 0]
        obstacle = np.full(len(may), Obstacle.EVEN, np.int8)
        obstacle[share >= config.plant_below] = Obstacle.REACHED
        obstacle[np.isnan(share)] = Obstacle.UNMEASURED
        if not timely:
            obstacle[:] = Obstacle.LATE
        obstacle[where.any(1) | ~may.any(1)] = Obstacle.NONE
        return _Plans(where, score, blueprint, obstacle, share, narrow, inner, blind[:, 0])

    def _remember(self, view: View, plans: _Plans) -> None:
        """Take what stands against planting into account."""
        if view.step == 0 or self._planted is None or self._obstacle is None or self._share is None:
            envs = len(view.seeds.stage)
            self._planted, self._obstacle = np.zeros(envs, bool), np.zeros(envs, np.int8)
            self._share = np.full(envs, np.nan)
        late = (plans.obstacle == Obstacle.LATE) & (self._obstacle != Obstacle.NONE)
        news = (plans.obstacle != Obstacle.NONE) & ~late
        self._obstacle = np.where(news, plans.obstacle, self._obstacle)
        self._share = np.where(news, plans.share, self._share)
        self._steps = view.steps

    def _why_planted(self, plans: _Plans, view: View, env: int, slot: int) -> str:
        config, name = self.config, view.space.slots[slot]
        blueprint = view.space.blueprints[int(plans.blueprint[env, slot])].name
        inner, narrow = plans.inner[env, slot], bool(plans.narrow[env, slot])
        if narrow:
            bound = (
                f"under {DEAD:.0%}" if inner < DEAD else f"at least {config.narrow_from:.0%} (heuristic.narrow_from)"
            )
            place = f"the segment in front of {name} is narrow: {inner:.0%} of its inner units are in use, {bound}"
        elif plans.blind[env]:
            place = (
                f"inner features are not measured, and the stream is about the thinnest at {name} (heuristic.tie_ratio)"
            )
        else:
            place = f"no segment is narrow (heuristic.narrow_from), and the stream is the thinnest at {name}"
        if not narrow and np.isfinite(plans.share[env]):
            limit = "plant_below" if plans.blind[env] else "weak_below"
            bound = f"under {getattr(config, limit):.0%} (heuristic.{limit})"
            place += f"; the metric has covered {plans.share[env]:.0%} of the way to a perfect one, {bound}"
        key = "narrow_blueprints" if narrow else "weak_blueprints"
        first = blueprint in getattr(config, key)
        kind = f"is the first of heuristic.{key} that fits" if first else f"fits, and none of heuristic.{key} does"
        return f"{place}; {blueprint} {kind}"

    def _why_judged(self, trials: _Trials, env: int, op: Op, slot: int) -> str | None:
        worth, error, price = (field[env, slot] for field in (trials.worth, trials.error, trials.price))
        figures = (
            f"its contribution {worth:+.4f} ± {error:.4f}",
            f"{price:.4f}, which is {self.config.keep_above:g} of its rent",
        )
        if op == Op.FOSSILIZE:
            return f"{figures[0]} is above {figures[1]} (heuristic.keep_above)"
        if op != Op.PRUNE:
            return None
        if trials.unpaid[env, slot]:
            return f"{figures[0]} is not above {figures[1]} (heuristic.keep_above)"
        if trials.holding[env, slot]:
            return f"its gate refused it at {self.config.holding_patience} decisions (heuristic.holding_patience)"
        return f"its gate refused it at {self.config.training_patience} decisions (heuristic.training_patience)"

    def _sentence(self, obstacle: Obstacle, share: Floats) -> str:
        config = self.config
        come = f"the metric had covered {_range(share)} of the way from the best constant prediction to a perfect one"
        if obstacle == Obstacle.LATE:
            return (
                f"a seed that can still be kept has to be planted before the last steps, and the run has {self._steps}; "
                f"raise steps, or lower heuristic.spare_steps ({config.spare_steps}), gates.min_training_steps or "
                "gates.min_holding_steps"
            )
        if obstacle == Obstacle.UNMEASURED:
            return "the metric is not a number; look at the data and the loss"
        if obstacle == Obstacle.REACHED:
            return f"{come}, and the heuristic plants below {config.plant_below:.0%}; raise heuristic.plant_below"
        return (
            f"no segment is narrow by heuristic.narrow_from ({config.narrow_from:g}), {come}, and such a host gets a seed "
            f"below {config.weak_below:.0%}; raise heuristic.weak_below"
        )


def reached(metric: Floats, floor: Floats, ceiling: Floats) -> Floats:
    """(E,) how far a metric has come from `floor` to `ceiling`: 0 at the floor, 1 at the ceiling, nan where it is nan.

    1 where there is nothing between the two, and minus infinity where either is not known.
    """
    room = ceiling - floor
    share = np.where(room > 0, (metric - floor) / np.where(room > 0, room, 1.0), 1.0)
    return np.where(np.isnan(metric), np.nan, np.where(np.isnan(room), -np.inf, share))


def _rent(view: View) -> Floats:
    """(E, S) by how much J would rise if only the rent of the seed were saved; 0 at an empty slot."""
    space, planted = view.space, view.seeds.blueprint
    cost = np.broadcast_to(space.cost, (*planted.shape, len(space.blueprints)))
    price = np.take_along_axis(cost, np.maximum(planted, 0).astype(np.int64)[..., None], 2)[..., 0]
    size = np.maximum(view.host_params, space.rent_size)[:, None] + view.added_params[:, None]
    left = np.maximum(size - np.where(planted >= 0, price, 0), 1)
    rent: Floats = space.rent * np.log(size / left)
    return rent


def _sensor(view: View, name: str) -> Floats:
    """(E, S) of one growth sensor; nan where it is not measured."""
    names = view.space.sensors
    if name not in names:
        return np.full(view.seeds.stage.shape, np.nan)
    return view.measurements.sensors[..., names.index(name)]


def _first_that_fits(names: Sequence[str], view: View) -> Ints:
    """(E, S) the first of some blueprints that may be planted, else the cheapest bypass, else the cheapest of all."""
    menu = view.space.blueprints
    order = [names.index(each.name) if each.name in names else len(names) + (each.tap != "before") for each in menu]
    cost = np.broadcast_to(view.space.cost, view.masks.blueprint.shape)
    place = np.where(view.masks.blueprint, np.array(order)[None, None], len(names) + 2)
    best = place == place.min(2, keepdims=True)
    cheapest: Ints = np.where(best, cost, np.iinfo(np.int64).max).argmin(2)
    return cheapest


def _range(values: Floats) -> str:
    """The smallest to the largest, in percent."""
    low, high = f"{values.min():.0%}", f"{values.max():.0%}"
    return low if low == high else f"{low} to {high}"


def _best(candidates: Bools, score: Floats) -> Ints:
    """The candidate of the highest score, the first of equals; one that was not measured comes after all that were.

    candidates, score: (E, S).  Returns (E,) int64; 0 where there is no candidate.
    """
    known = np.nan_to_num(score, nan=np.finfo(np.float64).min)
    best: Ints = np.where(candidates, known, -np.inf).argmax(1)
    return best
