"""Measure controllers on a suite of the leaderboard, add their rows to it, and print its table.

    python bench/scripts/leaderboard.py heal NAME ...   # a controller, also of another package, a run folder, path.py:function
    python bench/scripts/leaderboard.py heal-unknown NAME ...   # on the cases of another suite, which --help names
    python bench/scripts/leaderboard.py heal "from scratch" "frozen repairs"   # rows that are no controllers, which --help names
    python bench/scripts/leaderboard.py heal            # the table of the rows that are there

A suite is a list of cases of a task, each with two starts, on which no method was fitted or chosen. A row is a file in
bench/docs/leaderboard/SUITE: J on the test split of every case and start, what making the controller took, the commit, and the
version of the suite. Rows of another version are refused. Intervals draw hosts, each with all of its cases, where several cases
stand on one, and cases elsewhere. The table is put into bench/README.md too, where --out is not given.
"""

import argparse
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from collect_healing import FINE_TUNED, ONE_SITE, REDRAWN, SETTINGS, SOURCES, WITH_SKIPS, Figures, Floats, Source, grow
from numpy.typing import NDArray
from study_heal import SEEDS, difference, joint, repaired_frozen, static

from esper.leyline.config.tree import Config
from esper.leyline.messages import InputError
from esper.runs.evaluation.contenders import named
from esper.runs.evaluation.statistics import DRAWS, interval, mean
from esper.runs.folder.environment import describe_environment
from esper.store.disk import file_name
from esper_bench.records import SUITE, load_record, run_script, save_record

REPAIRS = "frozen repairs"
"""Stands for the rows of `esper_bench.healing.frozen`."""
ROOT = Path(__file__).parents[2]
BOARD, README = ROOT / "bench/docs/leaderboard", ROOT / "bench/README.md"


class Suite(NamedTuple):
    """Describes cases of a task: the first ones of a part that have the damage of a setting, on plain hosts."""

    task: str
    part: str
    cases: int
    setting: str = ONE_SITE
    anchor: str = REDRAWN

    @property
    def source(self) -> Source:
        """The task, with the opponents that are no controllers."""
        return SOURCES[self.task]

    @property
    def keys(self) -> list[int]:
        """The keys of the cases."""
        return [facts.key for facts in self.facts]

    @property
    def facts(self) -> list[Any]:
        """What is known of the cases."""
        return self.source.cases(self.part, self.cases, self.setting)

    @property
    def hosts(self) -> NDArray[np.int64] | None:
        """The number of the trained host of each case; None where every case has a host of its own."""
        numbers = np.array([getattr(facts, "number", facts.key) for facts in self.facts])
        return numbers if len(np.unique(numbers)) < len(numbers) else None


SUITES: Mapping[str, Suite] = {
    "heal": Suite("heal", "final", 96),
    "heal-unknown": Suite("heal-unknown", "final", 96),
    "heal-full": Suite("heal-full", "final", 96),
    "heal-images": Suite("heal-images", "final", 48),
    "heal-bytes": Suite("heal-bytes", "final", 48, anchor=FINE_TUNED),
    "repair": Suite("repair", "final", 96, anchor=WITH_SKIPS),
}


class Row(NamedTuple):
    """Holds a row of a suite.

    Attributes:
        row (str): its name
        anchor (bool): whether it is no controller
        cases (ints): the first key, the last key and the number of cases
        objective (lists): J of each case, a list of starts
        episodes (int or None): networks that were grown to make it; None if unknown
        seconds (float or None): seconds of a core that making it took; None if unknown
        commit (str or None): of the working directory
        command (str): what measured it
    """

    row: str
    anchor: bool
    cases: Sequence[int]
    objective: Sequence[Sequence[float]]
    episodes: int | None
    seconds: float | None
    commit: str | None
    command: str

    @property
    def scores(self) -> Floats:
        """J (cases, starts)."""
        return np.array(self.objective)


def measured(suite: Suite, folder: Path, name: str) -> tuple[dict[str, Figures], int | None]:
    """Measure a controller, static networks or frozen repairs; return figures by row, and the episodes that making it took."""
    source, keys = suite.source, suite.keys
    if name in source.static:
        return static(folder, source._replace(static={name: source.static[name]}), keys, suite.setting), 0
    if name == REPAIRS:
        return repaired_frozen(folder, source, keys, suite.setting), 0
    contender = named(name)  # always grown anew, because its code may have changed
    settings = SETTINGS[suite.setting].settings
    grown = [grow(source.task(), keys, contender, seed, settings) for seed in range(SEEDS)]
    figures = Figures(*(np.stack(field, 1) for field in zip(*grown, strict=True)))
    return {contender.name: figures}, contender.episodes


