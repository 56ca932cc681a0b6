"""Decide by the default rule: plant early where the host is narrow, keep the seeds that contribute more than they cost.

E environments, S slots, K blueprints.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from esper.leyline.config.tree import GatesConfig, HeuristicConfig
from esper.leyline.lifecycle.masks import complete, defaults
from esper.leyline.lifecycle.view import MISSING, Bools, Floats, Outcome, Space, View, sensor
from esper.leyline.lifecycle.vocabulary import ADDED, IN_BUDGET, Actions, Head, Ints, MeantNumber, Op, Stage, among
from esper.leyline.messages import nothing_planted
from esper.tamiyo.rules.base import Rule

DEAD = 0.02
"""Relative participation below which the inner features of a segment count as dead."""
FEW = 1e-2
"""Share of the gradient's energy up to which nothing is missing at a site."""
PLAIN = 0.05
"""Share of the gradient's energy from which something is plainly missing at a site before the first step."""
VAIN = 3
"""Measurements in a row by which nothing is missing anywhere, after which no more seeds are planted."""


class PlantingObstacle(MeantNumber):
    """Says why the rule planted no seed although the masks allowed it, and what to change."""

    NONE = 0, "nothing prevented it"
    LATE = (
        1,
        "the run has {steps} steps of one decision each, which are too few to plant, train and keep a seed; raise steps, or "
        "lower heuristic.spare_steps ({spare_steps}), gates.min_training_steps or gates.min_holding_steps",
    )
    UNMEASURED = 2, "the metric is not a number; check the data and the loss"
    REACHED = 3, "{come}, and the heuristic plants below {plant_below:.0%}; raise heuristic.plant_below"
    EVEN = (
        4,
        "no segment is narrow by heuristic.narrow_from ({narrow_from:g}), {come}, and the heuristic plants in such a host below "
        "{weak_below:.0%}; raise heuristic.weak_below",
    )


