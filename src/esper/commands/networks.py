"""Export the networks of a run folder to another folder, from files that are verified and never executed."""

import shlex
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn

from esper.api import load
from esper.kasmina.blueprints import count
from esper.kasmina.network import export
from esper.leyline.data.task import Task
from esper.leyline.messages import InputError, system_in_words
from esper.leyline.reference import is_reference
from esper.runs.folder.resume import read_config
from esper.store.disk import SUMS, check_sum, find_folder, sums_of, write_folder
from esper.store.files import MODELS, check_is_run, check_links
from esper.tasks.catalog import get_task

Topology = dict[str, Any]
_LARGEST_COPIED = 2**32  # bytes of weights of a network whose host is unknown
_LARGEST_INPUT = 2**26  # numbers in the example with which a program is traced


def export_networks(
    run: Path, env: int | None, target: Path, overwrite: bool, task_name: str | None, note: Callable[[str], None]
) -> dict[Path, Topology]:
    """Write all networks of a run, or that of `env` alone, to a folder, or none if one fails. Returns topologies by subfolder.

    A new program is made for each network. If the host of a network is code of the user, the host of the named task is used;
    without it the network gets no program, and `note` is told so. InputError if there is no run or network, a file is a link or
    damaged, or the target holds other files.
    """
    check_is_run(run)
    check_links(run)
    names = [path.name for path in (run / MODELS).glob("env-*")]
    # left by a process that was killed
    names += [path.name[1:].removesuffix(".old") for path in (run / MODELS).glob(".env-*.old")]
    found = {Path(name): find_folder(run / MODELS / name) for name in sorted(set(names))}
    parts = (export.MODEL, export.TOPOLOGY)
    sources = {name: path for name, path in found.items() if all((path / part).is_file() for part in parts)}
    if not sources:
        raise InputError(f"{run} holds no networks; run it to its end, with --models all or best")
    if env is not None:
        if Path(f"env-{env:03d}") not in sources:
            raise InputError(f"{run} has no network of environment {env}; it has {', '.join(map(str, sources))}")
        sources = {Path(): sources[Path(f"env-{env:03d}")]}
    task = None if task_name is None else get_task(task_name)
    mend = "give --task path.py:function, whose function returns the task that was grown"  # where a host is not known by name
    with suppress(InputError):  # the networks can be exported without the config
        if is_reference(own := read_config(run).task):
            one = [] if env is None else ["--env", str(env)]
            command = shlex.join(
                ["esper", "export", str(run), *one, "--out", str(target), "--overwrite", "--task", own]
            )
            mend = f"if you trust it, give {command}"
    if target.exists() and not target.is_dir():
        raise InputError(f"{target} is a file; name a folder with --out")
    content = list(target.iterdir()) if target.exists() else []
    if content and not overwrite:
        raise InputError(f"{target} is not empty; name another folder with --out, or replace it with --overwrite")
    if not _is_network(target) and not all(_is_network(path) for path in content):
        raise InputError(f"{target} holds other files than networks; name another folder with --out")
    if task is not None and not isinstance(task, Task):
        raise InputError(f"task {task.name} is a mixture, whose hosts are known by name; leave --task out")
    topologies = {name: export.read_topology(path) for name, path in sources.items()}
    with system_in_words(f"cannot write to {target}", "name another folder with --out"):
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as scratch:
            new, old = Path(scratch) / "new", Path(scratch) / "old"
            for name, path in sources.items():
                reason = _write(path, new / name, topologies[name], None if task is None else task.host, mend)
                if reason is not None:
                    note(f"{target / name} has no {export.PROGRAM}: {reason}")
            if target.exists():
                target.rename(old)
            try:
                new.rename(target)
            except OSError:
                if old.exists():
                    old.rename(target)
                raise
    return topologies


def _write(
    source: Path, folder: Path, topology: Topology, host: Callable[[], nn.Module] | None, mend: str
) -> str | None:
    """Write one network. Returns why it has no program; None if it has one."""
    if topology["host"] is None and host is None:
        export.check_size(source, topology["parameters"])
        size = (source / export.MODEL).stat().st_size
        if size > _LARGEST_COPIED:
            raise InputError(
                f"{source / export.MODEL} holds {size:,} bytes, and without its host a network of at most {_LARGEST_COPIED:,} is "
                "exported; give the task that was grown with --task"
            )
        check_sum(source / export.MODEL)
        files = {name: (source / name).read_bytes() for name in (export.MODEL, export.TOPOLOGY)}
        folder.parent.mkdir(parents=True, exist_ok=True)
        write_folder(folder, {**files, SUMS: sums_of(files)})
        why = "its host is code of your own, which a run folder may not start"
        return f"{why}; {mend}, or read the network with esper.load(folder, host=...)"
    network = load(source, host if topology["host"] is None else None)
    topology["parameters"] = count(network)
    failure = export.save_network(folder, network, topology, export.example_of(source, topology, _LARGEST_INPUT))
    return None if failure is None else f"torch.export cannot trace the network: {failure}"


def _is_network(folder: Path) -> bool:
    """Return whether a folder holds an exported network and nothing else."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    return export.TOPOLOGY in names and names <= export.FILES
