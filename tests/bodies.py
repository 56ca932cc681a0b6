"""Build bodies for tests: a slim host, any menu, seeds in any stage, parameters that are not 0."""

import numpy as np
import torch

from esper.kasmina.blueprints import BLUEPRINTS, drawn_with, get_blueprint
from esper.kasmina.lifecycle import dormant, edits
from esper.kasmina.stack.body import Body
from esper.leyline.lifecycle.slots import Kind
from esper.leyline.lifecycle.vocabulary import IN_BUDGET, Stage
from esper.tasks.hosts import MLP

ALL = tuple(name for kind, name in BLUEPRINTS if kind == Kind.VECTOR)


def planted_body(host, kind, rows, menu, dtype, **options):
    """Build a body of freshly drawn hosts of one kind of stream; row r is drawn with key r."""
    example = torch.zeros(2, *host.inputs, dtype=dtype)
    entries = [get_blueprint(name, kind) for name in menu]
    body = Body(lambda: host().to(dtype), entries, max(rows, 2), example, **options)
    for row in range(max(rows, 2)):
        with drawn_with(100 + row):
            body.plant_host([row], host(), example, host.outputs)
    return body


def make_body(rows=4, menu=ALL, *, width=8, hidden=(3, 5), inputs=6, dtype=torch.float32, plain=False, **options):
    """Build a body of freshly drawn hosts; row r is drawn with key r. `plain` hides that the host can run stacked."""
    factory = MLP(inputs=inputs, width=width, hidden=hidden, outputs=3)

    def host():
        made = factory()
        made.stacks = not plain
        return made.to(dtype)

    entries = [get_blueprint(name, Kind.VECTOR) for name in menu]
    body = Body(host, entries, max(rows, 2), torch.zeros(2, inputs, dtype=dtype), **options)
    for row in range(max(rows, 2)):
        with drawn_with(100 + row):
            body.plant_host([row], host(), torch.zeros(2, inputs, dtype=dtype), 3)
    return body


def set_seed(body, seeds, env, slot, blueprint, *, stage=Stage.HOLDING, blend=0, alpha=1.0, key=None, jolt=0.3):
    """Put one seed into a slot in a given stage, with parameters away from their birth. Returns the new Seeds."""
    after = type(seeds)(*(field.copy() for field in seeds))
    after.stage[env, slot], after.blueprint[env, slot], after.blend[env, slot] = stage, blueprint, blend
    after.alpha[env, slot] = alpha if stage in IN_BUDGET and stage not in (Stage.GERMINATED, Stage.TRAINING) else 0
    after.ramp[env, slot] = (0, alpha, 2)
    body.edit(edits(seeds, after), after, lambda e, s: key if key is not None else 1000 + 10 * e + s)
    if jolt:
        shake(body, after, env, slot, jolt, key=(key or 0) + 7 * env + slot)
    return after


@torch.no_grad()
def shake(body, seeds, env, slot, scale, *, key=0):
    """Move the true parameters of a seed away from 0, drawn from a key and not from the stack's padding."""
    seed = body.seed_module(seeds, env, slot)
    with drawn_with(key):
        for parameter in seed.parameters():
            parameter += scale * torch.randn(parameter.shape).to(parameter.dtype)
    at = slot, int(body.layout.form_of[slot, seeds.blueprint[env, slot]])
    row = int(np.flatnonzero(body.envs[at] == env)[0])
    body.stacks[at].write(row, seed)


def empty(body):
    """Return dormant seeds: none is planted anywhere."""
    return dormant(body.host.capacity, len(body.slots))
