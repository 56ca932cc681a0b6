"""Run growth in several processes: a program that each of them runs, and that tests start and read. B examples."""

import os
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from esper.kasmina.blueprints import drawn_with
from esper.kasmina.graft.grafted import graft, planted_at, ungraft
from esper.kasmina.graft.planted import Mode
from esper.kasmina.graft.sharding import gather, in_parts
from esper.leyline.lifecycle.slots import Site, Vector
from esper.leyline.lifecycle.vocabulary import Op
from esper.leyline.messages import InputError
from esper.runs.live.growth import Growth
from loops import repeatable, stages
from populations import Script

EVERY, STEPS = 2, 26
LIFE = {  # the first seed is kept, the second removed
    (0, 0): (Op.GERMINATE, 0, 1, 1, 1, 3),
    (2, 0): (Op.ADVANCE, 0),
    (4, 0): (Op.FOSSILIZE, 0),
    (5, 0): (Op.GERMINATE, 1, 2, 0, 1, 3),
    (7, 0): (Op.ADVANCE, 1),
    (10, 0): (Op.PRUNE, 1, 0, 0, 1, 0),
}
SETTINGS = {
    "gates": {"permissive": True, "min_training_steps": 1, "min_holding_steps": 0},
    "lifecycle": {"proximal": 0.0, "embargo": 2},  # |c|^2 / |h|^2 of a batch is no mean over its parts
}


class Case(NamedTuple):
    """Describes one training.

    Attributes:
        shadow: whether seeds incubate in a pass of their own
        norm: whether the host has batch normalisation, whose buffers are those of a part of the batch
        parts: backward passes of a step, all but the last of them without synchronisation
        wrap: how the model is wrapped: 'once', 'again' behind every decision, with the seeds that act, 'static' once; or sharded
            by FSDP 'before' it was grafted or 'after', 'bare' without its layers by themselves, or as 'copies' on every process
        stops: the steps behind which the growth is saved
        start: the step behind which the training begins, from what was saved there; 0 for a new one
        spoilt: the step whose batch is not finite in the last process, 0 for none
        blueprint: of the seed that is kept: 0 is linear, and becomes part of its layer
        half: whether FSDP computes in bfloat16
        clip: whether gradients are clipped, by a norm that is summed in another order under FSDP
        looks: whether the model runs without a backward pass before each step of the growth
        average: whether there is a moving average of the model
        scaled: whether a GradScaler scales the loss
        frozen: whether the host is
        thrown: whether a pass is thrown away in front of those of each step, which then all synchronise
    """

    shadow: bool = False
    norm: bool = False
    parts: int = 1
    wrap: str = "once"
    stops: tuple[int, ...] = ()
    start: int = 0
    spoilt: int = 0
    blueprint: int = 1
    half: bool = False
    clip: bool = True
    looks: bool = False
    average: bool = False
    scaled: bool = False
    frozen: bool = False
    thrown: bool = False


STOPS = (3, 5, 7, 9, 24)
CASES = {
    "plain": Case(),
    "shadow": Case(shadow=True),
    "parts": Case(parts=3),
    "parts, wrapped again": Case(parts=3, wrap="again"),
    "norm": Case(norm=True, stops=STOPS),
    "norm, wrapped again": Case(norm=True, wrap="again"),
    "norm, static": Case(norm=True, wrap="static"),
    **{f"norm from {step}": Case(norm=True, start=step) for step in STOPS},
    "spoilt": Case(spoilt=18),
    "thrown": Case(thrown=True, parts=2),
}
SHARDED = {
    "before": Case(wrap="before"),
    "after": Case(wrap="after", stops=(9,)),
    "after from 9": Case(wrap="before", start=9),
    "shadow": Case(wrap="after", shadow=True, parts=2),
    "spoilt": Case(wrap="after", spoilt=18),
    "folded": Case(wrap="before", blueprint=0),
    "half": Case(wrap="after", half=True),
    "copies": Case(wrap="copies"),
    "average": Case(wrap="after", average=True, stops=(20,)),
    "average from 20": Case(wrap="after", average=True, start=20),
    "bare": Case(wrap="bare", clip=False, looks=True),
    "bare, folded": Case(wrap="bare", blueprint=0, clip=False, looks=True, scaled=True),
    "wrapped": Case(clip=False),
    "frozen": Case(wrap="bare", frozen=True),
    "thrown": Case(wrap="after", thrown=True, parts=2),
    "bare, thrown": Case(wrap="bare", clip=False, thrown=True, parts=2),
}


