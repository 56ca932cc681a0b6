"""What a controller sees: a view as arrays of features. E environments, S slots, K blueprints, W remembered steps.

One table names every feature. Continuous ones are nan where they were not measured; `Normaliser` gives them zero mean and
unit variance and puts 0 in place of nan, beside a flag that says so. Flags are 0 or 1 and are left as they are.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from esper.leyline.actions import Actions, Blend, Op
from esper.leyline.stages import IN_BUDGET, Stage, among
from esper.leyline.view import Bools, CoalitionValues, Floats, Measurements, Space, View

Features = NDArray[np.float32]
WINDOWS = (2, 6)
"""Steps over which slopes are taken."""


class Feature(NamedTuple):
    """One column of an observation."""

    name: str
    unit: str
    scale: float  # the standard deviation before a first round; a tenth of it is the least there is later
    missing: bool  # it can be absent, and a column `name?` beside the flags says whether it was measured
    meaning: str


_TREND = (("metric", "1"), ("loss", "ln loss"), ("train_loss", "ln loss"))

GLOBAL: tuple[Feature, ...] = (
    Feature("time_left", "1", 1.0, False, "share of the episode that is left"),
    Feature("steps_left", "ln steps", 3.0, False, "ln(1 + steps left)"),
    Feature("metric", "1", 1.0, True, "on the probe split, at the real doses"),
    Feature("loss", "ln loss", 1.0, True, "logarithm of the probe loss"),
    Feature("train_loss", "ln loss", 1.0, True, "logarithm of the mean training loss of the step"),
    *(
        Feature(f"{name}_slope_{window}", f"{unit} / step", 0.1, True, f"its change over up to {window} steps, a step")
        for name, unit in _TREND
        for window in WINDOWS
    ),
    Feature("generalisation_gap", "ln loss", 1.0, True, "ln probe loss - ln training loss"),
    Feature("gradient_norm", "ln norm", 2.0, True, "of the host, mean over the step"),
    Feature("host_params", "ln parameters", 3.0, False, "size of the host"),
    Feature("added_params", "1", 0.5, False, "ln(1 + added / host parameters), what rent is paid on"),
    Feature("seeds_left", "seeds", 2.0, False, "seeds that may still be planted, at the present budget"),
    Feature("sensor_age", "1", 0.5, False, "steps since the growth sensors were computed / steps of an episode"),
    *(Feature(f"seeds_{stage.name.lower()}", "seeds", 1.0, False, f"slots in {stage.name}") for stage in Stage),
)
"""Continuous features of an environment."""

GLOBAL_FLAGS: tuple[str, ...] = (*(f"last_{op.name.lower()}" for op in Op), "last_accepted", "first_step")
"""The last decision's operation, whether it was taken, and whether there was none yet."""

SLOT: tuple[Feature, ...] = (
    Feature("age", "1", 0.2, False, "steps in the present stage / steps of an episode"),
    Feature("life", "1", 0.2, False, "steps since germination / steps of an episode"),
    Feature("alpha", "1", 1.0, False, "dose"),
    Feature("ramp_target", "1", 1.0, False, "alpha at the end of the ramp"),
    Feature("ramp_length", "steps", 4.0, False, "length of the ramp"),
    Feature("contribution", "metric", 0.1, True, "metric at the real doses less that without the seed"),
    Feature("contribution_se", "metric", 0.05, True, "its standard error"),
    Feature("contribution_loss", "loss", 0.1, True, "loss without the seed less that at the real doses"),
    Feature("gain", "loss", 0.1, True, "incubation gain: loss at the real doses less that with the seed at dose 1"),
    Feature("gain_se", "loss", 0.05, True, "its standard error"),
    Feature(
        "gain_metric", "metric", 0.1, True, "metric with the incubating seed at dose 1 less that at the real doses"
    ),
    Feature("interaction", "metric", 0.1, True, "worth of the seed among the live ones less its worth alone"),
    Feature("interaction_age", "1", 0.2, True, "steps since the coalitions were measured / steps of an episode"),
    Feature("seed_gradient", "ln norm", 2.0, True, "gradient norm of the seed, mean over the step"),
    Feature("depth", "1", 0.5, False, "position of the slot, 0 the first and 1 the last"),
    Feature("width", "ln features", 1.0, False, "width of the stream"),
    Feature("participation_probe", "1", 0.3, True, "participation ratio of the stream on the probe split / its width"),
)
"""Continuous features of a slot; those of the growth sensors follow, in the order of `Space.sensors`."""