class Heuristic(Rule):
    """Decides one operation per environment and step: the first of the following that applies.

    1. FOSSILIZE the seed on trial with the largest contribution, where the masks allow it and the contribution is above
       `keep_above` times its rent.
    2. ADVANCE the incubating seed with the largest incubation gain, if enough steps are left to fossilize it.
    3. PRUNE the seed with the lowest contribution among two groups. The first are seeds that were on trial for
       `gates.min_holding_steps` steps and contribute at most `keep_above` times their rent, while no other seed incubates or
       blends. The second are seeds that their gate has refused at `holding_patience` decisions, or `training_patience`
       decisions of an incubating seed.
    4. GERMINATE behind a *narrow* segment, if the relative metric is below `plant_below`. The relative metric is 0 for the best
       constant prediction and 1 for a perfect one. A segment is narrow where almost all of its inner units are in use, with a
       relative participation ratio of at least `narrow_from`, or almost none, with a ratio below .02. Among several such
       segments, the slot with the lowest participation of the stream is taken.
    5. GERMINATE at the slot with the lowest participation of the stream, if no other segment is narrow, no seed incubates, and
       the relative metric is below `weak_below`. A host that stays weak after 4 thereby gets a hidden layer. Where the inner
       features of no segment are measured, the bound is `plant_below`, seeds may incubate, and the slot is the first whose
       participation is within `tie_ratio` times the lowest, because a stream stays thin behind the segment that made it thin.
       The rule compares the slots of one host, because the smallest possible ratio, 1 / width, differs between hosts.
       Where it is measured what is missing at the slots (`esper.tolaria.live.missing`), as in `esper.Growth`, the slot that
       lacks most is planted instead, among those that lack at least `missing_ratio` times as much, while fewer than `nominated`
       seeds incubate. If nothing is missing at any slot, the slot is chosen as above until
       the first seed is planted, and none is planted afterwards; after three such measurements in a row none will be. With
       `lifecycle.direct`, a seed that is planted at the first decision, where at least 5 % is missing, acts at once.
    6. WAIT.

    A seed is planted only while there are enough steps to fossilize it, and `spare_steps` more, and only where what is left of
    `governor.param_limit` pays for its blueprint: another slot may have one that it pays for. The blueprint is the first of
    `narrow_blueprints` or `weak_blueprints` that fits the slot, otherwise the cheapest bypass, otherwise the cheapest. A
    quantity that was not measured satisfies no condition. Where the range of the metric is unknown, any metric is low enough.
    """

    sensors_every = 4
    sensors_read = MappingProxyType({Op.GERMINATE: ("participation", "participation_inner", MISSING)})

    def __init__(self, config: HeuristicConfig, gates: GatesConfig, param_limit: float | None = None) -> None:
        """param_limit: `governor.param_limit`, by which seeds are refused."""
        self.config, self.gates, self.param_limit = config, gates, param_limit
        self._why: list[str | None] = []  # reasons of the last decision
        self._planted = np.zeros(0, bool)  # (E,) whether a seed was planted in this episode
        self._obstacle = np.zeros(0, np.int8)  # (E,) the last one; LATE only where there was no other
        self._share = np.zeros(0)  # (E,) relative metric at that obstacle
        self._kept = np.zeros(0, bool)  # (E,) whether a seed was kept in this episode
        self._vain = np.zeros(0, np.int64)  # (E,) measurements in a row that found nothing missing
        self._steps = 0
        self._blind = False  # whether slots were chosen without measured inner features

    def act(self, view: View) -> Actions:
        """Return one decision per environment, from its row of the view alone."""
        usual, envs = defaults(view.space), len(view.seeds.stage)
        if view.step == 0 or len(self._planted) != envs:
            self._planted, self._obstacle = np.zeros(envs, bool), np.zeros(envs, np.int8)
            self._share, self._vain = np.full(envs, np.nan), np.zeros(envs, np.int64)
            self._kept = np.zeros(envs, bool)
        self._steps = view.steps
        worth, keep, prune, why_judged = self._judge(view)
        where, score, blueprint, plain, why_planted = self._plan(view)
        advance = view.masks.slot[:, Op.ADVANCE] & (view.steps - view.step >= self._trial(view))

        op, slot = np.zeros(envs, np.int64), np.zeros(envs, np.int64)
        for choice, candidates, order in (  # in reverse order, so that an operation replaces those of lower rank
            (Op.GERMINATE, where, score),
            (Op.PRUNE, prune, -worth),
            (Op.ADVANCE, advance, view.measurements.gain.mean),
            (Op.FOSSILIZE, keep, worth),
        ):
            any_candidate = candidates.any(1)
            op = np.where(any_candidate, choice, op)
            slot = np.where(any_candidate, _best(candidates, order), slot)
        self._why = [
            why_planted(env, at) if choice == Op.GERMINATE else why_judged(env, Op(choice), at)
            for env, (choice, at) in enumerate(zip(op.tolist(), slot.tolist(), strict=True))
        ]
        each = np.arange(envs)
        direct = plain[each, slot] & (op == Op.GERMINATE)
        tempo = np.where(direct, view.space.tempos.index(0), usual[Head.TEMPO])
        chosen = {Head.BLUEPRINT: blueprint[each, slot], Head.TEMPO: tempo}
        return complete(view.masks, op, slot, {**usual, **chosen})

    def store(self, outcome: Outcome) -> None:
        op, accepted = outcome.actions.op, outcome.accepted
        self._planted = self._planted | (accepted & (op == Op.GERMINATE))
        self._kept = self._kept | (accepted & (op == Op.FOSSILIZE))

    def plants(self, view: View) -> Bools:
        """Return at each slot the blueprint that it would choose there, as long as a seed can be fossilized in time."""
        fits = np.broadcast_to(view.space.fits, view.masks.blueprint.shape)
        measured = "participation_inner" in view.space.sensors  # without it, no segment is known to be narrow
        names = [self.config.weak_blueprints, *([self.config.narrow_blueprints] if measured else [])]
        chosen = [_first_that_fits(each, fits, view.space)[..., None] for each in names]
        those: Bools = np.logical_or.reduce([np.arange(fits.shape[2]) == each for each in chosen]) & fits
        return those & self.timely(view, view.step) & (self._vain < VAIN)[:, None, None]

    def reasons(self) -> Sequence[str | None]:
        return self._why

    def explain(self) -> list[str]:
        """Return sentences that name the conditions that prevented planting, with the number of environments.

        A further sentence says where narrow segments could not be recognised.
        """
        sentences = []
        for obstacle in list(PlantingObstacle)[1:]:
            where = ~self._planted & (self._obstacle == obstacle)
            if not where.any():
                continue
            share = self._share[where]
            low, high = (f"{min(max(float(each), 0.0), 1.0):.0%}" for each in (share.min(), share.max()))
            covered = low if low == high else f"{low} to {high}"
            come = f"the metric had covered {covered} of the way from the best constant prediction to a perfect one"
            if (share < 0).all():
                come = "the metric was below that of the best constant prediction"
            why = obstacle.meaning.format(come=come, steps=self._steps, **self.config.model_dump())
            sentences.append(f"{nothing_planted(int(where.sum()), len(where))}: {why}")
        if self._blind:
            sentences.append(
                "no segment of the host has inner features that can be measured (SlotSpec.inner), so the heuristic could not "
                "recognise narrow segments and chose slots by the stream alone"
            )
        return sentences

    def state(self) -> dict[str, Any]:
        """Return the obstacles so far, from which `explain` makes its sentences."""
        told = {"planted": self._planted, "obstacle": self._obstacle, "share": self._share, "vain": self._vain}
        return {**told, "kept": self._kept, "steps": self._steps, "blind": self._blind}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._planted, self._obstacle, self._share = state["planted"], state["obstacle"], state["share"]
        self._kept = np.array(state["kept"], bool)
        self._vain = state["vain"]
        self._steps, self._blind = state["steps"], state["blind"]

    def _judge(self, view: View) -> tuple[Floats, Bools, Bools, Callable[[int, Op, int], str | None]]:
        """Compare the contribution of every seed with its rent. A comparison with nan is False.

        Returns (E, S) the contribution to the metric or the loss of J, the seeds to keep and those to prune, and a function that
        says why an operation is decided for a seed.
        """
        gates, stage, age, may = self.gates, view.seeds.stage, view.seeds.age, view.masks.slot
        measured, space = view.measurements, view.space
        contribution = measured.contribution if space.objective == "metric" else measured.contribution_loss
        worth = contribution.mean
        size = np.maximum(view.host_params, space.rent_size)[:, None] + view.added_params[:, None]
        own = np.where(view.seeds.blueprint >= 0, _own_cost(view), 0)
        rent = space.rent * np.log(size / np.maximum(size - own, 1))  # (E, S), of each seed
        price = self.config.keep_above * rent
        holding, training = stage == Stage.HOLDING, stage == Stage.TRAINING
        keep = may[:, Op.FOSSILIZE] & (worth > price)
        # With two bottlenecks, the bypass of one contributes little until the other has its bypass, so no seed is removed while
        # another incubates or blends.
        coming = (training | (stage == Stage.BLENDING)) & ~view.seeds.doomed
        unpaid = holding & ~coming.any(1, keepdims=True) & (age >= gates.min_holding_steps) & (worth <= price)
        unkept = holding & ~may[:, Op.FOSSILIZE] & (age - gates.min_holding_steps + 1 >= self.config.holding_patience)
        untrained = (
            training & ~may[:, Op.ADVANCE] & (age - gates.min_training_steps + 1 >= self.config.training_patience)
        )

        def why(env: int, op: Op, slot: int) -> str | None:
            if op not in (Op.FOSSILIZE, Op.PRUNE):
                return None
            if op == Op.FOSSILIZE or unpaid[env, slot]:
                told = f"its contribution {worth[env, slot]:+.4f} ± {contribution.se[env, slot]:.4f}"
                above, rent = "above" if op == Op.FOSSILIZE else "not above", f"{self.config.keep_above:g} of its rent"
                return f"{told} is {above} {price[env, slot]:.4f}, which is {rent} (heuristic.keep_above)"
            key = "holding_patience" if holding[env, slot] else "training_patience"
            return f"it did not pass its gate at {getattr(self.config, key)} decisions (heuristic.{key})"

        return worth, keep, may[:, Op.PRUNE] & (unpaid | unkept | untrained), why

    def timely(self, view: View, step: int) -> bool:
        """Return whether a seed that is planted at a step can be fossilized before the run ends, with `spare_steps` to spare."""
        # A seed trains from the step after its planting on, and FOSSILIZE takes one more decision.
        needed = 1 + self.gates.min_training_steps + self._trial(view) + self.config.spare_steps
        return view.steps - step >= needed

    def _trial(self, view: View) -> int:
        """Return the steps from ADVANCE to FOSSILIZE."""
        return view.space.tempos[defaults(view.space)[Head.TEMPO]] + self.gates.min_holding_steps + 1

    def _plan(self, view: View) -> tuple[Bools, Floats, Ints, Bools, Callable[[int, int], str]]:
        """Decide where to plant: at narrow segments, or where there are none, at the weakest. Records what stands against it.

        Returns (E, S) the candidates, their scores, of which the largest is planted first, their blueprints, and where a seed
        acts from its first step, because something is plainly missing there; and a function that says why one is planted.
        """
        config, measured, space = self.config, view.measurements, view.space
        offered = view.masks.blueprint
        inner = sensor(view, "participation_inner")
        is_narrow = (inner >= config.narrow_from) | (inner < DEAD)
        blueprint: Ints = np.where(
            is_narrow,
            _first_that_fits(config.narrow_blueprints, offered, space),
            _first_that_fits(config.weak_blueprints, offered, space),
        )
        chosen = np.arange(offered.shape[2]) == blueprint[..., None]
        affordable: Any = True  # (E, S, K) the seeds for which the budget has room beside all that are there
        if self.param_limit is not None:
            coming = among(view.seeds.stage, IN_BUDGET - ADDED)  # of the others, `added_params` has the parameters
            spent = view.added_params + np.where(coming, _own_cost(view), 0).sum(1)
            affordable = space.cost <= (self.param_limit * view.host_params - spent)[:, None, None]
        may: Bools = (offered & chosen & affordable).any(2)
        share = relative_metric(measured.metric, space.floor, space.ceiling)[:, None]
        blind: Bools = np.asarray(np.isnan(inner).all(1, keepdims=True))
        if may.any() and not np.isnan(sensor(view, "participation")).all():
            self._blind = bool(blind.all())
        narrow = may & is_narrow
        none = ~narrow.any(1, keepdims=True)
        timely = self.timely(view, view.step)

        rank = measured.participation
        lowest = np.where(may & ~np.isnan(rank), rank, np.inf).min(1, keepdims=True)
        # A stream stays thin behind the segment that made it thin, so the first of several similar slots is the cause.
        thinnest = np.where(blind, rank <= config.tie_ratio * lowest, rank <= lowest) | np.isinf(lowest)
        # An incubating seed does not contribute yet, and may be all that the host lacks.
        incubating = (view.seeds.stage == Stage.TRAINING).any(1, keepdims=True)
        low = np.where(blind, share < config.plant_below, (share < config.weak_below) & ~incubating)
        weak = may & none & thinnest & low
        where: Bools = timely & ((narrow & (share < config.plant_below)) | weak)
        score = np.where(none, 0.0, -rank)

        missing = sensor(view, MISSING)
        lacks = may & (missing > FEW)
        most = np.where(lacks, missing, -np.inf).max(1, keepdims=True)
        lacks &= missing >= config.missing_ratio * most
        room = (view.seeds.stage == Stage.TRAINING).sum(1, keepdims=True) < config.nominated
        measured_at_all = ~np.isnan(missing).all(1, keepdims=True)
        begun = (view.seeds.stage != Stage.DORMANT).any(1, keepdims=True)
        begun |= self._kept[:, None]  # a kept seed may be part of its layers, and its slot empty
        judged = lacks.any(1, keepdims=True) | (measured_at_all & begun)
        fresh = view.measurements.sensor_age == 0  # a seed that was planted since may have filled what was missing
        where = np.where(judged, timely & fresh & lacks & room & (share < config.plant_below), where)
        score = np.where(judged, missing, score)
        share = share[:, 0]
        obstacle = np.full(len(may), PlantingObstacle.EVEN, np.int8)
        obstacle[share >= config.plant_below] = PlantingObstacle.REACHED
        obstacle[np.isnan(share)] = PlantingObstacle.UNMEASURED
        if not timely:
            obstacle[:] = PlantingObstacle.LATE
        obstacle[where.any(1) | ~may.any(1)] = PlantingObstacle.NONE
        late = (obstacle == PlantingObstacle.LATE) & (self._obstacle != PlantingObstacle.NONE)
        record = (obstacle != PlantingObstacle.NONE) & ~late
        self._obstacle = np.where(record, obstacle, self._obstacle)
        self._share = np.where(record, share, self._share)
        if fresh:  # whether seeds were planted, and nothing is missing at any free site
            self._vain = np.where((judged & ~lacks.any(1, keepdims=True))[:, 0], self._vain + 1, 0)
        missing = np.where(lacks, missing, np.nan)
        at_once = view.masks.tempo[:, Op.GERMINATE, :, space.tempos.index(0)]
        plain = at_once & (missing >= PLAIN) & (view.step == 0)

        def why(env: int, slot: int) -> str:
            name, planted = space.slots[slot], space.blueprints[int(blueprint[env, slot])].name
            used, nominated = inner[env, slot], np.isfinite(missing[env, slot])
            if nominated:
                place = (
                    f"at {name}, {missing[env, slot]:.1%} of the gradient is what the layer in front cannot follow and a "
                    "bypass can (heuristic.missing_ratio)"
                )
                if plain[env, slot]:
                    place += f", at least {PLAIN:.0%} before the first step, so that it acts at once (lifecycle.direct)"
            elif narrow[env, slot]:
                bound = (
                    f"under {DEAD:.0%}" if used < DEAD else f"at least {config.narrow_from:.0%} (heuristic.narrow_from)"
                )
                place = f"the segment in front of {name} is narrow: {used:.0%} of its inner units are in use, {bound}"
            elif blind[env, 0]:
                place = f"inner features are not measured, and the stream is about the thinnest at {name} (heuristic.tie_ratio)"
            else:
                place = f"no segment is narrow (heuristic.narrow_from), and the stream is the thinnest at {name}"
            if not (narrow[env, slot] or nominated) and np.isfinite(share[env]):
                limit = "plant_below" if blind[env, 0] else "weak_below"
                bound = f"under {getattr(config, limit):.0%} (heuristic.{limit})"
                place += f"; {progress_of(share[env])}, {bound}"
            key = "narrow_blueprints" if narrow[env, slot] else "weak_blueprints"
            first = planted in getattr(config, key)
            kind = f"is the first of heuristic.{key} that fits" if first else f"fits, and none of heuristic.{key} does"
            return f"{place}; {planted} {kind}"

        return where, score, blueprint, plain, why


