"""Fit the controller of streams that Esper ships, or a baseline, on training streams, by the return of whole streams.

    python bench/scripts/fit_streams.py fit runs/fit_streams                            # writes runs/fit_streams/fitted.json
    python bench/scripts/fit_streams.py fit runs/fit_slow --method ensemble-annealed --changes recurring-shared --streams 8
    python bench/scripts/fit_streams.py choose runs/fit_streams src/esper/streams/shipped.json
    python bench/scripts/fit_streams.py choose runs/fit_slow settings.json --method ensemble-annealed --changes recurring-shared

`fit` is the cross-entropy method (Rubinstein and Kroese, "The Cross-Entropy Method", 2004, chapter 4): the numbers of
`esper_bench.streams.fitted.NUMBERS`, or of BASELINES, or their logarithms, are drawn from independent normal distributions, which
move toward the best candidates. All candidates of a generation play the same streams, which no other generation plays. The
first candidate is the mean. The folder keeps every generation, and the same command goes on from there. With `--method`, the
file has the settings of that method, and with `--changes`, the streams have these changes alone. With `--settings`, a baseline
begins with its settings of a file that study_streams.py writes: those for recurring contexts over a shared trunk if the streams
have these alone, else those of the mixture.

`choose` plays the start of the search and what was fitted on validation streams. For `shipped` it writes what was fitted if the
95 % interval of its gain is above 0, else the start. For a baseline, FILE is such a file of settings: `choose` plays the settings
that it has, and puts what was fitted in their place if its mean is higher.
"""

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from esper_bench.records import load_figures, run_script, save_figures
from esper_bench.streams.data import RANGES, UPDATES, Change, draw_streams
from esper_bench.streams.fitted import NUMBERS, Number, read_numbers, to_file
from esper_bench.streams.methods import METHODS, find_method
from esper_bench.streams.play import Player

Floats = NDArray[np.float64]
STEP = 0.7
"""How far mean and deviation move toward those of the best candidates."""
BEST = 0.35
"""Share of the candidates that are the best ones."""
SEED = 5
SHIPPED = "shipped"
_RATES = {
    "lr": Number(0.02, 0.4, 0.001, 0.2, True, "learning rate"),
    "head_rate": Number(1.5, 0.4, 0.2, 20.0, True, "that of the head, as a multiple"),
    "halving": Number(60.0, 0.6, 5.0, 2000.0, True, "updates after which a learning rate halves"),
    "least": Number(0.15, 0.5, 0.005, 1.0, True, "share of the rate at which it no longer falls"),
}
_GATE = {**_RATES, "memory": Number(0.1, 0.15, 0.0, 0.95, False, "memory of the gate")}
BASELINES: Mapping[str, Mapping[str, Number]] = {
    "ensemble-annealed": _GATE,
    "ensemble-recognising": {**_GATE, "same": NUMBERS["same"], "away": NUMBERS["away"]},
    **{f"{name}-annealed": _RATES for name in ("reset-blocks", "reset", "continual-backprop", "replay")},
}
"""What is searched for, by method; see the attributes of `Number`."""


def table_of(method: str) -> Mapping[str, Number]:
    return NUMBERS if method == SHIPPED else BASELINES[method]


def scaled(values: Floats, numbers: Mapping[str, Number]) -> Floats:
    """Scale numbers (..., numbers) for the search: logarithms where `Number.ratio`."""
    ratio = np.array([number.ratio for number in numbers.values()])
    return np.where(ratio, np.log(np.maximum(values, 1e-12)), values)


def numbers_of(points: Floats, numbers: Mapping[str, Number]) -> Floats:
    """Return the numbers of points in the scale of the search, within the bounds: the inverse of `scaled`."""
    table = numbers.values()
    values = np.where([number.ratio for number in table], np.exp(np.minimum(points, 20)), points)
    return np.clip(values, [number.low for number in table], [number.high for number in table])


def returns(candidates: Floats, keys: Sequence[int], changes: Sequence[Change], options: argparse.Namespace) -> Floats:
    """Play every stream with each candidate (C, numbers), and return the mean accuracies (C, S)."""
    count, each = len(candidates), len(keys)
    streams = draw_streams(list(keys) * count, list(changes) * count, updates=options.updates)
    rows = np.repeat(candidates, each, 0)
    searched = {name: rows[:, index] for index, name in enumerate(table_of(options.method))}
    player = Player(streams, find_method(options.method).build(streams, {**settings_of(options), **searched}))
    player.play()
    return np.asarray(player.accuracy.mean(0, dtype=np.float64)).reshape(count, each)


def streams_of(
    part: str, first: int, each: int, kinds: Sequence[Change] = tuple(Change)
) -> tuple[list[int], list[Change]]:
    """Return keys and changes of `each` streams of every change."""
    changes = [change for change in kinds for _ in range(each)]
    return [RANGES[part].start + first + k for k in range(len(changes))], changes


def settings_of(options: argparse.Namespace) -> Mapping[str, Any]:
    """Return all settings of the method: its defaults, and in their place those of the file of settings."""
    known = METHODS[options.method].settings
    if options.settings is None:
        return known
    return {**known, **json.loads(options.settings.read_text())[set_of(options)].get(options.method, {})}


def set_of(options: argparse.Namespace) -> str:
    """Return the name of the changes in a file of settings."""
    return "recurring-shared" if options.changes == [Change.SHARED] else "mixture"