SLOT_FLAGS: tuple[str, ...] = (
    *(stage.name.lower() for stage in Stage),
    *(f"blend_{blend.name.lower()}" for blend in Blend),
    "doomed",
)
"""Stage and blend of the slot, and whether it ramps down to be pruned."""

RELATIVE = "_relative"
"""Suffix of a slot's feature less its mean over the slots where it was measured."""


class Observation(NamedTuple):
    """Features as they stand before normalisation; nan where something was not measured."""

    env: Features  # (E, G)
    env_flags: Features  # (E, Gf)
    slot: Features  # (E, S, F) raw, then relative to the mean over slots
    slot_flags: Features  # (E, S, Ff)
    blueprint: NDArray[np.int64]  # (E, S) index into the menu, -1 when empty
    cost: Features  # (E, S, K) ln(1 + parameters of the blueprint / host parameters)


class History(NamedTuple):
    """What an environment remembers of its own past, to tell slopes and the last decision."""

    trend: Floats  # (E, W, 3) metric, ln loss and ln training loss of the last steps, the newest first; nan before
    op: NDArray[np.int64]  # (E,) the last operation, -1 where there is none
    accepted: Bools  # (E,)

    @classmethod
    def empty(cls, envs: int) -> "History":
        """The history at the first decision of an episode."""
        shape = (envs, max(WINDOWS) + 1, len(_TREND))
        return cls(np.full(shape, np.nan), np.full(envs, -1, np.int64), np.zeros(envs, bool))

    def measured(self, measurements: Measurements) -> "History":
        """The history with one more step in front."""
        newest = np.stack([measurements.metric, _ln(measurements.loss), _ln(measurements.train_loss)], 1)
        newest = np.where(
            np.isfinite(newest), newest, np.nan
        )  # a loss that overflowed tells as little as an absent one
        return self._replace(trend=np.concatenate([newest[:, None], self.trend[:, :-1]], 1))

    def decided(self, actions: Actions, accepted: Bools) -> "History":
        """The history after a decision."""
        return self._replace(op=np.asarray(actions.op, np.int64), accepted=accepted)

    def reset(self, rows: Bools) -> "History":
        """The history with that of some environments, (E,) bool, forgotten."""
        fresh = History.empty(len(rows))
        return History(
            np.where(rows[:, None, None], fresh.trend, self.trend),
            np.where(rows, fresh.op, self.op),
            np.where(rows, fresh.accepted, self.accepted),
        )


def slot_features(sensors: Sequence[str]) -> tuple[Feature, ...]:
    """The continuous features of a slot, raw and then relative."""
    raw = (*SLOT, *(_sensor(name) for name in sensors))
    relative = (
        feature._replace(name=feature.name + RELATIVE, meaning="the same less its mean over the slots")
        for feature in raw
    )
    return (*raw, *relative)


def observe(view: View, history: History) -> Observation:
    """The view as features; `history` holds this view's own measurements in front (`History.measured`)."""
    raw = np.concatenate([_slots(view), _sensors(view.space, view.measurements)], 2)
    known = np.isfinite(raw)
    count = np.maximum(known.sum(1, keepdims=True), 1)
    relative = raw - np.where(known, raw, 0).sum(1, keepdims=True) / count
    host = view.host_params[:, None, None]
    return Observation(
        env=_single(_globals(view, history)),
        env_flags=_global_flags(view, history).astype(np.float32),
        slot=_single(np.concatenate([raw, relative], 2)),
        slot_flags=_slot_flags(view).astype(np.float32),
        blueprint=view.seeds.blueprint.astype(np.int64),
        cost=np.log1p(view.space.cost / host).astype(np.float32),
    )


class Moments(NamedTuple):
    """Running mean and variance of some features, and how many values of each they are made of."""

    mean: Floats  # (F,)
    var: Floats  # (F,)
    n: Floats  # (F,)

    @classmethod
    def prior(cls, features: Sequence[Feature]) -> "Moments":
        """Nothing seen yet: mean 0 and the scale of the table."""
        scale = np.array([feature.scale for feature in features])
        return cls(np.zeros(len(features)), scale**2, np.zeros(len(features)))

    def including(self, values: Features) -> "Moments":
        """With (..., F) more values, nan left out (Chan, Golub and LeVeque, "Updating formulae", 1979, equation 1.5)."""
        flat = values.reshape(-1, values.shape[-1]).astype(np.float64)
        known = np.isfinite(flat)
        count = known.sum(0).astype(np.float64)
        some = count > 0
        mean = np.where(known, flat, 0).sum(0) / np.maximum(count, 1)
        spread = np.where(known, (flat - mean) ** 2, 0).sum(0)
        total = np.maximum(self.n + count, 1)
        shift = mean - self.mean
        joint = self.var * self.n + spread + shift**2 * self.n * count / total
        return Moments(
            np.where(some, self.mean + shift * count / total, self.mean),
            np.where(some, joint / total, self.var),
            self.n + count,
        )


