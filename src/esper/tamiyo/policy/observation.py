"""Observe a view as arrays of features. E environments, S slots, K blueprints, W steps of history.

The tables name every column, with its unit, its scale and its function. Continuous features are nan where they were not measured.
`normalise` scales them to zero mean and unit variance, replaces nan by 0, and adds a flag for it. Flags are 0 or 1 and are not
scaled.
"""

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from esper.leyline.lifecycle.view import Bools, CoalitionValues, Floats, Measurements, Seeds, View, choose
from esper.leyline.lifecycle.vocabulary import IN_BUDGET, Actions, Blend, Op, Stage, among

Features = NDArray[np.float32]

WINDOWS = (2, 6)
"""Lengths of the windows of slopes [steps]."""


class Seen(NamedTuple):
    """Holds the sources of features."""

    view: View  # of this step, from which the next two are taken
    seeds: Seeds
    measured: Measurements
    history: "History"  # with the measurements of this step
    interaction: Floats  # (E, S) result of `interactions`
    interaction_age: Floats  # (E, S) result of `interactions` [steps]


Read = Callable[[Seen], Any]
"""Returns a column: (E,) or a number for a feature of the environment, (E, S) for a feature of a slot."""


class Feature(NamedTuple):
    """Describes a continuous column of an observation."""

    name: str
    unit: str
    scale: float  # standard deviation before the first round; a tenth of it is the lower bound later
    meaning: str  # description for `esper docs observation`
    read: Read
    missing: bool = False  # whether the value can be absent; a flag `name?` then says whether it was measured


_measured = partial(Feature, missing=True)
"""Describes a column whose value can be absent."""


class Flag(NamedTuple):
    """Describes a column that is 0 or 1."""

    name: str
    meaning: str  # the condition under which it is 1
    read: Read


TREND = (("metric", "1"), ("loss", "ln loss"), ("train_loss", "ln loss"))


def _newest(column: int) -> Read:
    return lambda seen: seen.history.trend[:, 0, column]


def _left(seen: Seen) -> int:
    return seen.view.steps - seen.view.step


def _change(column: int, window: int) -> Read:
    """Return the mean change per step (E,) over the measured part of a window; nan for fewer than two values."""

    def read(seen: Seen) -> Floats:
        values = seen.history.trend[..., column]  # newest first
        known = np.isfinite(values[:, : window + 1])
        span = known.cumprod(1).sum(1) - 1
        oldest = np.take_along_axis(values, np.maximum(span, 0)[:, None], 1)[:, 0]
        return np.where(span > 0, (values[:, 0] - oldest) / np.maximum(span, 1), np.nan)

    return read


def _equals(name: str, value: int) -> Read:
    column = attrgetter(name)
    return lambda seen: column(seen) == value


def _estimate(name: str) -> Read:
    return attrgetter(f"measured.{name.removesuffix('_se')}.{'se' if name.endswith('_se') else 'mean'}")


def _ln(name: str) -> Read:
    column = attrgetter(f"measured.{name}")
    return lambda seen: ln(column(seen))


def _count(stage: Stage) -> Read:
    return lambda seen: (seen.seeds.stage == stage).sum(1)


def _blended(blend: Blend) -> Read:
    return lambda seen: (seen.seeds.blend == blend) & (seen.seeds.blueprint >= 0)


def _depth(seen: Seen) -> Floats:
    return np.linspace(0, 1, len(seen.view.space.slots))


