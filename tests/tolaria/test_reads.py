"""A step reads the device once, whatever the population is."""

import contextlib
import traceback

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from esper.leyline.actions import Op
from esper.nissa.hub import Hub
from esper.nissa.outputs import Memory
from esper.tolaria.engine import VectorizedEngine
from populations import Script, blobs, small_config

READING = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "equal",
    "_unique",
    "unique_dim",
    "unique_consecutive",
    "is_nonzero",
)


class Reads(TorchDispatchMode):
    """Counts what would make the host wait for the device, by the line of ours that asked for it."""

    def __init__(self):
        super().__init__()
        self.sites = []

    def note(self, what):
        line = next(
            (f for f in reversed(traceback.extract_stack()) if "/src/esper/" in f.filename or "/esper/" in f.filename),
            None,
        )
        self.sites.append((what, f"{line.filename.rsplit('/', 1)[-1]}:{line.name}" if line else "?"))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in READING:
            self.note(name)
        if name in ("_to_copy", "copy_"):
            device = (kwargs or {}).get("device") or (args[0].device if name == "copy_" else None)
            source = args[1].device if name == "copy_" else args[0].device
            if device is not None and torch.device(device).type != source.type:
                self.note("copy across devices")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def counted(monkeypatch):
    """Every read by an operator, and every one by a method that hands numbers to Python or NumPy."""
    mode = Reads()
    for name in ("numpy", "tolist", "cpu", "__array__", "item", "__bool__", "__float__", "__int__", "__index__"):
        original = getattr(torch.Tensor, name)

        def method(self, *args, _original=original, _name=name, **kwargs):
            mode.note(_name)
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, method)
    with mode:
        yield mode
    monkeypatch.undo()


def grown(envs, slots, live, **top):
    """An engine whose environments have `live` seeds each at the next decision, and a client that waits."""
    menu = ("bypass-mlp", "mlp-small", "bypass-linear")
    config = small_config(envs=envs, steps=40, lifecycle={"max_seeds": 8, "max_training": 8}, **top)
    memory = Memory()
    engine = VectorizedEngine(blobs(hidden=(3,) * slots, menu=menu), config, Hub([memory]))
    decisions = {}
    for env in range(envs):
        for seed in range(live):
            decisions[seed, env] = (Op.GERMINATE, seed, (env + seed) % 3, (env + seed) % 3, 2, 3)
            if seed % 2 == 0:
                decisions[seed + 3 + live, env] = (Op.ADVANCE, seed)
    client = Script(decisions)
    view = engine.reset()
    for _ in range(2 * live + 5):
        view, _ = engine.step(client.act(view))
    return engine, client, view


@pytest.mark.parametrize("envs", [1, 4, 16])
@pytest.mark.parametrize(("slots", "live"), [(1, 0), (2, 2), (6, 5)])
@pytest.mark.parametrize("incubation", ["shadow", "ste"])
def test_a_step_reads_the_device_once_for_any_population(monkeypatch, envs, slots, live, incubation):
    engine, client, view = grown(envs, slots, live)
    actions = client.act(view)
    with counted(monkeypatch) as reads:
        engine.step(actions)
    assert len(reads.sites) <= 2, reads.sites
    assert [site for _, site in reads.sites] == ["runtime.py:read_packet"]


def test_a_step_that_germinates_prunes_and_ends_the_episode_reads_no_more(monkeypatch):
    engine, client, view = grown(4, 3, 2)
    client.decisions = {
        (view.step, 0): (Op.PRUNE, 0, 0, 0, 0, 0),
        (view.step, 1): (Op.GERMINATE, 2, 1, 0, 2, 3),
        (view.step, 2): (Op.PRUNE, 0, 0, 0, 3, 0),
    }
    engine.config = engine.config.model_copy(update={"steps": view.step + 1})
    actions = client.act(view)
    with counted(monkeypatch) as reads:
        _, outcome = engine.step(actions)
    assert outcome.terminal
    assert outcome.accepted.all()
    assert [site for _, site in reads.sites] == ["runtime.py:read_packet"]


def test_the_counter_sees_a_read(monkeypatch):
    with counted(monkeypatch) as reads:
        torch.arange(4).nonzero()
        float(torch.ones(()))
    assert {"nonzero", "__float__"} <= {what for what, _ in reads.sites}
