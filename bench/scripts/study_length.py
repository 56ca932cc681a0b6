"""Measure length and early stopping on scikit-learn's diabetes data: test R2 at one, two and four times the default length.

    python bench/scripts/study_length.py              # prints the table of bench/docs/length.md
    python bench/scripts/study_length.py --quick      # one division of the data, short runs

Divisions of the data differ by the seed of the task. scikit-learn's MLP of the grown network's size stands beside, without and
with its own early stopping, for which it gets the validation split too.
"""

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_diabetes
from sklearn.neural_network import MLPRegressor
from sklearn.preprocessing import StandardScaler

import esper
from esper.leyline.data.task import Task
from esper.tasks.hosts import MLP

BASE = 24  # steps of the default config


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one division of the data and short runs")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    tasks = [diabetes(seed) for seed in range(1 if quick else 6)]
    print("| steps asked for | early stopping | steps taken | grown | never-grow twin |\n|---|---|---|---|---|")
    for steps in (2, 4) if quick else (BASE, 2 * BASE, 4 * BASE):
        for enabled in (False, True):
            runs = [grown(task, steps, enabled=enabled) for task in tasks]
            taken = f"{min(run['steps_done'] for run in runs)} to {max(run['steps_done'] for run in runs)}"
            figures = [estimate([statistics.mean(run["test_r2"][who]) for run in runs]) for who in ("grown", "host")]
            print(f"| {steps} | {'on' if enabled else 'off'} | {taken} | {' | '.join(figures)} |", flush=True)
    alone, stopped = zip(*(scikit_learn(task, quick=quick) for task in tasks), strict=True)
    print(f"\nscikit-learn's MLP: {estimate(alone)} to its end, {estimate(stopped)} with its early stopping")


def diabetes(seed: int) -> Task:
    """Return the data, with the target standardized, dealt into splits by a seed."""
    x, y = load_diabetes(return_X_y=True)
    host = MLP(inputs=10, width=16, hidden=(16, 16), outputs=1)
    return esper.task("diabetes", x, (y - y.mean()) / y.std(), host=host, standardize="features", seed=seed)


def grown(task: Task, steps: int, *, enabled: bool) -> dict[str, Any]:
    """Return the summary of four environments under the default controller."""
    settings = {"envs": 4, "steps": steps, "early_stopping": {"enabled": enabled}, "baselines": ["twin"]}
    return esper.grow(task, settings, progress=False)


def scikit_learn(task: Task, *, quick: bool) -> tuple[float, float]:
    """Return test R2 of MLPRegressor, trained to its end, and with early stopping on the validation share."""
    assert task.test is not None
    scaler, splits = StandardScaler().fit(task.train.x.numpy()), (task.train, task.validation, task.test)
    (x, y), (x_validation, y_validation), test = (
        (scaler.transform(split.x.numpy()), split.y.numpy().ravel()) for split in splits
    )
    settings = {"hidden_layer_sizes": (32, 32), "max_iter": 20 if quick else 2000, "random_state": 0}
    both = np.concatenate([x, x_validation]), np.concatenate([y, y_validation])
    share = len(y_validation) / len(both[1])
    alone = MLPRegressor(**settings).fit(x, y)
    stopped = MLPRegressor(**settings, early_stopping=True, validation_fraction=share).fit(*both)
    return float(alone.score(*test)), float(stopped.score(*test))


def estimate(values: Sequence[float]) -> str:
    """Format the mean and standard error over divisions of the data."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return f"{statistics.mean(values):.3f} ± {error:.3f}"


if __name__ == "__main__":
    main()
