"""Define what a controller can do: operations, the heads of a decision, and which heads each operation reads."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from esper.leyline.lifecycle.stages import MeantNumber
from esper.leyline.messages import InputError, kind_of
from esper.leyline.records import brief

Ints = NDArray[np.int64]


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
