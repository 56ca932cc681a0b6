"""What came out of a run, as sentences and tables: for the page of the run, and for a notebook."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from markupsafe import Markup
from rich.table import Table as RichTable

from esper.karn.run_model import RunModel
from esper.karn.terminal import console
from esper.leyline.intervals import differences, shown, t_interval
from esper.leyline.text import counted, printable

MOST_CLASSES = (
    20  # largest number of classes of which the page shows a confusion matrix; the summary has larger ones too
)


class Table(NamedTuple):
    """A table of a section; the first cell of a row is its name, and `texts` are the columns of words, which may wrap."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    texts: Sequence[int] = ()


def table_of(caption: str, table: RichTable) -> Table:
    """A table that is printed elsewhere, with its header and cells as they are."""
    columns = [printable(str(column.header)) for column in table.columns]
    cells = [[printable(str(cell)) for cell in column.cells] for column in table.columns]
    return Table(caption, columns, list(zip(*cells, strict=True)))


def head_of(model: RunModel, name: str) -> str:
    """The beginning of the page as a piece of HTML: the heading, the sentences on what came out, and the table of figures."""
    verdicts, others, tables_of, _ = results(model)
    lines = Markup("").join(Markup("<p>{}</p>").format(line) for line in (heading(model), *verdicts, *others))
    tables = Markup("")
    for table in tables_of:
        rows = ((Markup("th"), table.columns), *((Markup("td"), row) for row in table.rows))
        cells = (Markup("").join(Markup("<{0}>{1}</{0}>").format(tag, cell) for cell in row) for tag, row in rows)
        tables += Markup("<table>{}</table>").format(
            Markup("").join(Markup("<tr>{}</tr>").format(row) for row in cells)
        )
    return str(Markup("<div><h3>{}</h3>{}{}</div>").format(printable(name), lines, tables))


def heading(model: RunModel) -> str:
    """What runs where, and how it stands, in one line."""
    head = model.head
    if model.summary is not None and "grown_params" in model.summary:
        return console.heading_line(model.summary)
    if head is None:
        return f"{model.status}; the run kept no events (telemetry.level)"
    return (
        f"{printable(head.task)}, {printable(head.controller)}: {counted(head.envs, 'environment')}, "
        f"{counted(head.steps, 'step')} an episode, run seed {head.seed}, {head.device}, {model.status}"
    )


def results(model: RunModel) -> tuple[list[str], list[str], list[Table], list[str]]:
    """What came out: sentences with the verdict, further sentences, tables, and notes on how these are to be read."""
    summary = model.summary
    if summary is None:
        how = {"running": "still goes on", "killed": "was killed before it ended"}.get(
            model.status, f"is {model.status}"
        )
        return [f"The run {how}, so there are no final figures yet."], [], [], []
    if "grown_params" not in summary:
        best = summary.get("best_validation_objective")
        if best is None:
            return ["No controller was validated, so none was kept."], [], [], []
        number = summary["best_round"]
        when = "after imitation" if number < 0 else f"after round {number}, counted from 0"
        return [f"The best controller reached a validation J of {best:.4f}, {when}."], [], [], []
    verdicts = [printable(summary["verdict"])] if "verdict" in summary else []
    if model.status == "interrupted":
        done = f"{summary['steps_done']} of {counted(summary['steps'], 'step')}"
        verdicts.append(f"The run was interrupted after {done}; the figures are those of the networks at that time.")
    if "error" in summary:
        verdicts.append(f"The run failed: {printable(summary['error']['message'])}")
    lines = _compared(summary)
    if summary.get("regrown"):
        lines.append(
            "The host is a network that was grown before, with its seeds; every environment starts from its weights."
        )
    lines += [
        *_lowest_lines(model),
        *console.grown_lines(summary),
        *console.trouble_lines(summary),
        *console.early_stopping_lines(summary),
        *console.rare_class_lines(summary),
        *console.explanation_lines(summary),
    ]
    caption = "Grown networks beside static ones, on the test split"
    tables = [table_of(caption, console.comparison_table(summary)), *_rare_classes(summary), _by_environment(model)]
    notes = [*console.objective_lines(summary), *console.table_notes(summary), *console.split_lines(summary)]
    return verdicts, lines, tables, notes


