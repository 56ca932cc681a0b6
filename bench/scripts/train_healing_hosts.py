"""Train the hosts of the tasks `heal`, `heal-images` or `heal-bytes` ahead of a run, into the cache folder.

    python bench/scripts/train_healing_hosts.py heldout 64
    python bench/scripts/train_healing_hosts.py heldout --task heal-bytes

The first trains the hosts of the first 64 held-out keys of `heal`, the second the held-out hosts of `heal-bytes`. Hosts that
are in the cache are read, which checks their files: a damaged one is named, and is trained again once it is deleted.
"""

import argparse
from functools import partial

import torch

from esper.leyline.messages import InputError
from esper_bench.healing import byte_hosts, heal, heal_bytes
from esper_bench.healing.hosts import VECTORS, HostSet, cache_folder, soundness, trained_weights
from esper_bench.healing.images import IMAGES


def healing(hosts: HostSet, part: str, count: int) -> str:
    """Train hosts of a set; a summary of them."""
    reached = []
    for key in heal.RANGES[part][: min(count, hosts.count)]:
        facts = heal.describe(key, hosts)
        reached.append(soundness(facts.number, trained_weights(facts.number, hosts), of=hosts))
        kind = "plain" if facts.plain else "residual"
        print(f"host {facts.number}: {facts.problem.family}, {kind}, soundness {reached[-1]:.3f}", flush=True)
    return f"{len(reached)} hosts in {cache_folder(hosts)}, mean soundness {sum(reached) / len(reached):.3f}"


def healing_bytes(part: str, count: int) -> str:
    """Train hosts of `heal-bytes`; a summary of them."""
    reached = []
    for key in heal.RANGES[part][: min(count, heal_bytes.HOSTS)]:
        number = heal_bytes.describe(key).number
        reached.append(byte_hosts.bits(heal_bytes.trained_host(number), number))
        print(f"host {number}: {reached[-1]:.3f} bits per byte", flush=True)
    return f"{len(reached)} hosts in {byte_hosts.cache_folder()}, mean {sum(reached) / len(reached):.3f} bits per byte"


TASKS = {"heal-bytes": healing_bytes} | {hosts.name: partial(healing, hosts) for hosts in (VECTORS, IMAGES)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=list(heal.RANGES))
    count = "keys from the first of the part on, 1 or more"
    parser.add_argument("count", type=int, nargs="?", default=VECTORS.count, help=count)
    parser.add_argument("--task", choices=list(TASKS), default="heal")
    options = parser.parse_args()
    if options.count < 1:
        parser.error(f"argument count: {options.count} is no number of keys; give a whole number from 1 on")
    torch.set_num_threads(1)
    try:
        print(TASKS[options.task](options.part, options.count))
    except InputError as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    main()
