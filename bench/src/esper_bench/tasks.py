"""Name the benchmark tasks: functions without arguments, found by entry points of the group `esper.tasks`."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from esper.leyline.data.task import Mixture
from esper.tasks import repair
from esper.tasks.hosts import VECTOR_MENU
from esper_bench.healing import heal as units
from esper_bench.healing import heal_bytes as byte_models
from esper_bench.healing.hosts import FULL, VECTORS, HostSet
from esper_bench.healing.images import IMAGES
from esper_bench.healing.unknown import UNKNOWN_HOSTS

SUMMARY = "the problems of repair with every kind of blueprint for blocks of vectors in the menu, skip-mlp among them"
FULL_MENU = (
    *VECTOR_MENU,
    "affine",
    "low-rank",
    "mlp-large",
    "gated",
    "bypass-mlp-small",
    "bypass-rank-1",
    "bypass-rank-2",
    "bypass-rank-4",
    "bypass-rank-8",
    "skip-mlp",
)
"""Every built-in blueprint for vectors."""


def repair_full() -> Mixture:
    """Sample the problems of repair, with every kind of blueprint for blocks of vectors in the menu, skip-mlp among them."""
    return replace(repair.repair(), name="repair-full", summary=SUMMARY, menu=FULL_MENU)


def _named(build: Callable[..., Mixture], hosts: HostSet | None, summary: str) -> Callable[[], Mixture]:
    """Return the function without arguments that builds a task, with its summary as docstring. hosts: None for its own."""
    function = partial(build) if hosts is None else partial(build, hosts)
    function.__doc__ = summary.format(hosts)
    return function


def __getattr__(name: str) -> Callable[[], Mixture]:
    """Return the builder of `heal`, `heal_full_taught` and so on: a set of hosts by a way to treat them."""
    if name not in _HEALING:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _HEALING[name]


_HEALING = {
    f"{hosts.name}{suffix}".replace("-", "_"): _named(build, hosts, summary)
    for hosts in (VECTORS, FULL, IMAGES, UNKNOWN_HOSTS)
    for suffix, build, summary in (
        ("", units.heal, units.FROZEN),
        ("-taught", units.heal_taught, units.TAUGHT),
        ("-unfrozen", units.heal_unfrozen, units.UNFROZEN),
        ("-redrawn", units.heal_redrawn, units.REDRAWN),
        ("-scratch", units.heal_scratch, units.SCRATCH),
        ("-eora", units.heal_eora, units.EORA),
    )
}
_HEALING |= {
    f"heal_bytes{suffix}": _named(build, None, summary)
    for suffix, build, summary in (
        ("", byte_models.heal_bytes, byte_models.SUMMARY),
        ("_taught", byte_models.heal_bytes_taught, byte_models.TAUGHT),
        ("_unfrozen", byte_models.heal_bytes_unfrozen, byte_models.UNFROZEN),
        ("_scratch", byte_models.heal_bytes_scratch, byte_models.SCRATCH),
        ("_eora", byte_models.heal_bytes_eora, byte_models.EORA),
    )
}
