"""Compare ways to search for the best fixed plan of `repair-full` in a replay, and show what the search finds.

    collect  grow every plan of the first stage, and the most promising ones made of their seeds, on training instances
    replay   search often with instances drawn from the collected ones, in several ways and with several budgets
    search   the search as it is, on training instances that were not collected, and the plans that it finds on the collected

python bench/scripts/study_plan_search.py PART ... [--out DIR] [--plans N] [--budgets N ...]

What was grown is kept in --out and not grown again. Replayed plans that were not collected have J of their better seed.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from esper.runs.evaluation.evaluation import Runner
from esper.tasks.catalog import get_task
from esper_bench.evaluation import plan_search
from esper_bench.evaluation.plan_menu import Candidate, candidate_plans
from esper_bench.evaluation.plan_search import Grow, climb, grow_abreast, halve, promising, rungs, search_plans
from esper_bench.records import load_figures, run_script, save_figures

Floats = NDArray[np.float64]

TASK = "repair-full"
COLLECTED = range(500_000, 500_032)
"""The training instances that are collected, which no search comes to."""
BUDGETS = (256, 512, 1152)
DRAWS = 400
"""Number of searches of a replay."""
GROUP = 2
"""Number of plans of a population of `collect`."""


class Menu:
    """Holds the plans, and J of those that were collected."""

    def __init__(self, out: Path) -> None:
        self.task, self.path = get_task(TASK).sealed(), out / "plans.npz"
        self.every = candidate_plans(self.task)
        self.first = np.array([index for index, each in enumerate(self.every) if each.first])
        self.runner = Runner(out / "grown")
        (out / "grown").mkdir(parents=True, exist_ok=True)
        self.scores = np.full((len(self.every), len(COLLECTED)), np.nan)  # (plans, instances); nan where not collected
        if self.path.is_file():
            figures = load_figures(self.path)
            places = {each.content + str(sorted(each.settings)): index for index, each in enumerate(self.every)}
            self.scores[[places[name] for name in figures["plans"].tolist()]] = figures["objective"]

    def collect(self, plans: Sequence[int]) -> None:
        """Grow plans that were not collected, and keep J of all."""
        missing = [index for index in plans if np.isnan(self.scores[index]).all()]
        for group in alike(self.every, missing):
            own = [self.every[index] for index in group]
            (self.scores[group],) = grow_abreast(self.task, [(own, np.array(COLLECTED))], [], "training", self.runner)
            print(", ".join(f"{self.every[index].name} {self.scores[index].mean():.3f}" for index in group), flush=True)
        there = np.flatnonzero(~np.isnan(self.scores).all(1))
        names = [self.every[index].content + str(sorted(self.every[index].settings)) for index in there]
        save_figures(self.path, plans=np.array(names), objective=self.scores[there])

    def ranked(self) -> NDArray[np.int64]:
        """Return the plans of the first stage, the best of the collected instances first."""
        return self.first[np.argsort(-self.scores[self.first].mean(1), kind="stable")]

    def filled(self) -> Floats:
        """Return J of all plans (plans, instances); what was not collected has that of the better of its seeds."""
        single = {self.every[index].parts[0]: index for index in self.first if self.every[index].parts}
        filled = self.scores.copy()
        for index in np.flatnonzero(np.isnan(filled).all(1)):
            parts = [single[part] for part in self.every[index].parts]
            filled[index] = filled[max(parts, key=lambda part: filled[part].mean())]
        return filled


def alike(every: Sequence[Candidate], plans: Sequence[int]) -> Iterator[list[int]]:
    """Yield groups of plans that can be grown together."""
    kinds: dict[str, list[int]] = {}
    for index in plans:
        each = every[index]
        kinds.setdefault(f"{type(each.choice).__name__} {each.settings}", []).append(index)
    for own in kinds.values():
        yield from (own[start : start + GROUP] for start in range(0, len(own), GROUP))


def equal_halves(count: int, episodes: int) -> list[tuple[int, int]]:
    """List rungs of halves with the same number of episodes each, after Karnin, Koren and Somekh; the last plans are left out."""
    sizes = lambda n: [n, *(sizes(-(-n // 2)) if n > 2 else [])]  # noqa: E731
    count = next(n for n in range(count, 0, -1) if n * len(sizes(n)) <= episodes)
    steps, left = [], episodes
    for rung, size in enumerate(sizes(count)):
        more = left // (len(sizes(count)) - rung) // size
        steps.append((size, more))
        left -= size * more
    return steps


@contextmanager
def varied(**constants: int) -> Iterator[None]:
    """Replace constants of the search until the context ends."""
    before = {name: getattr(plan_search, name) for name in constants}
    for name, value in constants.items():
        setattr(plan_search, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(plan_search, name, value)


def replay(menu: Menu) -> str:
    """Tabulate the mean J of the plans that ways to search find, with the share of searches whose plan is worse than the
    best single seed.
    """
    scores, every, first = menu.filled(), menu.every, menu.first
    means, many, everything = scores.mean(1), 2**20, np.arange(len(every))
    best = means[first].max()

    def as_it_is(episodes: int, grow: Grow, **constants: int) -> int:
        with varied(**constants):
            return int(climb(every, episodes, many, grow)[-1].order[0])

    ways: dict[str, Callable[[int, Grow], int]] = {
        "halves of equal cost, all plans in their order": lambda n, grow: int(
            halve(everything, equal_halves(len(every), n), grow).order[0]
        ),
        "halves of equal cost, first stage alone": lambda n, grow: int(
            halve(first, equal_halves(len(first), n), grow).order[0]
        ),
        "quarters, first stage alone": lambda n, grow: int(halve(first, rungs(len(first), n, many), grow).order[0]),
        "two stages, LEAST 2": lambda n, grow: as_it_is(n, grow, LEAST=2),
        "two stages, LEAST 16": lambda n, grow: as_it_is(n, grow, LEAST=16),
        "two stages, as it is": as_it_is,
    }
    lines = [["way", *(f"{budget:,} episodes" for budget in BUDGETS)]]
    for name, way in ways.items():
        line = [name]
        for budget in BUDGETS:
            random = np.random.default_rng(0)

            def grow(alive: NDArray[np.int64], done: int, more: int, random: Any = random) -> Floats:
                drawn: Floats = scores[alive][:, random.integers(len(COLLECTED), size=more)].sum(1)
                return drawn

            found = np.array([means[way(budget, grow)] for _ in range(DRAWS)])
            line.append(f"{found.mean():.3f} ({100 * (found < best - 1e-9).mean():.0f} %)")
        lines.append(line)
    there = int((~np.isnan(menu.scores).all(1)).sum())
    top = int(np.argmax(means))
    return table(lines) + (
        f"\n{there} of {len(every):,} plans collected, {DRAWS} searches each; J of nothing {means[0]:.3f}, of the best single "
        f"seed {best:.3f} ({every[int(first[np.argmax(means[first])])].name}), of the best plan {means[top]:.3f} "
        f"({every[top].name})"
    )


def search(menu: Menu, budgets: Sequence[int]) -> str:
    """Tabulate what the search finds with several budgets."""
    lines = [
        ["episodes", "plans tried", "the plan", "J of the search", "J of it on the collected instances", "seconds"]
    ]
    for budget in budgets:
        found = search_plans(menu.task, episodes=budget, runner=Runner(menu.runner.folder, print))
        place = menu.every.index(found.best)
        menu.collect([place])
        tried = f"{found.tried} of {found.candidates:,}"
        fresh = f"{menu.scores[place].mean():.3f}"
        lines.append([f"{budget:,}", tried, found.best.name, f"{found.objective:.3f}", fresh, f"{found.seconds:.0f}"])
    return table(lines)


def table(lines: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    head, *rows = lines
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *rows))


def main() -> None:
    """Do the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=("collect", "replay", "search"))
    parser.add_argument("--out", type=Path, default=Path("runs/study-plan-search"), help="where everything is kept")
    parser.add_argument("--plans", type=int, default=44, help="number of plans of the second stage that are collected")
    parser.add_argument("--budgets", type=int, nargs="+", default=BUDGETS, help="episodes of each search")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    menu = Menu(arguments.out)
    if "collect" in arguments.parts:
        menu.collect(menu.first.tolist())
        menu.collect(promising(menu.every, menu.ranked())[: arguments.plans].tolist())
    if "replay" in arguments.parts:
        print(replay(menu))
    if "search" in arguments.parts:
        print(search(menu, arguments.budgets))


if __name__ == "__main__":
    run_script(main)
