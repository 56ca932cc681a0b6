"""Fit controllers of streams: their thresholds and rates come from a file, not from the source. N streams.

`bench/scripts/fit_streams.py` chooses the numbers by the return of whole training streams. `shipped.json` has those shipped.
"""

import json
import math
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from esper.leyline.config.input import show
from esper.leyline.messages import InputError
from esper.store.disk import read_named
from esper_bench.streams.controllers import best_stored
from esper_bench.streams.data import Floats, Ints
from esper_bench.streams.decisions import KEEP, NEW, StreamDecision, StreamView, unchanged
from esper_bench.streams.network import Bools
from esper_bench.streams.recognition import nearest

SHIPPED = Path(__file__).with_name("shipped.json")
SUFFIX = ".json"
_LARGEST = 2**20  # bytes of a file of numbers


class Number(NamedTuple):
    """Describes one fitted number.

    Attributes:
        start (float): where the search begins
        spread (float): its standard deviation at the start of the search; of its logarithm if `ratio`
        low (float): least value
        high (float): greatest value
        ratio (bool): whether the search moves its logarithm
        meaning (str): what it says
    """

    start: float
    spread: float
    low: float
    high: float
    ratio: bool
    meaning: str


NUMBERS: Mapping[str, Number] = {
    "fits": Number(1.6, 0.3, 0.2, 5.0, True, "a stored head fits if its loss is below this [nats]"),
    "margin": Number(0.1, 0.1, 0.0, 2.0, False, "and below the loss of the active head by this [nats]"),
    "keep": Number(0.6, 0.3, 0.0, 3.0, False, "where none fits, a head whose loss is below this stays [nats]"),
    "moved": Number(3.0, 0.5, 1.0, 100.0, True, "the inputs have moved if their shift is above this"),
    "hit": Number(1.0, 0.4, 0.0, 5.0, False, "rise of the balance at an alarm where a stored head fits"),
    "slow": Number(1.0, 0.4, -2.0, 5.0, False, "further fall of the balance where the loss has risen slowly"),
    "sudden": Number(1.0, 0.3, 0.2, 5.0, True, "least rise of the loss that is not slow [nats]"),
    "soon": Number(0.0, 0.4, -2.0, 5.0, False, "further fall of the balance within 20 updates of the last alarm"),
    "memory": Number(0.97, 0.03, 0.5, 1.0, False, "share of the balance that lasts to the next alarm"),
    "patience": Number(4.0, 0.3, 0.5, 50.0, True, "a stream whose balance has fallen to minus this is reset"),
    "few": Number(3.0, 0.5, 0.0, 9.0, False, "as is one whose batch has at most so many classes"),
    "settle": Number(60.0, 0.3, 10.0, 500.0, True, "updates for which the trunk has the full rate"),
    "trunk_rate": Number(0.2, 0.4, 0.001, 1.0, True, "share of it afterwards"),
    "reset_rate": Number(0.8, 0.3, 0.001, 1.0, True, "share of it afterwards in a stream that is reset"),
    "lr": Number(0.0125, 0.2, 0.001, 0.1, True, "learning rate of the trunk"),
    "head_rate": Number(2.0, 0.3, 0.2, 20.0, True, "that of a new head, as a multiple"),
    "halving": Number(45.0, 0.3, 5.0, 2000.0, True, "updates after which the rate of a head halves"),
    "least": Number(0.125, 0.4, 0.005, 1.0, True, "share of the rate at which it no longer falls"),
    "same": Number(
        1.6, 0.15, 0.0, 10.0, False, "a stored context is recognised if the inputs are nearer to it than this"
    ),
    "away": Number(2.0, 0.3, 0.0, 20.0, False, "and farther from the active one than this"),
}
"""The fitted numbers by name; see the attributes of `Number`."""
RATES = ("lr", "head_rate", "halving", "least")
"""Those that the training reads; the others are thresholds and rates of the controller."""

Numbers = Mapping[str, float | Floats]


