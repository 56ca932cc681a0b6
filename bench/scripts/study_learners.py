"""Compare learned controllers over plans on `heal` with trees: a contextual bandit, and PPO.

    python bench/scripts/collect_healing.py FIGURES/training --part training --cases 480   # those of bench/docs/heal.md
    python bench/scripts/study_learners.py plans FIGURES OUT
    python bench/scripts/study_learners.py bandit FIGURES OUT

    plans       trees, the bandit, and policies over 15 plans, which learn from the figures of growing the plan that they chose
    bandit      a bandit that grows the training cases itself, without FIGURES; it is written to OUT/grown.bandit

The comparison is on fresh cases: plain hosts with one damaged site, of the part `learners`. OUT keeps what is finished; a call
goes on with what is missing. Policies that decide seed by seed are trained by bench/scripts/study_heal_ppo.py.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from collect_healing import PLANS, SENSED, VECTOR, Collected, Floats, collected, features, grow, views
from fit_trees import fitted, picked
from numpy.typing import NDArray
from study_heal import joint, picks, signed
from torch import Tensor, nn

from esper.leyline.lifecycle.view import View
from esper.leyline.lifecycle.vocabulary import Ints
from esper.runs.evaluation.contenders import named
from esper_bench.controllers.bandit import SUFFIX, Bandit, contexts, load_bandit, save_bandit
from esper_bench.controllers.healing_features import FEATURES
from esper_bench.controllers.placement import ParticipationDrop
from esper_bench.controllers.plans import BYPASS, HERE, MIXED, NONE, UNIFORM, Placed
from esper_bench.controllers.trees import SHIPPED, Trees, load_trees
from esper_bench.records import run_script

TRAINING, FITS, BOLD, ENVS = 480, 10, 1.0, 64
BUDGETS = (1920, 7200)
"""Episodes: networks that are grown for training."""
AT = {placed: index for index, placed in enumerate(PLANS)}
OF = np.array([placed.slot if placed.slot >= 0 else 5 for placed in PLANS])
"""The slot whose context a plan is judged by."""


class Scorer(nn.Module):
    """Scores plans: contexts (N, S, D) -> logits (N, plans), and the value (N,). Slots share their weights."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.slot = nn.Sequential(nn.Linear(size, 48), nn.SiLU())
        self.here = nn.Linear(96, 4)
        self.whole = nn.Linear(48, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        code = self.slot(x)
        pooled = code.mean(1)
        each = self.here(torch.cat([code, pooled[:, None].expand_as(code)], -1))
        whole = self.whole(pooled)
        names = [BYPASS, MIXED, HERE, NONE]
        columns = [
            whole[:, 0] if placed.plan == UNIFORM else each[:, at, names.index(placed.plan)]
            for placed, at in zip(PLANS, OF.tolist(), strict=True)
        ]
        return torch.stack(columns, 1), whole[:, 1]


def imitate(net: Scorer, x: Tensor, taught: Tensor, epochs: int = 60) -> None:
    """Fit the policy to the teacher's plan of each case. The teacher is asked without growing a network."""
    adam = torch.optim.Adam(net.parameters(), lr=3e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(64):
            loss = nn.functional.cross_entropy(net(x[rows])[0], taught[rows])
            adam.zero_grad()
            loss.backward()
            adam.step()


def ppo(net: Scorer, x: Tensor, worth: Tensor, episodes: int, group: int = 4, envs: int = 64) -> None:
    """Train by PPO on the return of whole episodes, J of the grown network; the mean of a group of one case is the baseline."""
    adam, rounds = torch.optim.Adam(net.parameters(), lr=1e-3), episodes // envs
    for number in range(rounds):
        rows = torch.randint(len(x), (envs // group,)).repeat_interleave(group)
        with torch.no_grad():
            share = 0.2 * (1 - number / rounds)  # of the uniform distribution
            p = (1 - share) * net(x[rows])[0].softmax(1) + share / len(PLANS)
        plan = p.multinomial(1)
        won = worth[rows].gather(1, plan)[:, 0]
        gain = (won - won.view(-1, group).mean(1).repeat_interleave(group)) * group / (group - 1)
        gain = gain / gain.std().clamp(min=1e-3)
        old = p.gather(1, plan)[:, 0].log()
        for _ in range(4):
            soft = net(x[rows])[0].softmax(1)
            now = (1 - share) * soft + share / len(PLANS)
            ratio = (now.gather(1, plan)[:, 0].log() - old).exp()
            surrogate = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
            entropy = torch.special.entr(soft).sum(1).mean()
            adam.zero_grad()
            (-surrogate - 0.01 * (1 - number / rounds) * entropy).backward()
            adam.step()


def policy_picks(
    of: Collected, seen: Floats, teach: Sequence[Placed] | None, episodes: int, seed: int, x: Floats
) -> Ints:
    """Return the plans that a policy picks for contexts x after imitation, PPO or both on cases with the contexts `seen`."""
    torch.manual_seed(seed)
    known = torch.tensor(seen, dtype=torch.float32)
    net = Scorer(known.shape[-1])
    if teach is not None:
        imitate(net, known, torch.tensor([AT[placed] for placed in teach]))
    if episodes:
        ppo(net, known, torch.tensor(worth_of(of), dtype=torch.float32), episodes)
    with torch.no_grad():
        found: Ints = net(torch.tensor(x, dtype=torch.float32))[0].argmax(1).numpy()
    return found


def worth_of(of: Collected) -> Floats:
    """Return J (n, plans) of growing each plan."""
    return np.stack([of.objective[placed] for placed in PLANS], 1)


def bandit_of(of: Collected, x: Floats, episodes: int, seed: int) -> Bandit:
    """Train a bandit for so many episodes: of each case that it meets one of UNIFORM, once, and one of the plan that it chose."""
    random, worth, bandit, spent = np.random.default_rng(seed), worth_of(of), Bandit(bold=BOLD), 0
    met: set[int] = set()
    while True:
        for case in random.permutation(len(x)).tolist():
            cost = int(case not in met)
            options, gains = bandit.gains(x[case : case + 1])
            plan, slot = options[int(gains[0].argmax())]
            cost += plan != UNIFORM
            if spent + cost > episodes:
                bandit.bold = 0.0
                return bandit
            met.add(case)
            spent += max(cost, 1)  # UNIFORM again is an episode that tells nothing
            gain = worth[case, AT[Placed(plan, slot)]] - worth[case, AT[Placed(UNIFORM)]]
            bandit.learn(plan, x[case, slot], float(gain))


def tree_picks(of: Collected, x: Floats, seen: Sequence[View], episodes: int, seed: int) -> list[Placed]:
    """Return the picks of trees fitted on as many cases as the episodes pay for, drawn by host with replacement."""
    random, count = np.random.default_rng(seed), episodes // len(PLANS)
    hosts = random.choice(np.unique(of.host), len(np.unique(of.host)))
    rows = np.concatenate([np.flatnonzero(of.host == host) for host in hosts])[:count]
    return picks(Trees(fitted(of, x, FEATURES, rows, seed)), seen)


def grow_bandit(out: Path, count: int) -> None:
    """Let a bandit grow the training cases, ENVS at a time: each once under `uniform` and once under the plan that it chose."""
    keys, bandit, uniform = [each.key for each in VECTOR.cases("training", count)], Bandit(bold=BOLD), named("uniform")
    for start in range(0, len(keys), ENVS):
        base, own = (
            grow(VECTOR.task(), keys[start : start + ENVS], contender, 0, SENSED).objective
            for contender in (uniform, uniform._replace(make=lambda config: bandit))
        )
        bandit.learn_all(own - base)
        save_bandit(out / f"grown{SUFFIX}", bandit)
        print(
            f"{2 * min(start + ENVS, len(keys))} episodes, J less that of uniform {100 * (own - base).mean():+.1f}",
            flush=True,
        )


def line(name: str, episodes: str, fits: Floats, base: Floats, tree: Floats, host: NDArray[np.int64]) -> None:
    """Print a row of a table: J, and the differences in points, bootstrapped over trainings and hosts together."""
    cells = []
    for other in (base, tree):
        gain = fits - other
        cells.append(signed(gain.mean(), *joint(gain, host)) if gain.any() else "")
    print(f"| {name} | {len(fits)} | {episodes} | {fits.mean():.3f} | {' | '.join(cells)} |", flush=True)


HEADER = "| | trainings | episodes | J | over the best fixed plan, points [95 %] | over the tree |\n|---|---|---|---|---|---|"


def plans(figures: Path, out: Path, count: int, fits: int) -> None:
    """Compare controllers that choose a plan by the figures of the plans, grown once for every case."""
    of = collected(figures / "training", VECTOR, "training", TRAINING, 1)
    known = features(of, figures / "training" / f"features-training-{TRAINING}.npz")
    fresh = collected(out / "fresh", VECTOR, "learners", count, 1)
    seen, columns = views(VECTOR, fresh.keys), slice(len(FEATURES))
    x = contexts(features(fresh, out / "fresh" / f"features-learners-{count}.npz")[..., columns])
    old, worth, best = contexts(known[..., columns]), worth_of(fresh), worth_of(of).mean(0).argmax()
    teacher = picked(load_trees(SHIPPED), of, known)

    def j(which: Ints) -> Floats:
        scores: Floats = worth[np.arange(len(worth)), which]
        return scores

    def placed(own: Sequence[Placed]) -> Floats:
        return j(np.array([AT[each] for each in own]))

    def chosen(trained: Bandit) -> Floats:
        options, gains = trained.gains(x)
        return placed([Placed(*options[index]) for index in gains.argmax(1)])

    def bandit(episodes: int, seed: int) -> Floats:
        save_bandit(out / f"{episodes}-s{seed}{SUFFIX}", trained := bandit_of(of, old, episodes, seed))
        return chosen(trained)

    base, tree = worth[:, best], placed(picks(Trees(), seen))
    hosts = len(np.unique(fresh.host))
    print(f"{count} cases, keys {fresh.keys[0]} to {fresh.keys[-1]}, {hosts} hosts; best fixed plan {PLANS[best].name}")
    print(f"the best of {len(PLANS)} plans by these very figures: {worth.max(1).mean():.3f}\n{HEADER}")
    single = {"best fixed plan": (base, "7,200"), "participation": (placed(picks(ParticipationDrop(), seen)), "0")}
    single["tree, as shipped"] = tree, "7,200"
    if (path := out / f"grown{SUFFIX}").is_file():
        single["bandit that grew its cases"] = chosen(load_bandit(path)), "960"
    for name, (own, episodes) in single.items():
        line(name, episodes, own[None], base, tree, fresh.host)
    arms: dict[str, Callable[[int, int], Floats]] = {
        "trees": lambda episodes, seed: placed(tree_picks(of, known, seen, episodes, seed)),
        "bandit": bandit,
        "PPO only": lambda episodes, seed: j(policy_picks(of, old, None, episodes, seed, x)),
        "imitation, then PPO": lambda episodes, seed: j(policy_picks(of, old, teacher, episodes, seed, x)),
    }
    line(
        "imitation only",
        "0 + the teacher's",
        np.stack([j(policy_picks(of, old, teacher, 0, seed, x)) for seed in range(fits)]),
        *(base, tree, fresh.host),
    )
    for episodes in BUDGETS:
        for name, arm in arms.items():
            also = " + the teacher's" if "imitation" in name else ""
            scores = np.stack([arm(episodes, seed) for seed in range(fits)])
            line(name, f"{episodes:,}{also}", scores, base, tree, fresh.host)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["plans", "bandit"])
    parser.add_argument("figures", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--fits", type=int, default=FITS, help="trainings")
    parser.add_argument("--cases", type=int, default=96, help="fresh cases; training cases of a bandit")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.part == "plans":
        plans(options.figures, options.out, options.cases, options.fits)
    else:
        grow_bandit(options.out, options.cases)


if __name__ == "__main__":
    run_script(main)