GLOBAL: tuple[Feature, ...] = (
    Feature("time_left", "1", 1.0, "share of the episode that is left", lambda s: _left(s) / s.view.steps),
    Feature("steps_left", "ln steps", 3.0, "ln(1 + steps left)", lambda s: np.log1p(_left(s))),
    _measured("metric", "1", 1.0, "metric on the probe split, every seed at its dose", _newest(0)),
    _measured("loss", "ln loss", 1.0, "logarithm of the probe loss", _newest(1)),
    _measured("train_loss", "ln loss", 1.0, "logarithm of the mean training loss of the step", _newest(2)),
    *(
        _measured(
            f"{name}_slope_{window}",
            f"{unit} / step",
            0.1,
            f"change of {name} per step, over up to {window} steps",
            _change(column, window),
        )
        for column, (name, unit) in enumerate(TREND)
        for window in WINDOWS
    ),
    _measured(
        "generalisation_gap",
        "ln loss",
        1.0,
        "ln probe loss - ln training loss",
        lambda s: s.history.trend[:, 0, 1] - s.history.trend[:, 0, 2],
    ),
    _measured("gradient_norm", "ln norm", 2.0, "gradient norm of the host, mean over the step", _ln("gradient_norm")),
    Feature("host_params", "ln parameters", 3.0, "size of the host", lambda s: np.log(s.view.host_params)),
    Feature(
        "added_params",
        "1",
        0.5,
        "ln(1 + added / host parameters)",
        lambda s: np.log1p(s.view.added_params / s.view.host_params),
    ),
    Feature(
        "seeds_left",
        "seeds",
        2.0,
        "number of seeds that can be planted within the budget",
        lambda s: s.view.space.max_seeds - among(s.seeds.stage, IN_BUDGET).sum(1),
    ),
    Feature(
        "sensor_age",
        "1",
        0.5,
        "steps since the growth sensors were computed / steps of an episode",
        lambda s: s.measured.sensor_age / s.view.steps,
    ),
    *(Feature(f"seeds_{stage.name.lower()}", "seeds", 1.0, f"slots in {stage.name}", _count(stage)) for stage in Stage),
)
"""Continuous features of an environment."""

GLOBAL_FLAGS: tuple[Flag, ...] = (
    *(Flag(f"last_{op.name.lower()}", f"the last decision was {op.name}", _equals("history.op", op)) for op in Op),
    Flag("last_accepted", "the last decision was accepted", lambda s: s.history.accepted),
    Flag("first_step", "there was no decision yet", lambda s: s.history.op < 0),
)
"""Flags of an environment: the last operation, whether it was accepted, and whether there was none."""

_ESTIMATES = (
    ("contribution", "metric", 0.1, "metric with every seed at its dose, minus the metric without the seed"),
    ("contribution_se", "metric", 0.05, "standard error of contribution"),
    ("contribution_loss", "loss", 0.1, "loss without the seed, minus the loss with every seed at its dose"),
    ("gain", "loss", 0.1, "incubation gain: loss with every seed at its dose, minus the loss with this seed at dose 1"),
    ("gain_se", "loss", 0.05, "standard error of gain"),
    (
        "gain_metric",
        "metric",
        0.1,
        "metric with the incubating seed at dose 1, minus the metric with every seed at its dose",
    ),
)
"""Name, unit, scale and meaning of those features of a slot that are an `Estimate` of the measurements."""

SLOT: tuple[Feature, ...] = (
    Feature("age", "1", 0.2, "steps in the current stage / steps of an episode", lambda s: s.seeds.age / s.view.steps),
    Feature("life", "1", 0.2, "steps since germination / steps of an episode", lambda s: s.seeds.life / s.view.steps),
    Feature("alpha", "1", 1.0, "alpha of the seed; the dose of a live seed", lambda s: s.seeds.alpha),
    Feature("ramp_target", "1", 1.0, "alpha at the end of the ramp", lambda s: s.seeds.ramp[..., 1]),
    Feature("ramp_length", "steps", 4.0, "length of the ramp", lambda s: s.seeds.ramp[..., 2]),
    *(_measured(name, unit, scale, meaning, _estimate(name)) for name, unit, scale, meaning in _ESTIMATES),
    _measured(
        "interaction",
        "metric",
        0.1,
        "value that the seed adds to all other live seeds, minus the value that it adds alone",
        lambda s: s.interaction,
    ),
    _measured(
        "interaction_age",
        "1",
        0.2,
        "steps since the coalitions were measured / steps of an episode",
        lambda s: s.interaction_age / s.view.steps,
    ),
    _measured(
        "seed_gradient", "ln norm", 2.0, "gradient norm of the seed, mean over the step", _ln("seed_gradient_norm")
    ),
    Feature("depth", "1", 0.5, "position of the slot, 0 the first and 1 the last", _depth),
    Feature("width", "ln features", 1.0, "width of the stream", lambda s: np.log(np.maximum(s.view.space.width, 1))),
    _measured(
        "participation_probe",
        "1",
        0.3,
        "participation ratio of the stream on the probe split / its width",
        lambda s: s.measured.participation,
    ),
)
"""Continuous features of a slot. Those of the growth sensors follow them, in the order of `Space.sensors`."""

SLOT_FLAGS: tuple[Flag, ...] = (
    *(Flag(stage.name.lower(), f"the slot is {stage.name}", _equals("seeds.stage", stage)) for stage in Stage),
    *(Flag(f"blend_{blend.name.lower()}", f"its seed blends by {blend.name}", _blended(blend)) for blend in Blend),
    Flag("doomed", "its seed ramps down to be pruned", lambda s: s.seeds.doomed),
)
"""Flags of a slot: its stage, its blend, and whether its seed ramps down to be pruned."""

