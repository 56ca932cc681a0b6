"""Measure what each family of growth sensors costs on `heal`, as a share of a training step without seeds.

    python bench/scripts/benchmark_sensors.py

Medians of processor seconds of one thread over REPEATS, in turn, for 64 hosts. A family is measured whole, with the forward pass
and, for gradient and explained, the backward passes that it needs.
"""

import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from collect_healing import VECTOR

from esper.leyline.config.tree import SENSOR_FAMILIES, build_config
from esper.leyline.lifecycle.vocabulary import Actions
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.measure.probe import sense
from esper.tolaria.stacked.population import taught_streams
from esper_bench.healing.heal import heal_taught

HOSTS, REPEATS = 64, 15
CHEAP = SENSOR_FAMILIES[:4]


def main() -> None:
    torch.set_num_threads(1)
    task = heal_taught().sealed()
    keys = np.array([facts.key for facts in VECTOR.cases("training", HOSTS)])
    config = build_config(
        task.defaults, {"task": task.name, "envs": HOSTS, "baselines": [], "steps": 1000, "probe": {"sensors_every": 0}}
    )
    engine = VectorizedEngine(task, config)
    engine.reset(keys)
    population, seeds = engine.population, engine.state.seeds
    body, data = population.body, population.data
    taught = taught_streams(data, body)

    def family(*names: str) -> None:
        sense(body, seeds, data.fit, data.probe, population.objective, taught if "drift" in names else (), names)

    trials: dict[str, Callable[[], object]] = {
        "a step: 2 updates and a probe": lambda: engine.step(Actions.wait(HOSTS)),
        **{name: partial(family, name) for name in SENSOR_FAMILIES},
        ", ".join(CHEAP): partial(family, *CHEAP),
        "all families": partial(family, *SENSOR_FAMILIES),
        "the intact networks for drift, once an episode": lambda: taught_streams(data, body),
    }
    seconds: dict[str, list[float]] = {name: [] for name in trials}
    for _ in range(REPEATS):
        for name, run in trials.items():
            begin = time.process_time()
            run()
            seconds[name].append(time.process_time() - begin)
    step = float(np.median(seconds["a step: 2 updates and a probe"]))
    print("| | processor ms | share of a step |\n|---|---|---|")
    for name, values in seconds.items():
        print(f"| {name} | {1000 * np.median(values):.1f} | {np.median(values) / step:.0%} |")


if __name__ == "__main__":
    main()
