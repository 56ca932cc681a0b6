"""The features of a controller, each with its unit, its scale and the function that reads it. E environments, S slots."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from esper.leyline.actions import Blend, Op
from esper.leyline.stages import IN_BUDGET, Stage, among
from esper.leyline.view import CoalitionValues, Floats, View

if TYPE_CHECKING:
    from esper.tamiyo.observation import History

WINDOWS = (2, 6)
"""Steps over which slopes are taken."""


class Seen(NamedTuple):
    """What features are read off."""

    view: View
    history: "History"
    interaction: Floats  # (E, S) as `interactions` has it
    interaction_age: Floats  # (E, S) likewise [steps]


Read = Callable[[Seen], Any]
"""A column off what is seen: (E,) or one number for all environments; of a slot (E, S)."""


class Feature(NamedTuple):
    """One column of an observation."""

    name: str
    unit: str
    scale: float  # the standard deviation before a first round; a tenth of it is the least there is later
    missing: bool  # it can be absent, and a column `name?` beside the flags says whether it was measured
    meaning: str
    read: Read


class Flag(NamedTuple):
    """One column that is 0 or 1."""

    name: str
    meaning: str  # 1 where this is so
    read: Read


TREND = (("metric", "1"), ("loss", "ln loss"), ("train_loss", "ln loss"))


def _newest(column: int) -> Read:
    return lambda seen: seen.history.trend[:, 0, column]


def _change(column: int, window: int) -> Read:
    return lambda seen: _slope(seen.history.trend[..., column], window)


def _left(seen: Seen) -> int:
    return seen.view.steps - seen.view.step


def _at(stage: Stage) -> Read:
    return lambda seen: seen.view.seeds.stage == stage


def _count(stage: Stage) -> Read:
    return lambda seen: (seen.view.seeds.stage == stage).sum(1)


def _last(op: Op) -> Read:
    return lambda seen: seen.history.op == op


def _blended(blend: Blend) -> Read:
    return lambda seen: (seen.view.seeds.blend == blend) & (seen.view.seeds.blueprint >= 0)


def _depth(seen: Seen) -> Floats:
    envs, slots = seen.view.seeds.stage.shape
    return np.broadcast_to(np.linspace(0, 1, slots), (envs, slots))


def _occupied(seen: Seen) -> NDArray[np.int64]:
    return np.asarray(among(seen.view.seeds.stage, IN_BUDGET).sum(1), np.int64)


GLOBAL: tuple[Feature, ...] = (
    Feature("time_left", "1", 1.0, False, "share of the episode that is left", lambda s: _left(s) / s.view.steps),
    Feature("steps_left", "ln steps", 3.0, False, "ln(1 + steps left)", lambda s: np.log1p(_left(s))),
    Feature("metric", "1", 1.0, True, "on the probe split, at the real doses", _newest(0)),
    Feature("loss", "ln loss", 1.0, True, "logarithm of the probe loss", _newest(1)),
    Feature("train_loss", "ln loss", 1.0, True, "logarithm of the mean training loss of the step", _newest(2)),
    *(
        Feature(
            f"{name}_slope_{window}",
            f"{unit} / step",
            0.1,
            True,
            f"its change over up to {window} steps, a step",
            _change(column, window),
        )
        for column, (name, unit) in enumerate(TREND)
        for window in WINDOWS
    ),
    Feature(
        "generalisation_gap",
        "ln loss",
        1.0,
        True,
        "ln probe loss - ln training loss",
        lambda s: s.history.trend[:, 0, 1] - s.history.trend[:, 0, 2],
    ),
    Feature(
        "gradient_norm",
        "ln norm",
        2.0,
        True,
        "of the host, mean over the step",
        lambda s: ln(s.view.measurements.gradient_norm),
    ),
    Feature("host_params", "ln parameters", 3.0, False, "size of the host", lambda s: np.log(s.view.host_params)),
    Feature(
        "added_params",
        "1",
        0.5,
        False,
        "ln(1 + added / host parameters), what rent is paid on",
        lambda s: np.log1p(s.view.added_params / s.view.host_params),
    ),
    Feature(
        "seeds_left",
        "seeds",
        2.0,
        False,
        "seeds that may still be planted, at the present budget",
        lambda s: s.view.space.max_seeds - _occupied(s),
    ),
    Feature(
        "sensor_age",
        "1",
        0.5,
        False,
        "steps since the growth sensors were computed / steps of an episode",
        lambda s: s.view.measurements.sensor_age / s.view.steps,
    ),
    *(
        Feature(f"seeds_{stage.name.lower()}", "seeds", 1.0, False, f"slots in {stage.name}", _count(stage))
        for stage in Stage
    ),
)
"""Continuous features of an environment."""

GLOBAL_FLAGS: tuple[Flag, ...] = (
    *(Flag(f"last_{op.name.lower()}", f"the last decision was {op.name}", _last(op)) for op in Op),
    Flag("last_accepted", "the last decision was taken, not refused", lambda s: s.history.accepted),
    Flag("first_step", "there was no decision yet", lambda s: s.history.op < 0),
)
"""The last decision's operation, whether it was taken, and whether there was none yet."""

