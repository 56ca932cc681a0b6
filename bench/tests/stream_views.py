"""Make views of one stream at an alarm, for tests of rules that decide there."""

import numpy as np

from esper_bench.streams.decisions import Operation, StreamView

NONE = np.nan


def view_of(stored_loss=(NONE, NONE), *, alarm=True, loss=3.0, before=0.3, shift=900.0, classes=10, age=10):
    """Make the view of one stream at an alarm."""
    row = np.array([list(stored_loss)], float)
    return StreamView(
        update=100,
        loss=np.array([loss]),
        accuracy=np.array([0.1]),
        alarm=np.array([alarm]),
        before=np.array([before]),
        since=np.array([20]),
        input_shift=np.array([shift]),
        classes=np.array([classes]),
        stored=~np.isnan(row),
        stored_loss=row,
        trunk_rate=np.ones(1),
        trunk_age=np.array([age]),
        recognised=np.array([False]),
    )


def done(decision):
    """Name the operations of the one stream."""
    return {Operation(each).name for each in np.nonzero(decision.operations()[0])[0]}
