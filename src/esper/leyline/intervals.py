"""Compute means over environments, with standard errors and Student's t intervals. A value that is None was not measured."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from esper.leyline.messages import rounded

Values = Sequence[float | None]


class MeanInterval(NamedTuple):
    """Holds a mean and its 95 % t interval; nan where there are too few values.

    Attributes:
        mean (float): mean of the values
        low (float): lower end; nan for fewer than two values
        high (float): upper end; nan for fewer than two values
        size (int): number of values
    """

    mean: float
    low: float
    high: float
    size: int

    def __format__(self, spec: str) -> str:
        """Return +0.078 [+0.031, +0.124] for `f"{gain:+.3f}"`; only the mean without an interval, and - without a mean."""
        if math.isnan(self.mean):
            return "-"
        ends = "" if math.isnan(self.low) else f" [{rounded(self.low, spec)}, {rounded(self.high, spec)}]"
        return rounded(self.mean, spec) + ends

    @property
    def above(self) -> bool:
        return self.low > 0

    @property
    def below(self) -> bool:
        return self.high < 0


def mean_and_error(values: Values | None) -> tuple[float, float]:
    """Return mean and standard error, s / sqrt(n), of the values that are not None; nan if there are too few."""
    measured = np.array([value for value in values or () if value is not None], float)
    mean = float(measured.mean()) if measured.size else math.nan
    error = float(measured.std(ddof=1)) / math.sqrt(measured.size) if measured.size > 1 else math.nan
    return mean, error


def plus_minus(mean: float | None, error: float | None, form: str = "+.4f", absent: str = "-") -> str:
    """Write a mean with its standard error, as +0.9866 ± 0.0021; `absent` without a mean, and the mean alone without an error."""
    if mean is None or math.isnan(mean):
        return absent
    return rounded(mean, form) + ("" if error is None or math.isnan(error) else f" ± {error:{form.lstrip('+')}}")


def t_factor(count: float) -> float:
    """Return half the width of the 95 % interval of the mean of `count` >= 2 normal values [standard errors].

    The 0.975 quantile of Student's t with count - 1 degrees of freedom, whole or not: 12.71 for 2 values, 1.96 for many.
    """
    from scipy.special import stdtrit  # type: ignore[import-untyped]  # imported here because it takes 0.1 s

    assert count >= 2, count
    return float(stdtrit(count - 1, 0.975))


def t_interval(values: Values) -> MeanInterval:
    """Compute mean ± t s / sqrt(n), the 95 % t interval of the mean of the values that are not None."""
    mean, error = mean_and_error(values)
    count = sum(value is not None for value in values)
    half = t_factor(count) * error if count > 1 else math.nan
    return MeanInterval(mean, mean - half, mean + half, count)


def differences(ours: Values, theirs: Values) -> list[float | None]:
    """Subtract theirs from ours, pair by pair; None where one of the two was not measured."""
    return [None if a is None or b is None else a - b for a, b in zip(ours, theirs, strict=True)]
