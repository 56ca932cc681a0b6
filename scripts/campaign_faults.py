"""Test faults that real runs meet, many times over, in campaigns that go on where they were left; write the page of results.

    kill       SIGKILL of `esper train`, `grow`, `resume`, `stream`, `heal` and `eval`, and of one's own loop, until each ends
    corrupt    damage to every file of a checkpoint and a controller, and what is made of it
    disk       a disk that becomes full, at each kind of write
    nan        NaN in the data, a loss, a gradient or a parameter of one environment, and whether another is touched
    governor   whether the governor is silent where all goes well, and what it costs
    cost       bytes and seconds of checkpoints, after many rounds too, and the throughput of a training with them
    page       the page of all results that there are

    python scripts/campaign_faults.py [PART ...] [--count N] [--only NAME] [--jobs N] [--quick] [--out DIR] [--page FILE]
    python scripts/campaign_faults.py kill --kills 12 --only stream

What was found is kept as JSON lines in --out, a file a campaign; another call makes only what is missing of --count. A change of
the code is not noticed: name another folder.
"""

import argparse
import sys
from pathlib import Path

import torch
from faults import corrupt, cost, disk, governor, kill, nan, rounds
from machine import machine

PARTS = ("kill", "corrupt", "disk", "nan", "governor", "cost")


def page(out: Path, options: str) -> str:
    """Return all results that there are as Markdown."""
    here = machine("cpu")
    sections = [part.section(out) for part in (kill, corrupt, disk, nan, governor, cost, rounds)]
    return "\n".join(
        [
            "# Faults",
            "",
            f"`python scripts/campaign_faults.py {options}`, on a machine with {here['cores']} cores of an {here['processor']}, "
            f"torch {here['torch']}, Python {here['python']}, one thread a process. It has not run on a GPU. "
            f"The parts {', '.join(PARTS)} may each be made by themselves.",
            "",
            *(line for section in sections for line in section),
        ]
    )


def main() -> None:
    """Run the campaigns that are asked for, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} or page; all where none is named")
    parser.add_argument("--count", "--kills", type=int, help="cases of the campaign; kill 200, corrupt 1,000, nan 100")
    parser.add_argument("--only", metavar="NAME", default="", help="kill only commands whose name begins so, as stream")
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and places")
    parser.add_argument("--quick", action="store_true", help="few cases of short runs, to see that it runs")
    parser.add_argument("--out", type=Path, default=Path("runs/faults"), help="where results are kept")
    parser.add_argument("--page", type=Path, help="write the page to this Markdown file")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - {*PARTS, "page"}:
        parser.error(f"there is no part {', '.join(sorted(unknown))}; give some of {', '.join(PARTS)}, page")
    torch.set_num_threads(1)
    parts, out, quick = arguments.parts or PARTS, arguments.out.absolute(), arguments.quick
    out.mkdir(parents=True, exist_ok=True)
    if "kill" in parts:
        count = arguments.count or (2 if quick else 200)
        every = kill.QUICK if quick else kill.VICTIMS
        commands = [command for command in every if command.name.startswith(arguments.only)]
        if not commands:
            parser.error(f"no command is called {arguments.only}; there are {', '.join(each.name for each in every)}")
        kill.Campaign(out, commands, count, 1 if quick else count // 10, arguments.seed).run(arguments.jobs)
    if "corrupt" in parts:
        count, resumed = arguments.count or (40 if quick else 1000), 1 if quick else 20
        corrupt.campaign(out, corrupt.QUICK if quick else corrupt.COMMANDS, count, resumed, arguments.seed)
    if "disk" in parts:
        disk.campaign(out, disk.QUICK if quick else disk.KINDS)
    if "nan" in parts:
        nan.campaign(out, arguments.count or (5 if quick else 100), arguments.seed, quick)
    if "governor" in parts:
        governor.campaign(out, quick)
    if "cost" in parts:
        cost.campaign(out, quick)
        rounds.campaign(out, quick)
    text = page(out, " ".join(sys.argv[1:]))
    print(text)
    if arguments.page:
        arguments.page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
