"""Damaged hosts for tests that are trained in a moment."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from esper.store.cache import VARIABLE
from esper.tasks import healing_hosts


@contextmanager
def quick_hosts(cache: Path) -> Iterator[None]:
    """Train hosts for a few updates, in a cache of their own."""
    train = healing_hosts.train_group
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(cache))
        patch.setattr(healing_hosts, "train_group", lambda numbers, of: train(numbers, updates=20, starts=1, of=of))
        healing_hosts._group.cache_clear()
        yield
    healing_hosts._group.cache_clear()
