"""Draw figures from shapes, as SVG for a page and with matplotlib for papers, in one layout.

SVG is written by hand, because a page has tens of figures with thousands of cells that can be walked through and say what they
are. matplotlib takes 0.2 s for a figure, and a page that follows a run would be made of them again and again.
Every text from outside is escaped. Colours are CSS variables of the page and follow its theme.
"""

import io
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any, Literal, NamedTuple

import numpy as np
from markupsafe import Markup

from esper.karn.run_model import Floats, Stay
from esper.leyline.lifecycle.vocabulary import ADDED, LIVE, Stage
from esper.leyline.messages import printable

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 720, 64, 16, 12, 34  # size of a figure and of the margins around its axes [px]
NAMES = 260  # width of the names of estimates [px]
LETTER = 6.6  # width of a letter of a name, about [px]
LINE = 20  # height of the title of a picture and of a line of its legend [px]
INCHES, DOTS = 6.5, 200  # width of a picture, that of a page's text [inches], and the dots per inch of a PNG
COLOURS = 8  # of slots, phases and runs; after that many they repeat
LASTING = [stage for stage in Stage if stage not in (Stage.DORMANT, Stage.GERMINATED, Stage.PRUNED)]
"""Stages that last as long as a step and are drawn."""


class Shape(NamedTuple):
    """Describes one shape of a figure."""

    kind: Literal["rect", "line", "polygon", "circle", "text"]  # a rect is from corner to corner
    points: Sequence[tuple[float, float]]  # its places [px]; a circle is around one, and a text at one
    style: str  # CSS classes; the last one that has a colour gives that of a picture
    text: str = ""
    words: str = ""  # what it says when it is pointed at, or walked to where it is a `stay`
    opacity: float = 1.0  # of its area
    anchor: Literal["start", "middle", "end"] = "start"  # which part of a text is at its place
    room: float = float("inf")  # most width of a text, which is squeezed into it [px]
    turned: bool = False  # whether a text reads from bottom to top
    radius: float = 3.0  # of a circle [px]


class Figure(NamedTuple):
    """Holds a figure under its heading as shapes, or says why there is nothing to draw."""

    name: str  # heading
    absent: str | None = None  # why there is nothing to draw; None if there is something
    words: str = ""  # what a screen reader says of it
    height: float = 0  # [px]; the width is `WIDTH`
    shapes: Sequence[Shape] = ()  # what is drawn, the topmost last
    kind: str = "chart"  # CSS class
    legend: Sequence[tuple[str, str]] = ()  # style and name of each line; empty if there is none on the page
    keys: Sequence[tuple[str, str]] = ()  # those of a picture, which stands alone


class Series(NamedTuple):
    """Holds values (T, N) at T places of an axis, drawn as their median and a band from the 10th to the 90th percentile."""

    name: str  # shown in the legend
    values: Floats
    style: str  # CSS class of the line


def on_axis(axis: Sequence[int], x: Sequence[int], values: Floats) -> Floats:
    """Spread values (T, N), measured at T places, over an axis that has these among others; nan at the others."""
    spread = np.full((len(axis), values.shape[1]), np.nan)
    spread[np.searchsorted(axis, x)] = values
    return spread


