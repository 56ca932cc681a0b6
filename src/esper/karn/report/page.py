"""The page about one run, from its model: sections of sentences, tables and figures, in one file without requests."""

import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from esper.karn import console
from esper.karn.examples import split_lines
from esper.karn.reader import open_run
from esper.karn.report.frame import Content, Section, Table, flat_settings, render, write_page
from esper.karn.report.model import NO_SEED, Population, RunModel, read_model
from esper.karn.report.svg import Series, curves, forest, text, timeline
from esper.leyline.arguments import to_path
from esper.leyline.config import Config
from esper.leyline.errors import InputError, RunWarning, warn
from esper.leyline.stages import Stage
from esper.leyline.text import counted, printable
from esper.store.files import REPORT, SUMMARY

DRAWN_DECISIONS = 60
"""Most decisions that the figure of contributions shows; the largest contributions and the smallest."""
LISTED = 200
"""Most rows of a table of single decisions or rollbacks."""
SIGNS: Mapping[str, str] = {
    "batch": "examples of a batch are not finite",
    "loss": "a loss is not finite",
    "gradient": "a gradient is not finite",
    "parameter": "a parameter is not finite",
    "rise": "the loss rose far above its past values",
    "collapse": "the outputs hardly differ between examples",
    "fall": "the metric fell far below its best value",
    "metric": "the metric is not finite",
}
"""The reasons of rollbacks (`esper.Vital`) in words."""


def write_report(run: str | PathLike[str], out: str | PathLike[str] | None = None) -> Path:
    """Write one self-contained page about a run, whether it goes on, has ended or was killed, and return its path.

    The page is `report.html` in the run folder, or `out`. It makes no request to any network. Raises InputError if the folder
    is not a run folder, a file of it is damaged, or the page cannot be written.
    """
    opened = open_run(run)
    path = opened.folder / REPORT if out is None else to_path(out, "out")
    return write_page(path, page(read_model(opened), opened.folder.resolve().name))


def report_at_end(folder: Path) -> None:
    """Write the report of a run that has ended, unless `report` is false in its config or the page is newer than the summary.

    The figures of the run are safe by then, so an error only issues a RunWarning.
    """
    summary, path = folder / SUMMARY, folder / REPORT
    try:
        if not open_run(folder).config.get("report", True):
            return
        if path.exists() and summary.exists() and path.stat().st_mtime_ns >= summary.stat().st_mtime_ns:
            return
        write_report(folder)
    except (InputError, OSError) as error:
        warn(f"no report was written: {error}", RunWarning)


def page(model: RunModel, name: str) -> str:
    """The page of a model; `name` is that of the run folder."""
    return render(content_of(model, name))


def content_of(model: RunModel, name: str) -> Content:
    """What the page of a model shows."""
    sections = [
        section
        for section in (
            _asked(model),
            _result(model),
            _curves(model),
            _training(model),
            _growth(model),
            _decisions(model),
            _faults(model),
            _machine(model),
        )
        if section is not None
    ]
    population = model.population
    last_step = 0 if population is None else len(population.steps) - 1
    return Content(name, _heading(model), sections, _data(model), last_step)


def head_of(model: RunModel, name: str) -> str:
    """The beginning of the page as a piece of HTML: the heading, the sentences on what came out, and the table of figures."""
    result = _result(model)
    lines = Markup("").join(Markup("<p>{}</p>").format(line) for line in (_heading(model), *result.lines))
    tables = Markup("")
    for table in result.tables:
        rows = ((Markup("th"), table.columns), *((Markup("td"), row) for row in table.rows))
        cells = (Markup("").join(Markup("<{0}>{1}</{0}>").format(tag, cell) for cell in row) for tag, row in rows)
        tables += Markup("<table>{}</table>").format(
            Markup("").join(Markup("<tr>{}</tr>").format(row) for row in cells)
        )
    return str(Markup("<div><h3>{}</h3>{}{}</div>").format(printable(name), lines, tables))


def _heading(model: RunModel) -> str:
    head = model.head
    if model.summary is not None and "grown_params" in model.summary:
        return console.heading_line(model.summary)
    if head is None:
        return f"{model.status}; the run kept no events (telemetry.level)"
    return (
        f"{printable(head.task)}, {printable(head.controller)}: {counted(head.envs, 'environment')}, "
        f"{counted(head.steps, 'step')} an episode, seed {head.seed}, {head.device}, {model.status}"
    )


