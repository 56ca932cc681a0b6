"""Write the section of a report on a network that becomes wider as a whole while a loop trains it: its sizes over time."""

import numpy as np

from esper.karn.report.drawing import Figure, Series, curves
from esper.karn.report.frame import ReportSection, Table
from esper.karn.run_model import SIZE_CURVES, RunModel
from esper.leyline.text import counted, printable


def size_section(model: RunModel) -> ReportSection:
    """Return what came out, and the sizes and the loss over the steps, of a run that has rows of sizes."""
    last, grown = model.sizes[-1], [row for row in model.sizes if row.widths]
    first = model.head.host_param_counts[0] if model.head is not None else last.params
    sizes = " -> ".join(f"{number:,}" for number in [first, *(row.params for row in grown)])
    lines = [
        f"{sizes} parameters after {counted(last.step, 'step')} and {counted(last.seen, 'target')}.",
        f"{'It is' if grown else 'Nothing grew: it is'} not larger, as {printable(model.why_not_larger)}.",
    ]
    rows = [
        (
            f"{row.step:,}",
            f"{row.seen:,}",
            f"{row.params:,}",
            ", ".join(f"{printable(layer)} {widths[0]} to {widths[1]}" for layer, widths in row.widths.items()),
            "not looked at" if row.loss is None else f"{row.loss:.4g}",
            f"{row.seconds or 0.0:.2f}",
            printable(row.why or ""),
        )
        for row in grown
    ]
    names = ("step", "targets seen", "parameters", "widths", "loss on the probe", "seconds", "why it became wider")
    table = Table("Growths", names, rows, texts=(3, 6))
    figures = list[Figure]()
    for field, name in SIZE_CURVES.items():
        known = [(row.step, float(value)) for row in model.sizes if (value := getattr(row, field)) is not None]
        steps, values = zip(*known, strict=True) if known else ((), ())
        figures.append(curves(name, steps, [Series(name, np.array(values)[:, None], "grown")], "step", "", 180))
    shown = [figure for figure in figures if figure.absent is None]
    return ReportSection("result", "What came out", lines, [table] if rows else [], shown)