RELATIVE = "_relative"
"""Suffix of relative features: the value minus its mean over the slots where it was measured."""


def slot_features(sensors: Sequence[str]) -> tuple[Feature, ...]:
    """Return the continuous features of a slot: first the raw ones, then the relative ones."""
    raw = (*SLOT, *(sensor_feature(name) for name in sensors))
    relative = (
        feature._replace(name=feature.name + RELATIVE, meaning="the raw feature minus its mean over the slots")
        for feature in raw
    )
    return (*raw, *relative)


PROSPECTS = (
    ("heldout", "the energy of the gradient that its kind of map explains on held-out examples"),
    ("explained", "the same on the examples that the map was fitted to"),
    ("map_gradient", "gradient norm of a zero linear map that reads what it reads"),
)
"""What growth sensors tell of a blueprint at a slot: the name, and its meaning. `BlueprintInfo.sensors` are in this order."""


def prospects(seen: Seen) -> Floats:
    """Return `PROSPECTS` of each blueprint of the menu at each slot, (E, S, K, 3); nan where its sensor is not measured.

    From them a policy chooses among blueprints: the features of a slot are the same for all blueprints.
    """
    space = seen.view.space
    shape = len(seen.view.host_params), len(space.slots)
    values = np.full((*shape, len(space.blueprints), len(PROSPECTS)), np.nan)
    told = {name for info in space.blueprints for name in info.sensors}.intersection(space.sensors)
    read_once = {name: sensor_feature(name).read(seen) for name in told}  # many blueprints share their sensors
    for k, info in enumerate(space.blueprints):
        for column, name in enumerate(info.sensors):
            if name in read_once:
                values[:, :, k, column] = read_once[name]
    return values


def read(columns: Sequence[Feature | Flag], seen: Seen, shape: tuple[int, ...]) -> Floats:
    """Return the columns of a table, (*shape, columns)."""
    values = [np.broadcast_to(np.asarray(column.read(seen), np.float64), shape) for column in columns]
    return np.stack(values, -1)


def interactions(table: CoalitionValues | None, step: int, life: NDArray[np.int32]) -> tuple[Floats, Floats]:
    """Compute [v(N) - v(N - {i})] - [v({i}) - v(0)] for each live seed i, and the age of the table [steps], each (E, S).

    N is the set of all live seeds. For two seeds the value is their pairwise interaction. It is nan where a coalition was not
    evaluated, where fewer than two seeds were live, and where the seed that was live has been removed.
    """
    envs, slots = shape = life.shape
    interaction, age = np.full((2, *shape), np.nan)
    if table is None or not len(table.env):
        return interaction, age
    bit = np.left_shift(1, np.arange(slots))
    live = table.live[:envs]
    every = (live * bit).sum(1)

    def value(mask: NDArray[np.int64]) -> Floats:
        """Return v (E, S) of a mask for each environment and slot; nan where the coalition was not evaluated."""
        code, asked = table.env << slots | table.mask, np.arange(envs)[:, None] << slots | mask
        at = np.searchsorted(code, asked).clip(max=len(code) - 1)  # the table is by environment and mask
        return np.where(code[at] == asked, table.metric[at], np.nan)

    nobody = np.zeros(shape, np.int64)
    whole = nobody + every[:, None]
    worth: Floats = value(whole) - value(whole & ~bit) - value(nobody + bit) + value(nobody)
    # not a seed that was planted since the table
    several = live & (live.sum(1) > 1)[:, None] & (life > step - table.step)
    interaction[several] = worth[several]
    age[several & np.isfinite(interaction)] = step - table.step
    return interaction, age


def sensor_feature(name: str) -> Feature:
    """Make a growth sensor a feature: shares as they are, held-out energies relative to the gradient's, others as logarithms."""

    def sensed(seen: Seen, sensor: str = name) -> Floats:  # (E, S), nan where it is not finite
        value = seen.measured.sensors[..., seen.view.space.sensors.index(sensor)]
        return np.where(np.isfinite(value), value, np.nan)

    def logarithm(seen: Seen) -> Floats:
        return np.log(np.maximum(sensed(seen), 1e-8))

    def energy_share(seen: Seen) -> Floats:
        if "gradient_rms" not in seen.view.space.sensors:
            return logarithm(seen)
        return np.clip(sensed(seen) / np.maximum(sensed(seen, "gradient_rms") ** 2, 1e-12), -1, 1)

    if name.startswith(("participation", "drift")) or name in ("dead", "unsaturated"):
        return _measured(name, "1", 0.3, "growth sensor (`esper docs observation`)", sensed)
    if name.startswith("heldout_"):
        return _measured(name, "1", 0.3, "growth sensor / gradient_rms^2, between -1 and 1", energy_share)
    return _measured(name, "ln sensor", 3.0, "logarithm of the growth sensor", logarithm)


