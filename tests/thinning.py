"""Leave most of many alike parameters to the slow tests."""

from collections.abc import Iterable
from typing import Any

import pytest


def thinned(values: Iterable[Any], every: int) -> list[Any]:
    """Return parameters of a test, of which the first and then each `every`-th run always, and the others with `-m slow`."""
    return [
        value if place % every == 0 else pytest.param(value, marks=pytest.mark.slow)
        for place, value in enumerate(values)
    ]
