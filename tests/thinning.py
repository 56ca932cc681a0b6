"""Leave most of many alike parameters to the slow tests."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def thinned(values: Iterable[Any], every: int) -> list[Any]:
    """Return parameters of a test, of which the first and then each `every`-th run always, and the others with `-m slow`.

    A tuple has the values of several parameters.
    """
    return [
        value
        if place % every == 0
        else pytest.param(*value if isinstance(value, tuple) else (value,), marks=pytest.mark.slow)
        for place, value in enumerate(values)
    ]


def crossed(*factors: Sequence[Any]) -> list[Any]:
    """Return all combinations of several parameters of a test, so few of which run always that each value is in one of them."""
    longest = max(map(len, factors))
    always = {tuple(at % len(values) for values in factors) for at in range(longest)}
    return [
        pytest.param(
            *(values[at] for values, at in zip(factors, places, strict=True)),
            marks=() if places in always else pytest.mark.slow,
        )
        for places in itertools.product(*(range(len(values)) for values in factors))
    ]
