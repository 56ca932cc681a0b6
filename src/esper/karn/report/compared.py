"""The page about several runs: how they were asked differently, what came out of each, and how every pair compares."""

from collections import Counter
from collections.abc import Callable, Sequence
from os import PathLike

import numpy as np

from esper.karn.comparison import (
    RESULT_COLUMNS,
    Compared,
    Comparison,
    notes,
    read_comparison,
    result_rows,
    settings_that_differ,
)
from esper.karn.report.drawing import COLOURS, Series, curves
from esper.karn.report.frame import Content, ReportSection, flat_settings, render, write_page
from esper.karn.result import Table
from esper.karn.run_model import EpisodeSteps, Floats
from esper.leyline.config.arguments import to_path
from esper.leyline.text import printable


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
        write_page(to_path(out, "out"), render(content_of(comparison)))
    return comparison


def content_of(comparison: Comparison) -> Content:
    """What the page of a comparison shows."""
    runs = comparison.runs
    sections = [_result(comparison), _settings(runs), _curves(runs), _growth(runs), _trainings(runs)]
    names = ", ".join(printable(run.name) for run in runs)
    return Content("Comparison of runs", names, [section for section in sections if section is not None])


def _result(comparison: Comparison) -> ReportSection:
    rows = [tuple(map(printable, row)) for row in result_rows(comparison.runs)]
    tables = [Table("What came out of each run, on the test split", RESULT_COLUMNS, rows, texts=(1,))]
    pairs = [
        (
            f"{printable(each.first)} less {printable(each.second)}",
            *("-" if found is None else found.shown for found in (each.metric, each.objective, each.params)),
            str(each.metric.pairs or "unpaired"),
        )
        for each in comparison.verdicts
        if each.metric is not None
    ]
    if pairs:
        columns = ("runs", "test metric", "J", "added parameters", "environments")
        tables.append(Table("Difference of every pair, with its 95 % interval", columns, pairs))
    lines = [each.sentence for each in comparison.verdicts]
    return ReportSection("result", "How the runs compare", lines, tables, notes=notes(comparison))


def _settings(runs: Sequence[Compared]) -> ReportSection:
    flat = [dict(flat_settings(run.model.config)) for run in runs]
    rows = settings_that_differ(runs, flat)
    if not rows:
        return ReportSection("asked", "What was asked", ["All settings are the same."])
    columns = ("key", *(printable(run.name) for run in runs))
    caption = "Settings that differ"
    return ReportSection("asked", "What was asked", [], [Table(caption, columns, rows, texts=range(1, len(columns)))])


FIGURES: Sequence[tuple[str, Callable[[EpisodeSteps], Floats]]] = (
    ("metric on the probe split", lambda population: population.metric),
    ("loss on the probe split", lambda population: population.loss),
    ("added parameters", lambda population: population.added.astype(float)),
)
"""Figures over the steps of an episode, with the values (T, E) that each shows."""


def _curves(runs: Sequence[Compared]) -> ReportSection | None:
    drawn = [(index, run, run.model.population) for index, run in enumerate(runs)]
    shown = [(index, run, population) for index, run, population in drawn if population is not None]
    if not shown:
        return None
    steps = sorted({int(step) for _, _, population in shown for step in population.steps})
    figures = []
    for title, read in FIGURES:
        series = [
            Series(run.name, _on_axis(steps, population.steps.tolist(), read(population)), f"run{index % COLOURS}")
            for index, run, population in shown
        ]
        figures.append(curves(title.capitalize(), steps, series, "step", title))
    lines = ["Lines are medians over environments; bands reach from the 10th to the 90th percentile."]
    left_out = [printable(run.name) for _, run, population in drawn if population is None]
    if left_out:
        lines.append(f"Without steps in their events, and so not drawn: {', '.join(left_out)}.")
    return ReportSection("curves", "Over time", lines, figures=figures)


def _on_axis(axis: Sequence[int], steps: Sequence[int], values: Floats) -> Floats:
    """Values (T, E) at the places of an axis that their steps have, and nan at the others."""
    place = {step: index for index, step in enumerate(axis)}
    spread = np.full((len(axis), values.shape[1]), np.nan)
    spread[[place[step] for step in steps]] = values
    return spread


def _growth(runs: Sequence[Compared]) -> ReportSection | None:
    grown = [(run, run.summary["grown"]) for run in runs if run.summary is not None]
    if not grown:
        return None
    counts = [
        Counter((slot, blueprint) for network in networks for slot, blueprint in network.items())
        for _, networks in grown
    ]
    seeds = sorted({seed for count in counts for seed in count})
    if not seeds:
        return ReportSection("growth", "What was kept", ["No run kept a seed."])
    rows = [
        (
            f"{printable(blueprint)} at {printable(slot)}",
            *(
                f"{count[slot, blueprint]} of {len(networks)}"
                for count, (_, networks) in zip(counts, grown, strict=True)
            ),
        )
        for slot, blueprint in seeds
    ]
    columns = ("seed", *(printable(run.name) for run, _ in grown))
    return ReportSection("growth", "What was kept", [], [Table("Environments that kept a seed", columns, rows)])


def _trainings(runs: Sequence[Compared]) -> ReportSection | None:
    trained = [(index, run) for index, run in enumerate(runs) if run.model.rounds]
    if not trained:
        return None
    rounds = sorted({row.round for _, run in trained for row in run.model.rounds})
    names = dict.fromkeys(name for _, run in trained for row in run.model.rounds for name in row.figures)
    figures = []
    for name in names:
        series = []
        for index, run in trained:
            known = [(row.round, row.figures.get(name)) for row in run.model.rounds]
            values = np.array([[np.nan if value is None else value] for _, value in known])
            where = [number for number, _ in known]
            series.append(Series(run.name, _on_axis(rounds, where, values), f"run{index % COLOURS}"))
        figure = curves(name.replace("_", " "), rounds, series, "round", "", height=180)
        if figure.absent is None:
            figures.append(figure)
    line = "Rounds below 0 are imitation. `esper docs training` explains every figure."
    return ReportSection("training", "Trainings", [line], figures=figures)
