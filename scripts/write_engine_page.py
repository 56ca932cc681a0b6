"""Write docs/benchmarks/engine.md from what scripts/benchmark_hot_path.py and profile_floor_gap.py left in engine*.json there."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "docs" / "benchmarks"
BARE, TORCH, PLAIN = "bare stack", "bare, torch's loss", "plain loop"

Result = dict[str, Any]


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Return the lines of a table in Markdown."""
    return ["", *("| " + " | ".join(map(str, row)) + " |" for row in (head, ["---"] * len(head), *rows)), ""]


def speed(result: Result) -> list[object]:
    """Return milliseconds, EPS by the clock, EPS by the process's own seconds, and both ratios of the engine."""
    ways = result["table"]
    engine, bare, torch = ways["engine auto"], ways[BARE], ways[TORCH]
    of_torch = engine["of_floor"] / torch["of_floor"]
    time = f"{engine['median_seconds'] * 1e3:.0f} ({engine['p95_seconds'] * 1e3:.0f})"
    assert bare["of_floor"] == 1.0
    return [time, f"{engine['eps']:.0f}", f"{engine['own_eps']:.0f}", f"{engine['of_floor']:.2f}", f"{of_torch:.2f}"]


def memory(result: Result) -> list[object]:
    """Return the tensors of the population and the resident peak, in MiB."""
    return [f"{result['memory']['population_mib']:.1f}", f"{result['memory']['peak_rss_mib']:.0f}"]


def states(results: Sequence[Result]) -> list[str]:
    """Return the table by what the seeds do."""
    rows = []
    for result in results:
        case, ways = result["case"], result["table"]
        plain = ways["engine auto"]["of_floor"] / ways[PLAIN]["of_floor"]
        rows.append([case["task"], case["live"], case["incubating"], *speed(result), f"{plain:.1f}"])
    head = ["task", "live seeds", "incubating", "ms/step (p95)", "EPS", "own EPS", "of bare", "of bare, torch's loss"]
    return ["## E = 64, by what the seeds do", *table([*head, "times the plain loop"], rows)]


def envs(results: Sequence[Result]) -> list[str]:
    """Return the table over E."""
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
    """Return the table over S and over parameters."""
    rows = [
        [r["slots"], r["case"]["width"], f"{r['host_params']:,}", r["case"]["live"], *speed(r), *memory(r)]
        for r in results
    ]
    head = ["S", "width", "parameters a host", "live seeds", "ms/step (p95)", "EPS", "own EPS", "of bare"]
    head += ["of bare, torch's loss", "population [MiB]", "peak resident [MiB]"]
    title = "E = 64, `digits-narrow` on hosts of S equal blocks."
    return ["## By S and by parameters", "", title, *table(head, rows)]


def coalitions(results: Sequence[Result]) -> list[str]:
    """Return the table of what complete attribution adds to a step."""
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
    """Return the table of where the time goes, and of what reads the device."""
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


def compiled(results: Sequence[Result]) -> list[str]:
    """Return the table of the engine with compiled passes beside the bare stack, which runs eagerly."""
    rows = []
    for result in results:
        case, ways = result["case"], result["table"]
        own = [f"{case['envs'] / ways[way]['own_eps'] * 1e3:.1f}" for way in ways]
        ratios = [f"{ways[way]['of_floor']:.2f}" for way in list(ways)[1:]]
        width = f" of width {case['width']}" if case["slots"] else ""
        rows.append([f"{case['task']}{width}", str(case["envs"]), str(case["live"]), *own, *ratios])
    head = [
        "task",
        "E",
        "live seeds",
        "bare, eager [ms]",
        "bare, torch's loss [ms]",
        "engine [ms]",
        "engine compiled [ms]",
    ]
    head += ["bare, torch's loss, of bare", "engine of bare", "compiled engine of bare"]
    return [
        "## With compiled passes",
        "",
        COMPILING,
        *table(head, rows),
    ]


