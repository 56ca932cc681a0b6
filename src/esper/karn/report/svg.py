"""Figures as SVG text. Every text from outside is escaped. Colours are CSS variables of the page and follow its theme."""

from collections.abc import Callable, Sequence
from html import escape

import numpy as np
from markupsafe import Markup

from esper.karn.report.figures import (
    Curves,
    Figure,
    Forest,
    HeatMap,
    Timeline,
    describe,
    describe_mark,
    percentiles,
)
from esper.karn.report.records import Stay
from esper.leyline.stages import Stage
from esper.leyline.text import printable

Place = Callable[[float], float]

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 720, 64, 16, 12, 34
"""Size of a figure and of the margins around its axes [px]."""
NAMES = 260
"""Width of the names of estimates [px]."""
LETTER = 6.6
"""Width of a letter of a name, about [px]."""


def text(value: object) -> str:
    """A text from outside as SVG or HTML text."""
    return escape(printable(value))


def draw(figure: Figure) -> Markup:
    """A figure under its heading; a sentence in its place if there is nothing to draw."""
    if figure.absent is not None:
        sentence = figure.absent[0].upper() + figure.absent[1:]
        return Markup(f'<h3>{text(figure.name)}</h3><p class="absent">{sentence}.</p>')
    match figure:
        case Curves():
            drawn = _curves(figure)
        case Timeline():
            drawn = _timeline(figure)
        case Forest():
            drawn = _estimates(figure)
        case HeatMap():
            drawn = _grid(figure)
    return Markup(f"<h3>{text(figure.name)}</h3>{drawn}")


def _curves(figure: Curves) -> str:
    """Medians over the last axis with bands; a title and a description for screen readers."""
    x, height, shown = figure.x, figure.height, figure.measured
    quantiles = [percentiles(each.values) for each in shown]
    low, high = (float(pick([pick(q[np.isfinite(q)]) for q in quantiles])) for pick in (min, max))
    if high - low < 1e-12:
        low, high = low - 0.5, high + 0.5
    across = _scale(min(x), max(x) if max(x) > min(x) else min(x) + 1, LEFT, WIDTH - RIGHT)
    up = _scale(low, high, height - BOTTOM, TOP)
    parts = [_axes(x, low, high, height, figure.x_name, figure.y_name)]
    for each, (bottom, middle, top) in zip(shown, quantiles, strict=True):
        places = [(across(value), up(q)) for value, q in zip(x, middle, strict=True) if np.isfinite(q)]
        if each.values.shape[1] > 1:
            there = [(across(v), up(b), up(t)) for v, b, t in zip(x, bottom, top, strict=True) if np.isfinite(b + t)]
            outline = [(a, t) for a, _, t in there] + [(a, b) for a, b, _ in reversed(there)]
            parts.append(f'<polygon class="band {each.style}" points="{_points(outline)}"/>')
        parts.append(f'<polyline class="line {each.style}" points="{_points(places)}"/>')
        if len(places) == 1:
            parts.append(f'<circle class="dot {each.style}" cx="{places[0][0]:.1f}" cy="{places[0][1]:.1f}" r="3"/>')
    legend = "".join(f'<span class="key"><i class="swatch {each.style}"></i>{text(each.name)}</span>' for each in shown)
    ends = [(each.name, q[1][np.isfinite(q[1])][-1]) for each, q in zip(shown, quantiles, strict=True)]
    last = "; ".join(f"{name} ends at {value:.4g}" for name, value in ends)
    return f"{_figure(figure.name, f'{figure.name}: {last}', height, parts, kind='chart lines')}<p class='legend'>{legend}</p>"