SLOT: tuple[Feature, ...] = (
    Feature(
        "age",
        "1",
        0.2,
        False,
        "steps in the present stage / steps of an episode",
        lambda s: s.view.seeds.age / s.view.steps,
    ),
    Feature(
        "life",
        "1",
        0.2,
        False,
        "steps since germination / steps of an episode",
        lambda s: s.view.seeds.life / s.view.steps,
    ),
    Feature(
        "alpha", "1", 1.0, False, "alpha of the seed, which is its dose while it is live", lambda s: s.view.seeds.alpha
    ),
    Feature("ramp_target", "1", 1.0, False, "alpha at the end of the ramp", lambda s: s.view.seeds.ramp[..., 1]),
    Feature("ramp_length", "steps", 4.0, False, "length of the ramp", lambda s: s.view.seeds.ramp[..., 2]),
    Feature(
        "contribution",
        "metric",
        0.1,
        True,
        "metric at the real doses less that without the seed",
        lambda s: s.view.measurements.contribution.mean,
    ),
    Feature(
        "contribution_se",
        "metric",
        0.05,
        True,
        "its standard error",
        lambda s: s.view.measurements.contribution.se,
    ),
    Feature(
        "contribution_loss",
        "loss",
        0.1,
        True,
        "loss without the seed less that at the real doses",
        lambda s: s.view.measurements.contribution_loss.mean,
    ),
    Feature(
        "gain",
        "loss",
        0.1,
        True,
        "incubation gain: loss at the real doses less that with the seed at dose 1",
        lambda s: s.view.measurements.gain.mean,
    ),
    Feature("gain_se", "loss", 0.05, True, "its standard error", lambda s: s.view.measurements.gain.se),
    Feature(
        "gain_metric",
        "metric",
        0.1,
        True,
        "metric with the incubating seed at dose 1 less that at the real doses",
        lambda s: s.view.measurements.gain_metric.mean,
    ),
    Feature(
        "interaction",
        "metric",
        0.1,
        True,
        "worth of the seed among the live ones less its worth alone",
        lambda s: s.interaction,
    ),
    Feature(
        "interaction_age",
        "1",
        0.2,
        True,
        "steps since the coalitions were measured / steps of an episode",
        lambda s: s.interaction_age / s.view.steps,
    ),
    Feature(
        "seed_gradient",
        "ln norm",
        2.0,
        True,
        "gradient norm of the seed, mean over the step",
        lambda s: ln(s.view.measurements.seed_gradient_norm),
    ),
    Feature("depth", "1", 0.5, False, "position of the slot, 0 the first and 1 the last", _depth),
    Feature(
        "width",
        "ln features",
        1.0,
        False,
        "width of the stream",
        lambda s: np.log(np.maximum(s.view.space.width, 1)),
    ),
    Feature(
        "participation_probe",
        "1",
        0.3,
        True,
        "participation ratio of the stream on the probe split / its width",
        lambda s: s.view.measurements.participation,
    ),
)
"""Continuous features of a slot; those of the growth sensors follow, in the order of `Space.sensors`."""

