"""Describe the machine that a benchmark runs on, for its record."""

import os
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch

import esper
from esper.leyline.config.tree import Config
from esper.tolaria.runtime import describe_gpu


def machine(device: str) -> dict[str, Any]:
    """Return the processor, caches, load, device and versions of this machine, by name."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "machine": platform.machine(),
        "system": platform.system(),
        "processor": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "caches": [
            path.read_text().strip() for path in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
        ],
        "load_average_before": os.getloadavg()[0],
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else "cpu, one thread",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "esper": esper.__version__,
        **describe_gpu(torch.device(device), Config()),  # a case says what it sets otherwise
    }


def machine_line(report: dict[str, Any] | None = None) -> str:
    """Describe the processor, the versions and the load in words; of a report, or of this machine as it is now."""
    known = report or machine("cpu")
    own = "{device}, {processor}, {cores} cores, torch {torch}, Python {python}".format(**known)
    if report is not None:
        return f"{own}, load {known['load_average_before']:.1f} before and {known['load_average_after']:.1f} after"
    return f"{own}, amp and compile off where the table does not say, load {known['load_average_before']:.1f}"
