"""Test seats under DistributedDataParallel, which averages their gradients itself: two processes over gloo."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.campaign

PROGRAM = textwrap.dedent(
    """
    import os
    import sys
    sys.path.insert(0, {tests!r})
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch import nn
    import esper
    from esper.kasmina.blueprints import drawn_with
    from esper.leyline.lifecycle.vocabulary import Op
    from populations import Script

    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    with drawn_with(0):
        model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        probe = torch.randn(12, 4).double(), torch.arange(12) % 3
    esper.graft(model, {{name: esper.Site(name, name, name, esper.Vector(6)) for name in ("0", "2")}})
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{{folder}}/meet", rank=rank, world_size=size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    life = {{
        (1, 0): (Op.GERMINATE, 0, 1, 1, 1, 3), (3, 0): (Op.ADVANCE, 0), (5, 0): (Op.FOSSILIZE, 0),
        (6, 0): (Op.GERMINATE, 1, 2, 0, 1, 3), (8, 0): (Op.ADVANCE, 1), (10, 0): (Op.PRUNE, 1),
    }}
    growth = esper.Growth(
        model, optimizer, probe=[probe], loss=F.cross_entropy, every=2, budget=9.0,
        controller=Script(life if rank == 0 else {{}}), mode="reserve" if size > 1 else "live",
        settings={{"gates": {{"permissive": True, "min_training_steps": 1, "min_holding_steps": 0}},
                  "lifecycle": {{"proximal": 0.0}}}},
    )
    wrapped = nn.parallel.DistributedDataParallel(model) if size > 1 else model
    for step in range(28):
        with drawn_with(100 + step):
            x, y = torch.randn(12, 4).double(), torch.randint(0, 3, (12,))
        F.cross_entropy(wrapped(x[rank::size]), y[rank::size]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        growth.step()
    assert [len(growth.summary()[name]) for name in ("keeps", "prunes")] == [1, 1]
    torch.save(growth.finish().state_dict(), f"{{folder}}/{{size}}-{{rank}}.pt")
    if size > 1:
        dist.barrier()
        dist.destroy_process_group()
        os._exit(0)
    """
).format(tests=str(Path(__file__).parents[1]))


def grow(folder, size):
    """Grow in some processes, or in this one, and return the network of each."""
    lines = [["program", str(rank), str(size), str(folder)] for rank in range(size)]
    if size == 1:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", lines[0])
            patch.setattr(sys, "path", list(sys.path))
            exec(compile(PROGRAM, "program", "exec"), {})
    else:
        command = [sys.executable, "-c", PROGRAM]
        running = [subprocess.Popen([*command, *line[1:]], stderr=subprocess.PIPE, text=True) for line in lines]
        for each in running:
            _, error = each.communicate(timeout=300)
            assert each.returncode == 0, error
    return [torch.load(folder / f"{size}-{rank}.pt") for rank in range(size)]


def test_seats_in_two_processes_grow_as_seeds_that_are_added_in_one(tmp_path):
    (alone,), several = grow(tmp_path, 1), grow(tmp_path, 2)
    for each in several:
        assert each.keys() == several[0].keys() == alone.keys()
        assert all(torch.equal(value, several[0][name]) for name, value in each.items())
    assert any(".esper." in name for name in alone)
    for name, value in several[0].items():
        assert torch.allclose(value, alone[name], rtol=1e-9, atol=1e-11), name
