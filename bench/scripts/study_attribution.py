"""Measure how often an interval of sampled attribution holds the exact Shapley value; print the table of docs/attribution.md.

python bench/scripts/study_attribution.py            # a minute of one core
"""

import argparse
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit  # type: ignore[import-untyped]

from esper.tolaria.measure.coalitions import half_width, sampled_coalitions, shapley, shapley_sampled

Floats = NDArray[np.float64]
Rng = np.random.Generator


def unstructured(members: Floats, envs: int, rng: Rng) -> Floats:
    """Draw games in which every coalition has a value of its own."""
    return rng.normal(size=(envs, len(members)))


def saturating(members: Floats, envs: int, rng: Rng) -> Floats:
    """Draw games in which each player mends a share of what the others leave wrong."""
    share = rng.uniform(0, 0.5, size=(envs, 1, members.shape[1]))
    return np.asarray(1 - np.prod(np.where(members == 1, 1 - share, 1.0), axis=2))


def redundant(members: Floats, envs: int, rng: Rng) -> Floats:
    """Draw games in which the best player alone counts."""
    worth = rng.uniform(0, 0.3, size=(envs, 1, members.shape[1]))
    return np.asarray(np.max(members * worth, axis=2))


def threshold(members: Floats, envs: int, rng: Rng) -> Floats:
    """Draw games in which half of the players together bring a jump, and each of them a little."""
    worth, noise = rng.uniform(0, 0.1, size=(envs, 1, members.shape[1])), rng.normal(0, 0.02, (envs, len(members)))
    return np.asarray((members.sum(1) >= members.shape[1] // 2) * 0.3 + (members * worth).sum(2) + noise)


GAMES: tuple[Callable[[Floats, int, Rng], Floats], ...] = (unstructured, saturating, redundant, threshold)


class Coverage(NamedTuple):
    """Holds the shares of exact values that lie within intervals of three kinds."""

    two_errors: float  # mean ± 2 standard errors
    student: float  # mean ± the quantile of Student's t times the standard error
    reported: float  # mean ± `Attribution.half_width`


def coverage(game: Callable[[Floats, int, Rng], Floats], players: int, pairs: int, envs: int, draws: int) -> Coverage:
    """Measure the coverage of so many games of a kind, each sampled under so many keys."""
    members = (np.arange(1 << players)[:, None] >> np.arange(players) & 1).astype(np.float64)
    values = game(members, envs, np.random.default_rng(players))
    exact, within = shapley(values), []
    for draw in range(draws):
        sampled = sampled_coalitions(players, pairs, draw)
        mean, se, _ = shapley_sampled(values[:, sampled.masks], sampled)
        off = np.abs(mean - exact) - 1e-12
        widths = (2 * se, stdtrit(pairs - 1, 0.975) * se, half_width(se, pairs))
        within.append([(off <= width).mean() for width in widths])
    return Coverage(*np.mean(within, axis=0).tolist())


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=200, help="keys per game")
    draws = parser.parse_args().draws
    print("| pairs | game | ± 2 standard errors | ± Student's t | ± `half_width` |\n|---|---|---|---|---|")
    for pairs in (2, 4, 8, 16, 32):
        for game in GAMES:
            found = [coverage(game, players, pairs, 20, draws) for players in (5, 6, 8)]
            cells = " | ".join(f"{100 * share:.1f} %" for share in np.mean(found, axis=0))
            print(f"| {pairs} | {game.__name__} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
