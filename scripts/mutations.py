"""Break the core in 46 ways, one at a time, and show that the tests notice each.

    python scripts/mutations.py                    # all of them; exit code 1 where one is not caught
    python scripts/mutations.py 3 17               # some, by number
    python scripts/mutations.py --named            # in 20 minutes, with the tests that are named beside each alone
    python scripts/mutations.py --list

A mutation replaces a text that stands once in a file of src/esper. It is made in a copy of the checkout, where the tests that are
named beside it run until one fails; if none fails, all tests of `make test` run. `make test` checks that every text of the list
still stands once in its file (tests/test_mutations.py).
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Mutation(NamedTuple):
    """Describes a fault: in which file which text becomes which, and the tests that should notice first, below tests/."""

    file: str
    old: str
    new: str
    tests: str


LIFECYCLE, GATES, MASKS = "kasmina/lifecycle.py", "leyline/lifecycle/gates.py", "leyline/lifecycle/masks.py"
SLOT, FOLDING, COALITIONS = "kasmina/slot.py", "kasmina/graft/folding.py", "tolaria/measure/coalitions.py"
TAPE, BODY, TRAIN = "kasmina/stack/tape.py", "kasmina/stack/body.py", "runs/train.py"
OPTIMIZER, PPO, REWARDS = "tolaria/stacked/optimizer.py", "simic/ppo.py", "simic/rewards.py"

MUTATIONS = (
    # Branches and imitation: seeds that do not act, rows of others, the policy of another round
    Mutation(
        BODY, "there if (branches.dose[through:there, slot] > 0).any() else through", "through", "kasmina/test_body.py"
    ),
    Mutation(
        BODY,
        "whole = np.array_equal(joining, np.arange(len(envs)))",
        "whole = len(joining) == len(envs) - 1",
        "tolaria/test_coalitions.py",
    ),
    Mutation(TRAIN, "self.policy.load_state(shown.policy)", "pass", "simic/test_imitation.py"),
    # Lifecycle: off by one, wrong stage, forgotten state
    Mutation(
        LIFECYCLE,
        "arrived = blending & (age >= seeds",
        "arrived = blending & (age > seeds",
        "kasmina/test_lifecycle.py",
    ),
    Mutation(LIFECYCLE, "(age >= config.embargo)", "(age > config.embargo)", "kasmina/test_lifecycle.py"),
    Mutation(LIFECYCLE, "(arrived & seeds.doomed)", "(arrived & ~seeds.doomed)", "kasmina/test_lifecycle.py"),
    Mutation(
        LIFECYCLE, "after[sprouted] = Stage.TRAINING", "after[sprouted] = Stage.BLENDING", "kasmina/test_lifecycle.py"
    ),
    Mutation(LIFECYCLE, "sum(1) < config.max_seeds", "sum(1) <= config.max_seeds", "kasmina/test_lifecycle.py"),
    Mutation(
        LIFECYCLE,
        "seeds.life >= config.min_prune_age",
        "seeds.life > config.min_prune_age",
        "kasmina/test_lifecycle.py",
    ),
    Mutation(LIFECYCLE, "& space.fits.any(1)", "& space.fits.all(1)", "kasmina/test_lifecycle.py"),
    Mutation(
        LIFECYCLE,
        "(stage == Stage.HOLDING) & gates.fossilize.passed()",
        "stage == Stage.HOLDING",
        "kasmina/test_lifecycle.py",
    ),
    Mutation(
        LIFECYCLE,
        "(stage == Stage.TRAINING) & gates.advance.passed()\n    slot",
        "stage == Stage.TRAINING\n    slot",
        "kasmina/test_lifecycle.py",
    ),
    Mutation(LIFECYCLE, "after.doomed[e, s] = True", "after.doomed[e, s] = False", "kasmina/test_lifecycle.py"),
    Mutation(LIFECYCLE, "ramp((seeds.age + 1)", "ramp((seeds.age + 0)", "kasmina/test_lifecycle.py"),
    Mutation(LIFECYCLE, "start + (end - start) * path)", "start - (end - start) * path)", "kasmina/test_lifecycle.py"),
    Mutation(LIFECYCLE, "seeds.doomed[gone] = False", "seeds.doomed[gone] = True", "kasmina/test_lifecycle.py"),
    # Gates: wrong sign, dropped part
    Mutation(GATES, "check.margin > 0 for", "check.margin >= 0 for", "leyline kasmina tolaria"),
    Mutation(GATES, "gain.mean - config.gain_z", "gain.mean + config.gain_z", "leyline tolaria kasmina"),
    Mutation(
        GATES,
        "contribution.mean - config.contribution_z",
        "contribution.mean + config.contribution_z",
        "leyline tolaria kasmina",
    ),
    Mutation(GATES, "age - steps + 1, age", "age - steps, age", "leyline kasmina tolaria"),
    # Masks
    Mutation(
        MASKS,
        "np.where(RELEVANT[op, head], choice, 0)",
        "np.where(RELEVANT[op, head], choice, choice)",
        "leyline tamiyo",
    ),
    Mutation(MASKS, "np.floor(draws[head] * valid.sum(1))", "np.ceil(draws[head] * valid.sum(1))", "leyline tamiyo"),
    Mutation(MASKS, "ops[rows, op] = False", "ops[:, op] = False", "leyline tamiyo simic"),
    # What a slot computes
    Mutation(SLOT, "passed = (1 + bent) / 2", "passed = gate", "kasmina"),
    Mutation(
        SLOT,
        "return gradient, gradient if rows is None else gradient.index_select(0, rows), None",
        "return gradient, gradient * 0, None",
        "kasmina",
    ),
    Mutation(SLOT, "2 * weight / h.square()", "weight / h.square()", "kasmina tolaria"),
    Mutation(SLOT, "return h + slot_change", "return h - slot_change", "kasmina"),
    Mutation(
        SLOT,
        "return dh, ddelta + d + own * passed, dgate",
        "return dh, ddelta + own * passed, dgate",
        "tolaria/test_tape.py",
    ),
    Mutation(TAPE, "dy if where is None else dy.index_select(0, where)", "dy", "tolaria/test_tape.py"),
    Mutation(TAPE, "gradient if known is None else known + gradient", "gradient", "tolaria/test_tape.py"),
    # Folding
    Mutation(
        FOLDING,
        "more, moved = torch.tensordot(kernel, weight, 1), shift",
        "more, moved = torch.tensordot(weight, kernel, 1), shift",
        "kasmina/test_folding.py",
    ),
    Mutation(FOLDING, "bias + alpha * moved", "bias", "kasmina/test_folding.py"),
    Mutation(FOLDING, "return lost <= seed / 100", "return True", "kasmina/test_folding.py"),
    # Attribution
    Mutation(COALITIONS, "masks(live)[env] ^ (1 << slot)", "masks(live)[env] | (1 << slot)", "tolaria"),
    Mutation(COALITIONS, "table = values.metric", "table = -values.metric", "tolaria/test_coalitions.py"),
    Mutation(COALITIONS, "(real > 0)", "(real >= 0)", "tolaria/test_coalitions.py"),
    # Optimizer
    Mutation(
        OPTIMIZER, "linalg.vector_norm(self.gradient, dim=1)", "linalg.vector_norm(self.gradient, dim=1) * 2", "tolaria"
    ),
    Mutation(OPTIMIZER, "self.steps += 1", "self.steps += 2", "tolaria"),
    Mutation(OPTIMIZER, "self._free = (~fixed)", "self._free = (fixed)", "tolaria kasmina"),
    # PPO and rewards
    Mutation(
        PPO,
        "delta = reward + gamma * next_value - value",
        "delta = reward + gamma * next_value + value",
        "simic/test_advantages.py",
    ),
    Mutation(PPO, "own = delta[t] + lam * discount[t]", "own = delta[t] + lam * gamma", "simic/test_advantages.py"),
    Mutation(PPO, "gain = torch.minimum(", "gain = torch.maximum(", "simic"),
    Mutation(PPO, "ratio = (log_prob - old).exp()", "ratio = (old - log_prob).exp()", "simic"),
    Mutation(REWARDS, "np.where(failed, -penalty, 0.0)", "np.where(failed, penalty, 0.0)", "simic"),
    Mutation(REWARDS, "outcome.accepted & ~outcome.rolled_back", "outcome.accepted", "simic"),
    Mutation(REWARDS, "np.maximum(after - base, 0.0)", "np.maximum(after + base, 0.0)", "simic"),
)


def main() -> None:
    """Try the mutations that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "numbers", nargs="*", type=int, metavar="N", help="mutations by number; all where none is named"
    )
    parser.add_argument("--named", action="store_true", help="run the tests named beside each mutation alone")
    parser.add_argument("--list", action="store_true", help="print the mutations and try none")
    arguments = parser.parse_args()
    if not arguments.list:
        named = " ".join(sorted({name for mutation in MUTATIONS for name in mutation.tests.split()}))
        if by := caught(Mutation("__init__.py", "", "", named), named=True):
            sys.exit(f"{by} fails without a mutation; mend it first")
    missed = 0
    for number, mutation in enumerate(MUTATIONS, 1):
        if arguments.numbers and number not in arguments.numbers:
            continue
        shown = f"{number:2} {mutation.file}: {mutation.old.splitlines()[0]} -> {mutation.new.splitlines()[0]}"
        if not arguments.list:
            by = caught(mutation, arguments.named)
            missed += by is None
            shown += f": {by or 'NOT CAUGHT'}"
        print(shown, flush=True)
    sys.exit(bool(missed))


