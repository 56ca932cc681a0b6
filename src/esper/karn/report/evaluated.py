"""What the page of an evaluation shows, from its record (`esper eval`)."""

from collections.abc import Sequence

from esper.karn.evaluation import (
    Record,
    compared,
    comparisons_table,
    costs_table,
    group_lines,
    interval_lines,
    objectives_table,
    sample_words,
    spread,
    static_lines,
)
from esper.karn.report.drawing import Figure, ForestRow, forest
from esper.karn.report.frame import Content, ReportSection, flat_settings
from esper.karn.result import Table, table_of
from esper.karn.terminal.console import actor_lines
from esper.leyline.text import counted, printable


def content_of(record: Record, name: str) -> Content:
    """What the page of a record shows; `name` is that of its folder."""
    tasks = record["tasks"]
    settings = [row for layer in record["settings"] for row in flat_settings(layer)]
    table = Table("Settings of all controllers", ("key", "value"), settings, texts=(1,))
    sections = [
        ReportSection("asked", "What was asked", _asked(record), [table] if record["settings"] else []),
        *(_task(record, task, f"task{index}") for index, task in enumerate(tasks)),
    ]
    if record["together"] is not None:
        tables, figures = _estimates(record["together"], tasks[0]["metric"], record)
        title = f"All {counted(len(tasks), 'task')} together"
        line = "Every task has the same weight."
        sections.append(ReportSection("together", title, [line], tables, figures, notes=interval_lines(record)))
    machine = Table("Machine", ("name", "value"), flat_settings(record["environment"]), texts=(1,))
    sections.append(ReportSection("machine", "Machine", tables=[machine]))
    controllers = ", ".join(printable(row["name"]) for row in tasks[0]["controllers"])
    return Content(name, f"evaluation of {controllers}", sections)


def _asked(record: Record) -> list[str]:
    names = ", ".join(map(printable, record.get("named") or [])) or "none, only the rules"
    part = "held out from every training" if record["part"] == "heldout" else f"of the part {record['part']}"
    return [
        f"Controllers that were named: {names}. Rules to compare with: {', '.join(map(printable, record['rules']))}.",
        f"Each grew {counted(record['instances'], 'instance')} of every task ({part}, from number {record['first_instance']}) "
        f"under the run seeds {', '.join(map(str, record['seeds']))}.",
        "J is the metric of a task less rent, a price for added parameters (reward.rent). All figures are of the test split.",
        *map(printable, record.get("lines", ())),
        *(f"Grown by {line}." for line in actor_lines(record)),
    ]


def _task(record: Record, task: Record, key: str) -> ReportSection:
    metric = task["metric"]
    tables, figures = _estimates(task, metric, record)
    verdicts = [_verdict(row, sample_words(record, task)) for row in compared(task, record)]
    lines = [f"{sample_words(record, task)}.", *(line for line in verdicts if line)]
    notes = [
        *interval_lines(record),
        "Interquartile mean: the mean over the middle half of the runs. P(better): how probably a run of the controller has a "
        "higher J than a run of the other on the same instance.",
        *static_lines(record, task),
        *group_lines(task),
        *map(printable, task.get("lines", ())),
    ]
    return ReportSection(key, f"Task {printable(task['task'])}", lines, tables, figures, notes=notes)


def _verdict(row: Record, sample: str) -> str | None:
    """A comparison of two controllers as a sentence; None without an interval. `sample` are the runs that it is made of."""
    found = row["difference"]
    if found["low"] is None:
        return None
    first, second = printable(row["controller"]), printable(row["rule"])
    shown = f"J differs by {spread(found, '+.3f')}"
    if found["low"] <= 0 <= found["high"]:
        return f"The difference between {first} and {second} is not resolved by {sample}: {shown}."
    return f"{first} is {'better' if found['value'] > 0 else 'worse'} than {second}: {shown}."


def _estimates(estimates: Record, metric: str, record: Record) -> tuple[list[Table], list[Figure]]:
    tables = [
        table_of("J of every controller, mean and interquartile mean", objectives_table(estimates)),
        table_of(
            "What J is made of: means over runs, and the seconds of all of its training", costs_table(estimates, metric)
        ),
        table_of("Paired differences of J, controller less rule", comparisons_table(estimates, record)),
    ]
    controllers = [(row["name"], row["objective"]) for row in estimates["controllers"]]
    pairs = [(f"{row['controller']} less {row['rule']}", row["difference"]) for row in compared(estimates, record)]
    figures = [
        forest("J on the test split", _points(controllers, ".4f"), "J, with its interval"),
        forest("Paired differences of J", _points(pairs, "+.4f"), "difference of J, with its interval"),
    ]
    return tables, figures


def _points(named: Sequence[tuple[str, Record]], form: str) -> list[ForestRow]:
    rows = []
    for name, estimate in named:
        if estimate["value"] is None:
            continue
        low, high = (float("nan") if estimate[end] is None else estimate[end] for end in ("low", "high"))
        rows.append(ForestRow(name, estimate["value"], low, high, "plain", f"{name}: {spread(estimate, form)}"))
    return rows
