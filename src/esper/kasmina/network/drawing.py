"""Describe grown networks as text and draw them as SVG: what runs in which order, and which seed reads and changes what."""

import json
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Literal, NamedTuple

from torch import nn

from esper.kasmina.blueprints import count
from esper.kasmina.graft.grown import class_of
from esper.kasmina.graft.planted import Planted
from esper.kasmina.network.grown_network import Graft, GraftedSegments, GrownNetwork
from esper.kasmina.slot import Seed
from esper.leyline.config.arguments import to_path
from esper.leyline.lifecycle.slots import Tap
from esper.leyline.messages import InputError, kind_of, printable, system_in_words
from esper.store.disk import write_atomic

LAYERS = 6
"""A part with more layers than these is described by its class and their number."""

READS = {
    Tap.HERE: "reads the stream here",
    Tap.BEFORE: "reads what entered the part before it",
    Tap.INPUT: "reads the input of the network",
}


class DrawnLine(NamedTuple):
    """Holds one line of a description."""

    kind: Literal["input", "host", "seed", "output"]  # input, host, seed or output
    name: str  # of the segment or submodule, or of the slot of a seed
    what: str  # its layers, or the blueprint of a seed
    note: str  # what a seed reads, its dose and its blend; empty elsewhere
    params: int | None  # its parameters; None for inputs and outputs
    reads: Tap | None = None  # what a seed reads; None elsewhere
    around: str = ""  # name of the first part that a bypass goes around, if these are several


def describe(network: nn.Module) -> str:
    """Return the parts of a grown network as text, one line each, in the order in which they run."""
    parts = parts_of(network)
    seeds = sum(part.params or 0 for part in parts if part.kind == "seed")
    lines = [f"{printable(class_of(network).__name__)}: {count(network):,} parameters, {seeds:,} of them in seeds"]
    width = max(len(_label(part)) for part in parts)
    for part in parts:
        params = "" if part.params is None else f"  [{part.params:,}]"
        note = f"; {part.note}" if part.note else ""
        lines.append(f"  {_label(part):{width}}  {part.what}{note}{params}".rstrip())
    return "\n".join(map(printable, lines))


def draw(network: nn.Module, out: str | Path | None = None) -> str:
    """Draw a grown network as SVG, and return the text of the image.

        esper.draw(esper.load("runs/demo/models/env-000"), "network.svg")

    The parts of the host stand below each other in the order in which they run, and every seed stands beside the place
    that it changes, with an arrow from what it reads. `network` is what `esper.load` or
    `Growth.finish` returned; for any other module, its children are drawn, without seeds. `out` names a file to write.

    Raises InputError if `network` is not a module or the file cannot be written.
    """
    if not isinstance(network, nn.Module):
        raise InputError(f"esper.draw was given {kind_of(network)}; give a network, as esper.load returns it")
    image = _svg(parts_of(network), printable(class_of(network).__name__))
    if out is not None:
        path = to_path(out, "out")
        with system_in_words(f"the drawing {path} cannot be written", "name another file"):
            write_atomic(path, image.encode())
    return image


def parts_of(network: nn.Module) -> list[DrawnLine]:
    """Return the parts of a grown network in the order in which they run, or the children of any other module in their order."""
    if isinstance(network, GrownNetwork):
        return list(_grown_parts(network))
    parts = []
    for name, child in network.named_children():
        planted = [(path, module) for path, module in child.named_modules() if type(module) is Planted]  # no seats
        own = count(child) - sum(count(seed) for _, seed in planted)
        parts.append(DrawnLine("host", name, _layers(child), "", own))
        for path, seed in planted:
            place = ".".join([name, *path.split(".")[:-1]])
            note = f"{READS[seed.tap]}, alpha {float(seed.alpha):g}, {seed.blend.name}"
            parts.append(DrawnLine("seed", place, _layers(seed.seed.delta), note, count(seed), seed.tap))
    return parts or [DrawnLine("host", type(network).__name__, _layers(network), "", count(network))]


def _grown_parts(network: GrownNetwork) -> Iterator[DrawnLine]:
    inputs = json.dumps(network.inputs) if isinstance(network.inputs, dict) else str(network.inputs)
    yield DrawnLine("input", "input", inputs, "standardized" if network.standardize is not None else "", None)
    names = {slot.after: slot.name for slot in network.slots}
    yield from _segments(network.segments, network.seeds, network.grafts, names, "segment")
    what = "" if network.classes is None else f"{len(network.classes)} classes"
    restored = "restored to the scale of the targets" if network.restore is not None else ""
    yield DrawnLine("output", "output", what, restored, None)


def _segments(
    segments: nn.ModuleList, seeds: nn.ModuleList, grafts: Sequence[Graft], names: dict[int, str], label: str
) -> Iterator[DrawnLine]:
    """Yield the segments and the seeds behind them; seeds of an earlier growth are inside the segments."""
    entries: list[str] = []  # the name of the first line of each segment
    for index, segment in enumerate(segments):
        name = f"{label} {index}"
        if isinstance(segment, GraftedSegments):
            lines = list(_segments(segment.segments, segment.seeds, segment.grafts, {}, f"{name}, part"))
        else:
            lines = [DrawnLine("host", name, _layers(segment), "", count(segment))]
        entries.append(lines[0].name)
        yield from lines
        for graft, seed in zip(grafts, seeds, strict=True):
            if graft.after == index:
                assert isinstance(seed, Seed)
                around = entries[graft.start] if graft.start < index and graft.tap == Tap.BEFORE else ""
                reads = f"reads what entered {around}" if around else READS[graft.tap]
                note = f"{reads}, alpha {graft.alpha:g}, {graft.blend.name}"
                what, behind = graft.blueprint or _layers(seed.delta), names.get(index, f"behind {name}")
                yield DrawnLine("seed", behind, what, note, count(seed), graft.tap, around)