def _asked(model: RunModel) -> Section:
    config, head = model.config, model.head
    lines = []
    if head is not None:
        lines.append(
            f"The controller {printable(head.controller)} was asked to grow {counted(head.envs, 'network')} on the task "
            f"{printable(head.task)}, for {counted(head.steps, 'step')} an episode."
        )
        lines.append(
            f"Slots: {', '.join(map(printable, head.slots))}. Menu: {', '.join(map(printable, head.blueprints))}."
        )
    seeds = (config.get("lifecycle") or {}).get("max_seeds")
    if seeds is not None:
        lines.append(
            f"At most {seeds} seeds may be in an environment at once, kept ones included (lifecycle.max_seeds)."
        )
    rent = (config.get("reward") or {}).get("rent")
    if rent is not None:
        lines.append(f"J is the metric less rent for added parameters; reward.rent is {rent:g}.")
    if model.changed:
        lines.append(f"Changed when the run was resumed: {', '.join(map(printable, model.changed))}.")
    usual = dict(flat_settings(Config().model_dump(mode="json")))
    own = [(key, value, usual[key]) for key, value in flat_settings(config) if key in usual and usual[key] != value]
    tables = [Table("Settings that differ from the defaults of Esper", ("key", "value", "default"), own, texts=(1, 2))]
    return Section("asked", "What was asked", lines, tables if own else [])


def _result(model: RunModel) -> Section:
    summary = model.summary
    if summary is None:
        how = {"running": "still goes on", "killed": "was killed before it ended"}.get(
            model.status, f"is {model.status}"
        )
        return Section("result", "What came out", [f"The run {how}, so there are no final figures yet."])
    if "grown_params" not in summary:
        best = summary.get("best_validation_objective")
        lines = ["No controller was validated, so none was kept."]
        if best is not None:
            lines = [f"The best controller reached a validation J of {best:.4f} in round {summary['best_round'] + 1}."]
        return Section("result", "What came out", lines)
    table = console.comparison_table(summary)
    columns = [printable(column.header) for column in table.columns]
    cells = [[str(cell) for cell in column.cells] for column in table.columns]
    rows = list(zip(*cells, strict=True))
    lines = _verdicts(summary)
    if "error" in summary:
        lines.insert(0, f"The run failed: {printable(summary['error']['message'])}")
    lines += [
        *console.grown_lines(summary),
        *console.trouble_lines(summary),
        *console.early_stopping_lines(summary),
        *console.explanation_lines(summary),
    ]
    caption = "Grown networks beside static ones, on the test split"
    notes = [*console.objective_lines(summary), *console.table_notes(summary), *split_lines(summary)]
    return Section("result", "What came out", lines, [Table(caption, columns, rows)], notes=notes)


def _verdicts(summary: Mapping[str, Any]) -> list[str]:
    """How the grown networks compare with each static one, in a sentence each."""
    metric, lines = f"test_{summary['metric']}", []
    for name, static in summary.get("baselines", {}).items():
        values = static.get(metric)
        pairs = [] if values is None else zip(summary[metric]["grown"], values, strict=True)
        gaps = [grown - other for grown, other in pairs if grown is not None and other is not None]
        mean, error = console.mean_and_error(gaps)
        if np.isnan(error):
            continue
        what = f"{name}, {console.DESCRIPTIONS.get(name, 'a static network')}"
        shown = f"{console.spread(gaps, '+.3f')}, a paired 95 % interval over {counted(len(gaps), 'environment')}"
        if abs(mean) <= console.t_factor(len(gaps)) * error:
            lines.append(f"No difference was found between the grown networks and {what}: {shown}.")
        else:
            lines.append(f"The grown networks are {'better' if mean > 0 else 'worse'} than {what}: {shown}.")
    return lines


def _curves(model: RunModel) -> Section | None:
    population = model.population
    if population is None:
        return None
    metric = str((model.summary or {}).get("metric", "metric"))
    steps = population.steps.tolist()
    grown = [Series("grown", population.metric, "grown")]
    if population.twin is not None:
        grown.append(Series("twin, which never grows", population.twin, "twin"))
    figures = [
        curves(f"{metric} on the probe split", steps, grown, "step", metric),
        curves(
            "loss",
            steps,
            [Series("probe", population.loss, "grown"), Series("training", population.train_loss, "third")],
            "step",
            "loss",
        ),
        curves(
            "added parameters", steps, [Series("added", population.added.astype(float), "grown")], "step", "parameters"
        ),
    ]
    line = "Lines are medians over environments; bands reach from the 10th to the 90th percentile."
    titles = (f"{printable(metric)} on the probe split", "Loss", "Added parameters")
    drawn = [Markup(f"<h3>{text(title)}</h3>{figure}") for title, figure in zip(titles, figures, strict=True)]
    return Section("curves", "Over time", [line], figures=drawn)


