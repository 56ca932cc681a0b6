"""The figures of a page as pictures for papers, one file each, drawn by matplotlib from the same data as the page."""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from esper.karn.evaluation import drawn_text
from esper.karn.report.figures import Curves, Figure, Forest, HeatMap, Timeline, percentiles
from esper.karn.report.frame import Content
from esper.karn.report.svg import opacity
from esper.leyline.errors import InputError
from esper.leyline.stages import Stage
from esper.store.disk import write_atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = ("png", "pdf", "svg")
WIDTH = 6.5
"""Width of a picture, that of a page's text [inches]."""
DOTS = 200
"""Dots per inch of a PNG."""
_COLOURS = ("#0b62b8", "#8a5300", "#6b3fa0", "#14733c", "#b3261e", "#b58900", "#5b6470", "#1c2024")
STYLES: Mapping[str, str] = {
    **{f"run{index}": colour for index, colour in enumerate(_COLOURS)},
    "grown": _COLOURS[0],
    "twin": _COLOURS[1],
    "third": _COLOURS[2],
    "kept": _COLOURS[3],
    "pruned": _COLOURS[4],
    "plain": _COLOURS[0],
}
"""The colours of report.css in the light theme, by CSS class."""
STAGES: Mapping[Stage, str] = {
    Stage.TRAINING: "#b58900",
    Stage.BLENDING: "#2f86d6",
    Stage.HOLDING: "#6b4fc4",
    Stage.FOSSILIZED: "#14733c",
    Stage.EMBARGOED: "#c9ced5",
}
"""Likewise, of the stages that last."""


class Pictures(NamedTuple):
    """What was drawn and what was not.

    Attributes:
        paths (list of Path): the files that were written, in the order of the page
        absent (sentences): figures that there are no data for, with the reason
    """

    paths: list[Path]
    absent: list[str]


