"""Train the hosts of the tasks `heal` or `heal-bytes` ahead of a run, into the cache folder.

    python scripts/train_healing_hosts.py heldout 64
    python scripts/train_healing_hosts.py heldout --task heal-bytes

The first trains the hosts of the first 64 held-out keys of `heal`, the second the held-out hosts of `heal-bytes`. Hosts that
are in the cache are read, which checks their files.
"""

import argparse

import torch

from esper.tasks import byte_hosts, heal, heal_bytes
from esper.tasks.healing_hosts import cache_folder, soundness, trained_weights


def healing(part: str, count: int) -> str:
    """Train hosts of `heal`; a summary of them."""
    reached = []
    for key in heal.RANGES[part][: min(count, heal.HOSTS)]:
        facts = heal.describe(key)
        reached.append(soundness(facts.number, trained_weights(facts.number)))
        kind = "plain" if facts.plain else "residual"
        print(f"host {facts.number}: {facts.problem.family}, {kind}, soundness {reached[-1]:.3f}", flush=True)
    return f"{len(reached)} hosts in {cache_folder()}, mean soundness {sum(reached) / max(len(reached), 1):.3f}"


def healing_bytes(part: str, count: int) -> str:
    """Train hosts of `heal-bytes`; a summary of them."""
    reached = []
    for key in heal.RANGES[part][: min(count, heal_bytes.HOSTS)]:
        number = heal_bytes.describe(key).number
        reached.append(byte_hosts.bits(heal_bytes.trained_host(number), number))
        print(f"host {number}: {reached[-1]:.3f} bits per byte", flush=True)
    return f"{len(reached)} hosts in {byte_hosts.cache_folder()}, mean {sum(reached) / max(len(reached), 1):.3f} bits per byte"


TASKS = {"heal": healing, "heal-bytes": healing_bytes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=list(heal.RANGES))
    parser.add_argument("count", type=int, nargs="?", default=heal.HOSTS, help="keys from the first of the part on")
    parser.add_argument("--task", choices=list(TASKS), default="heal")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(TASKS[options.task](options.part, options.count))


if __name__ == "__main__":
    main()