def host(case):
    with drawn_with(0):
        middle = nn.BatchNorm1d(6) if case.norm else nn.Identity()
        model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), middle, nn.Tanh(), nn.Linear(6, 3)).double()
    if case.wrap == "before" and dist.is_initialized():
        shard(model, case)
    return graft(model, {name: Site(name, name, name, Vector(6)) for name in ("0", "2")})


def shard(model, case):
    """Shard some layers by themselves, the others with the whole."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy, size = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if case.half else None), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    if case.wrap == "copies":
        mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("copies", "parts"))
    for layer in () if case.wrap == "bare" else (model[0], model[2]):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def refusals(rank, size):
    """Return the sentences with which a sharded model is refused."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel as Flat
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    line, square = (
        init_device_mesh("cpu", (size,)),
        init_device_mesh("cpu", (1, size), mesh_dim_names=("parts", "tensors")),
    )
    with drawn_with(1):
        probe = torch.randn(12, 4).double(), torch.arange(12) % 3
    names = "partly", "bare", "flat", "tensors", "both", "alone", "uneven", "whole", "averaged"
    models = {name: host(Case()) for name in names}
    averages = {name: torch.optim.swa_utils.AveragedModel(models[name]) for name in ("whole", "averaged")}
    fully_shard(models["partly"][0], mesh=line)
    fully_shard(ungraft(models["bare"]), mesh=line)
    models["flat"] = Flat(models["flat"], device_id=torch.device("cpu"))
    parallelize_module(models["tensors"], line, {"2": ColwiseParallel()})
    parallelize_module(models["both"], square["tensors"], {"2": ColwiseParallel()})
    for name, mesh in {"both": square["parts"], "alone": square["parts"], "uneven": line, "whole": line}.items():
        fully_shard(models[name], mesh=mesh)
    fully_shard(averages["averaged"].module, mesh=line)
    said = {}
    for name, model in models.items():
        probes = [probe] * (1 + rank if name == "uneven" else 1)
        optimizer = torch.optim.AdamW(model.parameters())
        try:
            Growth(model, optimizer, ema=averages.get(name), probe=probes, loss=F.cross_entropy, budget=9.0)
        except InputError as error:
            said[name] = str(error)
    whole = host(Case())
    fully_shard(whole, mesh=line)
    growth = Growth(whole, torch.optim.AdamW(whole.parameters()), probe=[probe], loss=F.cross_entropy, budget=9.0)
    asked = {
        "early": lambda: growth.gather(None),
        "empty": lambda: growth.load_state_dict({}),
        "other": lambda: growth.finish() and growth.gather(nn.Linear(2, 3) if rank == 0 else None),
        "grafted": lambda: growth.gather(host(Case()) if rank == 0 else None),
    }
    for name, ask in asked.items():
        try:
            ask()
        except InputError as error:
            said[name] = str(error)
    return said


def held(growth):
    """Count the bytes of the parameters, the moments and the snapshot in this process."""
    kept = growth.engine.governor.keeper
    moments = [*growth.population.groups.optimizer.state.values(), *kept.moments.values()]
    tensors = [
        *growth.model.parameters(),
        *kept.tensors.values(),
        *(each for entry in moments for each in entry.values()),
    ]
    own = [tensor.to_local() if in_parts(tensor) else tensor for tensor in tensors]
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in own}.values())


def wrap(model, case):
    """Wrap the model for the loop with the seeds that act, without those whose gradients the loop does not see."""
    if not dist.is_initialized() or case.wrap == "before":
        return model
    if case.wrap in ("after", "bare", "copies"):
        shard(model, case)
        return model
    ddp = nn.parallel.DistributedDataParallel
    seeds = {f"{site}.esper.": planted_at(model, site) for site in ("0", "2")}
    apart = tuple(first for first, seed in seeds.items() if seed is not None and seed.mode != Mode.ON)
    ddp._set_params_and_buffers_to_ignore_for_model(
        model, [name for name, _ in model.named_parameters() if name.startswith(apart)]
    )
    return ddp(model, static_graph=case.wrap == "static")


@contextmanager
def unsynchronised(wrapped):
    """Keep the gradients of a part of a step for the next part."""
    if isinstance(wrapped, nn.parallel.DistributedDataParallel):
        with wrapped.no_sync():
            yield
    else:
        wrapped.set_requires_gradient_sync(False)
        yield
        wrapped.set_requires_gradient_sync(True)