def write_pictures(content: Content, folder: Path, form: str = "png") -> Pictures:
    """Write every figure of a page to a file of its own, and return their paths.

    The files are named after their place, section and figure, such as `03-curves-loss.png`. `form` is png, pdf or svg. Raises
    InputError if the folder cannot be written or `form` is unknown.
    """
    if form not in FORMATS:
        raise InputError(f"unknown format of pictures {form!r}; choose one of {', '.join(FORMATS)}")
    paths: list[Path] = []
    absent = list(content.missing)
    figures = [(section, figure) for section in content.sections for figure in (*section.figures, *section.papers)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for section, figure in figures:
            if figure.absent is not None:
                absent.append(f"{section.name}, {figure.name}: {figure.absent}")
                continue
            stem = re.sub(r"[^a-z0-9]+", "-", figure.name.split(":")[0].lower()).strip("-")[:48] or "figure"
            path = folder / f"{len(paths) + 1:02}-{section.key}-{stem}.{form}"
            write_atomic(path, _drawn(figure, form))
            paths.append(path)
    except OSError as error:
        raise InputError(f"cannot write pictures to {folder}: {error.strerror}; name another folder") from None
    return Pictures(paths, absent)


def _drawn(figure: Figure, form: str) -> bytes:
    """A figure as the content of a file, the same for the same data."""
    from matplotlib import rc_context  # imported here because it takes 1 s; without pyplot it opens no window
    from matplotlib.figure import Figure as Picture

    draw, height = _DRAW[type(figure)]
    with rc_context({"svg.hashsalt": "esper", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        picture = Picture(figsize=(WIDTH, height(figure)), layout="constrained")
        axes = picture.subplots()
        axes.set_title(drawn_text(figure.name), fontsize=9, loc="left")
        draw(axes, figure)
        content = io.BytesIO()
        date = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}.get(form, {})
        picture.savefig(content, format=form, dpi=DOTS, metadata=date)
    return content.getvalue()


def _curves(axes: "Axes", figure: Curves) -> None:
    for each in figure.measured:
        low, middle, high = percentiles(each.values)
        colour, known = STYLES[each.style], np.isfinite(middle)
        x = np.asarray(figure.x, float)[known]
        marker = "o" if known.sum() == 1 else ""
        axes.plot(x, middle[known], color=colour, linewidth=1.5, marker=marker, label=drawn_text(each.name))
        if each.values.shape[1] > 1:
            axes.fill_between(x, low[known], high[known], color=colour, alpha=0.18, linewidth=0)
    axes.set(xlabel=drawn_text(figure.x_name), ylabel=drawn_text(figure.y_name))
    axes.grid(axis="y", color="0.88", linewidth=0.6)
    if len(figure.measured) > 1:
        axes.legend(fontsize=8, frameon=False)


def _timeline(axes: "Axes", figure: Timeline) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch, Rectangle

    for stay in figure.stays:
        place = (stay.start, stay.env - 0.45)
        colour = STAGES[stay.stage]
        axes.add_patch(
            Rectangle(place, stay.stop - stay.start, 0.9, facecolor=colour, alpha=opacity(stay), linewidth=0)
        )
    shapes = ((True, ">", "#1c2024", "GERMINATED"), (False, "D", "#b3261e", "PRUNED"))
    keys: list[Any] = [Patch(facecolor=colour, label=stage.name) for stage, colour in STAGES.items()]
    for planted, shape, colour, name in shapes:
        marks = [mark for mark in figure.marks if mark.planted == planted]
        size = max(1.5, min(4.0, 160 / figure.envs))
        axes.plot([mark.step for mark in marks], [mark.env for mark in marks], shape, color=colour, markersize=size)
        keys.append(Line2D([], [], linestyle="", marker=shape, color=colour, markersize=4, label=name))
    axes.set(xlim=(figure.first, figure.last), ylim=(figure.envs - 0.5, -0.5), xlabel="step", ylabel="environment")
    axes.legend(handles=keys, fontsize=7, frameon=False, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.18))


def _estimates(axes: "Axes", figure: Forest) -> None:
    for row, each in enumerate(figure.rows):
        colour = STYLES[each.style]
        axes.plot([each.value], [row], "o", color=colour, markersize=3.5)
        if np.isfinite(each.low + each.high):
            axes.hlines([row], [each.low], [each.high], colors=colour, linewidth=1.3)
    axes.axvline(0, color="0.6", linewidth=0.8, linestyle="--")
    axes.set_yticks(range(len(figure.rows)), [drawn_text(each.name) for each in figure.rows], fontsize=7)
    axes.set(ylim=(len(figure.rows) - 0.5, -0.5), xlabel=drawn_text(figure.unit))


def _grid(axes: "Axes", figure: HeatMap) -> None:
    axes.imshow(figure.shades, cmap="Blues", vmin=0, vmax=1.3, aspect="auto", interpolation="nearest")
    if len(figure.columns) <= 12:
        for (row, column), value in np.ndenumerate(figure.values):
            if np.isfinite(value):
                axes.text(column, row, f"{value:.4g}", ha="center", va="center", fontsize=7)
    every = max(1, len(figure.columns) // 12)
    names = [drawn_text(name) for name in figure.columns[::every]]
    axes.set_xticks(range(0, len(figure.columns), every), names, fontsize=7)
    axes.set_yticks(range(len(figure.rows)), [drawn_text(name) for name in figure.rows], fontsize=7)
    axes.set(xlabel=drawn_text(figure.column_name))


def _lines(rows: Sequence[object], each: float) -> float:
    return 1.0 + each * len(rows)


_DRAW: Mapping[type, tuple[Callable[[Any, Any], None], Callable[[Any], float]]] = {
    Curves: (_curves, lambda figure: 2.6),
    Timeline: (_timeline, lambda figure: min(1.6 + 0.16 * figure.envs, 8.5)),
    Forest: (_estimates, lambda figure: _lines(figure.rows, 0.16)),
    HeatMap: (_grid, lambda figure: _lines(figure.rows, 0.2)),
}
"""By kind of figure: how it is drawn, and its height [inches]."""