def rows_of(folder: Path, keys: Sequence[int]) -> list[Row]:
    """Read the rows of a folder. InputError for one of another version of the suite, or of other cases."""
    rows, cases = [], [keys[0], keys[-1], len(keys)]
    for path in sorted(folder.glob("*.json")):
        try:
            row = Row(**load_record(path))
        except TypeError:
            raise InputError(f"{path} is no row of the leaderboard; delete it, and measure the row again") from None
        if list(row.cases) != cases:
            raise InputError(
                f"{path} has the cases {row.cases}, and the suite has {cases}; delete it, and measure it again"
            )
        rows.append(row)
    return rows


def bounds(scores: Floats, hosts: NDArray[np.int64] | None) -> tuple[float, float]:
    """Return bounds of the mean of scores (cases, starts), over cases, or over hosts where they are given."""
    return interval(mean, [scores])[1:] if hosts is None else joint(scores.mean(1)[None], hosts, 2 * DRAWS)


def table(rows: Sequence[Row], anchor: str, hosts: NDArray[np.int64] | None = None) -> list[str]:
    """Return the table of a suite in Markdown: the anchor first, then the others, the largest J first."""
    first = next((row for row in rows if row.row == anchor), None)
    if first is None:
        raise InputError(f"the leaderboard has no row {anchor!r}, with which all are compared; name it as a controller")
    others = sorted((row for row in rows if row is not first), key=lambda row: -row.scores.mean())
    lines = [
        "| | J [95 %] | over the first row, points [95 %] | episodes and seconds to make | commit | measured by |",
        "|---|---|---|---|---|---|",
    ]
    for row in (first, *others):
        (low, high), cells = bounds(row.scores, hosts), [row.row if row.anchor else f"`{row.row}`"]
        cells.append(f"{row.scores.mean():.3f} [{low:.3f}, {high:.3f}]")
        cells.append("" if row is first else difference(row.scores, first.scores, hosts))
        cells.append("" if row.anchor else ", ".join("unknown" if n is None else f"{n:,.0f}" for n in row[4:6]))
        lines.append(f"| {' | '.join([*cells, (row.commit or 'unknown')[:8], f'`{row.command}`'])} |")
    return lines


def put(text: str, suite: str, lines: Sequence[str]) -> str:
    """Replace the table behind the heading of a suite in a page."""
    pattern, new = rf"(### `{suite}`:[^\n]*\n\n(?:\w[^\n]*\n\n)?)(?:\|[^\n]*\n)+", "\n".join(lines) + "\n"
    put_in, count = re.subn(pattern, lambda found: found[1] + new, text)
    assert count == 1, f"the page has {count} tables of {suite}"
    return put_in


def main() -> None:
    """Measure, write the rows, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=list(SUITES))
    others = ", ".join(repr(name) for name in (*SOURCES["heal"].static, REPAIRS))
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"controllers to add, or what is no controller: {others}"
    )
    parser.add_argument("--seconds", type=float, help="seconds of a core that making the controllers took; 0 for rules")
    parser.add_argument("--out", type=Path, help="folder of the rows; by default that of the leaderboard")
    parser.add_argument(
        "--figures", type=Path, default=Path("runs/leaderboard"), help="folder of the figures of what is no controller"
    )
    parser.add_argument("--cases", type=int, help="fewer cases, to see that all runs; needs --out")
    options = parser.parse_args()
    if options.cases and not options.out:
        parser.error("--cases needs --out: rows of other cases are not those of the leaderboard")
    torch.set_num_threads(1)
    suite, folder = SUITES[options.suite], (options.out or BOARD / options.suite)
    suite = suite._replace(cases=options.cases or suite.cases)
    keys, commit = suite.keys, describe_environment(torch.device("cpu"), Config())["git_revision"]
    command = shlex.join(["python", "bench/scripts/leaderboard.py", options.suite])
    for name in options.names:
        found, episodes = measured(suite, options.figures / options.suite, name)
        for each, figures in found.items():
            row = Row(
                each,
                name in (*suite.source.static, REPAIRS),
                [keys[0], keys[-1], len(keys)],
                figures.objective.round(6).tolist(),
                episodes,
                options.seconds if options.seconds is not None else 0.0 if episodes == 0 else None,
                commit,
                f"{command} {shlex.quote(name)}",
            )
            save_record(folder / f"{file_name(each)}.json", row._asdict())
    hosts = suite.hosts
    lines = table(rows_of(folder, keys), suite.anchor, hosts)
    on = f"{len(keys) if hosts is None else len(np.unique(hosts))} hosts"
    print(f"suite {options.suite}, version {SUITE}: {len(keys)} cases on {on}, keys {keys[0]:,} to {keys[-1]:,}\n")
    print("\n".join(lines))
    if not options.out:
        README.write_text(put(README.read_text(encoding="utf-8"), options.suite, lines), encoding="utf-8")


if __name__ == "__main__":
    run_script(main)
