"""Compare networks that grow with products in bfloat16 and in float16 with those in float32.

    python bench/scripts/study_precision.py [--tasks digits-narrow:16,digits-image:8,stdlib-text:4] [--steps 16] [--folder DIR]

For each task and type, environments of the same seeds grow under the heuristic. A line gives the loss on the test split, its
paired difference from float32 with a 95 % t interval over environments, the same of the mean probe loss over the steps (the
curve), and how many updates were skipped. The processor must multiply
bfloat16 natively. With a folder, what was computed is kept in it, and a run that is interrupted goes on.
"""

import argparse
from pathlib import Path

import numpy as np
import torch

import esper
from esper.leyline.intervals import t_interval
from esper.nissa.rows import StepRow
from esper_bench.records import load_record, run_script, save_record


class Curve:
    """Adds up the probe losses of the environments over the steps."""

    def __init__(self) -> None:
        self.losses: list[list[float]] = []

    def write(self, row: object) -> None:
        """Keep the probe losses of a step."""
        if isinstance(row, StepRow):
            self.losses.append(list(row.losses))

    def close(self) -> None:
        """Close nothing: no file is open."""


def main() -> None:
    """Run every task in every type and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default="digits-narrow:16,digits-image:8,stdlib-text:4")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--folder", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for text in asked.tasks.split(","):
        task, envs = text.split(":")
        found = {amp: figures(task, int(envs), amp, asked) for amp in ("off", "bf16", "fp16")}
        for amp, each in found.items():
            test, curve = (np.array(each[name]) - np.array(found["off"][name]) for name in ("test", "curve"))
            apart = (
                ""
                if amp == "off"
                else f", test {t_interval(test.tolist()):+.4f}, curve {t_interval(curve.tolist()):+.4f} apart"
            )
            print(f"{task}, n {envs}, {amp}: test loss {np.mean(each['test']):.4f}{apart}, skipped {each['skipped']}")


def figures(task: str, envs: int, amp: str, asked: argparse.Namespace) -> dict[str, list[float]]:
    """Return the test losses (E,), the mean probe losses (E,) and the number of skipped updates."""
    kept = None if asked.folder is None else asked.folder / f"{task}-{envs}-{amp}-{asked.steps}.json"
    if kept is not None and kept.exists():
        return load_record(kept)
    settings = {"envs": envs, "steps": asked.steps, "baselines": "none", "amp": amp, "models": "none"}
    curve = Curve()
    summary = esper.grow(task, settings, controller="heuristic", progress=False, outputs=[curve])
    skipped = summary.get("skipped_updates", {"grown": [0]})["grown"]
    found = {"test": summary["test_loss"]["grown"], "curve": np.mean(curve.losses, 0).tolist(), "skipped": sum(skipped)}
    if kept is not None:
        save_record(kept, found)
    return found


if __name__ == "__main__":
    run_script(main)
