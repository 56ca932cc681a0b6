"""Gates: what a seed must show before it may go on. E environments, S slots."""

from typing import NamedTuple

import numpy as np

from esper.leyline.config import GatesConfig
from esper.leyline.stages import Stage
from esper.leyline.view import Bools, Floats, Measurements, Seeds


class Check(NamedTuple):
    """One condition of a gate."""

    name: str
    margin: Floats  # (E, S) positive passes; nan where what it asks for was not measured, which fails
    value: Floats  # (E, S) what was measured
    failure: str  # what a value that does not pass is, what it has to be, and by which key; {value} stands for it


class Gate(NamedTuple):
    """Named checks that must all pass, for every slot of every environment at once."""

    stage: Stage  # where a seed must be for the gate to apply
    checks: tuple[Check, ...]

    def passed(self) -> Bools:
        """(E, S): every margin is positive; an absent measurement, nan, is not."""
        passed: Bools = np.logical_and.reduce([check.margin > 0 for check in self.checks])
        return passed

    def reason(self, env: int, slot: int) -> str:
        """Why one slot passes or fails, for a person."""
        failed = [
            f"{check.name} not measured"
            if np.isnan(check.margin[env, slot])
            else check.failure.format(value=float(check.value[env, slot]))
            for check in self.checks
            if not check.margin[env, slot] > 0
        ]
        return f"failed: {' and '.join(failed)}" if failed else "passed"


class Gates(NamedTuple):
    """The gates that a controller's operations go through; G3, the end of a ramp, is part of `tick`."""

    advance: Gate  # G2: TRAINING -> BLENDING
    fossilize: Gate  # G5: HOLDING -> FOSSILIZED


def judge(seeds: Seeds, measurements: Measurements, config: GatesConfig) -> Gates:
    """Hold every seed against both gates (docs/lifecycle.md)."""
    gain, contribution = measurements.gain, measurements.contribution
    untrained = np.where(seeds.age == 0, np.nan, -1.0)  # in TRAINING, the first batch comes after age 0
    finite = np.where(measurements.seed_gradient_finite, 1.0, untrained)
    trained = _dwell("min_training_steps", seeds, config.min_training_steps)
    held = _dwell("min_holding_steps", seeds, config.min_holding_steps)
    if config.permissive:
        return Gates(
            Gate(Stage.TRAINING, (trained, _measured("incubation gain", gain.mean))),
            Gate(Stage.HOLDING, (held, _measured("contribution", contribution.mean))),
        )
    gained = gain.mean - config.gain_z * gain.se
    brought = contribution.mean - config.contribution_z * contribution.se
    return Gates(
        Gate(
            Stage.TRAINING,
            (
                trained,
                Check("finite gradients", finite, finite, "a gradient of the seed is not finite"),
                _bound("incubation gain", gained, config.gain_z, 0.0, "gates.gain_z"),
            ),
        ),
        Gate(
            Stage.HOLDING,
            (
                held,
                _bound(
                    "contribution",
                    brought,
                    config.contribution_z,
                    config.min_contribution,
                    "gates.contribution_z and gates.min_contribution",
                ),
            ),
        ),
    )


def _dwell(name: str, seeds: Seeds, steps: int) -> Check:
    age = seeds.age.astype(np.float64)
    return Check(name, age - steps + 1, age, f"it has been there for {{value:.0f}} of {steps} steps (gates.{name})")


def _bound(name: str, bound: Floats, z: float, least: float, keys: str) -> Check:
    """Whether what was measured, less z standard errors, exceeds `least`."""
    errors = "its standard error" if z == 1 else f"{z:g} standard errors"
    return Check(name, bound - least, bound, f"{name} less {errors} is {{value:+.4g}}, not above {least:g} ({keys})")


def _measured(name: str, mean: Floats) -> Check:
    return Check(f"{name} measured", np.where(np.isnan(mean), np.nan, 1.0), mean, f"{name} is {{value:+.4g}}")
