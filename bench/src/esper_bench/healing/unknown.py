"""Play the game `heal-unknown`: damage at one to three blocks, of kinds that no training has shown, and a movable cap.

The hosts are those of `heal` without skip connections, where the place of a seed matters. Their problems are the synthetic
families: every digit has tested an instance of another task, and examples of a synthetic problem belong to one host alone.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from esper_bench.healing.bridged import BridgedMLP
from esper_bench.healing.damage import Damage, DamageDraw, DamageKind, draw_damage
from esper_bench.healing.data import OTHER, SYNTHETIC, Problem, problem
from esper_bench.healing.hosts import BLOCKS, VECTORS, HostSet, architecture

FIRST = OTHER.stop
KEYS: Mapping[str, range] = MappingProxyType(
    {
        "training": range(FIRST, FIRST + 2**17),
        "validation": range(FIRST + 2**17, FIRST + 2**17 + 2**16),
        "heldout": range(FIRST + 2**17 + 2**16, FIRST + 2**18),
    }
)
"""Keys behind those of every other task, so that hosts and problems are those of no other study."""
KNOWN: Mapping[DamageKind, float] = MappingProxyType(
    {DamageKind.PRUNED: 0.25, DamageKind.LOW_RANK: 0.25, DamageKind.NOISE: 0.25, DamageKind.REMOVED: 0.25}
)
"""Kinds of damage of training and validation keys, with their probabilities."""
UNKNOWN: Mapping[DamageKind, float] = MappingProxyType(
    {
        DamageKind.SPARSE: 0.2,
        DamageKind.SHUFFLED: 0.2,
        DamageKind.OFFSET: 0.2,
        DamageKind.FLIPPED: 0.2,
        DamageKind.GAIN: 0.2,
    }
)
"""Kinds of damage of held-out keys, none of which a training shows."""
MOST_SITES = 3


def synthetic_problem(number: int) -> Problem:
    """Draw the problem of a host's number, of a synthetic family."""
    return problem(number, SYNTHETIC)


def plain_architecture(number: int) -> BridgedMLP:
    """Draw the host of a number, without its trained weights and without skip connections."""
    return replace(architecture(number, synthetic_problem(number)), skips=(False,) * BLOCKS)


def unknown_damage(key: int) -> Damage:
    """Draw the damage of a key: a kind of its part, at one to MOST_SITES blocks, each number as probable as the others."""
    damage = draw_damage(key, BLOCKS, 0.0, UNKNOWN if key in KEYS["heldout"] else KNOWN)
    count = 1 + int(MOST_SITES * damage.uniform(DamageDraw.COUNT)[0])
    order = 1 + damage.uniform(DamageDraw.PLACE, np.arange(BLOCKS)).argsort()
    return replace(damage, segments=tuple(sorted(order[:count].tolist())))


CAP = 0.03
UNKNOWN_HOSTS: HostSet = replace(
    VECTORS,
    name="heal-unknown",
    summary="trained networks of five blocks without skip connections",
    count=128,
    problem=synthetic_problem,
    architecture=plain_architecture,
    keys=KEYS,
    damage=unknown_damage,
    settings={
        "steps": 20,
        "data": {"batch_size": 32, "batches_per_step": 4},
        "blueprints": ("bypass-rank-1", "bypass-rank-2", "bypass-rank-4", "bypass-rank-8"),
        "governor": {"param_limit": CAP},
        "gates": {"permissive": True, "min_training_steps": 1, "min_holding_steps": 1},
        "lifecycle": {
            "max_seeds": BLOCKS + 1,
            "max_training_seeds": BLOCKS + 1,
            "embargo": 0,
            "min_prune_age": 2,
            "tempos": (0, 1),
            "targets": (1.0,),
        },
        "trials": {"candidates": 4, "trial_steps": 3},
        "reward": {"rent": 0.1, "compute_price": 0.02},
    },
)
"""The hosts of the game."""