def caught(mutation: Mutation, named: bool) -> str | None:
    """Return the test that fails with a mutation; None if none of `make test` does, or none of the named ones."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        copy = Path(folder) / "esper"
        made = {".git", ".venv", "runs", "site", "dist"}  # below the checkout alone: src/esper/runs is code
        anywhere = shutil.ignore_patterns("__pycache__", "node_modules", ".*_cache", "*.egg-info")
        shutil.copytree(
            ROOT, copy, ignore=lambda at, names: {*anywhere(at, names), *(made if Path(at) == ROOT else ())}
        )
        path = copy / "src" / "esper" / mutation.file
        path.write_text(path.read_text(encoding="utf-8").replace(mutation.old, mutation.new, 1), encoding="utf-8")
        environment = os.environ | {"PYTHONPATH": str(copy / "src"), "OMP_NUM_THREADS": "1"}
        first = [f"tests/{each}" for each in mutation.tests.split()]
        for tests in (first,) if named else (first, ["tests"]):
            command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "2", "-p", "no:cacheprovider", *tests]
            done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
            failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
            if done.returncode in (1, 2) and failed:  # 2 where a test module computes its cases with the fault
                return failed[0].split(" - ")[0]
            if done.returncode not in (0, 1, 2):
                raise SystemExit(f"pytest ended with {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return None


if __name__ == "__main__":
    main()