def gap(results: Sequence[Result]) -> list[str]:
    """Return the table of what lies between the engine and the bare stack."""
    lines = [
        "## What lies between",
        "",
        "`python scripts/profile_floor_gap.py --turns 21 --json docs/benchmarks/engine-gap.json`:",
        "",
    ]
    for result in results:
        bare, engine = result["milliseconds"]["bare"], result["milliseconds"]["engine"]
        whole = bare["whole step"]
        rows = [
            [
                part,
                f"{own:.1f}",
                f"{engine[part]:.1f}",
                f"{engine[part] - own:+.1f}",
                f"{(engine[part] - own) / whole:+.0%}",
            ]
            for part, own in bare.items()
        ]
        lines += [f"{result['case']}, load {result['load']:.0f}:"]
        lines += table(["part", "bare [ms]", "engine [ms]", "more [ms]", "of the bare step"], rows)
    return [*lines, GAP, ""]


COMPILING = """Steps after the warm-up. Compiling takes 4 to 8 s for each plan, which is part of the seconds of a run, and is paid
back after [13,500 passes or more](../compiling.md#what-it-brings)."""
"""What the table of compiled passes leaves out."""


GAP = """The engine runs the same products, and trains faster than the bare stack, which autograd differentiates: it notes its
passes on a tape of its own ([the life of a batch](../architecture.md#the-life-of-a-batch)), with the same bits. What the engine
takes more is in the probe (ranks, spreads and standard errors) and around it (gates, masks, vital signs and views in NumPy),
which do not shrink with the population. On a CPU a small network of Esper's layers that is alone has no copy beside it, and the
bits that it has in any population. With a copy, a step would take 1.03 times the processor time on `digits-narrow`, 1.02 on
`repair`, and 1.03, 1.12, 1.32, 1.66 and 1.72 for MLPs of 16, 64, 128, 256 and 384 units
(`python scripts/benchmark_ghost.py --turns 40`, an AMD EPYC). The bare stack has none either, so that the floor is lower too: at
E = 1 it takes 11.2 ms a step where it took 12.4, and the engine 11.7 where it took 12.2, which is .96 of the floor
(`python scripts/benchmark_hot_path.py --table envs`; the tables above are of before)."""
"""What the tables of the gap say."""


SCALE: dict[str, tuple[str, str, Callable[[Result], object]]] = {
    "scale-envs": ("E", "no seeds, three slots", lambda r: f"{r['case']['envs']:,}"),
    "scale-slots": ("S", "E = 64, hosts of S blocks of width 16, no seeds", lambda r: r["slots"]),
    "scale-parameters": ("parameters a host", "E = 8, four blocks, no seeds", lambda r: f"{r['host_params']:,}"),
    "scale-live": ("live seeds", "E = 64, three slots", lambda r: r["case"]["live"]),
}
"""Of each table of scale: the quantity that varies, what is held, and how a result gives its value."""


def scale(report: Result) -> list[str]:
    """Return the tables of how a step grows with E, S, parameters and live seeds."""
    lines = []
    for at, (name, held, value) in SCALE.items():
        rows = []
        for result in (each for each in report["results"] if each["case"]["table"] == at):
            engine, envs = result["table"]["engine auto"], result["case"]["envs"]
            own = envs / engine["own_eps"]
            flops = 6 * result["host_params"] * report["batch"] * report["batches"] * engine["own_eps"] / 1e9
            row = [
                value(result),
                f"{engine['own_eps']:.0f}",
                f"{own * 1e3:.1f}",
                f"{own / envs * 1e6:.0f}",
                f"{flops:.1f}",
            ]
            rows.append([*row, f"{engine['of_floor']:.2f}", *memory(result)])
        head = [name, "own EPS", "ms/step", "us a step and environment", "GFLOP/s", "of bare"]
        lines += [f"By {name} ({held}):", *table([*head, "population [MiB]", "peak resident [MiB]"], rows)]
    copies = ", ".join(f"{speed:.0f} at {size}" for size, speed in report["copy_gib_per_second"].items())
    note = f"""All figures are seconds of the process. A GFLOP is 10^9 of 6 operations for each parameter and training
example. The caches of a core are {", ".join(report["caches"])}, the last one shared; a copy whose
source and target together have this many MiB runs at, in GiB/s: {copies}."""
    return ["## Where it stops being flat", "", note, "", *lines, FLAT, ""]


