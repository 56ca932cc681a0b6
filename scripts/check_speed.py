"""Fail if the engine became slower: compare its speed beside the bare stack with ratios that were recorded.

A ratio is the process seconds of a bare stack's step (scripts/floors.py) over those of the engine's step, the median over
turns. Both run in one process and take turns, so the ratio depends little on the machine and on what else runs there. A case is
tried up to three times, and fails only if every try is more than 20 % below the recorded ratio. Two more cases compare the
seconds of the engine with those of the engine and of a policy that decides, or learns, beside it. The last one fails if the rows
of telemetry.level step take more than 2 % of a step.

    python scripts/check_speed.py            # exit code 1 if a case fails
    python scripts/check_speed.py --record   # write the ratios of this machine to speed_ratios.json
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import benchmark_training
from benchmark_hot_path import Case, measure
from benchmark_telemetry import share_of_rows
from machine import machine

RECORDED = Path(__file__).with_name("speed_ratios.json")
CASES = {
    "digits, no seeds": Case("speed", envs=16, plain=False),
    "digits, two live seeds": Case("speed", envs=16, live=2, plain=False),
    "repair, a quarter incubating": Case("speed", "repair", envs=16, incubating="quarter", plain=False),
    "width 64, no seeds": Case("speed", envs=16, slots=4, width=64, plain=False),
}
LEARNING = {"digits, a policy that decides": ("acting", "storing"), "digits, a policy that learns": ("updating",)}
"""Parts of an episode of training (scripts/benchmark_training.py)."""
TURNS = 7
TRIES = 3
TOLERANCE = 0.2
"""A case fails if each of its tries is below (1 - TOLERANCE) times the recorded ratio."""


ROWS = 0.02
"""Seconds of the processor that the rows of level step may take, as a share of a step at level off."""


def ratio(case: Case) -> float:
    """Return the bare stack's seconds a step over the engine's, each case in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return float(pool.apply(measure, (case, TURNS, "cpu"))["table"]["engine auto"]["of_floor"])


def learning_ratio(parts: Sequence[str]) -> float:
    """Return the engine's seconds in episodes of training over the sum of its own and those of some parts."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        (row,) = pool.apply(benchmark_training.measure, (benchmark_training.TrainingCase(16), TURNS, "cpu"))["rows"]
    return float(row["engine"] / (row["engine"] + sum(row[part] for part in parts)))


def measured_ratios() -> dict[str, Callable[[], float]]:
    """Return a function for each case that measures its ratio."""
    found: dict[str, Callable[[], float]] = {name: partial(ratio, case) for name, case in CASES.items()}
    return found | {name: partial(learning_ratio, parts) for name, parts in LEARNING.items()}


def share() -> float:
    """Measure the share of a step that the rows of an episode with many changes take, in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return float(pool.apply(share_of_rows, ("repair", 16, 24)))


def check(name: str, measure_ratio: Callable[[], float], recorded: float) -> bool:
    """Return whether one of at most three tries reaches the lowest ratio that is accepted."""
    least = (1 - TOLERANCE) * recorded
    return tried(name, measure_ratio, lambda value: value >= least, f"recorded {recorded:.3f}, at least {least:.3f}")


def tried(name: str, measured: Callable[[], float], accepted: Callable[[float], bool], bound: str) -> bool:
    """Measure up to three times, print the tries, and return whether one of them is accepted."""
    tries = [measured()]
    while len(tries) < TRIES and not accepted(tries[-1]):
        tries.append(measured())
    passed = accepted(tries[-1])
    shown = ", ".join(f"{value:.3f}" for value in tries)
    print(f"{name}: {shown}; {bound}: {'ok' if passed else 'SLOWER'}", flush=True)
    return passed


def record() -> None:
    """Write the median of three ratios of each case, with the machine that measured them."""
    ratios = {
        name: round(statistics.median(measured() for _ in range(TRIES)), 3)
        for name, measured in measured_ratios().items()
    }
    report = {"machine": machine("cpu"), "ratios": ratios}
    RECORDED.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(ratios, indent=2))


def main() -> None:
    """Record, or check every case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--record", action="store_true", help="write the ratios of this machine instead of checking them"
    )
    if parser.parse_args().record:
        record()
        return
    begin, recorded = time.perf_counter(), json.loads(RECORDED.read_text(encoding="utf-8"))["ratios"]
    passed = [check(name, measured, recorded[name]) for name, measured in measured_ratios().items()]
    cheap = tried("repair, rows of level step", share, lambda value: value <= ROWS, f"at most {ROWS:.3f} of a step")
    print(f"{sum(passed)} of {len(passed)} cases as fast as recorded, in {time.perf_counter() - begin:.0f} s")
    if not all(passed):
        sys.exit("the engine became slower beside the bare stack; scripts/profile_hot_path_operations.py shows where")
    if not cheap:
        sys.exit("the rows of level step take too long; scripts/benchmark_telemetry.py measures every level")


if __name__ == "__main__":
    main()
