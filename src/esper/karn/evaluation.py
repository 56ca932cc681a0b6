"""Show an evaluation, from the object that `esper eval --json` prints, as tables, a figure and a page."""

from collections.abc import Mapping
from math import isnan, nan
from typing import Any

from rich.console import Console

from esper.karn.report.drawing import Figure, ForestRow, below_each_other, forest, paint
from esper.karn.report.frame import Content, ReportSection, flat_settings
from esper.karn.terminal.console import Table, print_lines, print_table, worker_lines
from esper.leyline.intervals import MeanInterval, plus_minus
from esper.leyline.messages import counted

Record = Mapping[str, Any]
FEW_UNITS = 10  # with fewer instances or runs, a line says that the intervals of a task are too narrow
FEW_TRAININGS = 5  # with fewer trainings of one controller, a line says that they are few


def print_evaluation(record: Record, console: Console) -> None:
    """Print controllers and comparisons of each task, and of all tasks together, without the sentences that repeat a table."""
    legend, *notes = reading_lines(record)
    print_lines(console, legend)
    for section in result_sections(record):
        print_lines(console, f"{section.name}: {section.lines[0]}")
        for table in section.tables:
            print_table(console, table)
        print_lines(console, *section.notes)
    print_lines(console, *notes)


def reading_lines(record: Record) -> list[str]:
    """Return lines on what the figures of all tasks are, and how they are to be read."""
    lines = ["J: the metric of a task less rent for added parameters (reward.rent); all figures are of the test split"]
    if record.get("baselines"):
        names = ", ".join(record["baselines"])
        lines.append(
            f"{names}: static networks, trained at the size that {record['sized_by']} grew to; `never` is the host "
            "itself, trained without growth"
        )
    return [
        *lines,
        *record.get("lines", ()),
        *interval_lines(record),
        *worker_lines(record),
        "interquartile mean: the mean over the middle half of the runs",
        "P(better): how probably a run of the controller has a higher J than a run of the other on the same instance",
    ]


def interval_lines(record: Record) -> list[str]:
    """Return how the intervals were computed, and whether they can be trusted."""
    tasks = record["tasks"]
    lines, few = [], []
    for task in tasks:
        several = task["problems"] > 1
        units, noun = (task["problems"], "instances") if several else (task["runs_of_each"], "runs")
        if units > 1:
            lines = [
                f"[low, high]: {record['confidence']:.0%} interval, by a stratified bootstrap of {record['draws']:,} draws"
            ]
        if units == 1:
            few.append(
                f"{task['task']}: one run of each controller gives no interval; --instances 200 (instances=200) gives one"
            )
        elif units < FEW_UNITS:
            few.append(
                f"{task['task']}: the intervals are too narrow, because they are drawn from {units} {noun} alone and say little "
                "about others; --instances 200 (instances=200) gives intervals that can be trusted"
            )
    return [*lines, *few]


def tables_of(estimates: Record, record: Record) -> list[Table]:
    """Return three tables: J by controller, what J is made of, and the differences of J between a controller and a rule."""
    shares = [row.get("share_of_headroom") for row in estimates["controllers"]]
    headroom = ["headroom"] if any(shares) else []
    objectives, costs = [], []
    for row, share in zip(estimates["controllers"], shares, strict=True):
        cells = [row["name"], f"{interval(row['objective']):.3f}", f"{interval(row['objective_iqm']):.3f}"]
        if headroom:
            known = {name: None if value is None else 100 * value for name, value in (share or {"value": None}).items()}
            cells.append("-" if known["value"] is None else f"{interval(known):.0f} %")
        objectives.append(cells)
        measured = (("metric", ".3f"), ("added_params", ",.0f"), ("kept", ".2f"))
        parts = (plus_minus(row[name]["value"], None, form) for name, form in measured)
        episodes = row.get("episodes")
        searched = "-" if episodes is None else f"{episodes:,}"
        costs.append([row["name"], *parts, f"{row['seconds']:,.1f}", searched])
    differences = []
    for row in compared(estimates, record):
        found = f"{interval(row['difference']):+.3f}", f"{interval(row['probability']):.2f}"
        differences.append([row["controller"], row["rule"], *found])
    of_objectives = ("controller", "J", "J, interquartile mean", *headroom)
    metric = estimates.get("metric", record["tasks"][0]["metric"])
    of_costs = ("controller", metric, "added parameters", "seeds kept", "training s", "searched")
    of_differences = ("controller", "against", "difference of J", "P(better)")
    return [
        Table("J of every controller, mean and interquartile mean", of_objectives, objectives, texts=(0,)),
        Table(
            "What J is made of: means over runs, and the seconds of all of its training", of_costs, costs, texts=(0,)
        ),
        Table("Paired differences of J, controller less rule", of_differences, differences, texts=(0, 1)),
    ]