def curves(
    name: str, x: Sequence[float], series: Sequence[Series], x_name: str, y_name: str, height: int = 240
) -> Figure:
    """Return lines over one axis of T places, with bands. `y_name` is empty if the heading says it."""
    shown = [each for each in series if len(x) and np.isfinite(each.values).any()]
    if not shown:
        return Figure(name, "nothing was measured")
    unknown = np.full(3, np.nan)
    quantiles = []  # (3, T) each
    for each in shown:
        finite = (row[np.isfinite(row)] for row in each.values)
        quantiles.append(np.array([np.percentile(row, (10, 50, 90)) if row.size else unknown for row in finite]).T)
    low, high = (float(pick([pick(q[np.isfinite(q)]) for q in quantiles])) for pick in (min, max))
    if high - low < 1e-12:
        low, high = low - 0.5, high + 0.5
    across = _scale(min(x), max(x) if max(x) > min(x) else min(x) + 1, LEFT, WIDTH - RIGHT)
    up = _scale(low, high, height - BOTTOM, TOP)
    shapes = []
    for value in _ticks(low, high):
        shapes.append(Shape("line", [(LEFT, up(value)), (WIDTH - RIGHT, up(value))], "grid"))
        shapes.append(Shape("text", [(LEFT - 6, up(value) + 4)], "tick", f"{value:,.4g}", anchor="end"))
    shapes += _x_axis(_ticks(min(x), max(x)), across, height, x_name)
    shapes.append(Shape("text", [(12, height / 2)], "name", y_name, turned=True))
    for each, (bottom, middle, top) in zip(shown, quantiles, strict=True):
        if each.values.shape[1] > 1:
            there = [(across(v), up(b), up(t)) for v, b, t in zip(x, bottom, top, strict=True) if np.isfinite(b + t)]
            outline = [(a, t) for a, _, t in there] + [(a, b) for a, b, _ in reversed(there)]
            shapes.append(Shape("polygon", outline, f"band {each.style}", opacity=0.18))
        places = [(across(value), up(q)) for value, q in zip(x, middle, strict=True) if np.isfinite(q)]
        shapes.append(Shape("line", places, f"line {each.style}"))
        if len(places) == 1:
            shapes.append(Shape("circle", places, f"dot {each.style}"))
    ends = [(each.name, q[1][np.isfinite(q[1])][-1]) for each, q in zip(shown, quantiles, strict=True)]
    words = f"{name}: " + "; ".join(f"{line} ends at {value:.4g}" for line, value in ends)
    legend = [(each.style, each.name) for each in shown]
    keys = legend if len(legend) > 1 else ()
    return Figure(name, None, words, height, shapes, "chart lines", legend, keys)


