"""Define what a controller of streams sees and decides. N streams, M places in the bank, for a head, seeds, or both.

The operations act on the network of a stream, before it trains on the batch on which the decision was made.
"""

from enum import IntEnum
from typing import Any, NamedTuple, Protocol

import numpy as np

from esper_bench.streams.bank import EVERY_PART
from esper_bench.streams.data import Floats, Ints
from esper_bench.streams.network import Bools

KEEP, NEW = -1, -2
"""Values of `Decision.place` that are no place in the bank."""


class Operation(IntEnum):
    """Names what can be done to a network, in the order in which it is done.

    Attributes:
        STORE: copies of the active parts, which are a head, seeds or both, go to a place in the bank
        ACTIVATE: the parts of a place leave the bank and become the active ones, and so do their doses
        NEW: the active head becomes zero; active seeds are drawn anew with zero output
        RESET: all blocks are drawn anew with zero output, as are the seeds, and the bank is emptied
        SHRINK: all weights move toward fresh ones, and the bank is emptied
        SET_HOST: the learning rate of the trunk changes
        SET_DOSE: stored seeds act beside the active ones, or cease to
    """

    STORE = 0
    ACTIVATE = 1
    NEW = 2
    RESET = 3
    SHRINK = 4
    SET_HOST = 5
    SET_DOSE = 6


class StreamView(NamedTuple):
    """Holds what is known of N streams after the scores of a batch and before training on it.

    Attributes:
        update (int): number of batches before this one
        loss (Floats): (N,) cross-entropy of this batch [nats]
        accuracy (Floats): (N,) of this batch
        alarm (Bools): (N,) whether the loss is far above its running mean (`alarm.Alarm`)
        before (Floats): (N,) running mean of the loss before this batch [nats]; nan where there is none
        since (Ints): (N,) batches since the last alarm, this one not counted
        input_shift (Floats): (N,) mean over features of the squared difference between this batch's mean and the mean since the
            last alarm, in units of its variance under no change; about 1 without a change, nan where there was no batch
        classes (Ints): (N,) classes in this batch
        stored (Bools): (N, M) places that hold a part
        stored_loss (Floats): (N, M) the loss on this batch if the parts of a place were active [nats]; nan where there are none,
            or no alarm
        trunk_rate (Floats): (N,) learning rate of the trunk as a share of the full one
        trunk_age (Ints): (N,) updates since the blocks were drawn
        recognised (Bools): (N,) whether a place was activated before this batch was predicted, by its inputs
    """

    update: int
    loss: Floats
    accuracy: Floats
    alarm: Bools
    before: Floats
    since: Ints
    input_shift: Floats
    classes: Ints
    stored: Bools
    stored_loss: Floats
    trunk_rate: Floats
    trunk_age: Ints
    recognised: Bools


class StreamDecision(NamedTuple):
    """Holds one decision for each stream. Wherever a part or a block changes, the optimizer forgets its moments.

    Attributes:
        place (Ints): (N,) KEEP, NEW, or the place whose parts to ACTIVATE
        store (Bools): (N,) STORE the active parts first
        reset (Bools): (N,) RESET the blocks
        keep (Floats): (N,) share of all weights that SHRINK keeps; 1 changes nothing, 0 draws the network anew
        forget (Bools): (N,) forget the moments where nothing else changes
        trunk_rate (Floats): (N,) SET_HOST to this share of the full learning rate; nan leaves it
        parts (Ints): (N,) the parts that STORE, ACTIVATE and NEW act on, as a sum of `bank.HEAD_PART` and `bank.slot_part`;
            of these, the ones that the bank holds are meant
        dose (Floats | None): (N, M) SET_DOSE: the alpha with which the stored seeds of each place act from now on in the context
            of the active parts; nan leaves it; None leaves all
    """

    place: Ints
    store: Bools
    reset: Bools
    keep: Floats
    forget: Bools
    trunk_rate: Floats
    parts: Ints
    dose: Floats | None = None

    def operations(self) -> Bools:
        """Return (N, operations) which operations each stream gets."""
        found = np.zeros((len(self.place), len(Operation)), bool)
        found[:, Operation.STORE] = self.store
        found[:, Operation.ACTIVATE] = self.place >= 0
        found[:, Operation.NEW] = self.place == NEW
        found[:, Operation.RESET] = self.reset
        found[:, Operation.SHRINK] = self.keep < 1
        found[:, Operation.SET_HOST] = ~np.isnan(self.trunk_rate)
        if self.dose is not None:
            found[:, Operation.SET_DOSE] = ~np.isnan(self.dose).all(1)
        return found


def unchanged(count: int) -> StreamDecision:
    """Return the decision to do nothing, whose arrays may be changed."""
    return StreamDecision(
        place=np.full(count, KEEP),
        store=np.zeros(count, bool),
        reset=np.zeros(count, bool),
        keep=np.ones(count),
        forget=np.zeros(count, bool),
        trunk_rate=np.full(count, np.nan),
        parts=np.full(count, EVERY_PART),
    )


class StreamController(Protocol):
    """Decides for all streams at once, after every batch."""

    def act(self, view: StreamView) -> StreamDecision:
        """Return the decisions. ACTIVATE needs a part in that place."""
        ...

    def snapshot(self) -> dict[str, Any]:
        """Return the memory of the controller as a tree of arrays; empty if it has none."""
        ...

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `snapshot` returned."""
        ...