SLOT_FLAGS: tuple[Flag, ...] = (
    *(Flag(stage.name.lower(), f"the slot is {stage.name}", _at(stage)) for stage in Stage),
    *(Flag(f"blend_{blend.name.lower()}", f"its seed blends by {blend.name}", _blended(blend)) for blend in Blend),
    Flag("doomed", "its seed ramps down to be pruned", lambda s: s.view.seeds.doomed),
)
"""Stage and blend of the slot, and whether it ramps down to be pruned."""

RELATIVE = "_relative"
"""Suffix of a slot's feature less its mean over the slots where it was measured."""


def slot_features(sensors: Sequence[str]) -> tuple[Feature, ...]:
    """The continuous features of a slot, raw and then relative."""
    raw = (*SLOT, *(sensor_feature(name) for name in sensors))
    relative = (
        feature._replace(name=feature.name + RELATIVE, meaning="the same less its mean over the slots")
        for feature in raw
    )
    return (*raw, *relative)


def read(columns: Sequence[Feature | Flag], seen: Seen, shape: tuple[int, ...]) -> Floats:
    """The columns of a table, (*shape, columns)."""
    values = [np.broadcast_to(np.asarray(column.read(seen), np.float64), shape) for column in columns]
    return np.stack(values, -1)


def _slope(values: Floats, window: int) -> Floats:
    """(E, W) newest first -> (E,) mean change a step over the measured part of a window; nan with one value or none."""
    known = np.isfinite(values[:, : window + 1])
    span = known.cumprod(1).sum(1) - 1
    oldest = np.take_along_axis(values, np.maximum(span, 0)[:, None], 1)[:, 0]
    return np.where(span > 0, (values[:, 0] - oldest) / np.maximum(span, 1), np.nan)


def interactions(table: CoalitionValues | None, step: int, life: NDArray[np.int32]) -> tuple[Floats, Floats]:
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


def sensor_feature(name: str) -> Feature:
    """A growth sensor as a feature: shares as they are, held-out energies as shares of the gradient's, the rest as logarithms."""
    if _is_share(name):
        return Feature(name, "1", 0.3, True, "growth sensor (docs/observation.md)", lambda s: _sensed(s, name))
    if name.startswith("heldout_"):
        meaning = "growth sensor / gradient_rms^2, between -1 and 1"
        return Feature(name, "1", 0.3, True, meaning, lambda s: _energy_share(s, name))
    meaning = "logarithm of the growth sensor"
    return Feature(name, "ln sensor", 3.0, True, meaning, lambda s: _ln_sensor(s, name))


def _is_share(name: str) -> bool:
    return name.startswith("participation") or name in ("dead", "unsaturated")


def _sensed(seen: Seen, name: str) -> Floats:
    """(E, S) of one growth sensor; what overflowed tells nothing and is nan."""
    value = seen.view.measurements.sensors[..., seen.view.space.sensors.index(name)]
    return np.where(np.isfinite(value), value, np.nan)


def _ln_sensor(seen: Seen, name: str) -> Floats:
    return np.log(np.maximum(_sensed(seen, name), 1e-8))


def _energy_share(seen: Seen, name: str) -> Floats:
    if "gradient_rms" not in seen.view.space.sensors:
        return _ln_sensor(seen, name)
    return np.clip(_sensed(seen, name) / np.maximum(_sensed(seen, "gradient_rms") ** 2, 1e-12), -1, 1)


def ln(values: Floats) -> Floats:
    """Logarithm of positive values, bounded below; nan stays nan."""
    return np.log(np.maximum(values, 1e-6))