def _layers(module: nn.Module) -> str:
    """Return the layers of a module without children of their own, in order."""
    leaves = [leaf for leaf in module.modules() if next(leaf.children(), None) is None]
    name = class_of(module).__name__
    if len(leaves) > LAYERS:
        return f"{name} of {len(leaves)} layers"
    shown = " > ".join(_layer(leaf) for leaf in leaves)
    return shown if isinstance(module, nn.Sequential) or leaves == [module] else f"{name}: {shown}"


def _layer(layer: nn.Module) -> str:
    """Return the class of a layer and, if it has them, its numbers of inputs and outputs, as text."""
    name = class_of(layer).__name__
    for before, after in (("in_features", "out_features"), ("in_channels", "out_channels")):
        if hasattr(layer, before) and hasattr(layer, after):
            return f"{name} {getattr(layer, before)} to {getattr(layer, after)}"
    return name


def _label(part: DrawnLine) -> str:
    return f"+ {part.name}" if part.kind == "seed" else part.name


# The drawing [px].

WIDTH, ROW, BOX, LEFT, HOST, MIDDLE = 840, 58, 40, 20, 380, 470
_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#1c2024}.soft{fill:#5b6470;font-size:11px}rect{fill:#f5f7f9;stroke:#9aa4b0}"
    ".seed{fill:#e5f3ea;stroke:#14733c;stroke-width:2}path{fill:none;stroke:#5b6470;stroke-width:1.5}.grown{stroke:#14733c}"
    "@media (prefers-color-scheme:dark){text{fill:#e8ebee}.soft{fill:#a9b2bc}rect{fill:#1d2226;stroke:#5b6470}"
    ".seed{fill:#16301f;stroke:#62c48a}path{stroke:#a9b2bc}.grown{stroke:#62c48a}}"
)


def _svg(parts: Sequence[DrawnLine], title: str) -> str:
    """Draw the parts of the host in a column, and each seed to the right of the part in front of it."""
    rows: list[tuple[DrawnLine, list[DrawnLine]]] = []
    for part in parts:
        if part.kind == "seed":
            rows[-1][1].append(part)
        else:
            rows.append((part, []))
    tops = [12]
    for _, seeds in rows:
        tops.append(tops[-1] + ROW * max(1, len(seeds)))
    drawn, edge, row_of = [], LEFT + HOST, {part.name: row for row, (part, _) in enumerate(rows)}
    for place, (part, seeds) in enumerate(rows):
        y = tops[place]
        if place:
            drawn.append(_arrow(f"M{LEFT + HOST // 2} {tops[place - 1] + BOX}V{y}"))
        drawn.append(_box(part, LEFT, y, HOST))
        for index, seed in enumerate(seeds):
            top = y + index * ROW
            first = row_of.get(seed.around, place)  # of the parts that a bypass goes around
            source = {Tap.HERE: place, Tap.BEFORE: max(first - 1, 0), Tap.INPUT: 0}[seed.reads or Tap.HERE]
            drawn.append(_box(seed, MIDDLE, top, WIDTH - MIDDLE - 12))
            drawn.append(_arrow(f"M{edge} {tops[source] + BOX // 4}L{MIDDLE} {top + BOX // 4}"))
            drawn.append(_arrow(f"M{MIDDLE} {top + 3 * BOX // 4}L{edge} {y + 3 * BOX // 4}", "grown"))
    words = escape(printable("; ".join(f"{_label(part)}: {part.what} {part.note}".strip() for part in parts)))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {tops[-1]}" role="img" aria-label="{words}">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style>"
        '<defs><marker id="end" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0L8 4L0 8"/></marker></defs>{"".join(drawn)}</svg>\n'
    )


def _box(part: DrawnLine, x: int, y: int, width: int) -> str:
    fits = (width - 16) // 7  # characters of the first line, about 7 px each
    head = f"{part.name}: {part.what}" if part.what else part.name
    params = "" if part.params is None else f"{part.params:,} parameters"
    foot = ", ".join(filter(None, (params, part.note)))
    lines = (("", head, 17, fits), ("soft", foot, 33, fits * 7 // 6))
    texts = "".join(
        f'<text class="{style}" x="{x + 8}" y="{y + down}">{escape(printable(cut))}</text>'
        for style, words, down, most in lines
        if (cut := words if len(words) <= most else words[: most - 1] + "…")
    )
    style = ' class="seed"' if part.kind == "seed" else ""
    whole = escape(printable(f"{head}; {foot}" if foot else head))
    return f'<g><title>{whole}</title><rect{style} x="{x}" y="{y}" width="{width}" height="{BOX}" rx="5"/>{texts}</g>'


def _arrow(path: str, style: str = "") -> str:
    return f'<path class="{style}" d="{path}" marker-end="url(#end)"/>'
