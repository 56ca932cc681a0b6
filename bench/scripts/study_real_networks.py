"""Measure what heals networks that come inside packages, damaged and repaired frozen: `esper heal` beside its opponents.

    python bench/scripts/study_real_networks.py [--out DIR] [--part | --quick] [--networks NAME ...] [--tables]

Every case is a network, a damage, a draw of the damaged layers, a seed and a cap on the parameters. All repairs of a case have
the same examples, batches and steps, and the better of two learning rates on the probe. Errors and losses are on test examples,
on which nothing was chosen. A case that was measured is kept in --out and not measured again. The whole study takes weeks of a
core; `--part` is the study that bench/docs/real-networks.md reports on, `--quick` shows that the script runs, and `--tables`
prints what is there.
"""

import argparse
import itertools
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

import esper
from esper.leyline.messages import InputError
from esper.runs.healing.heal import UNFROZEN
from esper.runs.healing.healed import half_width
from esper.runs.healing.training import (
    Case,
    HealingExamples,
    examples_of,
    losses_of,
    probe_loss,
    settled,
    split,
)
from esper_bench.packaged.networks import DAMAGES, NETWORKS, damaged
from esper_bench.records import load_record, run_script, save_record

Record = dict[str, Any]

OPPONENTS = (
    "uniform adapters",
    "adapters where damaged",
    "adapters where participation falls",
    "bias and scale",
    "head",
    "regrown",
    "refit",
    "distilled",
)
"""Frozen remedies that others have named first; `esper heal` chooses among these, its seeds and two of its own."""
OWN = ("nothing", "grown", "refit and trained", "distilled and trained")
"""The other rows that `esper heal` may choose."""
PAIRS = (("refit and trained", "grown"), ("refit and trained", "best opponent"))
"""Rows whose errors are compared beside those of `esper heal`."""


class Size(NamedTuple):
    """Sets how large the study is."""

    kinds: tuple[str, ...]
    draws: int
    seeds: tuple[int, ...]
    caps: tuple[float, ...]
    steps: int
    batch: int
    examples: int
    test: int


WHOLE = Size(tuple(DAMAGES), 3, (0, 1, 2, 3, 4), (0.01, 0.03, 0.06), 480, 64, 3000, 1000)
PART = Size(
    ("structured 75 %", "2 bits", "unstructured 90 %", "truncated", "4 bits"), 3, (0,), (0.03,), 48, 16, 600, 300
)
QUICK = Size(("structured 75 %",), 1, (0,), (0.06,), 24, 8, 60, 40)


def measure(name: str, kind: str, draw: int, seed: int, cap: float, size: Size) -> Record:
    """Damage a network, heal it, and measure every row on test examples."""
    begin, network = time.perf_counter(), NETWORKS[name]
    intact, data = network.build(), network.drawn(0, size.examples)
    model = damaged(intact, kind, draw)
    healed = esper.heal(model, data, intact, cap, loss=network.loss, steps=size.steps, batch_size=size.batch, seed=seed)
    parts = split(examples_of(data).like(model), seed)
    case = settled(Case(model, {}, parts, network.loss, size.steps, min(size.batch, len(parts.train)), seed))
    networks = {row.network: (healed.networks[row.network], row.trained) for row in healed.table}
    networks["intact"] = intact, 0
    test = HealingExamples(*network.drawn(size.examples, size.test))
    rows = {
        repair: {
            "trained": trained,
            "probe": probe_loss(own, case),
            "error": network.error(own, test.x, test.y),
            "losses": losses_of(own, test, case).round(5).tolist(),
        }
        for repair, (own, trained) in networks.items()
    }
    facts = {
        "network": name,
        "kind": kind,
        "draw": draw,
        "seed": seed,
        "cap": cap,
        "room": int(cap * healed.host_params),
        "size": size._asdict(),
    }
    return {**facts, "best": healed.best, "rows": rows, "seconds": time.perf_counter() - begin}