def _training(model: RunModel) -> Section | None:
    if not model.rounds:
        return None
    x = [row.round for row in model.rounds]
    names = list(dict.fromkeys(name for row in model.rounds for name in row.figures))
    figures = []
    for name in names:
        values = np.array([[_or_nan(row.figures.get(name))] for row in model.rounds])
        if np.isfinite(values).any():
            series = [Series(name.replace("_", " "), values, "grown")]
            shown = name.replace("_", " ")
            figures.append(Markup(f"<h3>{text(shown)}</h3>{curves(shown, x, series, 'round', '', height=180)}"))
    line = f"{counted(len(x), 'round')}; rounds below 0 are imitation. docs/training.md explains every figure."
    return Section("training", "Training", [line], figures=figures)


def _growth(model: RunModel) -> Section | None:
    population, head = model.population, model.head
    if population is None or head is None:
        return None
    first, last = int(population.steps[0]), int(population.steps[-1]) + 1
    envs = population.metric.shape[1]
    figures = [
        Markup(
            f"<h3>{text(slot)}</h3>{timeline(slot, [stay for stay in model.stays if stay.slot == s], envs, first, last)}"
        )
        for s, slot in enumerate(head.slots)
    ]
    shown = [stage for stage in Stage if stage != Stage.DORMANT]
    keys = "".join(f'<span class="key"><i class="swatch stage{stage.value}"></i>{stage.name}</span>' for stage in shown)
    lines = [
        *_limit_lines(model, population),
        "One line for each environment, time to the right; a paler colour is a smaller alpha. Point at a stage, or move to a "
        "figure with the tab key and through it with the arrow keys, to read what it is and why.",
    ]
    return Section(
        "growth", "What grew, where and when", lines, figures=figures, extra=Markup(f'<p class="legend">{keys}</p>')
    )


def _limit_lines(model: RunModel, population: Population) -> list[str]:
    """Whether the limits on seeds and parameters were reached."""
    limit = (model.config.get("lifecycle") or {}).get("max_seeds")
    lines = []
    if limit is not None:
        full = (population.seed != NO_SEED).sum(2) >= limit
        lines.append(
            f"The limit of {counted(limit, 'seed')} (lifecycle.max_seeds) was reached in {full.any(0).sum()} of "
            f"{counted(full.shape[1], 'environment')}, for {full.mean():.0%} of the steps of all environments. No seed can be "
            "planted while it is reached."
        )
    caps = {
        "reward.param_budget": (model.config.get("reward") or {}).get("param_budget"),
        "governor.param_limit": (model.config.get("governor") or {}).get("param_limit"),
    }
    known = [f"{key} is {value}" for key, value in caps.items() if value is not None]
    lines.append(
        f"Limits on parameters: {'; '.join(known) or 'none'}. Most that were added at once: {population.added.max():,}."
    )
    return lines


