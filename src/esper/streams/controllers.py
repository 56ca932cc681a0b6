"""Rules that decide what a network does when the data of its stream change."""

from typing import Any

import numpy as np

from esper.streams.decisions import KEEP_HEAD, NEW_HEAD, Decision, StreamView, unchanged
from esper.streams.network import Bools


class OnAlarm:
    """The same decision at every alarm, and nothing else: the rule of networks that store nothing."""

    def __init__(self, *, new_head: bool = False, reset: bool = False, keep: float = 1.0, forget: bool = False) -> None:
        self.new_head, self.reset, self.keep, self.forget = new_head, reset, keep, forget

    def act(self, view: StreamView) -> Decision:
        """Return the decisions."""
        alarm = view.alarm
        return unchanged(len(alarm))._replace(
            head=np.where(alarm & self.new_head, NEW_HEAD, KEEP_HEAD),
            reset=alarm & self.reset,
            keep=np.where(alarm, self.keep, 1.0),
            forget=alarm & self.forget,
        )

    def snapshot(self) -> dict[str, Any]:
        """The rule has no memory."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """The rule has no memory."""


class StoreAndReactivate:
    """At an alarm, STORE the head, and ACTIVATE the stored head of least loss if it fits, or else start a NEW one.

    A stored head fits if its loss on the batch is below `fits` nats and below the loss of the active head by `margin`. The
    trunk, which all heads share, has the full learning rate for its first `settle` updates, and `trunk_rate` of it afterwards.
    """

    def __init__(self, *, trunk_rate: float = 0.1, fits: float = 1.6, margin: float = 0.1, settle: int = 60) -> None:
        self.trunk_rate, self.fits, self.margin, self.settle = trunk_rate, fits, margin, settle

    def act(self, view: StreamView) -> Decision:
        """Return the decisions."""
        best, fits = self.best(view)
        head = np.where(view.alarm, np.where(fits, best, NEW_HEAD), KEEP_HEAD)
        rate = np.where(view.trunk_age == self.settle, self.trunk_rate, np.nan)
        return unchanged(len(best))._replace(head=head, store=view.alarm, trunk_rate=rate)

    def best(self, view: StreamView) -> tuple[Any, Bools]:
        """(N,) the slot whose head has the least loss, and whether that head fits."""
        loss = np.where(np.isnan(view.stored_loss), np.inf, view.stored_loss)
        if not loss.shape[1]:
            return np.zeros(len(loss), np.int64), np.zeros(len(loss), bool)
        best = loss.argmin(1)
        least = loss[np.arange(len(loss)), best]
        return best, view.alarm & (least < self.fits) & (least < view.loss - self.margin)

    def snapshot(self) -> dict[str, Any]:
        """The rule has no memory."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """The rule has no memory."""
