"""A network that becomes wider in two processes over gloo: under DistributedDataParallel, or sharded by fully_shard."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.tolaria.test_widening_networks import GPT, TOKENS
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import esper
from esper.kasmina.blueprints import count
from esper.leyline.errors import GrowthWarning, InputError
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
    from esper.leyline.errors import InputError
    from tests.tolaria.test_widening_networks import GPT

    rank, size, folder, name, start = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5])
    torch.set_num_threads(1)
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{{folder}}/meet-{{name}}-{{start}}", rank=rank, world_size=size)

    def texts(step):
        return torch.randint(20, (4, 9), generator=torch.Generator().manual_seed(step))

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
        model, optimizer, example=texts(rank)[:2, :-1], warmup=4, shared=size > 1, run=f"{{folder}}/run-{{size}}-{{start}}",
        overwrite=True, **settings
    )
    if start:
        saved = torch.load(f"{{folder}}/saved-{{start}}.pt")
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
                torch.save(states, f"{{folder}}/saved-{{step}}.pt")
        batch = texts(step)[rank::size]
        F.cross_entropy(network(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if growth.step(batch[:, 1:]):
            network = wrapped()
    growth.finish()
    refused = []
    if size > 1 and not sharded:
        probe = {{}} if rank else {{"probe": [(texts(99)[:, :-1], texts(99)[:, 1:])], "loss": lambda output, y: output.mean()}}
        for other, given in (network, {{}}), (model, {{"shared": True, **probe}}):
            try:
                esper.AnytimeGrowth(other, optimizer, example=texts(0)[:, :-1], **given)
            except InputError as error:
                refused.append(str(error))
    state = {{key: gather(value) for key, value in growth.model.state_dict().items()}}
    found = {{"model": state, "average": growth.snapshot().state_dict(), "growths": growth.growths,
              "seen": growth.seen, "why": growth.why, "refused": refused}}
    torch.save(found, f"{{folder}}/{{name}}-{{size}}-{{start}}-{{rank}}.pt")
    if size > 1:
        dist.barrier()
        dist.destroy_process_group()
        os._exit(0)
    """
)


def grow(folder, name, size, start=0):
    """What every process found."""
    tests = str(Path(__file__).parents[1])
    program = folder / "program.py"
    program.write_text(PROGRAM.format(tests=tests, runs=RUNS, steps=STEPS, stops=STOPS))
    command = [sys.executable, str(program)]
    running = [
        subprocess.Popen(
            [*command, str(rank), str(size), str(folder), name, str(start)], stderr=subprocess.PIPE, text=True
        )
        for rank in range(size)
    ]
    for each in running:
        _, error = each.communicate(timeout=300)
        assert each.returncode == 0, error
    return [torch.load(folder / f"{name}-{size}-{start}-{rank}.pt") for rank in range(size)]


@pytest.mark.parametrize("way", ["ratio", "sharded"])
def test_two_processes_become_wider_as_one_does_on_all_the_data_and_are_resumed_to_the_same_bits(way, tmp_path):
    first, second = grow(tmp_path, way, 2)
    assert equal(first, second)
    (alone,) = grow(tmp_path, way, 1)
    steps = [each["step"] for each in first["growths"]]
    assert first["growths"] == alone["growths"]
    assert (first["seen"], first["why"]) == (alone["seen"], "sizes ends with 4 times the first widths")
    assert steps[0] < STOPS[0] <= steps[0] + 4 < STOPS[1] < steps[1]
    for part in ("model", "average"):
        for name, value in first[part].items():
            assert torch.allclose(value, alone[part][name], rtol=1e-7, atol=1e-9), name
    stops = STOPS if way == "ratio" else STOPS[:1]
    for start in stops:
        assert equal(grow(tmp_path, way, 2, start), [first, second])
    summaries = [esper.open_run(tmp_path / f"run-{name}").summary for name in ("1-0", "2-0", f"2-{stops[-1]}")]
    assert [each["growths"] for each in summaries] == [alone["growths"]] * 3
    GPT(width=32).load_state_dict(first["average"])  # plain, of its own class
    if way == "sharded":
        return
    assert "give its .module with shared=True, and wrap that anew" in first["refused"][0]
    said = "the processes differ in probe: True in the first, False in another; give all the same"
    assert [said in each["refused"][1] for each in (first, second)] == [True, True]


@pytest.mark.parametrize("name", ["probe", "seconds", "fresh"])
def test_the_first_process_decides_where_each_measures_something_else(name, tmp_path):
    first, second = grow(tmp_path, name, 2)
    assert len(first["growths"]) == len(RUNS[name]["sizes"]) - 1
    assert equal(first, second)


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def shard(network):
    for block in network.h:
        fully_shard(block, mesh=init_device_mesh("cpu", (1,)))
    fully_shard(network, mesh=init_device_mesh("cpu", (1,)))