def measure_all(out: Path, size: Size, names: Iterable[str]) -> None:
    """Measure what is not there yet, a case after the other. A network whose package is not installed is left out."""
    there = []
    for name in names:
        network = NETWORKS[name]
        try:
            network.build(), network.drawn(0, 1)
            there.append(name)
        except InputError as error:
            print(f"{name} is left out: {error}", flush=True)
    every = itertools.product(size.seeds, range(size.draws), size.caps, size.kinds, there)
    for seed, draw, cap, kind, name in every:
        path = out / f"{name}, {kind}, draw {draw}, seed {seed}, cap {cap:g}.json"
        if not path.is_file():
            record = measure(name, kind, draw, seed, cap, size)
            save_record(path, record)
            print(f"{path.stem}: {record['best']}, {record['seconds']:.0f} s", flush=True)


def losses(record: Record, name: str) -> NDArray[np.float64]:
    """Return the losses (T,) of the test examples."""
    return np.array(record["rows"][name]["losses"])


def chosen(record: Record, names: Iterable[str], hindsight: bool = False) -> str:
    """Choose the row of the least loss of those within the cap, on the probe or with hindsight on the test examples."""
    rows = record["rows"]
    able = [name for name in names if name in rows and rows[name]["trained"] <= record["room"]]
    return min(able, key=lambda name: losses(record, name).mean() if hindsight else rows[name]["probe"])


def compared(record: Record, theirs: str) -> tuple[str, str]:
    """Return how much lower the loss of `esper heal` is than theirs, with its 95 % interval by test example, and the verdict."""
    apart = losses(record, theirs) - losses(record, record["best"])
    mean, half = float(apart.mean()), half_width(apart) if apart.any() else 0.0
    word = "better" if mean > half else "worse" if mean < -half else "level"
    return f"{mean:+.3f} [{mean - half:+.3f}, {mean + half:+.3f}]", word


def named(record: Record, name: str) -> str:
    """Return the row of a method, whose choice `esper heal` and `best opponent` are."""
    return {"esper heal": record["best"], "best opponent": chosen(record, OPPONENTS)}.get(name, name)


def tables(records: list[Record]) -> str:
    """Return the tables of the page, in Markdown."""
    lines = [
        "| case | intact | damaged | `esper heal` | best opponent | loss lower than its [95 %] | | than that of the best by"
    ]
    lines[0] += " hindsight | |\n|---|---|---|---|---|---|---|---|---|"
    words: dict[str, list[str]] = {"on the probe": [], "by hindsight": []}
    for record in records:
        rows, theirs, hindsight = record["rows"], chosen(record, OPPONENTS), chosen(record, OPPONENTS, hindsight=True)
        case = (
            f"{record['network']}, {record['kind']}, {record['cap']:.0%}, draw {record['draw']}, seed {record['seed']}"
        )
        cells = [case, *(f"{rows[name]['error']:.3f}" for name in ("intact", "nothing"))]
        cells += [f"{rows[name]['error']:.3f}, {name}" for name in (record["best"], theirs)]
        for found, name in zip(words.values(), (theirs, hindsight), strict=True):
            gap, word = compared(record, name)
            found.append(word)
            cells += [gap, word]
        lines.append(f"| {' | '.join(cells)} |")
    for by, found in words.items():
        said = ", ".join(f"{found.count(word)} {word}" for word in ("better", "level", "worse"))
        lines.append(f"\n`esper heal` beside the opponent that is best {by}: {said}, of {len(found)} cases.")
    networks = list(dict.fromkeys(record["network"] for record in records))
    lines.append(f"\n| mean error | {' | '.join(networks)} | of all [95 %] | less that of `esper heal` [95 %] |")
    lines.append("|---|" + "---|" * (len(networks) + 2))
    for name in dict.fromkeys(["intact", "esper heal", "best opponent", *OWN, *OPPONENTS, *UNFROZEN]):
        having = [record for record in records if named(record, name) in record["rows"]]
        errors = np.array([record["rows"][named(record, name)]["error"] for record in having])
        ours = np.array([record["rows"][record["best"]]["error"] for record in having])
        cells = [name if len(having) == len(records) else f"{name} ({len(having)} cases)"]
        for network in networks:
            own = errors[[record["network"] == network for record in having]]
            cells.append(f"{own.mean():.3f}" if len(own) else "")
        cells += [interval(errors), interval(errors - ours, "+")]
        lines.append(f"| {' | '.join(cells)} |")
    for first, other in PAIRS:
        having = [each for each in records if {first, named(each, other)} <= set(each["rows"])]
        if having:
            apart = [each["rows"][first]["error"] - each["rows"][named(each, other)]["error"] for each in having]
            lines.append(f"\n{first} less {other}: {interval(np.array(apart), '+')}, of {len(having)} cases.")
    return "\n".join(lines)