def compared(estimates: Record, record: Record) -> list[Record]:
    """Return the comparisons to show: of each named controller with every rule, static network and opponent.

    If no controller was named: of all with `never`, of the rules with the static networks, and of the opponents with the best
    fixed plan.
    """
    rows, rules = estimates["comparisons"], record["rules"]
    static, opponents = (
        [row["name"] for row in estimates["controllers"] if row.get(kind)] for kind in ("static", "opponent")
    )
    grown = [row for row in rows if row["controller"] not in static]
    named = record.get("named") or [row["controller"] for row in grown if row["controller"] not in (*rules, *opponents)]
    return [row for row in grown if row["controller"] in named] or [
        row
        for row in grown
        if row["rule"] == rules[0] or row["rule"] in (static if row["controller"] in rules else rules[-1:])
    ]


def result_sections(record: Record) -> list[ReportSection]:
    """Return a section for each task, and one for all tasks together: first what was grown, then how controllers compare."""
    tasks = record["tasks"]
    parts = [(f"task{k}", f"Task {task['task']}", sample_words(record, task), task) for k, task in enumerate(tasks)]
    if record["together"] is not None:
        several = f"{counted(len(tasks), 'task')}, each with the same weight"
        parts.append(("together", "All tasks together", several, record["together"]))
    sections = []
    for key, title, sample, estimates in parts:
        lines = [sample]
        for row in compared(estimates, record):
            found, first, second = interval(row["difference"]), row["controller"], row["rule"]
            shown = f"J differs by {found:+.3f}"
            if found.above or found.below:
                lines.append(f"{first} is {'better' if found.above else 'worse'} than {second}: {shown}.")
            elif not isnan(found.low):
                lines.append(f"The difference between {first} and {second} is not resolved by {sample}: {shown}.")
        notes = [f"{name}: absent: {reason}" for name, reason in estimates.get("absent", {}).items()]
        for name, members in estimates.get("groups", {}).items():
            few = f"; fewer than {FEW_TRAININGS} say little about a further one" if len(members) < FEW_TRAININGS else ""
            many = counted(len(members), "training")
            notes.append(f"{name}: {many}; its intervals are over trainings and instances together{few}")
        notes += estimates.get("lines", ())
        tables, figures = tables_of(estimates, record), _figures(estimates, record)
        sections.append(ReportSection(key, title, lines, tables, figures, notes))
    return sections


def draw_evaluation(record: Record, form: str = "png") -> bytes:
    """Draw J by controller and the paired differences of every task, and of all together, as the content of a file."""
    figures = [
        figure._replace(name=f"{section.name}, {section.lines[0]}: {figure.name}")
        for section in result_sections(record)
        for figure in section.figures
    ]
    return paint(below_each_other(figures), form)


def interval(estimate: Record) -> MeanInterval:
    """Return an estimate with its interval, written as 0.712 [0.690, 0.735]; what is absent is nan, and '-' for the estimate."""
    value, low, high = (nan if estimate[name] is None else estimate[name] for name in ("value", "low", "high"))
    return MeanInterval(value, low, high, 0)


def sample_words(record: Record, task: Record) -> str:
    """Return the number of runs of each controller."""
    if task["sampled"]:
        part = {"heldout": "held-out"}.get(record["part"], record["part"])
        return f"{counted(task['problems'], f'{part} instance')}, each with {counted(len(record['seeds']), 'seed')}"
    return f"{counted(task['runs_of_each'], 'run')}, each from starting weights of its own"


def content_of(record: Record, name: str) -> Content:
    """Return what the page of a record shows; `name` is that of its folder."""
    settings = [row for layer in record["settings"] for row in flat_settings(layer)]
    table = Table("Settings of all controllers", ("key", "value"), settings, texts=(1,))
    names = ", ".join(record.get("named") or []) or "none, only the rules"
    part = "held out from every training" if record["part"] == "heldout" else f"of the part {record['part']}"
    asked = [
        f"Controllers that were named: {names}. Rules to compare with: {', '.join(record['rules'])}.",
        f"Each grew {counted(record['instances'], 'instance')} of every task ({part}, from number {record['first_instance']}) "
        f"under the run seeds {', '.join(map(str, record['seeds']))}.",
        *reading_lines(record),
    ]
    machine = Table("Machine", ("name", "value"), flat_settings(record["environment"]), texts=(1,))
    sections = [
        ReportSection("asked", "What was asked", asked, [table] if record["settings"] else []),
        *result_sections(record),
        ReportSection("machine", "Machine", tables=[machine]),
    ]
    controllers = ", ".join(row["name"] for row in record["tasks"][0]["controllers"])
    return Content(name, f"evaluation of {controllers}", sections)


def _figures(estimates: Record, record: Record) -> list[Figure]:
    controllers = [
        (f"{row['name']}{which}", row[figure])
        for row in estimates["controllers"]
        for which, figure in (("", "objective"), (", interquartile mean", "objective_iqm"))
    ]
    pairs = [(f"{row['controller']} less {row['rule']}", row["difference"]) for row in compared(estimates, record)]
    figures = []
    for title, named, form, unit in (
        ("J on the test split", controllers, ".4f", "J, with its interval"),
        ("Paired differences of J", pairs, "+.4f", "difference of J, with its interval"),
    ):
        known = [(name, interval(estimate)) for name, estimate in named if estimate["value"] is not None]
        rows = [ForestRow(name, *found[:3], "plain", f"{name}: {found:{form}}") for name, found in known]
        figures.append(forest(title, rows, unit))
    return figures
