"""Measure how far an environment depends on the size of its population: shards of several sizes beside one population of all.

    python bench/scripts/study_shards.py [TASK ...]        # iris, wine, digits-narrow, spirals, repair

For each task, 12 environments play one episode in one population, under the rule `random-valid` and under an untrained policy
that samples, and again in shards. The table says in how many shards of each size every number is equal bit for bit: losses of
the networks (rule and policy), and the values and log-probabilities of the policy. Sizes of a shard are in the columns.
"""

import argparse

import numpy as np
import torch

from esper.leyline.config.tree import build_config
from esper.runs.configuration import TRAINING
from esper.simic.client import SimicClient
from esper.simic.ppo import PPO
from esper.simic.rewards import get_reward
from esper.tamiyo.policy.controller import Language, Policy
from esper.tamiyo.rules.base import RandomValid
from esper.tasks.catalog import get_task
from esper.tolaria.engine import VectorizedEngine

ENVS, SIZES = 12, (1, 2, 3, 4, 6)


def main() -> None:
    """Print a row for each task and quantity."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", default=["iris", "wine", "digits-narrow", "spirals", "repair"])
    torch.set_num_threads(1)
    print("task, quantity: " + ", ".join(f"of {size}" for size in SIZES))
    for name in parser.parse_args().tasks:
        whole = play(name, 0, ENVS)
        equal: dict[str, list[str]] = {quantity: [] for quantity in whole}
        for size in SIZES:
            shards = [play(name, first, size) for first in range(0, ENVS, size)]
            for quantity, values in whole.items():
                parts = zip(np.split(values, ENVS // size, axis=1), (shard[quantity] for shard in shards), strict=True)
                same = sum(np.array_equal(one, other, equal_nan=True) for one, other in parts)
                equal[quantity].append(f"{same}/{ENVS // size}")
        for quantity, counts in equal.items():
            print(f"{name}, {quantity}: " + ", ".join(counts), flush=True)


def play(name: str, first: int, envs: int) -> dict[str, np.ndarray]:
    """Return (steps, E) arrays of an episode of the environments `first` to `first + envs`."""
    task = get_task(name).sealed()
    over = {
        "envs": envs,
        "first_instance": first,
        "steps": 6,
        "reward": {"group_size": 1},
        "data": {"batches_per_step": 2},
    }
    config = build_config(task.defaults, TRAINING, over)
    engine = VectorizedEngine(task, config)
    losses = []
    engine.reset()
    rule = RandomValid()
    for _ in range(config.steps):
        _, outcome = engine.step(rule.act(engine.view()))
        losses.append(outcome.after.loss)
    client = SimicClient(
        PPO(Policy.fresh(Language.of([engine.space]), 3), config.ppo, config.seed), get_reward(config.reward)
    )
    sampled = []
    engine.reset()
    for _ in range(config.steps):
        _, outcome = engine.step(client.act(engine.view()))
        client.store(outcome)
        sampled.append(outcome.after.loss)
    rollout = client.rollout()
    return {
        "losses under the rule": np.stack(losses),
        "losses under the policy": np.stack(sampled),
        "values": rollout.value.numpy(),
        "log-probabilities": rollout.log_prob.numpy(),
    }


if __name__ == "__main__":
    main()
