"""Print the table of methods on streams, from the record that `esper.stream` returns."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from rich.console import Console

from esper.karn.terminal.console import Table, print_lines, print_table
from esper.leyline.messages import counted

COLUMNS = ("method", "accuracy", "over the first", "retention", "alarms", "multiply-adds")


def print_streams(record: Mapping[str, Any], console: Console) -> None:
    """Print a row for each method, and what the columns mean."""
    count = counted(record["streams"], "stream")
    shifts = np.mean([len(own) - 1 for own in record["segments"]])
    print_lines(console, f"{record['change']}: {count} of {record['updates']} updates, {shifts:.1f} changes in each")
    rows = []
    for name, own in record["methods"].items():
        over = own["over_reference"]
        price = sum(np.mean(each) for each in own["multiply_adds"].values())
        figures = f"{np.mean(own['retention']):.3f}", f"{np.mean(own['alarms']):.1f}", f"{price / 1e6:,.0f} M"
        rows.append((name, f"{own['accuracy']['value']:.4f}", "" if over is None else _bounds(over), *figures))
    print_table(console, Table("", COLUMNS, rows))
    for name, own in record["methods"].items():
        lost = int(np.count_nonzero(own["not_finite"]))
        if lost:
            said = f"{name}: the loss of {counted(lost, 'stream')} became nan or infinite, from where on it guesses"
            print_lines(console, f"{said}; lower {name}.lr")
    for line in (
        "accuracy: of every batch before training on it, the mean over the whole stream",
        f"over the first: the paired difference from {record['reference']}, with its 95 % bootstrap interval over streams",
        "retention: accuracy at the end on test examples of every context that the stream had",
        "alarms and multiply-adds: a mean over streams",
    ):
        print_lines(console, line)


def _bounds(found: Mapping[str, float | None]) -> str:
    if found["low"] is None:
        return f"{found['value']:+.4f}"
    return f"{found['value']:+.4f} [{found['low']:+.4f}, {found['high']:+.4f}]"