def train(name, rank=0, size=1, folder=None, cases=CASES):
    """Train a case in one process of several, and return what it comes to."""
    case = cases[name]
    model = host(case)
    average = torch.optim.swa_utils.AveragedModel(model) if case.average else None
    wrapped = wrap(model, case)
    if average is not None:
        wrap(average.module, case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with drawn_with(1):
        probe = torch.randn(12, 4).double(), torch.arange(12) % 3
    script = LIFE | {(0, 0): (Op.GERMINATE, 0, case.blueprint, 1 if case.blueprint else 0, 1, 3)}
    torch.manual_seed(rank)
    scaler = torch.amp.GradScaler("cpu", enabled=case.scaled)
    growth = Growth(
        wrapped,
        optimizer,
        ema=average,
        scaler=scaler if case.scaled else None,
        freeze="host" if case.frozen else "none",
        probe=[probe] if rank == 0 else [tuple(part[:4] for part in probe)],
        loss=F.cross_entropy,
        controller=Script(script if rank == 0 else {}),  # the first process decides
        every=EVERY,
        budget=9.0,
        settings=SETTINGS,
    )
    seen, memory = [], 0
    if case.start:
        growth.load_state_dict(torch.load(folder / f"{name}.pt"))
        memory = held(growth)
    for step in range(case.start, STEPS):
        for part in range(-case.thrown, case.parts):
            with drawn_with(100 + step + 1000 * part):
                x, y = torch.randn(12, 4).double(), torch.randint(0, 3, (12,))
            x, y = x[rank::size], y[rank::size]
            if step == case.spoilt and case.spoilt and rank == size - 1:
                x = x * torch.inf
            last = part == case.parts - 1
            with nullcontext() if last or size == 1 or case.thrown else unsynchronised(wrapped):
                scaler.scale(F.cross_entropy(wrapped(x), y) / case.parts).backward()
            if part < 0:
                optimizer.zero_grad()
        if case.clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if average is not None:
            average.update_parameters(model)
        if case.looks:
            with torch.no_grad():
                wrapped(x)
        if growth.step(*((x, y) if case.shadow else ())) and case.wrap == "again":
            wrapped = wrap(model, case)
            growth.population.ranks.share_gradients([])  # the wrapper does it alone
        seen.append(stages(growth))
        if step + 1 in case.stops:
            state = growth.state_dict()  # every process takes part
            if rank == 0 and folder is not None:
                torch.save(state, folder / f"{name} from {step + 1}.pt")
    summary = repeatable(growth)
    trained = {key: gather(value).clone() for key, value in model.state_dict().items()}
    if case.wrap in ("before", "after", "bare") and folder is not None:
        growth.save_adapter(folder / f"adapter of {name}")
        growth.save(folder / f"grown of {name}")
    if case.looks:
        with torch.no_grad():
            wrapped(x)
    network = growth.finish()
    mean = {} if average is None else average.module.state_dict()
    finished = {key: gather(value) for key, value in network.state_dict().items()}
    gathered = growth.gather(ungraft(host(Case(norm=case.norm))) if rank == 0 else None)
    finished |= {f"average.{key}": gather(value).clone() for key, value in mean.items()}
    kinds = [type(part).__name__ for part in network]
    return {
        "trained": trained,
        "finished": finished,
        "summary": summary,
        "stages": seen,
        "kinds": kinds,
        "gathered": gathered,
        "held": memory,
    }


def start(size, folder, names, table="CASES"):
    """Start processes that run some cases of a table, one after the other."""
    command = [sys.executable, __file__, str(size), str(folder), table, *names]
    return [
        subprocess.Popen([command[0], command[1], str(rank), *command[2:]], stderr=subprocess.PIPE, text=True)
        for rank in range(size)
    ]


def finished(running, size, folder):
    """Wait for the processes, and return what each of them found in every case."""
    for each in running:
        _, error = each.communicate(timeout=240)
        assert each.returncode == 0, error
    return [torch.load(folder / f"{size}-{rank}.pt", weights_only=False) for rank in range(size)]


if __name__ == "__main__":
    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet-{size}", rank=rank, world_size=size)
    found = {}
    cases = {"CASES": CASES, "SHARDED": SHARDED}[sys.argv[4]]
    for name in sys.argv[5:]:
        found[name] = train(name, rank, size, folder, cases) if name in cases else refusals(rank, size)
        dist.barrier()
    torch.save(found, folder / f"{size}-{rank}.pt")
    dist.destroy_process_group()
    # before Python 3.14, a regular exit is aborted where a thread of gloo still holds a tensor
    os._exit(0)
