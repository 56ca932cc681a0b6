"""Count how often a step makes the host wait for the device, and name the lines that ask for it.

Counted by intercepting the calls that would wait, on any device, copies to a GPU that block among them, but not those of threads
that read ahead. On CUDA `torch.cuda.set_sync_debug_mode` counts as well: there a step should have no wait that it names, because
the one read waits for an event. `streamed` are examples of a Dataset that are read batch by batch.

    python scripts/profile_gpu_sync.py [--quick] [--json FILE] [--device cpu] [--steps 24]
    python scripts/profile_gpu_sync.py --device cuda --mode error    # ends at the first wait, with its traceback
"""

import argparse
import json
import platform
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from device_reads import HOME, Read, counted_reads
from torch.utils.data import TensorDataset

import esper
from esper.leyline.config.tree import Config, build_config
from esper.leyline.data.task import Task
from esper.tamiyo.rules.base import Never, RandomValid
from esper.tasks.catalog import get_task
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.runtime import describe_gpu

CASES: tuple[tuple[str, int, Mapping[str, Any]], ...] = (
    *((task, envs, {}) for task in ("digits-narrow", "repair") for envs in (1, 8, 64)),
    ("digits-narrow", 8, {"amp": "fp16"}),
    ("digits-image-narrow", 8, {}),
    ("stdlib-text", 2, {}),
    ("streamed", 8, {}),
)
"""Tasks, environments, and settings."""
ON_CUDA: tuple[tuple[str, int, Mapping[str, Any]], ...] = (("digits-narrow", 8, {"compile": "on"}),)
"""Cases of which torch's own count is the only one."""


@contextmanager
def counted_waits(cuda: bool, mode: str) -> Iterator[Counter[str]]:
    """Count the waits that torch itself reports on CUDA, by the innermost line of Esper; the count is empty on other devices.

    With the mode "error", the first wait raises RuntimeError.
    """
    waits = Counter[str]()

    def note(message: Warning | str, *_: object) -> None:
        if "synchronizing CUDA operation" in str(message):
            ours = [frame for frame in traceback.extract_stack() if frame.filename.startswith(HOME)]
            waits[f"{Path(ours[-1].filename).name}:{ours[-1].lineno} {ours[-1].line}" if ours else "?"] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        if cuda:
            torch.cuda.set_sync_debug_mode(mode)
        try:
            yield waits
        finally:
            if cuda:
                torch.cuda.set_sync_debug_mode("default")


def streamed() -> Task:
    """Make a task whose training examples stay in a Dataset."""
    x = torch.randn(4000, 64, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x[:, :10].argmax(1))
    return esper.task("streamed", data, host=esper.mlp(inputs=64, width=16, classes=10), classes=10, stream=True)


def measure(
    task: str, envs: int, settings: Mapping[str, Any], steps: int, device: str, mode: str = "warn"
) -> dict[str, Any]:
    """Count the reads of every step of one episode under random valid decisions, sensors measured at every second step.

    With compiled passes nothing is planted, so that one plan is compiled, and torch's own count is the only one: torch compiles
    nothing while calls are intercepted.
    """
    chosen = streamed() if task == "streamed" else get_task(task)
    config = build_config(
        chosen.defaults,
        {"task": task, "envs": envs, "steps": steps, "device": device, "twin": False},
        {"gates": {"permissive": True}, "probe": {"sensors_every": 2}},
        settings,
    )
    compiled = config.compile != "off"
    engine, client = VectorizedEngine(chosen, config), Never() if compiled else RandomValid()
    view = engine.reset()
    counts, sites, waits = [], Counter[str](), Counter[str]()
    for step in range(steps):
        actions = client.act(view)
        intercepted = nullcontext(list[Read]()) if compiled else counted_reads()
        with intercepted as reads, counted_waits(device.startswith("cuda") and step > 0, mode) as found:
            view, _ = engine.step(actions)
        counts.append(len(reads))
        sites.update(f"{read.site} ({read.what})" for read in reads)
        waits += found  # none of the first step, which brings constants to the device
    return {
        "task": task,
        "envs": envs,
        "settings": dict(settings),
        "slots": len(view.space.slots),
        "reads_per_step": {"least": min(counts), "most": max(counts)},
        "sites": dict(sites),
        "cuda_waits_per_step": waits.total() / (steps - 1) if device.startswith("cuda") else None,
        "cuda_waits": dict(waits),
    }


def show(result: Mapping[str, Any]) -> None:
    """Print the reads and the waits of a case."""
    reads = result["reads_per_step"]
    added = "".join(f" {name}={value}" for name, value in result["settings"].items())
    print(f"{result['task'] + added:24} E={result['envs']:<4} reads a step: {reads['least']} to {reads['most']}")
    for site, count in result["sites"].items():
        print(f"    {count:5} x {site}")
    if result["cuda_waits_per_step"] is not None:
        print(f"    torch.cuda.set_sync_debug_mode: {result['cuda_waits_per_step']:.2f} waits a step", flush=True)
        for site, count in result["cuda_waits"].items():
            print(f"    {count:5} x {site}")


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one small population, to see that it runs")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--steps", type=int, default=24, help="steps of an episode")
    parser.add_argument(
        "--mode", choices=["warn", "error"], default="warn", help="on CUDA: list every wait, or end at the first"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cuda = arguments.device.startswith("cuda")
    cases = [("digits-narrow", 4, {})] if arguments.quick else [*CASES, *(ON_CUDA if cuda else ())]
    results = []
    for case in cases:
        results.append(measure(*case, 6 if arguments.quick else arguments.steps, arguments.device, arguments.mode))
        show(results[-1])
    if arguments.json:
        report = {
            "device": arguments.device,
            "machine": platform.machine(),
            "torch": torch.__version__,
            **describe_gpu(torch.device(arguments.device), Config()),  # a case says what it sets otherwise
            "results": results,
        }
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
