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
        margins = [(check.name, float(check.margin[env, slot])) for check in self.checks]
        failed = [f"{name}: not measured" if np.isnan(m) else f"{name}: {m:+.4g}" for name, m in margins if not m > 0]
        return "failed " + ", ".join(failed) if failed else "passed"


class Gates(NamedTuple):
    """The gates that a controller's operations go through; G3, the end of a ramp, is part of `tick`."""

    advance: Gate  # G2: TRAINING -> BLENDING
    fossilize: Gate  # G5: HOLDING -> FOSSILIZED


def judge(seeds: Seeds, measurements: Measurements, config: GatesConfig) -> Gates:
    """Hold every seed against both gates (docs/lifecycle.md)."""
    gain, contribution = measurements.gain, measurements.contribution
    untrained = np.where(seeds.age == 0, np.nan, -1.0)  # in TRAINING, the first batch comes after age 0
    finite = np.where(measurements.seed_gradient_finite, 1.0, untrained)
    if config.permissive:
        seen = (
            Check("incubation gain measured", _measured(gain.mean)),
            Check("contribution measured", _measured(contribution.mean)),
        )
        return Gates(
            Gate(Stage.TRAINING, (_dwell("min_training", seeds, config.min_training), seen[0])),
            Gate(Stage.HOLDING, (_dwell("min_holding", seeds, config.min_holding), seen[1])),
        )
    return Gates(
        Gate(
            Stage.TRAINING,
            (
                _dwell("min_training", seeds, config.min_training),
                Check("finite gradients", finite),
                Check("incubation gain", gain.mean - config.gain_z * gain.se),
            ),
        ),
        Gate(
            Stage.HOLDING,
            (
                _dwell("min_holding", seeds, config.min_holding),
                Check("contribution", contribution.mean - config.z * contribution.se - config.min_contribution),
            ),
        ),
    )


def _dwell(name: str, seeds: Seeds, steps: int) -> Check:
    return Check(name, seeds.age.astype(np.float64) - steps + 1)


def _measured(mean: Floats) -> Floats:
    return np.where(np.isnan(mean), np.nan, 1.0)