def _own_cost(view: View) -> Ints:
    """Return (E, S) the parameters of the seed at each slot; where there is none, the number means nothing."""
    cost, planted = np.broadcast_to(view.space.cost, view.masks.blueprint.shape), view.seeds.blueprint
    return np.take_along_axis(cost, np.maximum(planted, 0).astype(np.int64)[..., None], 2)[..., 0]


def relative_metric(metric: Floats, floor: Floats, ceiling: Floats) -> Floats:
    """Compute (metric - floor) / (ceiling - floor), (E,): 0 at the floor and 1 at the ceiling.

    nan where the metric is nan, minus infinity where floor or ceiling is nan, and 1 where the ceiling is not above the floor.
    """
    room = ceiling - floor
    share = np.where(room > 0, (metric - floor) / np.where(room > 0, room, 1.0), 1.0)
    return np.where(np.isnan(metric), np.nan, np.where(np.isnan(room), -np.inf, share))


def _first_that_fits(names: Sequence[str], fits: Bools, space: Space) -> Ints:
    """Return (E, S) the first of the named blueprints that fit, (E, S, K), otherwise the cheapest bypass, or the cheapest."""
    menu = space.blueprints
    order = [names.index(each.name) if each.name in names else len(names) + (each.tap != "before") for each in menu]
    cost = np.broadcast_to(space.cost, fits.shape)
    rank = np.where(fits, np.array(order)[None, None], len(names) + 2)
    best = rank == rank.min(2, keepdims=True)
    return np.where(best, cost, np.iinfo(np.int64).max).argmin(2)


def progress_of(share: float) -> str:
    """Return a `relative_metric` in words: how far the metric of a network has come."""
    if not np.isfinite(share):
        return "how far the metric is on the way to a perfect one is not known"
    if share < 0:
        return "the metric is below that of the best constant prediction, so it has covered none of the way to a perfect one"
    return f"the metric has covered {min(share, 1.0):.0%} of the way to a perfect one"


def _best(candidates: Bools, score: Floats) -> Ints:
    """Return the candidate with the highest score, the first of equal ones. A score of nan is the lowest.

    candidates, score: (E, S). Returns (E,) int64; 0 where there is no candidate.
    """
    known = np.nan_to_num(score, nan=np.finfo(np.float64).min)
    return np.where(candidates, known, -np.inf).argmax(1)