FLAT = """In E a step is nearly flat up to 8 environments, because calls of operators and Python, which do not depend on
E, take 12 ms of it; from 64 on it grows as E does, because the arithmetic outweighs them and one thread has
nothing left to share. In parameters it is flat up to 10^3 and costs 40 % more at 10^4; from 10^5 on it grows
with the arithmetic. It is not memory that ends the flat part: the population leaves the cache of the core (2 MiB) at
10^5 parameters and the shared cache (260 MiB) at 10^7, and from 10^5 on the rate of arithmetic hardly changes. Every slot adds
the products of a block, about 110 us an environment, and every live seed its own and a pass of the probe. The memory of a
population is 16 bytes for each parameter: value, gradient and two moments. At 10^7 parameters autograd makes copies that a tape
does not need, so that the bare stack is slower there.

In steps, memory is flat: `python scripts/benchmark_memory.py --steps 20000` grows four environments of `iris` by the default
rule, with a row of events for each step, and has 442.3 MiB resident after 2,000 steps, and 442.6 MiB from 6,000 to 20,000. With
decisions at random, which plant and remove a seed in nearly every step, what the summary says of them takes 1.5 KB a step."""
"""What the tables of scale say."""


def main() -> None:
    """Read the figures and write the page."""
    report = json.loads((FOLDER / "engine.json").read_text(encoding="utf-8"))

    def of(*names: str) -> list[Result]:
        return [result for result in report["results"] if result["case"]["table"] in names]

    seeds = of("states")
    bare = [result["table"]["engine auto"]["of_floor"] for result in seeds]
    plain = [r["table"]["engine auto"]["of_floor"] / r["table"][PLAIN]["of_floor"] for r in seeds]
    ratios = [r["table"]["engine auto"]["of_floor"] for r in report["results"] if "engine auto" in r["table"]]
    below = [ratio for ratio in ratios if ratio < 0.92]
    text = f"""# Speed of the engine

`python scripts/benchmark_hot_path.py --repeats 9 --json docs/benchmarks/engine.json`, then `python
scripts/write_engine_page.py`: a virtual machine with {report["cores"]} cores of an {report["processor"]}, one thread, torch
{report["torch"]}, Python {report["python"]}. Its load was {report["load_average_before"]:.1f} before and
{report["load_average_after"]:.1f} after. It has not run on a GPU.

Times and EPS are by the clock; *own EPS* and all ratios by the seconds that the process itself ran, which a shared machine
disturbs less.

All ways of a case take turns, step by step, in one process. The *bare stack* is the same stacked arithmetic written by hand:
the engine's own parameters, data and passes (leave-one-out passes of live seeds, shadow passes of incubating ones, probe and
paired errors) with baddbmm, autograd, torch's fused AdamW and nothing else, and it must measure what the engine measures before
it is timed. It is run with the engine's cross-entropy, and once more with `F.cross_entropy`, which takes four times as long for
ten classes. The *plain loop* is ordinary PyTorch over one network after another with a DataLoader and `.item()`; four networks
are timed and scaled. A step is 16 batches of 64 and one probe. What the engine does beyond the floor: the rank of every slot,
gradient norms, frozen rows, an order of its own for every row and epoch, gates, masks, events.

Both run leave-one-out and shadow passes from their slot on, side by side in one call behind a shared prefix, so that the floor is
as low as is known.

The aims: .92 of the bare stack, and .9 with one environment, which came out at {min(bare):.2f} to {max(bare):.2f}; ten times the
plain loop, which came out at {min(plain):.1f} to {max(plain):.1f} times; 900 EPS without seeds and 600 with two live ones.
Of all {len(ratios)} cases of this page {len(below)} are below .92 of the bare stack, the lowest at {min(below):.2f}:
one slot with a live seed, two with two, three live seeds, and two live seeds in two of their three measurements.
On two free cores of an AMD EPYC, `--table states`, run twice, gave .91 to 1.02 of the bare stack (with two live seeds .91 and .94
on `digits-narrow`, .94 and .91 on `repair`; all or a quarter incubating .91 to 1.02), and `--table envs` 1.01 with one
environment and with eight, .99 with 64 and .94 with 256.

"""
    parts = [states(seeds), envs(of("envs")), shapes(of("slots", "parameters")), coalitions(of("coalitions"))]
    text += "\n".join(line for part in [*parts, phases(seeds)] for line in part)
    between = json.loads((FOLDER / "engine-gap.json").read_text(encoding="utf-8"))
    for section in (compiled(of("compiled")), gap(between), scale(report)):
        text += "\n" + "\n".join(section).rstrip() + "\n"
    (FOLDER / "engine.md").write_text(text.rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