def ln(values: Floats) -> Floats:
    """Return the logarithm of values of at least 1e-6; nan stays nan."""
    return np.log(np.maximum(values, 1e-6))


class Observation(NamedTuple):
    """Holds features before normalisation, float32; nan where a quantity was not measured."""

    env: Features  # (E, G) continuous features of the environment
    env_flags: Features  # (E, Gf) flags of the environment
    slot: Features  # (E, S, F) continuous features of the slots, raw, then relative to the mean over slots
    slot_flags: Features  # (E, S, Ff) flags of the slots
    blueprint: NDArray[np.int64]  # (E, S) index into the menu; -1 for an empty slot
    cost: Features  # (E, S, K) ln(1 + parameters of the blueprint / host parameters)
    # (E, S, K, 3) what the growth sensors tell of each blueprint at each slot (`PROSPECTS`)
    prospects: Features


class History(NamedTuple):
    """Holds the recent measurements and the last decision of every environment."""

    trend: Floats  # (E, W, 3) metric, ln loss and ln training loss, newest step first; nan before the episode
    op: NDArray[np.int64]  # (E,) last operation; -1 where there is none
    accepted: Bools  # (E,) whether the last decision was accepted

    @classmethod
    def empty(cls, envs: int) -> "History":
        """Return the history at the first decision of an episode."""
        shape = (envs, max(WINDOWS) + 1, len(TREND))
        return cls(np.full(shape, np.nan), np.full(envs, -1, np.int64), np.zeros(envs, bool))

    def measured(self, measurements: Measurements) -> "History":
        """Return the history with the measurements of one more step. Infinite values become nan."""
        newest = np.stack([measurements.metric, ln(measurements.loss), ln(measurements.train_loss)], 1)
        newest = np.where(np.isfinite(newest), newest, np.nan)
        return self._replace(trend=np.concatenate([newest[:, None], self.trend[:, :-1]], 1))

    def decided(self, actions: Actions, accepted: Bools) -> "History":
        return self._replace(op=np.asarray(actions.op, np.int64), accepted=accepted)

    def reset(self, rows: Bools) -> "History":
        """Return the history, emptied in the environments that are marked in `rows` (E,)."""
        emptied: History = choose(rows, History.empty(len(rows)), self)
        return emptied


def observe(view: View, history: History) -> Observation:
    """Return the features of a view. `history` must already contain the measurements of the view (`History.measured`)."""
    seen = Seen(
        view, view.seeds, view.measurements, history, *interactions(view.coalitions, view.step, view.seeds.life)
    )
    envs = len(view.host_params)
    slot_shape = envs, len(view.space.slots)
    raw = read((*SLOT, *(sensor_feature(name) for name in view.space.sensors)), seen, slot_shape)
    known = np.isfinite(raw)
    count = np.maximum(known.sum(1, keepdims=True), 1)
    relative = raw - np.where(known, raw, 0).sum(1, keepdims=True) / count
    host = view.host_params[:, None, None]
    return Observation(
        env=_single(read(GLOBAL, seen, (envs,))),
        env_flags=read(GLOBAL_FLAGS, seen, (envs,)).astype(np.float32),
        slot=_single(np.concatenate([raw, relative], 2)),
        slot_flags=read(SLOT_FLAGS, seen, slot_shape).astype(np.float32),
        blueprint=view.seeds.blueprint.astype(np.int64),
        cost=np.log1p(view.space.cost / host).astype(np.float32),
        prospects=_single(prospects(seen)),
    )


