"""Decide by rules what a network does when the data of its stream change."""

from typing import Any

import numpy as np

from esper_bench.streams.data import Floats, Ints
from esper_bench.streams.decisions import KEEP, NEW, StreamDecision, StreamView, unchanged
from esper_bench.streams.network import Bools


def best_stored(view: StreamView) -> tuple[Ints, Floats]:
    """Return (N,) the slot whose head has the least loss, and that loss [nats]; infinite where there is none, or no alarm."""
    if not view.stored_loss.shape[1]:
        return np.zeros(len(view.loss), np.int64), np.full(len(view.loss), np.inf)
    loss = np.where(np.isnan(view.stored_loss), np.inf, view.stored_loss)
    return loss.argmin(1), loss.min(1)


class OnAlarm:
    """Makes the same decision at every alarm, and nothing else: the rule of networks that store nothing."""

    def __init__(self, *, new_head: bool = False, reset: bool = False, keep: float = 1.0, forget: bool = False) -> None:
        self.new_head, self.reset, self.keep, self.forget = new_head, reset, keep, forget

    def act(self, view: StreamView) -> StreamDecision:
        """Return the decisions."""
        alarm = view.alarm
        return unchanged(len(alarm))._replace(
            place=np.where(alarm & self.new_head, NEW, KEEP),
            reset=alarm & self.reset,
            keep=np.where(alarm, self.keep, 1.0),
            forget=alarm & self.forget,
        )

    def snapshot(self) -> dict[str, Any]:
        """Return an empty tree, because the rule has no memory."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Ignore the state, because the rule has no memory."""


class StoreAndReactivate:
    """Stores the head at an alarm, and activates the stored head of least loss if it fits, or else starts a new one.

    A stored head fits if its loss on the batch is below `fits` nats and below the loss of the active head by `margin`. The
    trunk, which all heads share, has the full learning rate for its first `settle` updates, and `trunk_rate` of it afterwards.
    Where the bank holds seeds, they take the place of the head, or go with it. With `support`, the stored seeds of least loss
    act beside new ones, with this alpha, for as long as the new context lasts and whenever it returns.
    """

    def __init__(
        self,
        *,
        trunk_rate: float = 0.1,
        fits: float = 1.6,
        margin: float = 0.1,
        settle: int = 60,
        support: float = 0.0,
    ) -> None:
        self.trunk_rate, self.fits, self.margin, self.settle, self.support = trunk_rate, fits, margin, settle, support

    def act(self, view: StreamView) -> StreamDecision:
        """Return the decisions."""
        best, fits = self.best(view)
        place = np.where(view.alarm, np.where(fits, best, NEW), KEEP)
        rate = np.where(view.trunk_age == self.settle, self.trunk_rate, np.nan)
        dose = None
        if self.support:
            starts = np.nonzero((place == NEW) & view.stored[np.arange(len(best)), best])[0]
            dose = np.full(view.stored.shape, np.nan)
            dose[starts, best[starts]] = self.support
        return unchanged(len(best))._replace(place=place, store=view.alarm, trunk_rate=rate, dose=dose)

    def best(self, view: StreamView) -> tuple[Any, Bools]:
        """Return (N,) the slot whose head has the least loss, and whether that head fits."""
        best, least = best_stored(view)
        return best, view.alarm & (least < self.fits) & (least < view.loss - self.margin)

    def snapshot(self) -> dict[str, Any]:
        """Return an empty tree, because the rule has no memory."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Ignore the state, because the rule has no memory."""


class Adaptive:
    """Reactivates as `StoreAndReactivate` as long as the past seems to return, and otherwise resets as `OnAlarm`.

    Each stream begins as one whose past returns. At an alarm where a stored head fits, its balance rises by 1; where none fits,
    it falls by 1, or by 2 if the loss has risen by less than `sudden` nats, as in a drift. A stream whose balance has reached
    -`patience`, or whose batches have at most `few` classes, is reset at this and every later alarm. Alarms at which the inputs
    have not moved neither count nor reset: only the labels have changed, so the trunk still fits. The inputs have moved if
    `StreamView.input_shift` is above `moved`.
    """

    def __init__(
        self,
        count: int,
        *,
        trunk_rate: float = 0.1,
        patience: int = 4,
        few: int = 3,
        moved: float = 3.0,
        sudden: float = 1.0,
    ) -> None:
        self.rule = StoreAndReactivate(trunk_rate=trunk_rate)
        self.patience, self.few, self.moved, self.sudden = patience, few, moved, sudden
        self.balance: Ints = np.zeros(count, np.int64)
        self.resets: Bools = np.zeros(count, bool)

    def act(self, view: StreamView) -> StreamDecision:
        """Return the decisions."""
        best, fits = self.rule.best(view)
        moved = view.alarm & (view.input_shift > self.moved)
        miss = np.where(view.loss - view.before < self.sudden, -2, -1)
        self.balance = self.balance + np.where(moved, np.where(fits, 1, miss), 0)
        self.resets = self.resets | (moved & ((self.balance <= -self.patience) | (view.classes <= self.few)))
        reset = self.resets & moved
        rate = np.where(~self.resets & (view.trunk_age == self.rule.settle), self.rule.trunk_rate, np.nan)
        return unchanged(len(best))._replace(
            place=np.where(view.alarm, np.where(fits & ~reset, best, NEW), KEEP),
            store=view.alarm & ~self.resets,
            reset=reset,
            trunk_rate=rate,
        )

    def snapshot(self) -> dict[str, Any]:
        """Return the balances and which streams are reset."""
        return {"balance": self.balance, "resets": self.resets}

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `snapshot` returned."""
        self.balance, self.resets = state["balance"], state["resets"]
