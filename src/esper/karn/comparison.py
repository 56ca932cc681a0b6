"""Compare runs: how their settings differ, what came out of each, the difference of every pair, and a page."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from os import PathLike
from typing import Any, NamedTuple

import numpy as np

from esper.karn.reader import fitting_files, open_run, read_model
from esper.karn.report.drawing import COLOURS, Series, curves, on_axis
from esper.karn.report.frame import Content, ReportSection, flat_settings, write_page
from esper.karn.report.grown import BANDS
from esper.karn.report.trained import round_curves
from esper.karn.run_model import RunModel
from esper.karn.terminal.console import Table, added_params, estimate
from esper.leyline.config.arguments import to_path
from esper.leyline.intervals import MeanInterval, t_factor, t_interval
from esper.leyline.messages import InputError, counted, printable

Key = tuple[str, str, int, int]
"""Task, part of its instances, run seed and number of an environment. Two environments of one key have the same host, the same
data and the same order of batches."""


class Compared(NamedTuple):
    """Holds a run that is compared with others."""

    name: str  # the name of its folder, or its path if another run has a folder of that name
    model: RunModel  # what the folder holds

    @property
    def summary(self) -> Mapping[str, Any] | None:
        """The final figures of grown networks; None for a training, and for a run that has none yet."""
        summary = self.model.summary
        return summary if summary is not None and "grown_params" in summary else None

    def by_key(self, values: Sequence[float | None]) -> dict[Key, float]:
        """Return values of the environments (E,) by their keys, without those that are not known."""
        config = self.model.config
        first = int(config.get("first_instance", 0))
        keys = (
            (str(config.get("task")), str(config.get("instances")), int(config.get("seed", 0)), first + env)
            for env in range(len(values))
        )
        return {key: float(value) for key, value in zip(keys, values, strict=True) if value is not None}


class Difference(MeanInterval):
    """Holds the first run's value less the second's, with a 95 % interval; nan where a run has too few values."""

    @property
    def pairs(self) -> int:
        """Number of environments that both runs have, over which the difference is paired; 0 if they share none."""
        return self.size


class Verdict(NamedTuple):
    """Says how two runs compare.

    Attributes:
        first (str): name of a run
        second (str): name of the other run
        metric (Difference or None): difference of the metric on the test split; None if the runs cannot be compared by it
        objective (Difference or None): the same difference of J
        params (Difference or None): the same difference of the added parameters
        sentence (str): the result in words
    """

    first: str
    second: str
    metric: Difference | None
    objective: Difference | None
    params: Difference | None
    sentence: str


class Comparison(NamedTuple):
    """Holds runs and how each pair of them compares.

    Attributes:
        runs (list of Compared): the runs in the order in which they were named
        verdicts (list of Verdict): one for each pair of runs
    """

    runs: list[Compared]
    verdicts: list[Verdict]

    def __repr__(self) -> str:
        return "\n".join(verdict.sentence for verdict in self.verdicts)


def read_comparison(folders: Sequence[str | PathLike[str]]) -> Comparison:
    """Compare run folders. InputError if there are fewer than two, one is given twice, or a folder is not a run or is damaged."""
    opened = [open_run(folder) for folder in folders]
    paths = [run.folder.resolve() for run in opened]
    if len(paths) < 2:
        raise InputError(
            f"a comparison needs two runs or more, but {counted(len(paths), 'run')} was given; name another"
        )
    for path in paths:
        if paths.count(path) > 1:
            raise InputError(f"{path} is named more than once; name each run once")
    names = [path.name if [each.name for each in paths].count(path.name) == 1 else str(path) for path in paths]
    runs = [Compared(name, read_model(run)) for name, run in zip(names, opened, strict=True)]
    with fitting_files(paths[-1]):
        return Comparison(runs, [verdict(first, second) for first, second in combinations(runs, 2)])


def verdict(first: Compared, second: Compared) -> Verdict:
    """Return how two runs compare on the test split."""
    names = first.name, second.name
    one, other = first.summary, second.summary
    one_name, other_name = map(printable, names)
    apart = f"{one_name} and {other_name} cannot be compared"
    if one is None or other is None:
        run = first if one is None else second
        how = {"running": "still goes on", "killed": "was killed before its end"}
        why = f"{how.get(run.model.status, f'is {run.model.status}')} and has no final figures"
        if run.model.summary is not None and "rounds_done" in run.model.summary:
            why = "is a training, which has no figures on the test split; compare controllers with esper eval"
        return Verdict(*names, None, None, None, f"{apart}: {printable(run.name)} {why}.")
    if (one["task"], one["metric"]) != (other["task"], other["metric"]):
        what = " and ".join(f"{printable(run['metric'])} on {printable(run['task'])}" for run in (one, other))
        return Verdict(*names, None, None, None, f"{apart}: they measure {what}.")
    both, figure = ((first, one), (second, other)), f"test_{one['metric']}"
    metric = difference(*(run.by_key(summary[figure]["grown"]) for run, summary in both))
    objective = None
    if one["objective_formula"] == other["objective_formula"]:
        objective = difference(*(run.by_key(summary["test_objective"]["grown"]) for run, summary in both))
    params = difference(*(run.by_key(added_params(summary)) for run, summary in both))
    over = f"over {counted(metric.pairs, 'environment')} that both grew from the same host and data"
    if not metric.pairs:
        over = "unpaired, because the runs share no environment (task, seed and instances)"
    shown = f"test {printable(one['metric'])} {metric:+.4f}, {over}"
    if objective is not None:
        shown += f"; J {objective:+.4f}"
    if math.isnan(metric.low):
        sentence = f"{one_name} and {other_name} differ by {shown}: too few environments for an interval."
    elif not metric.above and not metric.below:
        by = f" by {counted(metric.pairs, 'environment')}" if metric.pairs else ""
        sentence = f"The difference in the metric between {one_name} and {other_name} is not resolved{by}: {shown}."
    else:
        sentence = f"{one_name} is {'better' if metric.above else 'worse'} than {other_name}: {shown}."
    return Verdict(*names, metric, objective, params, sentence)


def difference(first: Mapping[Key, float], second: Mapping[Key, float]) -> Difference:
    """Return the first values less the second ones: paired where keys are shared, of independent samples if none is.

    Paired intervals are those of Student's t over the differences. Of independent samples they are Welch's (B. L. Welch, "The
    generalization of Student's problem when several different population variances are involved", 1947).
    """
    shared = [key for key in first if key in second]
    if shared:
        return Difference(*t_interval([first[key] - second[key] for key in shared]))
    samples = [np.array(list(values.values())) for values in (first, second)]
    means = [float(sample.mean()) if sample.size else math.nan for sample in samples]
    mean = means[0] - means[1]
    if min(sample.size for sample in samples) < 2:
        return Difference(mean, math.nan, math.nan, 0)
    squares = [float(sample.var(ddof=1)) / sample.size for sample in samples]  # of the standard errors
    if sum(squares) == 0:
        return Difference(mean, mean, mean, 0)
    freedom = sum(squares) ** 2 / sum(
        square**2 / (sample.size - 1) for square, sample in zip(squares, samples, strict=True)
    )
    half = t_factor(freedom + 1) * math.sqrt(sum(squares))
    return Difference(mean, mean - half, mean + half, 0)


def as_record(found: Verdict) -> dict[str, Any]:
    """Return a verdict as plain values; an end of an interval that is not known is None."""
    record: dict[str, Any] = {"first": found.first, "second": found.second, "sentence": found.sentence}
    for name in ("metric", "objective", "params"):
        one: Difference | None = getattr(found, name)
        plain = [None if math.isnan(value) else value for value in one or ()]
        record[name] = dict(zip(("mean", "low", "high", "pairs"), plain, strict=True)) if one else None
    return record


def result_table(runs: Sequence[Compared]) -> Table:
    """Return a row for each run: status, metric, J, added parameters, seeds kept of those planted, seconds."""
    rows: list[tuple[str, ...]] = []
    for run in runs:
        summary, model = run.summary, run.model
        if summary is None:
            best = (model.summary or {}).get("best_validation_objective")
            value = "-" if best is None else f"{best:.4f} (validation)"
            rows.append((run.name, model.status, "-", value, "-", "-", "-"))
            continue
        seeds, metric = summary["seeds"], summary["metric"]
        test = f"{metric} {estimate(summary[f'test_{metric}']['grown'], '.4f')}"
        worth, added = estimate(summary["test_objective"]["grown"], ".4f"), estimate(added_params(summary), ",.0f")
        kept, seconds = f"{seeds['fossilized']} of {seeds['germinated']}", f"{summary['seconds']:,.1f}"
        rows.append((run.name, model.status, test, worth, added, kept, seconds))
    columns = ("run", "status", "test metric", "J", "added parameters", "seeds kept", "seconds")
    return Table("What came out of each run, on the test split", columns, rows)


def notes(comparison: Comparison) -> list[str]:
    """Return sentences on how the figures are to be read."""
    lines = ["Figures of runs are means ± standard error over environments; differences have a 95 % t interval."]
    formulas = {run.summary["objective_formula"] for run in comparison.runs if run.summary is not None}
    if len(formulas) > 1:
        lines.append(f"J is not compared where its formula differs: {'; '.join(sorted(formulas))}.")
    if len(comparison.verdicts) > 1:
        lines.append("Every interval is that of its own pair; none is corrected for the number of pairs.")
    return lines


def compare(*runs: str | PathLike[str], out: str | PathLike[str] | None = None) -> Comparison:
    """Compare two run folders or more: the difference of every pair on the test split, with 95 % intervals.

        print(esper.compare("runs/a", "runs/b", out="comparison.html"))

    Differences are paired over the environments that two runs share, which have the same host and data: those of one task, run
    seed and number. Runs that share none are compared as independent samples. `out` names an HTML file to write with tables,
    curves and the settings that differ; it makes no request to any network.

    Raises InputError if fewer than two runs are named, one is named twice, a folder is not a run folder or is damaged, or the
    page cannot be written.
    """
    comparison = read_comparison(runs)
    if out is not None:
        write_page(to_path(out, "out"), content_of(comparison))
    return comparison


def content_of(comparison: Comparison) -> Content:
    """Return what the page of a comparison shows."""
    runs = comparison.runs
    names = [run.name for run in runs]
    tables = [result_table(runs)]
    pairs = [
        (
            f"{each.first} less {each.second}",
            *("-" if found is None else f"{found:+.4f}" for found in (each.metric, each.objective, each.params)),
            str(each.metric.pairs or "unpaired"),
        )
        for each in comparison.verdicts
        if each.metric is not None
    ]
    if pairs:
        columns = ["runs", "test metric", "J", "added parameters", "environments"]
        tables.append(Table("Difference of every pair, with its 95 % interval", columns, pairs))
    lines = [each.sentence for each in comparison.verdicts]
    sections = [ReportSection("result", "How the runs compare", lines, tables, notes=notes(comparison))]

    flat = [dict(flat_settings(run.model.config)) for run in runs]
    keys = dict.fromkeys(key for config in flat for key in config)
    every = [(key, *(config.get(key, "absent") for config in flat)) for key in keys]
    rows = [row for row in every if len(set(row[1:])) > 1]
    lines = [] if rows else ["All settings are the same."]
    tables = [Table("Settings that differ", ["key", *names], rows, texts=range(1, 1 + len(names)))] if rows else []
    sections.append(ReportSection("asked", "What was asked", lines, tables))

    drawn = [(run.name, f"run{index % COLOURS}", run.model) for index, run in enumerate(runs)]
    shown = [(name, style, model.population) for name, style, model in drawn if model.population is not None]
    if shown:
        steps = sorted({int(step) for _, _, population in shown for step in population.steps})
        figures = []
        for title, field in (
            ("metric on the probe split", "metric"),
            ("loss on the probe split", "loss"),
            ("added parameters", "added"),
        ):
            series = [
                Series(name, on_axis(steps, population.steps.tolist(), getattr(population, field)), style)
                for name, style, population in shown
            ]
            figures.append(curves(title.capitalize(), steps, series, "step", title))
        lines = [BANDS]
        if left_out := [name for name, _, model in drawn if model.population is None]:
            lines.append(f"Without steps in their events, and so not drawn: {', '.join(left_out)}.")
        sections.append(ReportSection("curves", "Over time", lines, figures=figures))

    grown = {run.name: run.summary["grown"] for run in runs if run.summary is not None}
    counts = [Counter(seed for network in networks for seed in network.items()) for networks in grown.values()]
    kept = []
    for slot, blueprint in sorted({seed for count in counts for seed in count}):
        each = zip(counts, grown.values(), strict=True)
        cells = (f"{count[slot, blueprint]} of {len(networks)}" for count, networks in each)
        kept.append((f"{blueprint} at {slot}", *cells))
    if grown:
        lines = [] if kept else ["No run kept a seed."]
        tables = [Table("Environments that kept a seed", ["seed", *grown], kept)] if kept else []
        sections.append(ReportSection("growth", "What was kept", lines, tables))

    trained = [(name, style, model.rounds) for name, style, model in drawn if model.rounds]
    if trained:
        known = dict.fromkeys(figure for _, _, own in trained for row in own for figure in row.figures)
        lines = ["Rounds below 0 are imitation. `esper docs training` explains every figure."]
        sections.append(ReportSection("training", "Trainings", lines, figures=round_curves(trained, known, {})))
    return Content("Comparison of runs", ", ".join(names), sections)
