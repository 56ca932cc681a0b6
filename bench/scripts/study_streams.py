"""Measure what networks gain on streams of changing data: storing and reactivating heads beside static networks of one size.

    python bench/scripts/study_streams.py tune --out bench/docs/streams.json       # settings, on training keys
    python bench/scripts/study_streams.py measure --settings bench/docs/streams.json --out runs/streams
    python bench/scripts/study_streams.py table --out runs/streams                      # the tables of bench/docs/streams.md

`tune` plays four settings of every method on the same training streams, on recurring contexts over a shared trunk and on a
mixture of all changes, and writes the best of each into a file, in place of what it held. `measure` plays held-out streams with
these settings. It keeps the figures of every method in a file of its own, so that it can be interrupted: files that exist are
not made again.
"""

import argparse
import itertools
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from esper.runs.evaluation.statistics import interval, mean_difference
from esper_bench.records import load_figures, run_script, save_figures
from esper_bench.streams.controllers import Adaptive
from esper_bench.streams.data import RANGES, UPDATES, Change, DrawnStreams, Floats, draw_streams
from esper_bench.streams.learner import NetworkLearner
from esper_bench.streams.methods import METHODS, build_learner
from esper_bench.streams.play import Played, Player

FIRST = RANGES["heldout"].start + 40_960
"""Key of the first held-out stream. No stream from here on had been played when it was chosen."""
KNOBS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "adamw": [{"lr": lr} for lr in (0.005, 0.01, 0.02)],
    "l2-init": [{"decay": decay} for decay in (0.1, 0.3, 1.0)],
    "shrink-perturb": [{"keep": keep} for keep in (0.2, 0.5, 0.8)],
    "continual-backprop": [{"rate": rate} for rate in (0.0002, 0.001, 0.005)],
    "replay": [{"drawn": drawn} for drawn in (8, 24, 48)],
    "ewc": [{"strength": strength} for strength in (1.0, 10.0, 100.0)],
    "ensemble": [{"lr": 0.01, "memory": 0.5}, {"lr": 0.02, "memory": 0.5}, {"lr": 0.02, "memory": 0.0}],
    "reset": [{"lr": lr} for lr in (0.007, 0.01, 0.015)],
    "reset-blocks": [{"lr": lr} for lr in (0.007, 0.01, 0.015)],
    "adaptive": [{"lr": lr} for lr in (0.01, 0.0125, 0.015)],
    "reactivate": [{"trunk_rate": rate} for rate in (0.03, 0.1, 0.3)],
    **{
        name: [{}]
        for name in METHODS
        if name.endswith(("-annealed", "-recognising", "-seeds", "-both", "-doses")) or name == "shipped"
    },
}
"""Three settings of each method with normalised features, or its defaults. The second one is also played without."""
SETS: Mapping[str, tuple[Change, ...]] = {"recurring-shared": (Change.SHARED,), "mixture": tuple(Change)}
TOLD = "told"
RETURNING = (Change.RECURRING, Change.SHARED, Change.LABELS)
"""Changes under which stored heads, or the trunk, are of use again."""
NEVER = 10**9


def streams_of(changes: Sequence[Change], first: int, count: int, updates: int = UPDATES) -> DrawnStreams:
    """Draw `count` streams of each change. A change has keys of its own."""
    keys = [first + 1024 * list(Change).index(change) + k for change in changes for k in range(count)]
    return draw_streams(keys, [change for change in changes for _ in range(count)], updates=updates)


def played(streams: DrawnStreams, name: str, settings: Mapping[str, Any]) -> Played:
    """Play the streams by a method; TOLD is the rule `adaptive` that knows from the start which streams are to be reset."""
    learner = build_learner("adaptive" if name == TOLD else name, streams, **settings)
    if name == TOLD:
        assert isinstance(learner, NetworkLearner)
        assert isinstance(learner.controller, Adaptive)
        learner.controller.resets = np.array([change not in RETURNING for change in streams.changes])
        learner.controller.patience, learner.controller.few = NEVER, 0
    player = Player(streams, learner)
    player.play()
    return player.result()


def tune(path: Path, options: argparse.Namespace) -> None:
    best: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
    for kind in options.sets:
        changes = SETS[kind]
        each = options.streams or (16 if len(changes) == 1 else 2)
        streams = streams_of(changes, RANGES["training"].start, each, options.updates)
        for name in (each for each in options.methods if len(KNOBS[each]) > 1):
            begun, score = time.monotonic(), {}
            plain = {**KNOBS[name][1], "norm": False}
            for settings in ({"norm": True, **knob} for knob in (*KNOBS[name], plain)):
                score[json.dumps(settings)] = float(played(streams, name, settings).returned.mean())
            best.setdefault(kind, {})[name] = json.loads(max(score, key=lambda each: score[each]))
            shown = {each: round(value, 4) for each, value in score.items()}
            print(f"{kind}, {len(streams.keys)} streams, {name}: {shown}, {time.monotonic() - begun:.0f} s", flush=True)
            path.write_text(json.dumps(best, indent=2) + "\n")


