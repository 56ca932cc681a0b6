"""The sections and figures of a page as data, which `drawing.py` draws. T places, E environments, N lines."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from esper.karn.result import Table
from esper.karn.run_model import Floats, SeedMark, Stay

Integers = NDArray[np.int64]
Bools = NDArray[np.bool_]


class Series(NamedTuple):
    """Values over an axis.

    Attributes:
        name (str): shown in the legend
        values ((T, N) float): N values at each place; their median is drawn, with a band from the 10th to the 90th percentile
        style (str): CSS class of the line
    """

    name: str
    values: Floats
    style: str


class Curves(NamedTuple):
    """Lines over one axis, with bands.

    Attributes:
        name (str): heading
        x (numbers): (T,) the places
        series (list of Series): the lines
        x_name (str): name of the axis
        y_name (str): name of the values; empty if the heading says it
        height (int): [px]
    """

    name: str
    x: Sequence[float]
    series: Sequence[Series]
    x_name: str
    y_name: str
    height: int = 240

    @property
    def measured(self) -> list[Series]:
        """The series that have a finite value."""
        return [each for each in self.series if len(self.x) and np.isfinite(each.values).any()]

    @property
    def absent(self) -> str | None:
        """Why there is nothing to draw; None if there is something."""
        return None if self.measured else "nothing was measured"


class Timeline(NamedTuple):
    """The stages of one slot over time, a line for each environment.

    Attributes:
        name (str): of the slot
        stays (list of Stay): the stages
        marks (list of SeedMark): where seeds were planted and removed
        envs (int): number of environments
        first (int): first step
        last (int): one past the last step
    """

    name: str
    stays: Sequence[Stay]
    marks: Sequence[SeedMark]
    envs: int
    first: int
    last: int

    @property
    def absent(self) -> str | None:
        """Why there is nothing to draw; None if there is something."""
        return None if self.stays or self.marks else "no seed was planted here"


class ForestRow(NamedTuple):
    """A value with its error.

    Attributes:
        name (str): what it belongs to
        value (float): the value
        low (float): lower end of the bar; nan if it is not known
        high (float): upper end
        style (str): CSS class
        words (str): a sentence on it
    """

    name: str
    value: float
    low: float
    high: float
    style: str
    words: str


class ForestPlot(NamedTuple):
    """Values with bars, one a line.

    Attributes:
        name (str): heading
        rows (list of ForestRow): the values, the first on top
        unit (str): what is measured
    """

    name: str
    rows: Sequence[ForestRow]
    unit: str

    @property
    def absent(self) -> str | None:
        """Why there is nothing to draw; None if there is something."""
        return None if self.rows else "nothing was measured"


class HeatMap(NamedTuple):
    """A table of numbers as colours: the darker, the larger.

    Attributes:
        name (str): heading
        rows (names): R
        columns (names): C
        values ((R, C) float): the numbers; nan is absent
        column_name (str): what the columns are
        by_row (bool): whether every row has a scale of its own, from its least to its largest number; else from 0 to the largest
    """

    name: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: Floats
    column_name: str
    by_row: bool = False

    @property
    def absent(self) -> str | None:
        """Why there is nothing to draw; None if there is something."""
        return None if self.values.size and np.isfinite(self.values).any() else "nothing was measured"

    @property
    def shades(self) -> Floats:
        """(R, C) between 0 and 1; nan is absent. A row whose values are all the same has the shade 0.5, or 0 if they are 0."""
        shades = np.full(self.values.shape, np.nan)
        known = np.isfinite(self.values)
        for row, (values, there) in enumerate(zip(self.values, known, strict=True)):
            if not there.any():
                continue
            scale = values[there] if self.by_row else self.values[known]
            low, high = (scale.min() if self.by_row else min(0.0, scale.min())), scale.max()
            shades[row, there] = (values[there] - low) / (high - low) if high > low else 0.5 * (low != 0)
        return shades


Figure = Curves | Timeline | ForestPlot | HeatMap


class ReportSection(NamedTuple):
    """A part of the page under its own heading.

    Attributes:
        key (str): anchor
        name (str): heading
        lines (sentences): plain text at the beginning
        tables (list of Table): tables
        figures (list of Figure): drawn below the tables
        extra (Markup): what follows them
        notes (sentences): plain text at the end
        papers (list of Figure): figures that are drawn as pictures alone, because the page shows the same with a slider
    """

    key: str
    name: str
    lines: Sequence[str] = ()
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    extra: Markup = Markup()
    notes: Sequence[str] = ()
    papers: Sequence[Figure] = ()


class Content(NamedTuple):
    """What a page shows, without its style and scripts.

    Attributes:
        title (str): first heading
        heading (str): line below it
        sections (list of Section): parts
        data (Markup or None): JSON of the slider in the section "growth"; None without it
        last_step (int): last place of the slider
        missing (sentences): what the page leaves out because the run has none of it
    """

    title: str
    heading: str
    sections: Sequence[ReportSection]
    data: Markup | None = None
    last_step: int = 0
    missing: Sequence[str] = ()


def percentiles(values: Floats) -> Floats:
    """(T, N) -> (3, T) the 10th, 50th and 90th percentile of the finite values of each row; nan where there are none."""
    absent = np.full(3, np.nan)
    rows = (row[np.isfinite(row)] for row in values)
    return np.array([np.percentile(row, (10, 50, 90)) if row.size else absent for row in rows]).T


def describe(stay: Stay, slot: str) -> str:
    """A stay in words."""
    until = f"step {stay.start}" if stay.stop == stay.start + 1 else f"steps {stay.start} to {stay.stop - 1}"
    seed = f"{stay.blueprint}, " if stay.blueprint else ""
    dose = f", alpha {stay.alpha:.2g}" if stay.stage.name in ("BLENDING", "HOLDING", "FOSSILIZED") else ""
    why = f": {stay.why}" if stay.why else ""
    return f"environment {stay.env}, {slot}, {until}: {seed}{stay.stage.name}{dose}{why}"


def describe_mark(mark: SeedMark, slot: str) -> str:
    """A planting or a removal in words."""
    what = "GERMINATED (planted)" if mark.planted else "PRUNED (removed)"
    why = f": {mark.why}" if mark.why else ""
    return f"environment {mark.env}, {slot}, step {mark.step}: {mark.blueprint or 'seed'}, {what}{why}"


def with_error(mean: float, error: float) -> str:
    """A mean with its standard error; 'not measured' for nan."""
    if np.isnan(mean):
        return "not measured"
    return f"{mean:+.4f}" + ("" if np.isnan(error) else f" ± {error:.4f}")
