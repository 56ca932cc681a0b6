"""Figures as SVG text. Every text from outside is escaped. Colours are CSS variables of the page and follow its theme."""

from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from esper.karn.report.model import Decided, Stay
from esper.leyline.stages import Stage
from esper.leyline.text import printable

Floats = NDArray[np.float64]
Place = Callable[[float], float]

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 720, 64, 16, 12, 34
"""Size of a figure and of the margins around its axes [px]."""


class Series(NamedTuple):
    """Values over an axis, one line a column.

    Attributes:
        name (str): shown in the legend
        values ((T, N) float): N values at each place; their median is drawn, with a band from the 10th to the 90th percentile
        style (str): CSS class of the line
    """

    name: str
    values: Floats
    style: str


def text(value: object) -> str:
    """A text from outside as SVG or HTML text."""
    return escape(printable(value))


def curves(
    title: str, x: Sequence[float], series: Sequence[Series], x_name: str, y_name: str, height: int = 240
) -> str:
    """Medians over the last axis with bands; a title and a description for screen readers."""
    shown = [each for each in series if np.isfinite(each.values).any()]
    if not shown or not len(x):
        return f'<p class="absent">{text(title)}: nothing was measured.</p>'
    quantiles = [_percentiles(each.values) for each in shown]
    low, high = (float(pick([pick(q[np.isfinite(q)]) for q in quantiles])) for pick in (min, max))
    if high - low < 1e-12:
        low, high = low - 0.5, high + 0.5
    across = _scale(min(x), max(x) if max(x) > min(x) else min(x) + 1, LEFT, WIDTH - RIGHT)
    up = _scale(low, high, height - BOTTOM, TOP)
    parts = [_axes(x, low, high, height, x_name, y_name)]
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
    last = "; ".join(f"{each.name} ends at {q[1][-1]:.4g}" for each, q in zip(shown, quantiles, strict=True))
    return f"{_figure(title, f'{title}: {last}', height, parts)}<p class='legend'>{legend}</p>"


def timeline(slot: str, stays: Sequence[Stay], envs: int, first: int, last: int) -> str:
    """The stages of one slot: a line for each environment, time to the right, first <= step < last."""
    if not stays:
        return '<p class="absent">No seed was planted here.</p>'
    row = max(5, min(18, 720 // max(envs, 1)))
    height = TOP + row * envs + BOTTOM
    across = _scale(first, last, LEFT, WIDTH - RIGHT)
    parts = []
    for stay in stays:
        left, right = across(stay.start), across(stay.stop)
        words = describe(stay, slot)
        parts.append(
            f'<rect class="stay stage{int(stay.stage)}" tabindex="-1" x="{left:.1f}" y="{TOP + row * stay.env}" '
            f'width="{max(right - left - 0.5, 1):.1f}" height="{row - 1}" fill-opacity="{_opacity(stay):.2f}" '
            f'data-words="{text(words)}"><title>{text(words)}</title></rect>'
        )
    for env in range(0, envs, max(1, envs // 32)):
        parts.append(f'<text class="tick end" x="{LEFT - 6}" y="{TOP + row * env + row - 1}">{env}</text>')
    parts += _steps(first, last, across, height)
    parts.append(f'<text class="name" transform="translate(14 {TOP + row * envs / 2}) rotate(-90)">environment</text>')
    count = len({stay.env for stay in stays})
    return _figure(
        f"slot {slot}", f"stages of slot {slot}: seeds in {count} of {envs} environments", height, parts, "timeline"
    )


def describe(stay: Stay, slot: str) -> str:
    """A stay in words."""
    until = f"step {stay.start}" if stay.stop == stay.start + 1 else f"steps {stay.start} to {stay.stop - 1}"
    seed = f"{stay.blueprint}, " if stay.blueprint else ""
    dose = f", alpha {stay.alpha:.2g}" if stay.stage in (Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED) else ""
    why = f": {stay.why}" if stay.why else ""
    return f"environment {stay.env}, {slot}, {until}: {seed}{stay.stage.name}{dose}{why}"


def forest(decided: Sequence[Decided]) -> str:
    """Contributions with one standard error to each side, one line a decision, the largest first."""
    height = TOP + 16 * len(decided) + BOTTOM
    ends = [each.contribution + sign * _known(each.error) for each in decided for sign in (-1, 1)]
    low, high = min(0.0, *ends), max(0.0, *ends)
    across = _scale(low, high if high > low else low + 1, 260, WIDTH - RIGHT)
    parts = [f'<line class="zero" x1="{across(0):.1f}" x2="{across(0):.1f}" y1="{TOP}" y2="{height - BOTTOM}"/>']
    for index, each in enumerate(sorted(decided, key=lambda one: -one.contribution)):
        y, style = TOP + 16 * index + 8, "kept" if each.kept else "pruned"
        left, right = (across(each.contribution + sign * _known(each.error)) for sign in (-1, 1))
        what = f"{each.blueprint} at {each.slot}, environment {each.env}, step {each.step}"
        parts.append(
            f'<g class="{style}"><title>{text(f"{what}: {each.contribution:+.4f}, {each.why}")}</title>'
            f'<text class="tick end" x="252" y="{y + 4}">{text(what)}</text>'
            f'<line class="bar" x1="{left:.1f}" x2="{right:.1f}" y1="{y}" y2="{y}"/>'
            f'<circle cx="{across(each.contribution):.1f}" cy="{y}" r="3.5"/></g>'
        )
    for value in _ticks(low, high):
        parts.append(f'<text class="tick middle" x="{across(value):.1f}" y="{height - 16}">{value:+.3g}</text>')
    words = f"contributions of {len(decided)} seeds when they were kept or pruned"
    return _figure("contributions", words, height, parts)


def _opacity(stay: Stay) -> float:
    return 0.35 + 0.65 * stay.alpha if stay.stage in (Stage.BLENDING, Stage.HOLDING) else 1.0


def _known(error: float) -> float:
    return error if np.isfinite(error) else 0.0


def _percentiles(values: Floats) -> Floats:
    """(T, N) -> (3, T) the 10th, 50th and 90th percentile of the finite values of each row; nan where there are none."""
    absent = np.full(3, np.nan)
    rows = (row[np.isfinite(row)] for row in values)
    return np.array([np.percentile(row, (10, 50, 90)) if row.size else absent for row in rows]).T


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


def _figure(title: str, description: str, height: int, parts: Sequence[str], style: str = "chart") -> str:
    role = (
        'role="group" tabindex="0"' if style == "timeline" else 'role="img"'
    )  # the arrow keys walk through a timeline
    return (
        f'<svg class="{style}" viewBox="0 0 {WIDTH} {height}" {role} aria-label="{text(description)}">'
        f"<title>{text(title)}</title>{''.join(parts)}</svg>"
    )
