"""Check the installation and this machine: `esper doctor`."""

import importlib.metadata
import importlib.util
import platform
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from esper.commands.options import say, use_one_thread
from esper.leyline.distribution import EXTRAS, pip_install
from esper.leyline.messages import InputError

Check = tuple[bool | None, str]
"""Whether a check passed, or None if something optional is missing; and what was checked."""


def doctor(
    every_size: Annotated[
        bool,
        Option("--all", help="Compare rows at every number of rows and batch size, not at one: five times as long."),
    ] = False,
) -> None:
    """Check that Esper can run here; the exit code is 1 if a check fails."""
    failed = False
    for passed, text in _checks(every_size):
        failed |= passed is False
        say(f"{'--' if passed is None else 'ok' if passed else 'FAIL':<5}{text}")
    if failed:
        raise typer.Exit(1)


def _checks(every_size: bool) -> Iterator[Check]:
    """Yield checks of the machine, of blueprints, and of hosts: whether rows have bitwise the same results in any population."""
    import torch

    from esper.kasmina.blueprints import BLUEPRINTS, check
    from esper.kasmina.stack.invariance import EVERY_SIZE, FEW_SIZES, blends_that_vary, segments_that_vary
    from esper.leyline.data.batches import first, picked
    from esper.leyline.data.task import Task
    from esper.leyline.lifecycle.slots import CONVOLVED
    from esper.tasks.catalog import TASKS, get_task

    yield (3, 11) <= sys.version_info < (3, 14), f"python {platform.python_version()} (3.11 to 3.13)"
    for name in ("torch", "numpy", "safetensors", "scikit-learn"):
        yield True, f"{name} {importlib.metadata.version(name)}"
    yield True, f"{torch.get_num_threads()} threads (`esper grow` takes one)"
    for index in range(torch.cuda.device_count()):
        yield True, f"cuda:{index} {torch.cuda.get_device_name(index)}"
    if not torch.cuda.is_available():
        yield None, "CUDA: torch sees no device; runs take the CPU"
    for extra, modules in EXTRAS.items():
        missing = any(importlib.util.find_spec(module) is None for module in modules)
        yield None if missing else True, f"extra {extra}" + (f": {pip_install(extra)}" if missing else "")
    try:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "probe").write_text("probe")
        yield True, f"can write to {tempfile.gettempdir()}"
    except OSError as error:
        yield False, f"cannot write to a temporary folder: {error.strerror}"
    use_one_thread()  # the arrays are small: a second thread doubles the time
    for (kind, name), blueprint in BLUEPRINTS.items():
        try:
            check(blueprint)
            yield True, f"{kind} blueprint {name} passes its birth checks"
        except InputError as error:
            yield False, f"{kind} blueprint {name}: {error}"
    sizes = EVERY_SIZE if every_size else FEW_SIZES
    known: dict[str, Mapping[str, str]] = {}  # by structure, because several tasks have the same hosts
    for name in TASKS:
        try:
            task = get_task(name)
        except InputError:  # the files of its data are missing
            continue
        if isinstance(task, Task) and task.pixels is None and not first(task.train.x).is_floating_point():
            x = picked(task.train.x, slice(64))  # tokens, which cannot be drawn as any number
        else:
            x = torch.randn(64, *task.inputs, generator=torch.Generator().manual_seed(0))
        host = repr(task.largest())
        if host not in known:
            known[host] = segments_that_vary(task.largest, x, sizes)
        yield _row_check(f"host of {name}", known[host])
    for (kind, name), blueprint in BLUEPRINTS.items():
        if kind not in CONVOLVED:  # modules on maps and volumes run row by row, in separate calls
            yield _row_check(
                f"{kind} blueprint {name}",
                blends_that_vary(blueprint, 8, sizes) | blends_that_vary(blueprint, 2, sizes),
            )


def _row_check(what: str, differences: Mapping[str, str]) -> Check:
    if not differences:
        return True, f"{what}: rows are independent"
    where = "; ".join(f"{part}: {text}" for part, text in differences.items())
    return False, f"{what}: rows depend on their neighbours ({where})"