def _decisions(model: RunModel) -> Section | None:
    if model.head is None:
        return None
    tables, figures, lines = [], [], []
    if model.tallies:
        rows = [
            (
                printable(each.blueprint),
                printable(each.slot),
                f"{each.tried:,}",
                f"{each.kept:,}",
                f"{each.pruned:,}",
                _with_error(each.contribution, each.error),
                "-" if np.isnan(each.steps_to_keep) else f"{each.steps_to_keep:.1f}",
            )
            for each in model.tallies
        ]
        columns = ("blueprint", "slot", "tried", "kept", "pruned", "contribution", "steps until kept")
        caption = (
            "What became of the seeds; contributions are means over seeds ± standard error, when they were decided on"
        )
        tables.append(Table(caption, columns, rows, texts=(1,)))
    else:
        lines += ["No seed was planted.", *(model.summary or {}).get("explanations", [])]
    measured = sorted(
        (each for each in model.decided if not np.isnan(each.contribution)), key=lambda d: -d.contribution
    )
    if len(measured) > DRAWN_DECISIONS:
        lines.append(
            f"The figure shows {DRAWN_DECISIONS} of {len(measured):,} measured decisions: both ends of the order."
        )
        measured = measured[: DRAWN_DECISIONS // 2] + measured[-DRAWN_DECISIONS // 2 :]
    if measured:
        figures.append(Markup(forest(measured)))
        lines.append(
            "The figure below has the contributions when seeds were kept (green) or pruned (red), in units of the metric, "
            "with one standard error to each side."
        )
    if model.refused:
        refusals = [(printable(reason.replace("_", " ")), f"{count:,}") for reason, count in model.refused.items()]
        tables.append(Table("Decisions that were refused", ("reason", "decisions"), refusals))
    elif model.population is not None:
        lines.append("No decision was refused.")
    listed = [
        (
            f"{each.step}",
            f"{each.env}",
            printable(each.slot),
            printable(each.blueprint),
            _fate(each.kept),
            printable(each.why),
        )
        for each in model.decided[:LISTED]
    ]
    if listed:
        more = f", the first {LISTED} of {len(model.decided):,}" if len(model.decided) > LISTED else ""
        names = ("step", "environment", "slot", "blueprint", "decision", "reason")
        tables.append(Table(f"Keeps and prunes with their reasons{more}", names, listed, texts=(2, 3, 4, 5)))
    return Section("decisions", "Decisions and why", lines, tables, figures)


def _faults(model: RunModel) -> Section | None:
    if model.head is None:
        return None
    if not model.rollbacks:
        return Section("faults", "Rollbacks", ["No environment failed, so none was restored."])
    rows = [
        (
            f"{row.step}",
            f"{row.env}" + (" (twin)" if row.twin else ""),
            SIGNS.get(row.reason, printable(row.reason.replace("_", " "))),
            "not finite" if row.loss is None else f"{row.loss:.4g}",
            ", ".join(map(printable, row.pruned)) or "none",
        )
        for row in model.rollbacks[:LISTED]
    ]
    columns = ("step", "environment", "what failed", "loss before it was restored", "slots whose seed was lost")
    table = Table("Environments restored to a snapshot", columns, rows, texts=(1, 2, 4))
    lost = sum(len(row.pruned) for row in model.rollbacks)
    line = (
        f"{counted(len(model.rollbacks), 'rollback')}. Seeds that were lost in them: {lost}; they count as pruned, without a "
        "decision of the controller. docs/governor.md has the limits behind each reason."
    )
    return Section("faults", "Rollbacks", [line], [table])


def _machine(model: RunModel) -> Section:
    tables, lines, summary = [], [], model.summary or {}
    if "grown_params" in summary:
        lines += console.time_lines(summary)
    elif summary.get("seconds") is not None:
        lines.append(f"The run took {summary['seconds']:,.1f} seconds.")
    phases = summary.get("phase_seconds")
    if phases:
        whole = sum(phases.values())
        rows = [
            (printable(name), f"{seconds:,.2f}", f"{seconds / whole:.0%}" if whole else "-")
            for name, seconds in phases.items()
        ]
        tables.append(Table("Time by phase of a step", ("phase", "seconds", "share"), rows))
    if model.environment is not None:
        tables.append(Table("Machine", ("name", "value"), flat_settings(model.environment), texts=(1,)))
    tables.append(Table("Config", ("key", "value"), flat_settings(model.config), texts=(1,)))
    return Section("machine", "Time, machine and config", lines, tables)


def _data(model: RunModel) -> Markup | None:
    """What the slider and the drawn network need, as JSON that no text in it can end."""
    population, head = model.population, model.head
    if population is None or head is None:
        return None
    known = {
        "slots": [printable(slot) for slot in head.slots],
        "blueprints": [printable(name) for name in head.blueprints],
        "stages": [stage.name for stage in Stage],
        "envs": population.metric.shape[1],
        "steps": population.steps.tolist(),
        "stage": population.stage.ravel().tolist(),
        "seed": population.seed.ravel().tolist(),
        "alpha": np.rint(100 * np.nan_to_num(population.alpha)).astype(int).ravel().tolist(),
    }
    assert NO_SEED < 0, "the page takes negative numbers for an empty slot"
    return Markup(json.dumps(known, separators=(",", ":")).replace("<", "\\u003c"))


def _with_error(mean: float, error: float) -> str:
    if np.isnan(mean):
        return "not measured"
    return f"{mean:+.4f}" + ("" if np.isnan(error) else f" ± {error:.4f}")


def _fate(kept: bool) -> str:
    return "kept" if kept else "pruned"


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value
