"""A network that grows under DistributedDataParallel, in two and three processes over gloo."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

PROGRAM = textwrap.dedent(
    """
    import sys
    sys.path.insert(0, {tests!r})
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch import nn
    from esper.kasmina.blueprints import drawn_with
    from esper.kasmina.grafted import graft
    from esper.leyline.actions import Op
    from esper.leyline.sites import Site
    from esper.leyline.streams import Vector
    from esper.runs.growth import Growth
    from populations import Script

    rank, size, folder, batch = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4] == "shadow"
    torch.set_num_threads(1)
    with drawn_with(0):
        model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        probe = torch.randn(12, 4).double(), torch.arange(12) % 3
    graft(model, {{name: Site(name, name, name, Vector(6)) for name in ("0", "2")}})
    wrapped = model
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{{folder}}/meet", rank=rank, world_size=size)
        wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    life = {{
        (0, 0): (Op.GERMINATE, 0, 1, 1, 1, 3), (2, 0): (Op.ADVANCE, 0), (4, 0): (Op.FOSSILIZE, 0),
        (5, 0): (Op.GERMINATE, 1, 2, 0, 1, 3), (7, 0): (Op.ADVANCE, 1), (10, 0): (Op.PRUNE, 1, 0, 0, 1, 0),
    }}
    torch.manual_seed(rank)
    script = Script(life if rank == 0 else {{}})  # the first process decides
    growth = Growth(
        wrapped, optimizer, probe=[probe] if rank == 0 else [tuple(part[:4] for part in probe)], loss=F.cross_entropy,
        controller=script, every=2, budget=9.0,
        settings={{"gates": {{"permissive": True, "min_training_steps": 1, "min_holding_steps": 0}},
                  "lifecycle": {{"proximal": 0.0}}}},  # |c|^2 / |h|^2 of a batch is no mean over its parts
    )
    for step in range(26):
        with drawn_with(100 + step):
            x, y = torch.randn(12, 4).double(), torch.randint(0, 3, (12,))
        x, y = x[rank::size], y[rank::size]
        F.cross_entropy(wrapped(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        growth.step(*((x, y) if batch else ()))
    summary = growth.summary()
    assert [entry["site"] for entry in summary["keeps"]] == ["0"], summary
    assert [entry["site"] for entry in summary["prunes"]] == ["2"], summary
    network = growth.finish()
    torch.save(network.state_dict(), f"{{folder}}/{{size}}-{{rank}}.pt")
    if size > 1:
        dist.destroy_process_group()
    """
).format(tests=str(Path(__file__).parents[1]))


def grow(folder, size, way):
    """The grown network of every process."""
    command = [sys.executable, "-c", PROGRAM]
    running = [
        subprocess.Popen([*command, str(rank), str(size), str(folder), way], stderr=subprocess.PIPE, text=True)
        for rank in range(size)
    ]
    for each in running:
        _, error = each.communicate(timeout=120)
        assert each.returncode == 0, error
    return [torch.load(folder / f"{size}-{rank}.pt") for rank in range(size)]


@pytest.mark.parametrize(("size", "way"), [(2, "straight-through"), (3, "shadow")])
def test_all_processes_grow_alike_and_as_one_process_on_all_the_data(tmp_path, size, way):
    (alone,), several = grow(tmp_path, 1, way), grow(tmp_path, size, way)
    for each in several:
        assert each.keys() == several[0].keys() == alone.keys()
        assert all(torch.equal(value, several[0][name]) for name, value in each.items())
    assert any(".esper." in name for name in alone)
    for name, value in several[0].items():
        assert torch.allclose(value, alone[name], rtol=1e-9, atol=1e-11), name
