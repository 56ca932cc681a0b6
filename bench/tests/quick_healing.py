"""Make damaged hosts for tests that are trained in a moment."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from esper.kasmina.blueprints import drawn_with
from esper.kasmina.host import SegmentedHost
from esper.store.files import VARIABLE
from esper_bench.healing import hosts as healing_hosts
from esper_bench.healing.damage import Damage, DamageKind, damage_host
from esper_bench.healing.heal import HealCase, describe


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


def facts_of_first_hosts() -> Iterator[HealCase]:
    """Return what the training keys of the first hosts of `heal` stand for, which are trained together."""
    first = range(healing_hosts.GROUP)
    return (describe(start + number) for start in range(0, 40_000, healing_hosts.VECTORS.count) for number in first)


def damaged(
    like: Callable[[], SegmentedHost], kind: DamageKind, segments: tuple[int, ...], severity: float
) -> SegmentedHost:
    """Build a small host with random weights, biases too as of a trained one, and damage it."""
    with drawn_with(3):
        host = like()
        with torch.no_grad():
            for parameter in host.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape))
    damage_host(host, Damage(kind, segments, severity, key=7))
    return host