def measure(out: Path, options: argparse.Namespace) -> None:
    out.mkdir(parents=True, exist_ok=True)
    chosen: dict[str, dict[str, Any]] = json.loads(options.settings.read_text())
    updates = options.updates if options.quick else UPDATES
    for kind, name in itertools.product(options.sets, options.methods):
        files = {change: out / f"{kind}.{name}.{change}.npz" for change in SETS[kind]}
        missing = [change for change, file in files.items() if not file.exists()]
        if not missing:
            continue
        begun = time.monotonic()
        settings = chosen[kind].get("adaptive" if name == TOLD else name, {})
        found = played(streams_of(missing, FIRST, options.streams or 70, updates), name, settings)
        for change, rows in zip(missing, np.split(np.arange(len(found.returned)), len(missing)), strict=True):
            figures = {each: getattr(found, each)[rows] for each in ("returned", "retention", "price")}
            save_figures(files[change], alarms=found.alarms[:, rows], **figures)
            print(
                f"{kind}, {name}, {change}: {figures['returned'].mean():.4f}, "
                f"retention {figures['retention'].mean():.3f}, {time.monotonic() - begun:.0f} s",
                flush=True,
            )


def gain(ours: Sequence[Floats], theirs: Sequence[Floats]) -> str:
    """Format the paired difference over the streams that both have played, the first of each change."""
    pairs = [(a[: len(b), None], b[: len(a), None]) for a, b in zip(ours, theirs, strict=True)]
    value = interval(mean_difference, [a for a, _ in pairs], [b for _, b in pairs])
    return f"{value.value:+.4f} [{value.low:+.4f}, {value.high:+.4f}]"


def table(out: Path, reference: str) -> None:
    """Print what a method gains over the others in each set."""
    for kind, changes in SETS.items():
        files = {name: [out / f"{kind}.{name}.{change}.npz" for change in changes] for name in (*KNOBS, TOLD)}
        played = {
            name: [load_figures(file) for file in each] for name, each in files.items() if all(map(Path.exists, each))
        }
        if reference not in played:
            continue
        scores = {name: [each["returned"] for each in figures] for name, figures in played.items()}
        order = sorted(scores, key=lambda name: -float(np.mean([own.mean() for own in scores[name]])))
        print(f"\n{kind}\n\n| | streams | accuracy | {reference} gains [95 %] | retention | multiply-adds [millions] |")
        print("|---|---|---|---|---|---|")
        for name in order:
            over = "" if name == reference else gain(scores[reference], scores[name])
            accuracy, kept = (np.mean([each[key].mean() for each in played[name]]) for key in ("returned", "retention"))
            price = np.mean([each["price"].sum(1).mean() for each in played[name]]) / 1e6
            count = sum(len(own) for own in scores[name])
            print(f"| {name} | {count} | {accuracy:.4f} | {over} | {kept:.3f} | {price:,.0f} |")
        if len(changes) > 1:
            print(f"\n| | {' | '.join(changes)} |\n|---|{'---|' * len(changes)}")
            for name in order:
                print(f"| {name} | {' | '.join(f'{own.mean():.3f}' for own in scores[name])} |")
            for name in (each for each in order if each != reference):
                each = [gain([a], [b]) for a, b in zip(scores[reference], scores[name], strict=True)]
                print(f"{reference} over {name}: {', '.join(each)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("tune", "measure", "table"))
    parser.add_argument("--out", type=Path, required=True, help="file of the settings, or folder of the figures")
    parser.add_argument("--settings", type=Path, help="file that `tune` wrote")
    parser.add_argument(
        "--streams", type=int, help="streams of each change; 16, or 2 of a mixture, to tune; 70 to measure"
    )
    parser.add_argument("--updates", type=int, default=832, help="updates of the streams on which settings are chosen")
    parser.add_argument("--methods", nargs="+", choices=(*KNOBS, TOLD), default=list(KNOBS))
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--reference", choices=(*KNOBS, TOLD), default="shipped", help="whose gains `table` prints")
    parser.add_argument("--quick", action="store_true", help="two streams of 40 batches, to see that the study runs")
    options = parser.parse_args()
    if options.quick:
        options.streams, options.updates = 2, 40
    torch.set_num_threads(1)
    if options.part == "tune":
        tune(options.out, options)
    elif options.part == "measure":
        measure(options.out, options)
    else:
        table(options.out, options.reference)


if __name__ == "__main__":
    run_script(main)