def loop(stop, given=None, state=None, spoilt=None, **settings):
    """The growth of a small network that is trained up to a step, its optimizer, and its state behind step 15."""
    torch.manual_seed(0)
    model = GPT().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    settings = {"sizes": [1, 2], "ratio": 0.2, "warmup": 4, "fresh": 0.2, **settings}
    settings |= {"probe": [(TOKENS, TOKENS)], "loss": lambda output, y: 1 + 0 * output.sum(-1)}
    growth = esper.AnytimeGrowth(model, optimizer, example=TOKENS, shard=given, **settings)
    if state is not None:
        growth.load_state_dict(state)
    kept = None
    for step in range(growth.steps, stop):
        texts = torch.randint(20, (4, 9), generator=torch.Generator().manual_seed(step))
        nn.functional.cross_entropy(growth.model(texts[:, :-1]).flatten(0, 1), texts[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == spoilt:
            with torch.no_grad():
                next(growth.model.parameters()).mul_(torch.nan)
        growth.step(texts[:, 1:])
        with torch.no_grad():  # an evaluation leaves some parameters whole
            growth.model(texts[:, :-1])
            growth.average(texts[:, :-1])
        kept = growth.state_dict() if growth.steps == 15 else kept
    return growth, optimizer, kept


def test_a_sharded_network_of_one_process_is_a_plain_one_bit_for_bit_and_each_goes_on_from_the_state_of_the_other(
    group,
):
    plain, optimizer, state = loop(30)
    sharded, _, whole = loop(30, shard)
    assert plain.growths == sharded.growths != []
    assert plain.growths[0]["step"] < 15
    assert repr(sharded) == repr(plain)
    states = [each.state_dict() for each in (plain, sharded, loop(30, shard, whole)[0], loop(30, None, whole)[0])]
    assert all(equal(states[0][name], each[name]) for each in states for name in ("average", "before"))
    assert all(equal(states[1][name], states[2][name]) for name in ("model", "optimizers"))
    assert type(sharded.snapshot()) is GPT
    assert equal(sharded.snapshot(), plain.snapshot())
    assert count(sharded.snapshot()) < sharded.parameters  # that of before the growth, as the wider one is not better
    with pytest.raises(InputError, match="the state is of a run without shard=, and holds no network"):
        loop(30, shard, state)
    moved = {**states[0], "model": plain.model.state_dict(), "optimizers": [optimizer.state_dict()]}
    ends = [loop(32, shard, each)[0].state_dict() for each in (moved, states[1])]
    assert all(equal(ends[0][name], ends[1][name]) for name in ("average", "before", "model", "optimizers"))


def test_a_sharded_network_that_is_not_finite_is_restored_and_one_that_was_outgrown_refuses_to_run(group):
    with pytest.warns(GrowthWarning, match="are those of step 13 again"):
        growth, *_ = loop(100, shard, spoilt=98)
    assert growth.rollbacks == [{"step": 100, "restored": 13}]
    assert all(bool(each.isfinite().all()) for each in growth.snapshot().parameters())
    torch.manual_seed(0)
    model = GPT().double()
    growth = esper.AnytimeGrowth(
        model, torch.optim.SGD(model.parameters(), 0.1), example=TOKENS, shard=shard, ratio=1e-3
    )
    assert growth.model is model
    assert growth.step(100)
    with pytest.raises(InputError, match=r"this GPT is trained no more, .*; run growth\.model"):
        model(TOKENS)


@pytest.mark.parametrize(
    ("given", "settings", "said"),
    [
        (True, {}, "shard is a bool; give a function that calls fully_shard"),
        (shard, {"cost": "seconds"}, "cost='seconds' times whole networks"),
        (lambda network: None, {}, "shard leaves the GPT whole, or returns another module"),
        (lambda network: nn.Sequential(fully_shard(network)), {}, "shard leaves the .*, or returns another module"),
        (lambda network: fully_shard(network.h[0]) and None, {}, "call fully_shard on the whole model too"),
        (lambda network: [fully_shard(network.lm_head), fully_shard(network)][-1], {}, "takes tied parameters apart"),
    ],
)
def test_what_cannot_be_sharded_is_refused_in_a_sentence(given, settings, said, group):
    with pytest.raises(InputError, match=said):
        loop(1, given, **settings)


def test_a_network_in_parts_is_refused_by_name_before_and_after_the_growth_is_made(group):
    x, models = torch.randn(2, 4), [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)) for _ in range(2)]
    optimizer = torch.optim.SGD(models[0].parameters(), 0.1)
    growth = esper.AnytimeGrowth(models[0], optimizer, example=x, shared=True)
    for model in models:
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(InputError, match="Sequential is sharded by fully_shard, and parts of parameters cannot"):
        esper.AnytimeGrowth(models[1], torch.optim.SGD(models[1].parameters(), 0.1), example=x)
    with pytest.raises(InputError, match="is sharded by fully_shard"):
        growth.step(4)
    assert (growth.steps, growth.seen) == (0, 0)


def test_the_program_of_the_page_widens_a_sharded_network_as_one_process_does(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "sharding.md").read_text(encoding="utf-8")
    (program,) = re.findall(r'^```python title="wider.py"\n(.*?)^```', page, re.DOTALL | re.MULTILINE)
    (printed,) = re.findall(r"^torchrun .* wider.py  # (.*)$", page, re.MULTILINE)
    (tmp_path / "wider.py").write_text(program)
    networks = []
    for size in ("2", "2", "1"):  # the second run goes on from the middle of the first one
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", size, "wider.py"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(printed.removesuffix("..."))
        networks.append(torch.load(tmp_path / "wider.pt"))
        (tmp_path / "growth.pt").unlink() if len(networks) == 2 else None
    assert equal(networks[0], networks[1])
    for name, value in networks[0].items():
        assert torch.allclose(value, networks[2][name], rtol=1e-6, atol=1e-7), name