def damage_table(names: Iterable[str]) -> str:
    """Return the errors of the damaged networks, lowest to highest of three draws, in Markdown."""
    lines = [f"| damage | {' | '.join(f'{name}: {NETWORKS[name].what}' for name in names)} |"]
    lines.append("|---|" + "---|" * len(lines[0].split(" | ")[1:]))
    intact = {name: NETWORKS[name].build() for name in names}
    tests = {name: NETWORKS[name].drawn(WHOLE.examples, PART.test) for name in names}
    lines.append(
        "| none | " + " | ".join(f"{NETWORKS[name].error(intact[name], *tests[name]):.3f}" for name in names) + " |"
    )
    for kind in DAMAGES:
        cells = [kind]
        for name in names:
            errors = [
                NETWORKS[name].error(damaged(intact[name], kind, draw), *tests[name]) for draw in range(WHOLE.draws)
            ]
            cells.append(f"{min(errors):.3f} to {max(errors):.3f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def interval(values: NDArray[np.float64], sign: str = "") -> str:
    """Format the mean of (N,) values with its 95 % t interval over cases."""
    if len(values) < 2:
        return "" if not len(values) else f"{values.mean():{sign}.3f}"
    mean, half = values.mean(), half_width(values) if values.any() else 0.0
    return f"{mean:{sign}.3f} [{mean - half:{sign}.3f}, {mean + half:{sign}.3f}]"


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/study-real-networks"), help="where cases are kept")
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument(
        "--part", action="store_true", help="three draws, one seed and one cap, for a page: two hours of a core"
    )
    sizes.add_argument("--quick", action="store_true", help="one small case of each network")
    parser.add_argument("--caps", type=float, nargs="+", help="caps on the parameters, in place of those of the study")
    parser.add_argument("--draws", type=int, help="draws of the damaged layers, in place of those of the study")
    parser.add_argument("--seeds", type=int, nargs="+", help="seeds of the repairs, in place of those of the study")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=[*NETWORKS], help="networks to measure")
    parser.add_argument("--tables", action="store_true", help="print the tables of what is there, and measure nothing")
    parser.add_argument("--damage", action="store_true", help="print what the damage does to each network, and end")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.damage:
        print(damage_table(arguments.networks))
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    if not arguments.tables:
        size = PART if arguments.part else QUICK if arguments.quick else WHOLE
        size = size._replace(
            caps=tuple(arguments.caps or size.caps),
            draws=arguments.draws or size.draws,
            seeds=tuple(arguments.seeds or size.seeds),
        )
        measure_all(arguments.out, size, arguments.networks)
    records = [load_record(path) for path in sorted(arguments.out.glob("*.json"))]
    if not records:
        raise InputError(
            f"{arguments.out} holds no case that was measured; run it without --tables, or name another folder"
        )
    print(tables(records))


if __name__ == "__main__":
    run_script(main)
