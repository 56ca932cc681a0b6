"""Count the bytes that each process holds while a model grows under fully_shard, for several numbers of processes on the CPU.

    python scripts/benchmark_sharding.py
    python scripts/benchmark_sharding.py --processes 1 2 --size 64x2

A decoder transformer grows by a schedule: one seed is kept and another incubates. Each block is sharded by itself, and the rest
with the whole model. The bytes are those of the tensors of a process between two steps, every storage counted once. All of them
are found by the garbage collector, so that a copy which somebody forgot is counted too.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmark_growth import LENGTH, LIFE, VOCABULARY, Decoder, Schedule, loss
from torch import nn

import esper

STEPS = 8
COLUMNS = {
    "parameters": "parameters",
    "moments": "moments of AdamW",
    "snapshot": "snapshot",
    "all": "all tensors",
    "resumed": "all, after a resume",
    "state": "state that is saved",
}


def size_of(tensors: Iterable[Any]) -> int:
    """Return the bytes of tensors in this process; those that share a storage are counted once."""
    from torch.distributed.tensor import DTensor

    found = {}
    for tensor in tensors:
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = own.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """List the tensors of a tree of mappings and lists."""
    entries = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    return [tree] if isinstance(tree, torch.Tensor) else [each for entry in entries for each in tensors_of(entry)]


def everything() -> int:
    """Return the bytes of all tensors of this process."""
    gc.collect()
    return size_of([each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)])


def begin(width: int, layers: int) -> tuple[nn.Module, torch.optim.Optimizer, esper.Growth]:
    """Make a sharded model, its optimizer and its growth."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (2, 4, LENGTH + 1))
    model = esper.graft(Decoder(width, layers), example=ids[0, :, :-1])
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    gates = {"permissive": True, "min_training_steps": 1, "min_holding_steps": 1}
    growth = esper.Growth(
        model, optimizer, probe=[(each[:, :-1], each[:, 1:]) for each in ids], loss=loss, controller=Schedule(LIFE),
        every=1, budget=1.0, settings={"gates": gates, "blueprints": ["bypass-mlp"]},
    )  # fmt: skip
    return model, optimizer, growth


def measure(width: int, layers: int, folder: Path) -> dict[str, Any]:
    """Train and grow the model in this process, and return the bytes that it holds, before and after it resumes."""
    model, optimizer, growth = begin(width, layers)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        ids = torch.randint(0, VOCABULARY, (4, LENGTH + 1), generator=generator)
        loss(model(ids[:, :-1]), ids[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
        growth.step()
    kept = growth.engine.governor.keeper
    found = {
        "seeds": growth.population.planted(),
        "parameters": size_of(model.parameters()),
        "moments": size_of(tensors_of(dict(optimizer.state))),
        "snapshot": size_of(tensors_of([kept.tensors, kept.moments])),
        "all": everything(),
    }
    state = growth.state_dict()
    found["state"] = size_of(tensors_of(state))
    if dist.get_rank() == 0:
        torch.save(state, folder / "growth.pt")
    del state, model, optimizer, growth, kept
    dist.barrier()
    growth = begin(width, layers)[-1]
    growth.load_state_dict(torch.load(folder / "growth.pt", mmap=True))
    return {**found, "resumed": everything()}


def processes(number: int, size: str) -> list[dict[str, Any]]:
    """Run several processes, and return the bytes of each."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--size", size, "--folder", folder, "--processes", str(number), "--rank"]
        running = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(number)]
        said = [each.communicate()[0] for each in running]
        if any(each.returncode for each in running):
            raise SystemExit("a process has failed, see above")
    return [json.loads(each.splitlines()[-1]) for each in said]


def main() -> None:
    """Read the arguments and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2, 4], help="numbers of them (default: 1 2 4)")
    parser.add_argument("--size", default="256x4", help="width x layers (default: 256x4)")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    width, layers = map(int, arguments.size.split("x"))
    if arguments.rank is not None:
        torch.set_num_threads(1)
        meet = f"file://{arguments.folder}/meet"
        dist.init_process_group("gloo", meet, rank=arguments.rank, world_size=arguments.processes[0])
        print(json.dumps(measure(width, layers, arguments.folder)), flush=True)
        dist.barrier()
        dist.destroy_process_group()
        # before Python 3.14, a regular exit is aborted where a thread of gloo still holds a tensor
        os._exit(0)
    print(f"| processes | process | {' | '.join(COLUMNS.values())} |\n|{'---|' * (2 + len(COLUMNS))}", flush=True)
    for number in arguments.processes:
        found = processes(number, arguments.size)
        for name, each in {"the first": found[:1], "the largest other": found[1:]}.items():
            if each:
                cells = [f"{max(entry[key] for entry in each) / 2**20:.1f}" for key in COLUMNS]
                print(f"| {number} | {name} | {' | '.join(cells)} |", flush=True)
    print(f"\nMiB; {arguments.size}; seeds by site, with blueprint and blend: {found[0]['seeds']}")


if __name__ == "__main__":
    main()
