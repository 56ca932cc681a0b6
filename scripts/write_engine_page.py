"""Write docs/benchmarks/engine.md from the figures that scripts/benchmark_hot_path.py left in docs/benchmarks/engine.json."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "docs" / "benchmarks"
BARE, TORCH, PLAIN = "bare stack", "bare, torch's loss", "plain loop"

Result = dict[str, Any]


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """A table in Markdown."""
    return ["", *("| " + " | ".join(map(str, row)) + " |" for row in (head, ["---"] * len(head), *rows)), ""]


def speed(result: Result) -> list[object]:
    """Milliseconds, EPS by the clock, EPS by the process's own seconds, and both ratios of the engine."""
    ways = result["table"]
    engine, bare, torch = ways["engine auto"], ways[BARE], ways[TORCH]
    of_torch = engine["of_floor"] / torch["of_floor"]
    time = f"{engine['median_seconds'] * 1e3:.0f} ({engine['p95_seconds'] * 1e3:.0f})"
    assert bare["of_floor"] == 1.0
    return [time, f"{engine['eps']:.0f}", f"{engine['own_eps']:.0f}", f"{engine['of_floor']:.2f}", f"{of_torch:.2f}"]


def memory(result: Result) -> list[object]:
    """Tensors of the population, and the resident peak, in MiB."""
    return [f"{result['memory']['population_mib']:.1f}", f"{result['memory']['peak_rss_mib']:.0f}"]


def states(results: Sequence[Result]) -> list[str]:
    """The table by what the seeds do."""
    rows = []
    for result in results:
        case, ways = result["case"], result["table"]
        plain = ways["engine auto"]["of_floor"] / ways[PLAIN]["of_floor"]
        rows.append([case["task"], case["live"], case["incubating"], *speed(result), f"{plain:.1f}"])
    head = ["task", "live seeds", "incubating", "ms/step (p95)", "EPS", "own EPS", "of bare", "of bare, torch's loss"]
    return ["## E = 64, by what the seeds do", *table([*head, "times the plain loop"], rows)]


def envs(results: Sequence[Result]) -> list[str]:
    """The table over E."""
    rows = [
        [result["case"]["envs"], way, f"{row['own_eps']:.0f}", f"{row['of_floor']:.2f}", *memory(result)]
        for result in results
        for way, row in result["table"].items()
    ]
    head = ["E", "way", "own EPS", "of bare", "population [MiB]", "peak resident [MiB]"]
    note = (
        "`digits-narrow`, no seeds. The population is all tensors of hosts and seeds; the resident peak is that of a process that"
        " has built the\nengine and made its first steps, of which about 320 MiB are torch, scikit-learn and the data."
    )
    return ["## By E", *table(head, rows), note, ""]


def shapes(results: Sequence[Result]) -> list[str]:
    """The tables over S and over parameters."""
    rows = [
        [r["slots"], r["case"]["width"], f"{r['host_params']:,}", r["case"]["live"], *speed(r), *memory(r)]
        for r in results
    ]
    head = ["S", "width", "parameters a host", "live seeds", "ms/step (p95)", "EPS", "own EPS", "of bare"]
    head += ["of bare, torch's loss", "population [MiB]", "peak resident [MiB]"]
    note = (
        "At width 128 it is the optimizer that lies between: a fused AdamW goes through memory once, ours nine times, for rows"
        " that each have\na step count and a rate of their own."
    )
    title = "E = 64, `digits-narrow` on hosts of S equal blocks."
    return ["## By S and by parameters", "", title, *table(head, rows), note, ""]


def coalitions(results: Sequence[Result]) -> list[str]:
    """What complete attribution adds to a step."""
    rows = []
    for result in results:
        fourth, every = (f"{1 / result['table'][f'every {n}']['of_floor'] - 1:+.0%}" for n in (4, 1))
        rows.append([result["case"]["task"], result["case"]["live"], fourth, every])
    head = ["task", "live seeds", "every fourth step (the default), on average", "every step"]
    note = (
        "E = 64; the cost of a step at which all coalitions are evaluated, against one with leave-one-out alone. The aims are"
        " 15 % with two\nlive seeds and 30 % with three."
    )
    return ["## Complete attribution", "", note, *table(head, rows)]


def phases(results: Sequence[Result]) -> list[str]:
    """Where the time goes, and what reads the device."""
    names = ("apply", "train", "tick", "probe", "close")
    rows = [
        [
            result["case"]["task"],
            result["case"]["live"],
            result["case"]["incubating"],
            *(f"{result['phases']['engine auto'][name]:.1%}" for name in names),
            f"{result['reads']['count']}: {', '.join(result['reads']['sites'])}",
        ]
        for result in results
    ]
    note = "Shares of the phases of a step, by the clock, and device reads."
    head = ["task", "live seeds", "incubating", *names, "device reads a step"]
    return ["## Where the time goes", "", note, *table(head, rows)]


def main() -> None:
    """Read the figures and write the page."""
    report = json.loads((FOLDER / "engine.json").read_text(encoding="utf-8"))

    def of(*names: str) -> list[Result]:
        return [result for result in report["results"] if result["case"]["table"] in names]

    seeds = of("states")
    bare = [result["table"]["engine auto"]["of_floor"] for result in seeds]
    plain = [r["table"]["engine auto"]["of_floor"] / r["table"][PLAIN]["of_floor"] for r in seeds]
    text = f"""# Speed of the engine

`python scripts/benchmark_hot_path.py --repeats 9 --json docs/benchmarks/engine.json`, then `python
scripts/write_engine_page.py`: a virtual machine with {report["cores"]} cores of an {report["processor"]}, one thread, torch
{report["torch"]}, Python {report["python"]}. Its load was {report["load_average_before"]:.1f} before and
{report["load_average_after"]:.1f} after. It has not run on a GPU.

Times and EPS are by the clock; *own EPS* and all ratios by the seconds that the process itself ran, which a shared machine
disturbs less.

All ways of a case take turns, step by step, in one process. The *bare stack* is the same stacked arithmetic written by hand:
the engine's own parameters, data and passes (leave-one-out passes of live seeds, shadow passes of incubating ones, probe and
paired errors) with baddbmm, torch's fused AdamW and nothing else, and it must measure what the engine measures before it is
timed. It is run with the engine's cross-entropy, and once more with `F.cross_entropy`, which takes four times as long for ten
classes. The *plain loop* is ordinary PyTorch over one network after another with a DataLoader and `.item()`; four networks are
timed and scaled. A step is 16 batches of 64 and one probe. What the engine does beyond the floor: the rank of every slot,
gradient norms, frozen rows, an order of its own for every row and epoch, gates, masks, events.

The aims: .85 of the bare stack, which came out at {min(bare):.2f} to {max(bare):.2f}; ten times the plain loop, which came out at
{min(plain):.1f} to {max(plain):.1f} times; 900 EPS without seeds and 600 with two live ones.

"""
    parts = [states(seeds), envs(of("envs")), shapes(of("slots", "parameters")), coalitions(of("coalitions"))]
    text += "\n".join(line for part in [*parts, phases(seeds)] for line in part)
    (FOLDER / "engine.md").write_text(text.rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
