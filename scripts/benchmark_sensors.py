"""What the sensors of `heal` cost, as a share of a training step without seeds.

    python scripts/benchmark_sensors.py

Medians of processor seconds of one thread over REPEATS, in turn, for 64 hosts.
"""

import time
from collections.abc import Callable

import numpy as np
import torch
from collect_healing import cases

from esper.leyline.actions import Actions
from esper.leyline.config import build_config
from esper.tasks.heal import heal_taught
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.probe import doses, samples, sense
from esper.tolaria.sensors import Taught, activity, drift, participation_ratio
from esper.tolaria.teaching import taught_streams

HOSTS, REPEATS = 64, 15


def main() -> None:
    torch.set_num_threads(1)
    task = heal_taught().sealed()
    keys = np.array([facts.key for facts in cases(0, HOSTS)])
    config = build_config(
        task.defaults, {"task": task.name, "envs": HOSTS, "baselines": [], "steps": 1000, "probe": {"sensors_every": 0}}
    )
    engine = VectorizedEngine(task, config)
    engine.reset(keys)
    population, seeds = engine.population, engine.state.seeds
    body, data = population.body, population.data
    routes = [body.route(doses(seeds), seeds, part=part, frozen=True) for part in body.parts]
    taught: list[Taught] = taught_streams(data, body)

    def shared() -> None:
        samples(body, routes, data.fit, population.objective)

    found = samples(body, routes, data.fit, population.objective)
    width = torch.from_numpy(body.table.taps.astype(np.float32))
    trials: dict[str, Callable[[], object]] = {
        "a step: 2 updates and a probe": lambda: engine.step(Actions.wait(HOSTS)),
        "all growth sensors": lambda: sense(body, seeds, data.fit, data.probe, population.objective, taught),
        "the forward and backward pass that all sensors share": shared,
        "participation, participation_before": lambda: [
            participation_ratio(h, real=s.real) for s in found for h in (s.stream, s.before)
        ],
        "participation_inner": lambda: [
            participation_ratio(s.inner, real=s.real) for s in found if s.inner is not None
        ],
        "dead, unsaturated": lambda: [
            activity(s.inner, width[:, slot, 3], s.real) for slot, s in enumerate(found) if s.inner is not None
        ],
        "drift, drift_before": lambda: [
            drift(h, h0)
            for s, t in zip(found, taught, strict=True)
            for h, h0 in ((s.stream, t.stream), (s.before, t.before))
        ],
        "the intact networks, once an episode": lambda: taught_streams(data, body),
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