def start_of(options: argparse.Namespace) -> Mapping[str, float]:
    """Return where the search begins: the numbers of a file, or those of the table."""
    if options.start:
        return read_numbers(options.start)
    if options.settings:
        return {name: settings_of(options)[name] for name in table_of(options.method)}
    return {name: number.start for name, number in table_of(options.method).items()}


def fit(folder: Path, options: argparse.Namespace) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    table = table_of(options.method)
    start = start_of(options)
    mean = scaled(np.array([start[name] for name in table]), table)
    spread = options.spread * np.array([number.spread for number in table.values()])
    size = len(options.changes) * options.streams
    for generation in range(options.generations):
        file = folder / f"{generation}.npz"
        if not file.exists():
            begun, random = time.monotonic(), np.random.default_rng([SEED, generation])
            points = mean + spread * random.standard_normal((options.candidates, len(mean)))
            points[0] = mean
            candidates = numbers_of(points, table)
            keys, changes = streams_of("training", options.first + generation * size, options.streams, options.changes)
            found = returns(candidates, keys, changes, options)
            best = np.argsort(-found.mean(1))[: max(2, round(BEST * options.candidates))]
            kept = scaled(candidates[best], table)
            save_figures(
                file,
                candidates=candidates,
                returned=found,
                mean=(1 - STEP) * mean + STEP * kept.mean(0),
                spread=(1 - STEP) * spread + STEP * kept.std(0),
            )
            print(
                f"generation {generation}: mean {found[0].mean():.4f}, best {found.mean(1).max():.4f}, "
                f"median {np.median(found.mean(1)):.4f}, {time.monotonic() - begun:.0f} s",
                flush=True,
            )
        kept_file = load_figures(file)
        mean, spread = kept_file["mean"], kept_file["spread"]
    facts = {"generations": options.generations, "candidates": options.candidates, "streams": size}
    fitted = {name: float(f"{value:.4g}") for name, value in zip(table, numbers_of(mean, table), strict=True)}
    (folder / "fitted.json").write_bytes(to_file(fitted, fitted=facts))


def choose(folder: Path, file: Path, options: argparse.Namespace) -> None:
    """Play the start and what was fitted on validation streams, and write the better one; see the top of this file."""
    fitted: Mapping[str, Any] = json.loads((folder / "fitted.json").read_text())
    if options.method != SHIPPED:
        options.settings = file
    candidates = [start_of(options), fitted["numbers"]]
    keys, changes = streams_of("validation", options.first, options.streams, options.changes)
    table = np.array([[each[name] for name in table_of(options.method)] for each in candidates])
    found = returns(table, keys, changes, options)
    over = found[1] - found[0]
    for change in options.changes:
        own = np.array([each == change for each in changes])
        print(f"{change}: start {found[0, own].mean():.4f}, fitted {found[1, own].mean():.4f}")
    error = 1.96 * over.std(ddof=1) / len(over) ** 0.5
    print(f"{len(keys)} streams: start {found[0].mean():.4f}, fitted {over.mean():+.4f} +- {error:.4f}")
    if options.method == SHIPPED:
        best = int(over.mean() > error)
        facts = {**fitted["fitted"], "chosen": ("start", "fitted")[best], "validation_streams": len(keys)}
        file.write_bytes(to_file(candidates[best], fitted=facts))
    elif over.mean() > 0:
        chosen = json.loads(file.read_text())
        chosen[set_of(options)].setdefault(options.method, {}).update(fitted["numbers"])
        file.write_text(json.dumps(chosen, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("fit", "choose"))
    parser.add_argument("folder", type=Path, help="folder of the generations")
    parser.add_argument("file", type=Path, nargs="?", help="file that `choose` writes")
    parser.add_argument("--method", choices=(SHIPPED, *BASELINES), default=SHIPPED)
    parser.add_argument("--changes", nargs="+", type=Change, choices=list(Change), default=list(Change))
    parser.add_argument("--start", type=Path, help="file of numbers of `shipped` at which the search begins")
    parser.add_argument("--settings", type=Path, help="file of settings with which a baseline begins its search")
    parser.add_argument("--spread", type=float, default=1.0, help="factor of the deviations at the start of the search")
    parser.add_argument("--generations", type=int, default=6)
    parser.add_argument("--candidates", type=int, default=16)
    parser.add_argument("--streams", type=int, default=2, help="streams of each change")
    parser.add_argument("--updates", type=int, default=UPDATES, help="batches of each stream")
    parser.add_argument("--first", type=int, default=500_000, help="number of the first stream of its part")
    parser.add_argument(
        "--quick", action="store_true", help="two generations of three short streams, to see that it runs"
    )
    options = parser.parse_args()
    if options.quick:
        options.generations, options.candidates, options.streams, options.updates = 2, 3, 1, 40
    if options.part == "choose" and options.file is None:
        parser.error("choose needs the file that it is to write")
    if options.settings and options.method == SHIPPED:
        parser.error("--settings is for a baseline; --start has the numbers of shipped")
    torch.set_num_threads(1)
    if options.part == "fit":
        fit(options.folder, options)
    else:
        if options.first == 500_000:
            options.first = 0
        choose(options.folder, options.file, options)


if __name__ == "__main__":
    run_script(main)
