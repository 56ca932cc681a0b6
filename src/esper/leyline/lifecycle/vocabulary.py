"""Name the stages of a seed, what a controller can do, and why it was not done, in numbers that keep their meaning."""

from enum import IntEnum
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from esper.leyline.messages import InputError, kind_of
from esper.leyline.records import brief

Ints = NDArray[np.int64]


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


class Op(MeantNumber):
    """Names the operations on a slot, of which a controller chooses one per environment and step."""

    WAIT = 0, "do nothing"
    GERMINATE = 1, "plant a seed in a dormant slot"
    ADVANCE = 2, "start blending a trained seed in"
    SET_ALPHA = 3, "move a holding seed to another dose"
    PRUNE = 4, "remove a seed"
    FOSSILIZE = 5, "keep a holding seed permanently"


class Head(MeantNumber):
    """Names the parts of a decision, in the order in which they are chosen."""

    OP = 0, "the operation, an `Op`"
    SLOT = 1, "the slot, an index"
    BLUEPRINT = 2, "what is planted, an index into the menu"
    BLEND = 3, "how the seed enters the stream, a `Blend`"
    TEMPO = 4, "length of the ramp, an index into `Space.tempos`"
    TARGET = 5, "alpha at the end of the ramp, an index into `Space.targets`"


class Blend(MeantNumber):
    """Says how a seed's change delta enters the stream h at dose alpha."""

    ADD = 0, "h + alpha * delta"
    GATE = 1, "h + alpha * g(u) * delta"
    MULTIPLY = 2, "h * (1 + alpha * tanh(delta))"


class Refusal(MeantNumber):
    """Says why a decision was not carried out; NONE if it was."""

    NONE = 0, "the decision was carried out"
    MASKED = 1, "the masks forbade it, as it was not open at that time"
    SEED_CAP = 2, "the environment had lifecycle.max_seeds seeds already"
    PARAM_BUDGET = 3, "the seed's parameters would exceed governor.param_limit"
    MEMORY = 4, "the seed's modules would not fit into the free memory"


class Vital(MeantNumber):
    """Says why a row was rolled back after a step; GOOD if it was not."""

    GOOD = 0, "the row was not rolled back"
    BATCH = 1, "examples of a batch are not finite"
    LOSS = 2, "a training loss, or the loss on the probe split, is not finite"
    GRADIENT = 3, "a gradient of the host or of a seed is not finite"
    PARAMETER = 4, "a parameter is not finite"
    RISE = 5, "the loss rose far above its past values"
    COLLAPSE = 6, "the outputs hardly differ between examples"
    FALL = 7, "the metric fell far below its best value"
    METRIC = 8, "the metric on the probe split is not finite"


RELEVANT: NDArray[np.bool_] = np.zeros((len(Op), len(Head)), bool)
"""(operations, heads) bool: whether an operation reads a head. Masks, log-probabilities, losses and telemetry use this table."""
RELEVANT[:, Head.OP] = True
RELEVANT[Op.GERMINATE, :] = True
RELEVANT[[Op.ADVANCE, Op.FOSSILIZE], Head.SLOT] = True
RELEVANT[Op.SET_ALPHA, [Head.SLOT, Head.TEMPO, Head.TARGET]] = True
RELEVANT[Op.PRUNE, [Head.SLOT, Head.TEMPO]] = True
RELEVANT.setflags(write=False)


@brief
class Actions(NamedTuple):
    """Holds one decision per environment. The engine ignores heads that the operation does not read (`RELEVANT`).

    Attributes:
        op ((E,) int64): an `Op`
        slot ((E,) int64): index of a slot of the task
        blueprint ((E,) int64): index into the task's menu
        blend ((E,) int64): a `Blend`
        tempo ((E,) int64): index into `Space.tempos`
        target ((E,) int64): index into `Space.targets`
    """

    op: Ints
    slot: Ints
    blueprint: Ints
    blend: Ints
    tempo: Ints
    target: Ints

    @classmethod
    def wait(cls, envs: int) -> "Actions":
        """Return WAIT for each of `envs` environments."""
        return cls(*(np.zeros(envs, np.int64) for _ in Head))


def checked_actions(actions: Any, envs: int) -> Actions:
    """Return the decisions of a controller with every field as int64 (E,). InputError if a field has another shape or dtype."""
    if not isinstance(actions, Actions):
        raise InputError(
            f"act of the controller returned {kind_of(actions)}; return esper.Actions with the fields "
            f"{', '.join(Actions._fields)}, each of shape ({envs},)"
        )
    mend, checked = f"give one whole number for each environment, int64 of shape ({envs},)", []
    for name, value in actions._asdict().items():
        told = f"act of the controller returned {name}"
        try:
            array = np.asarray(value)
        except (TypeError, ValueError):  # a ragged list, or a tensor of another device
            raise InputError(f"{told} as {kind_of(value)}; {mend}") from None
        if array.shape != (envs,):
            raise InputError(f"{told} of shape {array.shape}; {mend}")
        if array.dtype.kind not in "iu":
            broken = array.dtype.kind == "f" and not np.isfinite(array).all()
            where = f", not finite in environment {int(np.argmin(np.isfinite(array)))}" if broken else ""
            raise InputError(f"{told} as {array.dtype}{where}; {mend}")
        checked.append(array.astype(np.int64))
    return Actions(*checked)