def timeline(slot: str, stays: Sequence[Stay], envs: int, first: int, stop: int) -> Figure:
    """Return the stages of one slot over time, a line for each environment; `stop` is one past the last step."""
    if not stays:
        return Figure(slot, "no seed was planted here")
    row = max(5, min(18, 720 // max(envs, 1)))
    height = TOP + row * envs + BOTTOM
    across, size = _scale(first, stop, LEFT, WIDTH - RIGHT), max(2.0, min(4.5, (row - 1) / 2))
    shapes = []
    # A mark lies above the stay that begins at its step.
    for stay in sorted(stays, key=lambda each: (each.env, each.start, each.start == each.stop, each.stage)):
        left, right, top = across(stay.start), across(stay.stop), TOP + row * stay.env
        words, why = f"environment {stay.env}, {slot}", f": {stay.why}" if stay.why else ""
        if stay.start == stay.stop:
            x, y, planted = left + size, top + (row - 1) / 2, stay.stage == Stage.GERMINATED
            points = [(x, y - size), (x + size, y), (x, y + size), (x - size, y)]
            if planted:  # a triangle that points to what follows
                points = [(x - size, y - size), (x - size, y + size), (x + size, y)]
            what, style = ("GERMINATED (planted)", "planted") if planted else ("PRUNED (removed)", "removed")
            words += f", step {stay.start}: {stay.blueprint or 'seed'}, {what}{why}"
            shapes.append(Shape("polygon", points, f"stay mark {style}", words=words))
            continue
        corners = [(left, top), (left + max(right - left - 0.5, 1), top + row - 1)]
        opacity = 0.35 + 0.65 * stay.alpha if stay.stage in LIVE else 1.0
        until = f"step {stay.start}" if stay.stop == stay.start + 1 else f"steps {stay.start} to {stay.stop - 1}"
        seed = f"{stay.blueprint}, " if stay.blueprint else ""
        dose = f", alpha {stay.alpha:.2g}" if stay.stage in ADDED else ""
        words += f", {until}: {seed}{stay.stage.name}{dose}{why}"
        shapes.append(Shape("rect", corners, f"stay stage{int(stay.stage)}", words=words, opacity=opacity))
    for env in range(0, envs, max(1, envs // 32)):
        shapes.append(Shape("text", [(LEFT - 6, TOP + row * env + row - 1)], "tick", str(env), anchor="end"))
    shapes += _x_axis(_ticks(first, stop), across, height, "step")
    place = min(TOP + row * envs / 2 + LETTER * 5.5, height - 4.0)  # the name may be longer than the figure is high
    shapes.append(Shape("text", [(14, place)], "name", "environment", turned=True))
    seeded = len({stay.env for stay in stays if stay.start < stay.stop})
    words = f"stages of slot {slot}: seeds in {seeded} of {envs} environments"
    keys = [(f"stage{int(stage)}", stage.name) for stage in LASTING]
    keys += [("planted", "GERMINATED (a triangle)"), ("removed", "PRUNED (a diamond)")]
    return Figure(slot, None, words, height, shapes, "chart timeline", keys=keys)


class ForestRow(NamedTuple):
    """Holds a value with its error, one line of a forest plot."""

    name: str  # what it belongs to
    value: float
    low: float  # lower end of the bar; nan if it is not known
    high: float
    style: str  # CSS class
    words: str  # a sentence on it


def forest(name: str, rows: Sequence[ForestRow], unit: str) -> Figure:
    """Return a forest plot: a value and its interval in each line, the first on top; `unit` names the axis."""
    if not rows:
        return Figure(name, "nothing was measured")
    height = TOP + 16 * len(rows) + BOTTOM
    known = [value for each in rows for value in (each.value, each.low, each.high) if np.isfinite(value)]
    low, high = min(0.0, *known), max(0.0, *known)
    across = _scale(low, high if high > low else low + 1, NAMES, WIDTH - RIGHT)
    shapes = [Shape("line", [(across(0), TOP), (across(0), height - BOTTOM)], "zero")]
    for index, each in enumerate(rows):
        y, words = TOP + 16 * index + 8, each.words
        shapes.append(Shape("text", [(NAMES - 8, y + 4)], "tick", each.name, words, anchor="end", room=NAMES - 12))
        if np.isfinite(each.low + each.high):
            ends = [(across(each.low), y), (across(each.high), y)]
            shapes.append(Shape("line", ends, f"bar {each.style}", words=words))
        shapes.append(Shape("circle", [(across(each.value), y)], f"dot {each.style}", words=words, radius=3.5))
    shapes += _x_axis(_ticks(low, high), across, height, unit, NAMES, "+.3g")
    return Figure(name, None, f"{name}: {len(rows)} values", height, shapes)


def heat_map(
    name: str, rows: Sequence[str], columns: Sequence[str], values: Floats, column_name: str, by_row: bool = False
) -> Figure:
    """Return a table of numbers (R, C) as colours: the darker, the larger; nan is absent.

    With `by_row` every row has a scale of its own, from its least to its largest number; else from 0 to the largest of all.
    A row whose values are all the same has the middle of its scale, or the begin if they are 0.
    """
    known = np.isfinite(values)
    if not known.any():
        return Figure(name, "nothing was measured")
    left, row = min(NAMES, 24 + int(LETTER * max(map(len, rows)))), 18
    height = TOP + row * len(rows) + BOTTOM
    wide = (WIDTH - RIGHT - left) / len(columns)
    digits = 4 if wide >= 52 else 3 if wide >= 44 else 2
    shapes = []
    for r, (line, numbers, there) in enumerate(zip(rows, values, known, strict=True)):
        y = TOP + row * r
        shapes.append(Shape("text", [(left - 6, y + 13)], "tick", line, anchor="end", room=left - 8))
        scale = numbers[there] if by_row else values[known]
        low, high = (scale.min() if by_row else min(0.0, scale.min()), scale.max()) if there.any() else (0.0, 0.0)
        for c, (column, value) in enumerate(zip(columns, numbers, strict=True)):
            x, absent = left + wide * c, bool(np.isnan(value))
            words = f"{line}, {column_name} {column}: {'not measured' if absent else f'{value:.4g}'}"
            corners = [(x, y), (x + wide - 1, y + row - 1)]
            shade = (value - low) / (high - low) if high > low else 0.5 * (low != 0)
            opacity = 0.0 if absent else float(0.06 + 0.7 * shade)
            shapes.append(Shape("rect", corners, "stay cell", words=words, opacity=opacity))
            if wide >= 36 and not absent:
                number, middle = f"{value:.{digits}g}", [(x + wide / 2, y + 13)]
                shapes.append(Shape("text", middle, "name through", number, anchor="middle", room=wide - 4))
    every = int(np.ceil(34 / wide))
    for c in range(0, len(columns), every):
        place, room = [(left + wide * (c + 0.5), height - 18)], wide * every - 4
        shapes.append(Shape("text", place, "tick", columns[c], anchor="middle", room=room))
    shapes += _x_axis([], float, height, column_name, left)
    words = f"{name}: {len(rows)} rows by {len(columns)} columns"
    return Figure(name, None, words, height, shapes, "chart timeline")


def _x_axis(
    ticks: Sequence[float],
    across: Callable[[float], float],
    height: float,
    name: str,
    left: float = LEFT,
    form: str = "g",
) -> list[Shape]:
    shapes = [
        Shape("text", [(across(value), height - 18)], "tick", format(value, form), anchor="middle") for value in ticks
    ]
    return [*shapes, Shape("text", [((left + WIDTH - RIGHT) / 2, height - 3)], "name", name, anchor="middle")]


def _scale(low: float, high: float, start: float, stop: float) -> Callable[[float], float]:
    """Return a map from values between low and high to places between start and stop."""
    return lambda value: start + (value - low) / (high - low) * (stop - start)


def _ticks(low: float, high: float) -> list[float]:
    """Return at most about six round values from low to high."""
    if not high > low:
        return [low]
    raw = (high - low) / 5
    power = 10.0 ** np.floor(np.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    return [round(k * step, 12) for k in range(int(np.ceil(low / step - 1e-9)), int(np.floor(high / step + 1e-9)) + 1)]


def draw(figure: Figure) -> Markup:
    """Return a figure under its heading as SVG; a sentence in its place if there is nothing to draw."""
    heading = f"<h3>{_text(figure.name)}</h3>"
    if figure.absent is not None:
        return Markup(f'{heading}<p class="absent">{figure.absent[0].upper()}{figure.absent[1:]}.</p>')
    walks = "timeline" in figure.kind  # the arrow keys walk through its cells
    role = 'role="group" tabindex="0"' if walks else 'role="img"'
    key = '<span class="key"><i class="swatch {}"></i>{}</span>'
    legend = "".join(key.format(style, _text(name)) for style, name in figure.legend)
    return Markup(
        f'{heading}<svg class="{figure.kind}" viewBox="0 0 {WIDTH} {figure.height:g}" {role} '
        f'aria-label="{_text(figure.words)}"><title>{_text(figure.name)}</title>'
        f"{''.join(map(_svg, figure.shapes))}</svg>" + (f'<p class="legend">{legend}</p>' if legend else "")
    )


def _svg(shape: Shape) -> str:
    (x, y), style = shape.points[0], shape.style
    words, inner = _text(shape.words), ""
    tag = "polyline" if shape.kind == "line" else shape.kind
    if shape.words and "cell" not in style:
        inner = f"<title>{words}</title>"
    match shape.kind:
        case "rect":
            right, bottom = shape.points[1]
            place = f'x="{x:.1f}" y="{y:g}" width="{right - x:.1f}" height="{bottom - y:g}"'
        case "line" | "polygon":
            place = 'points="{}"'.format(" ".join(f"{x:.1f},{y:.1f}" for x, y in shape.points))
        case "circle":
            place = f'cx="{x:.1f}" cy="{y:.1f}" r="{shape.radius}"'
        case "text":
            inner += _text(shape.text)
            style += f" {shape.anchor}" if shape.anchor != "start" else ""
            place = f'transform="translate({x:g} {y:.1f}) rotate(-90)"' if shape.turned else f'x="{x:.1f}" y="{y:.1f}"'
            if LETTER * len(shape.text) > shape.room:
                place += f' textLength="{shape.room:.0f}" lengthAdjust="spacingAndGlyphs"'
    if shape.opacity != 1.0 and "band" not in style:
        place += f' fill-opacity="{shape.opacity:.2f}"'
    if "stay" in style:
        place += f' tabindex="-1" data-words="{words}"'
    return f'<{tag} class="{style}" {place}>{inner}</{tag}>' if inner else f'<{tag} class="{style}" {place}/>'


def _text(value: object) -> str:
    """Return a text that may be anything, without control characters and escaped for SVG and HTML."""
    return escape(printable(value))


def below_each_other(figures: Sequence[Figure]) -> Figure:
    """Return one figure of several, each under its heading, for a picture that stands alone."""
    shapes: list[Shape] = []
    height = 0.0
    for figure in figures:
        shapes.append(Shape("text", [(4, height + LINE - 6)], "name", figure.name, room=WIDTH - 8))
        height += LINE
        shapes += [shape._replace(points=[(x, y + height) for x, y in shape.points]) for shape in figure.shapes]
        height += figure.height
    return Figure("", height=height, shapes=shapes)


def paint(figure: Figure, form: str) -> bytes:
    """Return a figure with its heading and its keys as the content of a file, the same for the same data."""
    from matplotlib import patches, rc_context  # imported here because it takes 1 s; without pyplot it opens no window
    from matplotlib.figure import Figure as Picture
    from matplotlib.lines import Line2D

    shapes = [Shape("text", [(4, -6)], "name", figure.name), *figure.shapes]
    x, y = float(LEFT), figure.height + LINE / 2
    for style, name in figure.keys:
        wide = 1.2 * LETTER * len(name) + 30  # many are capitals
        if x + wide > WIDTH:
            x, y = float(LEFT), y + LINE
        shapes.append(Shape("rect", [(x, y - 9), (x + 10, y + 1)], style))
        shapes.append(Shape("text", [(x + 15, y)], "name", name))
        x += wide
    bottom = y + LINE / 2 if figure.keys else figure.height
    pixel = INCHES / WIDTH  # [inches]
    colours = _colours()
    with rc_context({"svg.hashsalt": "esper"}):
        picture = Picture(figsize=(INCHES, (bottom + LINE) * pixel))
        axes = picture.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(bottom, -LINE))
        axes.axis("off")
        for shape in shapes:
            points = shape.points
            colour = next(colours[name] for name in reversed(shape.style.split()) if name in colours)
            area: dict[str, Any] = {"facecolor": colour, "alpha": shape.opacity, "linewidth": 0}
            match shape.kind:
                case "rect":
                    (left, top), (right, low) = points
                    axes.add_patch(patches.Rectangle((left, top), right - left, low - top, **area))
                case "polygon":
                    axes.add_patch(patches.Polygon(points, **area))
                case "circle":
                    axes.add_patch(patches.Circle(points[0], shape.radius, **area))
                case "line":
                    across, up = zip(*points, strict=True)
                    width = 0.6 if shape.style in ("grid", "zero") else 1.3
                    dashed = shape.style in ("zero", "line twin")
                    axes.add_line(Line2D(across, up, color=colour, linewidth=width, linestyle="--" if dashed else "-"))
                case "text":
                    size = 12 * min(1.0, shape.room / max(LETTER * len(shape.text), 1)) * 72 * pixel
                    axes.text(
                        *points[0],
                        printable(shape.text),
                        fontsize=size,
                        color=colour,
                        ha={"start": "left", "middle": "center", "end": "right"}[shape.anchor],
                        rotation=90 if shape.turned else 0,
                        rotation_mode="anchor",
                        parse_math=False,
                    )
        content = io.BytesIO()
        date = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}.get(form, {})
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph")  # a letter that the font does not have is drawn as a box
            picture.savefig(content, format=form, dpi=DOTS, metadata=date)
    return content.getvalue()


@cache
def _colours() -> Mapping[str, str]:
    """Return the colours of the classes of report.css in the light theme."""
    css = (files("esper.karn.report") / "report.css").read_text(encoding="utf-8")
    named = dict(re.findall(r"--(\w+): (#\w{6})", css[: css.index("@media")]))
    runs = {run: named[name] for run, name in re.findall(r"\.(run\d) \{ --run: var\(--(\w+)\)", css)}
    own = {"plain": "grown", "cell": "grown", "grid": "rule", "zero": "soft", "tick": "soft", "name": "ink"}
    own |= {"through": "ink", "planted": "ink", "removed": "pruned"}
    return {**named, **runs, **{name: named[colour] for name, colour in own.items()}}