class Normaliser(NamedTuple):
    """Frozen moments of the continuous features. They change between a policy's update and the next rollout only."""

    env: Moments
    slot: Moments

    @classmethod
    def prior(cls, sensors: Sequence[str]) -> "Normaliser":
        """What stands in for moments before the first round."""
        return cls(Moments.prior(GLOBAL), Moments.prior(slot_features(sensors)))

    def including(self, observation: Observation) -> "Normaliser":
        """With the moments of more observations, of any leading shape."""
        return Normaliser(self.env.including(observation.env), self.slot.including(observation.slot))


class Inputs(NamedTuple):
    """An observation as a network reads it: no nan, flags included. All but `blueprint` are float32."""

    env: Features  # (..., G + flags)
    slot: Features  # (..., S, F + flags)
    blueprint: NDArray[np.int64]  # (..., S)
    cost: Features  # (..., S, K)


CLIP = 5.0
"""Largest normalised value [standard deviations]."""


def normalise(observation: Observation, normaliser: Normaliser, features: Sequence[Feature]) -> Inputs:
    """Inputs of a network; `features` are the columns of `observation.slot`, as `slot_features` names them."""
    return Inputs(
        env=_normal(observation.env, observation.env_flags, normaliser.env, GLOBAL),
        slot=_normal(observation.slot, observation.slot_flags, normaliser.slot, features),
        blueprint=observation.blueprint,
        cost=observation.cost,
    )


