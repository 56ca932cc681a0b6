"""Test a network that becomes wider in two processes over gloo: under DistributedDataParallel, or sharded by fully_shard."""

import functools
import os
import re
import runpy
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from tests.tolaria.test_widening_networks import GPT

import esper
from loops import equal

pytestmark = pytest.mark.campaign

STEPS = 60
RUNS = {
    "ratio": {"ratio": 0.2, "sizes": [1, 2, 4]},
    "probe": {"ratio": 0.2, "sizes": [1, 2, 4], "probed": True},
    "seconds": {"ratio": 1e-3, "sizes": [1, 2], "cost": "seconds"},
    "sharded": {"ratio": 0.2, "sizes": [1, 2, 4], "sharded": True},
    "fresh": {"ratio": 0.2, "sizes": [1, 2], "sharded": True, "probed": True, "fresh": 0.2},
}
STOPS = [15, 33]
"""Steps behind which the run with a ratio is resumed: in the warm-up behind a growth, and between two growths."""
PLAYED = {
    "two": [f"{name} 0" for name in RUNS],
    "one": ["ratio 0", "sharded 0"],
    "resumed": [*(f"ratio {step}" for step in STOPS), f"sharded {STOPS[0]}"],
}
"""What each group of processes plays in turn, because their start takes long: a name of a run, and the step to go on from."""

