"""Define the stages of a slot, and numbers that say what they mean."""

from enum import IntEnum
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray


class MeantNumber(IntEnum):
    """Names numbers and says what each means, in the docstring of the class too."""

    meaning: str

    def __new__(cls, value: int, meaning: str = "") -> Self:
        member = int.__new__(cls, value)
        member._value_, member.meaning = value, meaning
        return member

    def __init_subclass__(cls) -> None:
        meanings = "".join(f"    {name}: {member.meaning}\n" for name, member in cls.__members__.items())
        cls.__doc__ = f"{cls.__doc__}\n\nAttributes:\n{meanings}"


class Stage(MeantNumber):
    """Names the stages of a slot. The values are stored in arrays and in files, so their meaning never changes."""

    DORMANT = 0, "the slot is empty"
    GERMINATED = 1, "the seed was built in this step and has not run yet"
    TRAINING = 2, "the seed trains, and does not change the output of the host"
    BLENDING = 3, "alpha moves along a ramp to its target, so the seed begins to act, or stops acting"
    HOLDING = 4, "alpha is at its target, and the seed is on trial"
    FOSSILIZED = 5, "the seed is a permanent part of the network"
    PRUNED = 6, "the seed was removed in this step"
    EMBARGOED = 7, "the slot is empty and cannot be planted yet"


def meaning_of(kind: type[MeantNumber], name: str) -> str:
    """Return what a name in small letters means, as rows of the events have it; the name in words if `kind` has none such."""
    return kind[name.upper()].meaning if name.upper() in kind.__members__ else name.replace("_", " ")


LIVE = frozenset({Stage.BLENDING, Stage.HOLDING})
IN_BUDGET = frozenset({Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED})
ADDED = frozenset({Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED})
"""The stages of seeds whose parameters all count as added to the network, whatever their alpha."""
SETTLED = frozenset({Stage.DORMANT, Stage.FOSSILIZED, Stage.EMBARGOED})
"""The stages of slots without a seed that is under way."""


def among(stage: NDArray[Any], stages: frozenset[Stage]) -> NDArray[np.bool_]:
    """Return whether each entry of an array of stages is one of `stages`; bool, of the same shape."""
    table = np.zeros(len(Stage), bool)
    table[list(stages)] = True
    return table[stage]
