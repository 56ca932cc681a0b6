"""Make small populations for tests: a task that trains in milliseconds, and a client that replays what it is told."""

import numpy as np
import torch
from torch.utils.data import Dataset

import esper
from esper.leyline.config.tree import build_config
from esper.leyline.lifecycle.vocabulary import Actions, Op
from esper.leyline.protocols import Controller
from esper.nissa.hub import Hub
from esper.tasks.hosts import MLP
from esper.tasks.own.custom import task_from
from esper.tolaria.engine import Decision, Step, VectorizedEngine
from esper.tolaria.journal import Journal

MENU = ("bypass-linear", "bypass-mlp", "mlp-small")


def blobs(*, dtype=torch.float32, examples=160, classes=3, hidden=(3, 5), menu=MENU, stacks=True, frozen=False):
    """Make a task of noisy clusters, and a slim host with two slots."""
    generator = torch.Generator().manual_seed(5)
    y = torch.arange(examples) % classes
    centres = torch.randn(classes, 6, generator=generator, dtype=torch.float64)
    x = centres[y] + 0.8 * torch.randn(examples, 6, generator=generator, dtype=torch.float64)
    factory = MLP(inputs=6, width=8, hidden=hidden, outputs=classes)

    def host():
        made = factory()
        made.stacks = stacks
        return made.to(dtype).requires_grad_(not frozen)

    return task_from("blobs", x.to(dtype), y, host=host, classes=classes, menu=menu)


def small_config(*layers, **top):
    """Make a config of short steps."""
    base = {"envs": 3, "steps": 8, "baselines": [], "data": {"batch_size": 12, "batches_per_step": 3}}
    return build_config(
        base,
        {
            "lifecycle": {"max_training_seeds": 2},
            "gates": {"permissive": True, "min_training_steps": 1, "min_holding_steps": 1},
        },
        *layers,
        top,
    )


class Memory:
    """Keeps the rows of the events in a list, as a sink."""

    def __init__(self):
        self.rows = []

    def write(self, row):
        self.rows.append(row)

    def close(self):
        pass


class Journalled(VectorizedEngine):
    """Runs as an engine, and keeps the rows of all its steps."""

    def __init__(self, task, config, level="step"):
        super().__init__(task, config)
        memory = Memory()
        self.rows_of_events = memory.rows
        self.journal = Journal(self, Hub([memory], level))

    def step(self, actions, reasons=None, further=None):
        before = self.view()
        self.journal.going(before)
        view, outcome = super().step(actions, reasons, further)
        self.journal.stepped(Step(before, outcome, view, 0.0, 0.0, Decision(actions, reasons)))
        return view, outcome


class Script(Controller):
    """Plays decisions by (step, env): {(2, 0): (op, slot, blueprint, blend, tempo index, target index)}; WAIT elsewhere."""

    def __init__(self, decisions):
        self.decisions, self.outcomes, self.views = decisions, [], []

    def act(self, view):
        self.views.append(view)
        heads = np.zeros((6, len(view.host_params)), np.int64)
        for (step, env), decision in self.decisions.items():
            if step == view.step and env < heads.shape[1]:
                heads[: len(decision), env] = decision
        return Actions(*heads)

    def store(self, outcome):
        self.outcomes.append(outcome)


GROW = {  # a whole life of environment 1 in slot 0, and of environment 2 in slot 1, pruned slowly
    (0, 1): (Op.GERMINATE, 0, 1, 0, 2, 3),
    (2, 1): (Op.ADVANCE, 0),
    (5, 1): (Op.FOSSILIZE, 0),
    (0, 2): (Op.GERMINATE, 1, 2, 2, 1, 3),
    (2, 2): (Op.ADVANCE, 1),
    (4, 2): (Op.PRUNE, 1, 0, 0, 2, 0),
}
EARLY = {at: decision for at, decision in GROW.items() if at[0] < 3}  # births, and seeds that blend in


def trajectory(config, decisions=GROW, task=None, env=0):
    """Play a run; return the engine, the client, and a row's parameters, moments and measurements after every step."""
    engine = VectorizedEngine(task or blobs(), config)
    view, client, seen = engine.reset(), Script(decisions), []
    while view.step < config.steps:
        view, outcome = engine.step(client.act(view))
        client.store(outcome)
        host = engine.population.body.host
        seen.append([column[env].clone() for name, column in host.columns.items() if name != "gradient"])
        measured = view.measurements
        seen[-1] += [torch.tensor(field[env]) for field in (measured.metric, measured.loss, measured.participation)]
        seen[-1] += [torch.tensor(measured.contribution.mean[env]), torch.tensor(measured.gain.se[env])]
    return engine, client, seen


def assert_same(first, second):
    for a, b in zip(first, second, strict=True):
        for x, y in zip(a, b, strict=True):
            assert torch.equal(x.nan_to_num(-1), y.nan_to_num(-1))


GROW_ZERO = {(step, 0): decision for (step, env), decision in GROW.items() if env == 1}


class Lost(Dataset):
    """Holds examples that cannot be read any more once `left` of them were read."""

    def __init__(self):
        self.x = torch.randn(300, 6, generator=torch.Generator().manual_seed(0))
        self.left = None

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise OSError("the disk with the examples is gone")
        return self.x[index], self.x[index, :3].argmax().item()


def streamed(data):
    return esper.task("mine", data, classes=3, host=MLP(inputs=6, width=8, hidden=(3, 5), outputs=3), stream=True)