def _rare_classes(summary: Mapping[str, Any]) -> list[Table]:
    """Figures in which every class counts alike, and the confusion matrices, where a class is rare."""
    found = summary.get("rare_classes")
    if found is None:
        return []
    kinds = {name: found[key] for name, key in (("grown", "grown"), ("twin", "host")) if found[key] is not None}
    figures = {"balanced accuracy": "balanced_accuracy", "F1": "f1_macro", "ROC AUC": "roc_auc"}
    rows = [(name, *(console.estimate(each[key], ".4f") for key in figures.values())) for name, each in kinds.items()]
    names = [printable(name) for name in found["classes"]]
    rare = ", ".join(map(printable, found["rare"]))
    caption = f"Every class counts alike, as some are rare ({rare}): means over classes, on the test split"
    tables = [Table(caption, ("", *figures), rows)]
    for name, each in kinds.items():
        if each["confusion"] is None or len(names) > MOST_CLASSES:
            continue
        counts = [(own, *(f"{count:,}" for count in row)) for own, row in zip(names, each["confusion"], strict=True)]
        title = f"Confusion matrix, {name}: test examples by class (row) and prediction (column), over all environments"
        tables.append(Table(title, ("class", *names), counts))
    return tables


def _by_environment(model: RunModel) -> Table:
    summary = model.summary or {}
    metric = f"test_{summary['metric']}"
    grown, whole, hosts = summary[metric]["grown"], summary["grown_params"], summary["host_params"]
    static = {name: each[metric] for name, each in summary.get("baselines", {}).items() if each.get(metric) is not None}
    failed = Counter(row.env for row in model.rollbacks if not row.twin)
    sizes = hosts if isinstance(hosts, list) else [hosts] * len(whole)
    rows = []
    for env, seeds in enumerate(summary["grown"]):
        kept = ", ".join(f"{printable(blueprint)} at {printable(slot)}" for slot, blueprint in seeds.items())
        others = (_number(values[env]) for values in static.values())
        rows.append(
            (str(env), _number(grown[env]), *others, f"{whole[env] - sizes[env]:,}", kept or "none", f"{failed[env]}")
        )
    names = (f"grown, test {printable(summary['metric'])}", *map(printable, static))
    columns = ("environment", *names, "added parameters", "seeds kept", "rollbacks")
    return Table("Results by environment", columns, rows, texts=(len(columns) - 2,))


def _lowest_lines(model: RunModel) -> list[str]:
    """Which environment has the lowest metric, what the host alone has there, and whether it learned anything."""
    summary, population = model.summary or {}, model.population
    scores = (summary.get(f"test_{summary.get('metric')}") or {}).get("grown") or []
    known = [(score, env) for env, score in enumerate(scores) if score is not None]
    if len(known) < 2:
        return []
    score, env = min(known)
    static = {name: each.get(f"test_{summary['metric']}") for name, each in summary.get("baselines", {}).items()}
    there = [f"{_number(values[env])} of {printable(name)}" for name, values in static.items() if values]
    line = f"The lowest test {printable(summary['metric'])} is {_number(score)}, in environment {env}"
    line += f", beside {', '.join(there)}." if there else "."
    if population is not None:
        begin, end = population.loss[0, env], population.loss[-1, env]
        line += (
            f" Its loss on the probe split was {begin:.4g} after step {population.steps[0]} and {end:.4g} after step "
            f"{population.steps[-1]}."
        )
    return [line]


def _compared(summary: Mapping[str, Any]) -> list[str]:
    """How the grown networks compare with each static one, in a sentence each."""
    metric, lines = f"test_{summary['metric']}", []
    for name, static in summary.get("baselines", {}).items():
        values = static.get(metric)
        gaps = [] if values is None else differences(summary[metric]["grown"], values)
        paired = t_interval(gaps)
        if paired.size < 2:
            continue
        what = f"{name}, {console.DESCRIPTIONS.get(name, 'a static network')}"
        many, figures = counted(paired.size, "environment"), shown(paired, "+.3f")
        if not any(gaps):
            lines.append(f"The grown networks equal {what}, in all {many}.")
        elif paired.above or paired.below:
            word = "better" if paired.above else "worse"
            lines.append(f"The grown networks are {word} than {what}: {figures}, a paired 95 % interval over {many}.")
        else:
            lines.append(f"The difference between the grown networks and {what}, is not resolved by {many}: {figures}.")
    return lines


def _number(value: float | None) -> str:
    return "absent" if value is None else f"{value:.4f}"