PROGRAM = textwrap.dedent(
    """
    import os
    import sys
    sys.path[:0] = [{tests!r}, {tests!r} + "/.."]
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    import esper
    from esper.kasmina.graft.sharding import gather
    from esper.leyline.messages import InputError
    from tests.tolaria.test_widening_networks import GPT

    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{{folder}}/meet-{{sys.argv[4]}}", rank=rank, world_size=size)

    def texts(step):
        return torch.randint(20, (4, 9), generator=torch.Generator().manual_seed(step))

    def play(name, start):
        torch.manual_seed(0)
        settings = dict({runs!r}[name])
        if settings.pop("probed", False):
            # the first process alone has a loss that falls, and decides
            falls = iter([1.0 / (step + 1) if rank == 0 else 1.0 for step in range(100)])
            settings["probe"] = [(texts(99)[:, :-1], texts(99)[:, 1:])]
            settings["loss"] = lambda output, y: next(falls) + 0 * output.square().mean((1, 2))
        if sharded := settings.pop("sharded", False) and size > 1:
            mesh = init_device_mesh("cpu", (size,))

            def shard(network):
                for block in network.h:
                    fully_shard(block, mesh=mesh)
                fully_shard(network, mesh=mesh)

            settings["shard"] = shard
        model = GPT().double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        growth = esper.AnytimeGrowth(
            model, optimizer, example=texts(rank)[:2, :-1], warmup=4, shared=size > 1,
            run=f"{{folder}}/run-{{name}}-{{size}}-{{start}}", overwrite=True, **settings
        )
        if start:
            saved = torch.load(f"{{folder}}/saved-{{name}}-{{start}}.pt")
            growth.load_state_dict(saved["growth"])
            if not sharded:
                model.load_state_dict(saved["model"])
                optimizer.load_state_dict(saved["optimizer"])

        def wrapped():
            if sharded:
                return growth.model
            return nn.parallel.DistributedDataParallel(model) if size > 1 else model

        network = wrapped()
        for step in range(start, {steps}):
            if step in {stops!r} and name in ("ratio", "sharded") and size > 1 and not start:
                parts = {{"growth": growth}} if sharded else {{"growth": growth, "model": model, "optimizer": optimizer}}
                states = {{key: part.state_dict() for key, part in parts.items()}}
                if rank == 0:
                    torch.save(states, f"{{folder}}/saved-{{name}}-{{step}}.pt")
            batch = texts(step)[rank::size]
            F.cross_entropy(network(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
            if growth.step(batch[:, 1:]):
                network = wrapped()
        growth.finish()
        refused = []
        if size > 1 and not sharded:
            probe = {{"probe": [(texts(99)[:, :-1], texts(99)[:, 1:])], "loss": lambda output, y: output.mean()}}
            for other, given in (network, {{}}), (model, {{"shared": True, **({{}} if rank else probe)}}):
                try:
                    esper.AnytimeGrowth(other, optimizer, example=texts(0)[:, :-1], **given)
                except InputError as error:
                    refused.append(str(error))
        state = {{key: gather(value) for key, value in growth.model.state_dict().items()}}
        return {{"model": state, "average": growth.snapshot().state_dict(), "growths": growth.growths,
                 "seen": growth.seen, "why": growth.why, "refused": refused}}

    found = {{played: play(played.split()[0], int(played.split()[1])) for played in sys.argv[5:]}}
    torch.save(found, f"{{folder}}/{{sys.argv[4]}}-{{rank}}.pt")
    if size > 1:
        dist.barrier()
        dist.destroy_process_group()
        os._exit(0)
    """
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def grow(folder):
    """Return a function that runs a group of processes once, one process here, and returns what each found in a run."""
    tests = str(Path(__file__).parents[1])
    program = folder / "program.py"
    program.write_text(PROGRAM.format(tests=tests, runs=RUNS, steps=STEPS, stops=STOPS))

    @functools.cache
    def played(group):
        size = 1 if group == "one" else 2
        lines = [[str(program), str(rank), str(size), str(folder), group, *PLAYED[group]] for rank in range(size)]
        if size == 1:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(sys, "argv", lines[0])
                patch.setattr(sys, "path", list(sys.path))
                runpy.run_path(str(program))
        else:
            running = [subprocess.Popen([sys.executable, *line], stderr=subprocess.PIPE, text=True) for line in lines]
            for each in running:
                _, error = each.communicate(timeout=300)
                assert each.returncode == 0, error
        return [torch.load(folder / f"{group}-{rank}.pt") for rank in range(size)]

    return lambda group, name, start=0: [each[f"{name} {start}"] for each in played(group)]


@pytest.mark.parametrize("way", ["ratio", "sharded"])
def test_two_processes_become_wider_as_one_does_on_all_the_data_and_are_resumed_to_the_same_bits(way, folder, grow):
    first, second = grow("two", way)
    assert equal(first, second)
    (alone,) = grow("one", way)
    steps = [each["step"] for each in first["growths"]]
    assert first["growths"] == alone["growths"]
    assert (first["seen"], first["why"]) == (alone["seen"], "sizes ends with 4 times the first widths")
    assert steps[0] < STOPS[0] <= steps[0] + 4 < STOPS[1] < steps[1]
    for part in ("model", "average"):
        for name, value in first[part].items():
            assert torch.allclose(value, alone[part][name], rtol=1e-7, atol=1e-9), name
    stops = STOPS if way == "ratio" else STOPS[:1]
    for start in stops:
        assert equal(grow("resumed", way, start), [first, second])
    summaries = [esper.open_run(folder / f"run-{way}-{name}").summary for name in ("1-0", "2-0", f"2-{stops[-1]}")]
    assert [each["growths"] for each in summaries] == [alone["growths"]] * 3
    GPT(width=32).load_state_dict(first["average"])  # plain, of its own class
    if way == "sharded":
        return
    assert "give its .module with shared=True, and wrap that anew" in first["refused"][0]
    said = "the processes differ in probe: True in the first, False in another; give all the same"
    assert [said in each["refused"][1] for each in (first, second)] == [True, True]


@pytest.mark.parametrize("name", ["probe", "seconds", "fresh"])
def test_the_first_process_decides_where_each_measures_something_else(name, grow):
    first, second = grow("two", name)
    assert len(first["growths"]) == len(RUNS[name]["sizes"]) - 1
    assert equal(first, second)


def started_by_hand(size):
    """Return, for each process, the variables that torchrun gives it: a start of torchrun takes as long as one of a process."""
    with socket.create_server(("localhost", 0)) as free:
        port = str(free.getsockname()[1])
    known = {"WORLD_SIZE": str(size), "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    return [os.environ | known | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]


def test_the_program_of_the_page_widens_a_sharded_network_as_one_process_does(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "sharding.md").read_text(encoding="utf-8")
    (program,) = re.findall(r'^```python title="wider.py"\n(.*?)^```', page, re.DOTALL | re.MULTILINE)
    (command,) = re.findall(r"^torchrun (.* wider.py)  #", page, re.MULTILINE)
    (printed,) = re.findall(r"^torchrun .* wider.py  # (.*)$", page, re.MULTILINE)
    (tmp_path / "wider.py").write_text(program)
    by_torchrun = [sys.executable, "-m", "torch.distributed.run", *command.split()], [os.environ]
    networks = []
    for arguments, environments in (  # the second run goes on from the middle of the first one
        by_torchrun,
        *(([sys.executable, "wider.py"], started_by_hand(size)) for size in (2, 1)),
    ):
        running = [
            subprocess.Popen(
                arguments, cwd=tmp_path, env=each, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            for each in environments
        ]
        done = [each.communicate(timeout=300) for each in running]
        assert not any(each.returncode for each in running), done
        assert done[0][0].startswith(printed.removesuffix("..."))
        networks.append(torch.load(tmp_path / "wider.pt"))
        (tmp_path / "growth.pt").unlink() if len(networks) == 2 else None
    assert equal(networks[0], networks[1])
    for name, value in networks[0].items():
        assert torch.allclose(value, networks[2][name], rtol=1e-6, atol=1e-7), name
