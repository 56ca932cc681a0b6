"""What an exporter writes when a run has ended: the table that the run prints, and an image of its best network."""

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.text import Text

from esper.karn.console import can_print, comparison_table
from esper.karn.exporters.targets import FinalTable
from esper.leyline.text import counted, printable, rounded

TITLE, DPI = 0.7, 100  # height of the title [inches], resolution
WIDTH, ROW, BOX = 10.0, 0.62, 0.44  # of the image, of a row and of the box in it [inches]
CHARACTERS = (58, 78)  # of the lines of a box, head and foot; a longer one is cut
FACE = {"seed": ("#e5f3ea", "#14733c")}  # of the boxes of seeds; others are grey
MOST = 100  # boxes of an image; the last of more are left out


class Box(NamedTuple):
    """A part of a network.

    Attributes:
        kind (str): input, host, seed or output
        head (str): what it is
        foot (str): more about it; may be empty
    """

    kind: Literal["input", "host", "seed", "output"]
    head: str
    foot: str


def final_table(summary: Mapping[str, Any]) -> FinalTable | None:
    """The table that a run prints at its end; of a training, the figures of its last rounds. None if the run failed early."""
    training = "rounds_done" in summary
    if not can_print(summary, training):
        return None
    if not training:
        columns = comparison_table(summary).columns
        cells = [[_plain(cell) for cell in (column.header, *column.cells)] for column in columns]
        heads, *rows = zip(*cells, strict=True)
        return FinalTable(["network", *heads[1:]], rows)
    figures: Mapping[str, float | None] = summary["last_rounds"]
    known = [(name, f"{value:.3g}") for name, value in figures.items() if value is not None]
    best = summary["best_validation_objective"]
    if best is not None:
        known = [
            ("best_validation_objective", rounded(best, ".4f")),
            ("best_round", str(summary["best_round"])),
            *known,
        ]
    return FinalTable(["figure", "value"], known) if known else None


def boxes_of(summary: Mapping[str, Any], slots: Sequence[str]) -> Iterator[Box]:
    """The best network of a summary as boxes, one for each slot, where the network itself cannot be loaded."""
    env = summary["best"]["env"]
    hosts = summary["host_params"]
    params = hosts[env] if isinstance(hosts, list) else hosts
    yield Box("input", "host", f"{params:,} parameters, {counted(len(slots), 'slot')}")
    for slot in slots:
        yield Box("host", f"slot {slot}", "")
        if slot in summary["grown"][env]:
            yield Box("seed", summary["grown"][env][slot], "")
    yield Box("output", "output", f"{summary['grown_params'][env]:,} parameters with seeds")


def title_of(summary: Mapping[str, Any]) -> str:
    """A line with the network that is drawn, and how many others have seeds in the same slots."""
    env, grown = summary["best"]["env"], summary["grown"]
    same = sum(each == grown[env] for each in grown)
    return (
        f"{summary['task']}, {summary['controller']}: environment {env}, the best; {same} of {len(grown)} grew the same"
    )


def drawing(title: str, boxes: Sequence[Box]) -> NDArray[np.uint8]:
    """An image (H, W, 3) of a network: the host from top to bottom, each seed beside the part in front of it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # imported here because it takes 1 s
    from matplotlib.figure import Figure

    rows: list[list[Box]] = []
    for box in boxes[:MOST]:
        if box.kind == "seed" and rows:
            rows[-1].append(box)
        else:
            rows.append([box])
    height = TITLE + ROW * sum(max(1, len(row) - 1) for row in rows)
    figure = Figure(figsize=(WIDTH, height), dpi=DPI)
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(height, 0))
    axes.axis("off")
    axes.text(0.2, TITLE / 2, _cut(title, 120), fontsize=10, weight="bold", va="center", parse_math=False)
    y = below = TITLE
    for place, (part, *seeds) in enumerate(rows):
        if place:
            axes.annotate("", (2.4, y), (2.4, below), arrowprops={"arrowstyle": "->", "color": "#5b6470"})
        _draw(axes, part, 0.2, y)
        for index, seed in enumerate(seeds):
            _draw(axes, seed, 5.4, y + index * ROW)
            ends = (4.6, y + BOX / 2), (5.4, y + index * ROW + BOX / 2)
            axes.annotate("", *ends, arrowprops={"arrowstyle": "->", "color": "#14733c"})
        below = y + BOX
        y += ROW * max(1, len(seeds))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # a letter that the font does not have is drawn as a box
        canvas.draw()  # type: ignore[no-untyped-call]
    return np.array(canvas.buffer_rgba(), np.uint8)[:, :, :3]  # type: ignore[no-untyped-call]


def fingerprint(table: FinalTable, boxes: Sequence[Box]) -> str:
    """A text that differs if the table or the boxes differ."""
    return json.dumps([table, boxes])


def _draw(axes: Any, box: Box, x: float, y: float) -> None:
    from matplotlib.patches import Rectangle

    face, edge = FACE.get(box.kind, ("#f5f7f9", "#9aa4b0"))
    axes.add_patch(Rectangle((x, y), 4.4, BOX, facecolor=face, edgecolor=edge))
    lines = [(box.head, 8.5, "#1c2024"), (box.foot, 6.5, "#5b6470")]
    for index, ((line, size, colour), most) in enumerate(zip(lines, CHARACTERS, strict=True)):
        down = BOX / 2 if not box.foot else BOX * (0.3 + 0.42 * index)
        axes.text(x + 0.08, y + down, _cut(line, most), fontsize=size, color=colour, va="center", parse_math=False)


def _cut(line: str, most: int) -> str:
    shown = printable(line)
    return shown if len(shown) <= most else shown[: most - 1] + "…"


def _plain(cell: object) -> str:
    return cell.plain if isinstance(cell, Text) else str(cell)
