"""Train the hosts of the task `heal` ahead of a run, into the cache folder.

    python scripts/train_healing_hosts.py heldout 64

trains the hosts of the first 64 held-out keys. Hosts that are in the cache are read, which checks their files.
"""

import argparse

import torch

from esper.tasks.heal import HOSTS, RANGES, describe
from esper.tasks.healing_hosts import cache_folder, soundness, trained_weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=list(RANGES))
    parser.add_argument("count", type=int, nargs="?", default=HOSTS, help="keys from the first of the part on")
    options = parser.parse_args()
    torch.set_num_threads(1)
    reached = []
    for key in RANGES[options.part][: min(options.count, HOSTS)]:
        facts = describe(key)
        reached.append(soundness(facts.number, trained_weights(facts.number)))
        kind = "plain" if facts.plain else "residual"
        print(f"host {facts.number}: {facts.problem.family}, {kind}, soundness {reached[-1]:.3f}", flush=True)
    print(f"{len(reached)} hosts in {cache_folder()}, mean soundness {sum(reached) / max(len(reached), 1):.3f}")


if __name__ == "__main__":
    main()