class Moments(NamedTuple):
    """Holds the running mean, variance and number of values of each feature, (F,) float64 each."""

    mean: Floats
    var: Floats
    n: Floats

    @classmethod
    def prior(cls, scale: Sequence[float]) -> "Moments":
        """Return the moments before any value: mean 0 and these standard deviations."""
        return cls(np.zeros(len(scale)), np.square(scale), np.zeros(len(scale)))

    @classmethod
    def of(cls, values: Features) -> "Moments":
        """Return the moments of values (..., F); nan is left out."""
        flat = values.reshape(-1, values.shape[-1]).astype(np.float64)
        known = np.isfinite(flat)
        count = known.sum(0).astype(np.float64)
        mean = np.where(known, flat, 0).sum(0) / np.maximum(count, 1)
        var = np.where(known, (flat - mean) ** 2, 0).sum(0) / np.maximum(count, 1)
        return cls(mean, var, count)

    def merged(self, other: "Moments") -> "Moments":
        """Return the moments of these values and others (Chan, Golub and LeVeque, "Updating formulae", 1979, eq. 1.5)."""
        total = np.maximum(self.n + other.n, 1)
        shift, some = other.mean - self.mean, other.n > 0
        joint = self.var * self.n + other.var * other.n + shift**2 * self.n * other.n / total
        merged: Moments = choose(
            some, Moments(self.mean + shift * other.n / total, joint / total, self.n + other.n), self
        )
        return merged


class Normaliser(NamedTuple):
    """Holds moments of the continuous features. They change only after an update of the policy, never during a rollout."""

    env: Moments
    slot: Moments
    prospects: Moments

    @classmethod
    def prior(cls, sensors: Sequence[str]) -> "Normaliser":
        """Return the moments before the first round."""
        scales = [[feature.scale for feature in table] for table in (GLOBAL, slot_features(sensors))]
        return cls(*map(Moments.prior, [*scales, [1.0] * len(PROSPECTS)]))

    @classmethod
    def of(cls, observation: Observation) -> "Normaliser":
        """Return the moments of observations, of any leading shape."""
        return cls(*(Moments.of(getattr(observation, name)) for name in cls._fields))

    def merged(self, other: "Normaliser") -> "Normaliser":
        return Normaliser(*(mine.merged(theirs) for mine, theirs in zip(self, other, strict=True)))


CLIP = 5.0
"""Largest absolute normalised value [standard deviations]."""


def normalise(observation: Observation, normaliser: Normaliser, features: Sequence[Feature]) -> Observation:
    """Return what a network reads of an observation: normalised features with their flags behind them, without nan.

    `env`, `slot` and `prospects` have as many further columns as there are flags. features: the columns of `observation.slot`,
    from `slot_features`.
    """
    known = np.isfinite(observation.prospects)
    scaled = _scaled(observation.prospects, normaliser.prospects, np.ones(len(PROSPECTS)))
    return observation._replace(
        env=_normal(observation.env, observation.env_flags, normaliser.env, GLOBAL),
        slot=_normal(observation.slot, observation.slot_flags, normaliser.slot, features),
        prospects=np.concatenate([scaled, known], -1, dtype=np.float32),
    )


def input_names(sensors: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return names of the columns of `env` and `slot` as `normalise` returns them. `name?` says whether `name` was measured."""
    return _columns(GLOBAL, GLOBAL_FLAGS), _columns(slot_features(sensors), SLOT_FLAGS)


def _columns(features: Sequence[Feature], flags: Sequence[Flag]) -> tuple[str, ...]:
    measured = (f"{feature.name}?" for feature in features if _flagged(feature))
    return (*(feature.name for feature in features), *(flag.name for flag in flags), *measured)


def _flagged(feature: Feature) -> bool:
    """Return whether a feature has a flag `name?`. A relative feature shares the flag of the raw one."""
    return feature.missing and not feature.name.endswith(RELATIVE)


def _normal(values: Features, flags: Features, moments: Moments, features: Sequence[Feature]) -> Features:
    assert values.shape[-1] == len(features), (values.shape, len(features))
    may_miss = [i for i, feature in enumerate(features) if _flagged(feature)]
    scaled = _scaled(values, moments, np.array([feature.scale for feature in features]))
    return np.concatenate([scaled, flags, np.isfinite(values)[..., may_miss]], -1, dtype=np.float32)


def _scaled(values: Features, moments: Moments, scale: Floats) -> Floats:
    """Scale values to zero mean and unit variance, 0 for nan. A tenth of `scale` is the least deviation that divides them."""
    deviation = np.maximum(np.sqrt(moments.var), 0.1 * scale)
    scaled = np.clip((values - moments.mean) / deviation, -CLIP, CLIP)
    return np.where(np.isfinite(values), scaled, 0)


def _single(values: Floats) -> Features:
    """Return values as float32; nan where they exceed its range."""
    return np.where(np.abs(values) <= np.finfo(np.float32).max, values, np.nan).astype(np.float32)