class Fitted:
    """Decides as `Adaptive` does, with fitted numbers, which may differ between streams.

    At an alarm the balance of a stream is multiplied by `memory`. It rises by `hit` if a stored head fits, and else falls by
    1 + `slow` [the loss has risen by less than `sudden`] + `soon` [the last alarm was less than 20 updates ago]. Alarms at which
    the inputs have not moved do not count. If the balance is at most -`patience`, or the batch has at most `few` classes, the
    blocks and the head are drawn anew. Else the active head is stored, and the stored head of least loss returns if it fits. If
    none fits, a head whose loss is below `keep` stays, and any other is followed by a new one.

    Before a batch is predicted, a stored context returns if the inputs are nearer to it than `same`, and farther from the active
    one than `away`. If its head fits then, an alarm at this batch is ignored.
    """

    recent = 20

    def __init__(self, count: int, numbers: Numbers) -> None:
        """`numbers` has a float, or an array (N,), for each name of NUMBERS that is not in RATES."""
        self.numbers = numbers
        self.balance = np.zeros(count)
        self.resets: Bools = np.zeros(count, bool)

    def recognise(self, shifts: Floats) -> Ints:
        """Return (N,) the place whose context the inputs are from, by the shifts (N, M + 1) from all contexts; KEEP if none."""
        place, least = nearest(shifts[:, :-1])
        return np.where((least < self.numbers["same"]) & (shifts[:, -1] > self.numbers["away"]), place, KEEP)

    def act(self, view: StreamView) -> StreamDecision:
        """Return the decisions."""
        number = self.numbers
        view = view._replace(alarm=view.alarm & ~(view.recognised & (view.loss < number["fits"])))
        best, least = best_stored(view)
        fits = view.alarm & (least < number["fits"]) & (least < view.loss - number["margin"])
        moved = view.alarm & (view.input_shift > number["moved"])
        slow, soon = view.loss - view.before < number["sudden"], view.since < self.recent
        returns = fits | (view.recognised & ~view.alarm)
        change = np.where(returns, number["hit"], -1 - number["slow"] * slow - number["soon"] * soon)
        self.balance = np.where(
            moved | (returns & view.recognised), number["memory"] * self.balance + change, self.balance
        )
        reset = moved & ((self.balance <= -np.asarray(number["patience"])) | (view.classes <= number["few"]))
        self.resets = np.where(moved, reset, self.resets)
        stays = view.alarm & ~fits & ~reset & (view.loss < number["keep"])
        other = np.where(reset | ~fits, NEW, best)
        later = np.where(self.resets, number["reset_rate"], number["trunk_rate"])
        return unchanged(len(best))._replace(
            place=np.where(view.alarm & ~stays, other, KEEP),
            store=view.alarm & ~self.resets & ~stays,
            reset=reset,
            trunk_rate=np.where(view.trunk_age == np.rint(number["settle"]), later, np.nan),
        )

    def snapshot(self) -> dict[str, Any]:
        """Return the balances, and which streams are reset."""
        return {"balance": self.balance, "resets": self.resets}

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `snapshot` returned."""
        self.balance, self.resets = state["balance"], state["resets"]


def to_file(numbers: Mapping[str, float], **facts: Any) -> bytes:
    """Make the text of a file of numbers. `facts` say how they were fitted."""
    return (json.dumps({"numbers": dict(numbers), **facts}, indent=2, allow_nan=False) + "\n").encode()


@lru_cache(maxsize=8)
def read_numbers(path: Path) -> Mapping[str, float]:
    """Read the numbers of a file that `to_file` made. InputError if it is missing or damaged, or a number is out of range."""
    mend = "give a file that bench/scripts/fit_streams.py wrote"
    try:
        found = json.loads(read_named(path, _LARGEST, mend))["numbers"]
        missing = sorted(set(NUMBERS) ^ set(found))
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} is not a file of a controller of streams; {mend}") from None
    if missing:
        raise InputError(f"{path} and Esper differ in the number {show(missing[0])}; {mend}")
    for name, (*_, low, high, _, _) in NUMBERS.items():
        value = found[name]
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not number or not low <= value <= high:
            raise InputError(f"{name} is {show(value)} in {path}; give a number from {low:g} to {high:g}")
    return {name: float(value) for name, value in found.items()}