def _timeline(figure: Timeline) -> str:
    envs = figure.envs
    row = max(5, min(18, 720 // max(envs, 1)))
    height = TOP + row * envs + BOTTOM
    across = _scale(figure.first, figure.last, LEFT, WIDTH - RIGHT)
    parts: list[tuple[tuple[int, int, bool], str]] = []  # a mark lies above the stay that begins at its step
    for stay in figure.stays:
        left, right = across(stay.start), across(stay.stop)
        shape = (
            f'rect class="stay stage{int(stay.stage)}" x="{left:.1f}" y="{TOP + row * stay.env}" '
            f'width="{max(right - left - 0.5, 1):.1f}" height="{row - 1}" fill-opacity="{opacity(stay):.2f}"'
        )
        parts.append(((stay.env, stay.start, False), _cell(shape, describe(stay, figure.name))))
    for mark in figure.marks:
        size = max(2.0, min(4.5, (row - 1) / 2))
        x, y = across(mark.step) + size, TOP + row * mark.env + (row - 1) / 2
        points = [(x - size, y - size), (x - size, y + size), (x + size, y)]  # a triangle that points to what follows
        if not mark.planted:
            points = [(x, y - size), (x + size, y), (x, y + size), (x - size, y)]
        stage = Stage.GERMINATED if mark.planted else Stage.PRUNED
        shape = f'polygon class="stay mark stage{int(stage)}" points="{_points(points)}"'
        parts.append(((mark.env, mark.step, True), _cell(shape, describe_mark(mark, figure.name))))
    drawn = [cell for _, cell in sorted(parts)]
    for env in range(0, envs, max(1, envs // 32)):
        drawn.append(f'<text class="tick end" x="{LEFT - 6}" y="{TOP + row * env + row - 1}">{env}</text>')
    drawn += _steps(figure.first, figure.last, across, height)
    place = min(TOP + row * envs / 2 + LETTER * 5.5, height - 4.0)  # the name may be longer than the figure is high
    drawn.append(f'<text class="name" transform="translate(14 {place:.1f}) rotate(-90)">environment</text>')
    count = len({stay.env for stay in figure.stays})
    title, words = f"slot {figure.name}", f"stages of slot {figure.name}: seeds in {count} of {envs} environments"
    return _figure(title, words, height, drawn, walks=True)


def _estimates(figure: Forest) -> str:
    height = TOP + 16 * len(figure.rows) + BOTTOM
    known = [value for each in figure.rows for value in (each.value, each.low, each.high) if np.isfinite(value)]
    low, high = min(0.0, *known), max(0.0, *known)
    across = _scale(low, high if high > low else low + 1, NAMES, WIDTH - RIGHT)
    parts = [f'<line class="zero" x1="{across(0):.1f}" x2="{across(0):.1f}" y1="{TOP}" y2="{height - BOTTOM}"/>']
    for index, each in enumerate(figure.rows):
        y = TOP + 16 * index + 8
        bar = ""
        if np.isfinite(each.low + each.high):
            bar = f'<line class="bar" x1="{across(each.low):.1f}" x2="{across(each.high):.1f}" y1="{y}" y2="{y}"/>'
        parts.append(
            f'<g class="{each.style}"><title>{text(each.words)}</title>'
            f'<text class="tick end" x="{NAMES - 8}" y="{y + 4}"{_squeezed(each.name, NAMES - 12)}>{text(each.name)}</text>'
            f'{bar}<circle cx="{across(each.value):.1f}" cy="{y}" r="3.5"/></g>'
        )
    for value in _ticks(low, high):
        parts.append(f'<text class="tick middle" x="{across(value):.1f}" y="{height - 18}">{value:+.3g}</text>')
    middle = (NAMES + WIDTH - RIGHT) / 2
    parts.append(f'<text class="name middle" x="{middle}" y="{height - 3}">{text(figure.unit)}</text>')
    return _figure(figure.name, f"{figure.name}: {len(figure.rows)} values", height, parts)


def _grid(figure: HeatMap) -> str:
    left, row = min(NAMES, 24 + int(LETTER * max(map(len, figure.rows)))), 18
    height = TOP + row * len(figure.rows) + BOTTOM
    wide = (WIDTH - RIGHT - left) / len(figure.columns)
    digits = 4 if wide >= 52 else 3 if wide >= 44 else 2
    printed = wide >= 36
    parts = []
    for r, (name, values, shades) in enumerate(zip(figure.rows, figure.values, figure.shades, strict=True)):
        y = TOP + row * r
        parts.append(
            f'<text class="tick end" x="{left - 6}" y="{y + 13}"{_squeezed(name, left - 8)}>{text(name)}</text>'
        )
        for c, (column, value, shade) in enumerate(zip(figure.columns, values, shades, strict=True)):
            shown = "not measured" if np.isnan(value) else f"{value:.4g}"
            paint = "none" if np.isnan(value) else "var(--grown)"
            words = text(f"{name}, {figure.column_name} {column}: {shown}")
            parts.append(
                f'<rect class="stay cell" x="{left + wide * c:.1f}" y="{y}" width="{wide - 1:.1f}" height="{row - 1}" '
                f'fill="{paint}" fill-opacity="{np.nan_to_num(0.06 + 0.7 * shade):.2f}" data-words="{words}"/>'
            )
            if printed and not np.isnan(value):
                x = left + wide * (c + 0.5)
                number = f"{value:.{digits}g}"
                squeezed = _squeezed(number, wide - 4)
                parts.append(f'<text class="name middle through" x="{x:.1f}" y="{y + 13}"{squeezed}>{number}</text>')
    every = int(np.ceil(34 / wide))
    for c in range(0, len(figure.columns), every):
        x, name = left + wide * (c + 0.5), figure.columns[c]
        squeezed = _squeezed(name, wide * every - 4)
        parts.append(f'<text class="tick middle" x="{x:.1f}" y="{height - 18}"{squeezed}>{text(name)}</text>')
    parts.append(
        f'<text class="name middle" x="{(left + WIDTH - RIGHT) / 2}" y="{height - 3}">{text(figure.column_name)}</text>'
    )
    words = f"{figure.name}: {len(figure.rows)} rows by {len(figure.columns)} columns"
    return _figure(figure.name, words, height, parts, walks=True)


def _cell(shape: str, words: str) -> str:
    """A shape of a timeline, with what it says when it is pointed at or walked to."""
    said = text(words)
    return f'<{shape} tabindex="-1" data-words="{said}"><title>{said}</title></{shape.split()[0]}>'


def opacity(stay: Stay) -> float:
    """How opaque a stay is drawn: by alpha while the seed acts."""
    return 0.35 + 0.65 * stay.alpha if stay.stage in (Stage.BLENDING, Stage.HOLDING) else 1.0


def _squeezed(name: str, room: float) -> str:
    """Attributes that fit a text into `room` [px], where it would be longer."""
    return f' textLength="{room:.0f}" lengthAdjust="spacingAndGlyphs"' if LETTER * len(name) > room else ""


def _scale(low: float, high: float, start: float, stop: float) -> Place:
    """From values between low and high to places between start and stop."""
    return lambda value: start + (value - low) / (high - low) * (stop - start)


def _axes(x: Sequence[float], low: float, high: float, height: int, x_name: str, y_name: str) -> str:
    up = _scale(low, high, height - BOTTOM, TOP)
    across = _scale(min(x), max(x) if max(x) > min(x) else min(x) + 1, LEFT, WIDTH - RIGHT)
    parts = []
    for value in _ticks(low, high):
        y = up(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick end" x="{LEFT - 6}" y="{y + 4:.1f}">{value:,.4g}</text>')
    for value in _ticks(min(x), max(x)):
        parts.append(f'<text class="tick middle" x="{across(value):.1f}" y="{height - 18}">{value:g}</text>')
    parts.append(f'<text class="name middle" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{height - 3}">{text(x_name)}</text>')
    parts.append(f'<text class="name" transform="translate(12 {height / 2}) rotate(-90)">{text(y_name)}</text>')
    return "".join(parts)


def _steps(first: int, last: int, across: Place, height: int) -> list[str]:
    parts = [
        f'<text class="tick middle" x="{across(value):.1f}" y="{height - 18}">{value:g}</text>'
        for value in _ticks(first, last)
    ]
    return [*parts, f'<text class="name middle" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{height - 3}">step</text>']


def _ticks(low: float, high: float) -> list[float]:
    """At most about six round values from low to high."""
    if not high > low:
        return [low]
    raw = (high - low) / 5
    power = 10.0 ** np.floor(np.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    return [round(k * step, 12) for k in range(int(np.ceil(low / step - 1e-9)), int(np.floor(high / step + 1e-9)) + 1)]


def _points(places: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)


def _figure(
    title: str, description: str, height: int, parts: Sequence[str], walks: bool = False, kind: str = "chart"
) -> str:
    """An SVG figure; `walks` says that the arrow keys walk through its cells."""
    role = 'role="group" tabindex="0"' if walks else 'role="img"'
    style = "chart timeline" if walks else kind
    return (
        f'<svg class="{style}" viewBox="0 0 {WIDTH} {height}" {role} aria-label="{text(description)}">'
        f"<title>{text(title)}</title>{''.join(parts)}</svg>"
    )
