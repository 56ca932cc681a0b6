"""Test frozen networks that are repaired without seeds."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from esper_bench.healing.damage import DamageKind
from esper_bench.healing.frozen import BEST, BEST_TAUGHT, repaired
from esper_bench.healing.heal import heal_taught
from esper_bench.healing.images import IMAGES
from quick_healing import facts_of_first_hosts, quick_hosts


@pytest.fixture(autouse=True, scope="module")
def _quick_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with quick_hosts(tmp_path_factory.mktemp("cache")):
        yield


def key_of(kind: DamageKind) -> int:
    return next(facts.key for facts in facts_of_first_hosts() if facts.plain and facts.damage.kind == kind)


def short(task):  # type: ignore[no-untyped-def]
    return replace(task, defaults={**task.defaults, "steps": 4})


def test_every_repair_has_figures_and_all_but_two_are_within_the_cap() -> None:
    found = repaired(short(heal_taught()), key_of(DamageKind.PRUNED), 0.06, 0)
    assert all(0 <= each.metric <= 1 for each in found.values())
    above = {name for name, each in found.items() if each.added > 0.06}
    assert above == {"LoRA at every layer", "bias and scale"}
    assert found["units regrown where participation falls"].added > 0.03
    assert max(found[BEST].added, found[BEST_TAUGHT].added) <= 0.06
    again = repaired(short(heal_taught()), key_of(DamageKind.PRUNED), 0.06, 0)
    assert again == found


def test_nothing_is_regrown_or_refitted_where_the_labels_are_exchanged() -> None:
    found = repaired(short(heal_taught()), key_of(DamageKind.LABELS), 0.06, 0)
    for name in ("units regrown where participation falls", "refit by ridge regression (taught)"):
        assert found[name].added == 0
    assert found["head"].added > 0


def test_convolutional_hosts_are_repaired_too() -> None:
    found = repaired(short(heal_taught(IMAGES)), 0, 0.06, 0)
    assert len(found) == 11