def input_names(sensors: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the columns of `Inputs.env` and `Inputs.slot`; `name?` says whether `name` was measured."""
    return _columns(GLOBAL, GLOBAL_FLAGS), _columns(slot_features(sensors), SLOT_FLAGS)


def _columns(features: Sequence[Feature], flags: Sequence[str]) -> tuple[str, ...]:
    measured = (f"{feature.name}?" for feature in features if _flagged(feature))
    return (*(feature.name for feature in features), *flags, *measured)


def _flagged(feature: Feature) -> bool:
    """A relative feature is measured where the raw one is, so one flag does for both."""
    return feature.missing and not feature.name.endswith(RELATIVE)


def _normal(values: Features, flags: Features, moments: Moments, features: Sequence[Feature]) -> Features:
    assert values.shape[-1] == len(features), (values.shape, len(features))
    least = np.array([0.1 * feature.scale for feature in features])
    deviation = np.maximum(np.sqrt(moments.var), least)
    scaled = np.clip((values - moments.mean) / deviation, -CLIP, CLIP)
    known = np.isfinite(values)
    may_miss = [i for i, feature in enumerate(features) if _flagged(feature)]
    columns = np.concatenate([np.where(known, scaled, 0), flags, known[..., may_miss]], -1)
    return np.asarray(columns, np.float32)


def _globals(view: View, history: History) -> Floats:
    measured, envs = view.measurements, len(view.host_params)
    newest = history.trend[:, 0]
    stage = view.seeds.stage
    counts = [(stage == s).sum(1) for s in Stage]
    left = view.steps - view.step
    columns = [
        np.full(envs, left / view.steps),
        np.full(envs, np.log1p(left)),
        *newest.T,
        *(_slope(history.trend[..., i], window) for i in range(len(_TREND)) for window in WINDOWS),
        newest[:, 1] - newest[:, 2],
        _ln(measured.gradient_norm),
        np.log(view.host_params),
        np.log1p(view.added_params / view.host_params),
        view.space.max_seeds - among(stage, IN_BUDGET).sum(1),
        np.full(envs, measured.sensor_age / view.steps),
        *counts,
    ]
    return np.stack(columns, 1)


def _slope(values: Floats, window: int) -> Floats:
    """(E, W) newest first -> (E,) mean change a step over the measured part of a window; nan with one value or none."""
    known = np.isfinite(values[:, : window + 1])
    span = known.cumprod(1).sum(1) - 1
    oldest = np.take_along_axis(values, np.maximum(span, 0)[:, None], 1)[:, 0]
    return np.where(span > 0, (values[:, 0] - oldest) / np.maximum(span, 1), np.nan)


def _global_flags(view: View, history: History) -> Floats:
    last = history.op[:, None] == np.arange(len(Op))
    return np.concatenate([last, history.accepted[:, None], (history.op < 0)[:, None]], 1).astype(np.float64)


def _slots(view: View) -> Floats:
    seeds, measured, (envs, slots) = view.seeds, view.measurements, view.seeds.stage.shape
    interaction, age = _interactions(view.coalitions, view.step, seeds.life)
    columns = [
        seeds.age / view.steps,
        seeds.life / view.steps,
        seeds.alpha,
        seeds.ramp[..., 1],
        seeds.ramp[..., 2],
        measured.contribution.mean,
        measured.contribution.se,
        measured.contribution_loss.mean,
        measured.gain.mean,
        measured.gain.se,
        measured.gain_metric.mean,
        interaction,
        age / view.steps,
        _ln(measured.seed_gradient_norm),
        np.broadcast_to(np.linspace(0, 1, slots), (envs, slots)),
        np.log(np.maximum(view.space.width, 1)),
        measured.participation,
    ]
    return np.stack([np.asarray(column, np.float64) for column in columns], 2)


def _slot_flags(view: View) -> Floats:
    seeds = view.seeds
    stage = seeds.stage[..., None] == np.array(Stage)
    blend = (seeds.blend[..., None] == np.array(Blend)) & (seeds.blueprint >= 0)[..., None]
    return np.concatenate([stage, blend, seeds.doomed[..., None]], 2).astype(np.float64)


def _interactions(table: CoalitionValues | None, step: int, life: NDArray[np.int32]) -> tuple[Floats, Floats]:
    """(E, S) each: a live seed's worth with all other live ones less its worth alone, and the age of the table [steps].

    [v(N) - v(N - {i})] - [v({i}) - v(0)], which for two seeds is their pairwise interaction. nan where the table lacks a
    term of it, where fewer than two seeds were live, and where the seed that was live is gone.
    """
    envs, slots = shape = life.shape
    found, age = np.full(shape, np.nan), np.full(shape, np.nan)
    if table is None or not len(table.env):
        return found, age
    bit = np.left_shift(1, np.arange(slots))
    live = table.live[:envs]
    every = (live * bit).sum(1)

    def value(mask: NDArray[np.int64]) -> Floats:
        """v of one mask per environment and slot, (E, S); nan where it was not evaluated."""
        code, asked = table.env << slots | table.mask, np.arange(envs)[:, None] << slots | mask
        order = np.argsort(code)
        place = np.searchsorted(code[order], asked).clip(max=len(code) - 1)
        at = order[place]
        return np.where(code[at] == asked, table.metric[at], np.nan)

    nobody = np.zeros(shape, np.int64)
    whole = nobody + every[:, None]
    worth: Floats = value(whole) - value(whole & ~bit) - value(nobody + bit) + value(nobody)
    several = live & (live.sum(1) > 1)[:, None] & (life > step - table.step)  # a seed planted since has lived less
    found[several] = worth[several]
    age[several & np.isfinite(found)] = step - table.step
    return found, age


def _sensor(name: str) -> Feature:
    if _is_share(name):
        return Feature(name, "1", 0.3, True, "growth sensor (docs/observation.md)")
    if name.startswith("heldout_"):
        return Feature(name, "1", 0.3, True, "growth sensor / gradient_rms^2, between -1 and 1")
    return Feature(name, "ln sensor", 3.0, True, "logarithm of the growth sensor")


def _is_share(name: str) -> bool:
    return name.startswith("participation") or name in ("dead", "unsaturated")


def _sensors(space: Space, measured: Measurements) -> Floats:
    """Growth sensors as features: shares as they are, held-out energies as shares of the gradient's, the rest as logarithms."""
    if not space.sensors:
        return np.zeros((*measured.participation.shape, 0))
    sensors = np.where(np.isfinite(measured.sensors), measured.sensors, np.nan)  # one that overflowed tells nothing
    energy = sensors[..., space.sensors.index("gradient_rms")] ** 2 if "gradient_rms" in space.sensors else None
    columns: list[Any] = []
    for index, name in enumerate(space.sensors):
        value = sensors[..., index]
        if _is_share(name):
            columns.append(value)
        elif name.startswith("heldout_") and energy is not None:
            columns.append(np.clip(value / np.maximum(energy, 1e-12), -1, 1))
        else:
            columns.append(np.log(np.maximum(value, 1e-8)))
    return np.stack(columns, -1)


def _single(values: Floats) -> Features:
    """As float32; what exceeds its range counts as not measured, nan."""
    return np.where(np.abs(values) <= np.finfo(np.float32).max, values, np.nan).astype(np.float32)


def _ln(values: Floats) -> Floats:
    """Logarithm of positive values, bounded below; nan stays nan."""
    return np.log(np.maximum(values, 1e-6))
