"""Compare the numbers of an environment between devices, sizes of its population, and with and without `deterministic`.

    python scripts/compare_devices.py [--device cuda] [--json FILE] [--quick]

Environment 0 of a population grows under random valid decisions. *bits twice*: a second run has the same bits. *alone and among 4
and 16*: so has the environment beside others; if not, the largest difference of a loss, relative to the loss. *from the CPU*: the
largest such difference from the run on the CPU after a step, and after an episode, over environments whose decisions agreed.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import machine
from numpy.typing import NDArray

from esper.leyline.config.tree import build_config
from esper.tamiyo.rules.base import RandomValid
from esper.tasks.catalog import get_task
from esper.tolaria.engine import VectorizedEngine

TASKS = {"digits-narrow": 8, "digits-image-narrow": 8, "stdlib-text": 2}
"""Steps of an episode by task."""


def losses(
    task: str, envs: int, steps: int, device: str, deterministic: bool
) -> tuple[NDArray[np.float64], NDArray[Any], list[NDArray[Any]]]:
    """Return losses (T, E) of an episode, operations (T, E) that were carried out, and the parameters of environment 0."""
    chosen = get_task(task)
    settings = {"envs": envs, "steps": steps, "twin": False, "device": device, "deterministic": deterministic}
    engine = VectorizedEngine(chosen, build_config(chosen.defaults, settings, {"gates": {"permissive": True}}))
    view, client, seen, done = engine.reset(), RandomValid(), [], []
    for _ in range(steps):
        view, outcome = engine.step(client.act(view))
        seen.append(outcome.after.loss.copy())
        done.append(np.where(outcome.accepted, outcome.actions.op, 0))
    columns = engine.population.body.host.columns.items()
    return np.array(seen), np.array(done), [column[0].cpu().numpy() for name, column in columns if name != "gradient"]


def same(one: list[NDArray[Any]], other: list[NDArray[Any]]) -> bool:
    """Return whether all parameters have the same bits."""
    return all(a.tobytes() == b.tobytes() for a, b in zip(one, other, strict=True))


def apart(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """Return the largest relative difference of two arrays of losses."""
    return float(np.max(np.abs(one - other) / np.abs(other)))


def compare(task: str, steps: int, device: str, deterministic: bool) -> dict[str, Any]:
    """Measure the row of a task."""
    found = {envs: losses(task, envs, steps, device, deterministic) for envs in (1, 4, 16)}
    again, cpu = losses(task, 4, steps, device, deterministic), losses(task, 16, steps, "cpu", deterministic)
    row: dict[str, Any] = {"task": task, "deterministic": deterministic, "bits twice": same(again[2], found[4][2])}
    for envs in (4, 16):
        row[f"alone and among {envs}"] = same(found[1][2], found[envs][2]) or apart(
            found[1][0][:, 0], found[envs][0][:, 0]
        )
    agreed = (found[16][1] == cpu[1]).all(0)
    row["from the CPU, a step"] = apart(found[16][0][0], cpu[0][0])
    row["from the CPU, an episode"] = apart(found[16][0][:, agreed], cpu[0][:, agreed]) if agreed.any() else None
    row["decisions agreed"] = f"{int(agreed.sum())} of {len(agreed)}"
    return row


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="one task for three steps, to see that it runs")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    report = machine(arguments.device) | {"rows": []}
    for deterministic in (True, False):  # the first must be set before CUDA begins
        torch.use_deterministic_algorithms(deterministic)
        torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32 = deterministic, not deterministic
        for task, steps in list(TASKS.items())[: 1 if arguments.quick else None]:
            row = compare(task, 3 if arguments.quick else steps, arguments.device, deterministic)
            report["rows"].append(row)
            print(
                ", ".join(
                    f"{name}: {value:.2g}" if isinstance(value, float) else f"{name}: {value}"
                    for name, value in row.items()
                ),
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
