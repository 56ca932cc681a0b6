"""Define a package that adds a task, a controller, an output and a command to Esper (`esper docs plugins`)."""

from collections import Counter
from typing import Annotated

import numpy as np
import typer

import esper


def rings():
    """Make a task of two rings of points, one inside the other, for a small MLP."""
    draw = np.random.default_rng(0)
    angle, inner = draw.uniform(0, 2 * np.pi, 600), draw.integers(0, 2, 600)
    radius = np.where(inner, 1.0, 2.0) + draw.normal(0, 0.2, 600)
    points = np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1).astype("float32")
    return esper.task("rings", points, inner, host=esper.mlp(2, classes=2, width=8))


class FirstStep(esper.Controller):
    """Plants one blueprint in the first slot in the first step, and waits from then on."""

    def __init__(self, blueprint):
        self.blueprint = blueprint

    def act(self, view):
        actions = esper.Actions.wait(len(view.host_params))
        names = [each.name for each in view.space.blueprints]
        if view.step == 0 and self.blueprint in names:
            actions.op[:] = esper.Op.GERMINATE
            actions.blueprint[:] = names.index(self.blueprint)
            actions.tempo[:] = np.argmax(np.array(view.space.tempos) > 0)
        return actions


def first_step(argument):
    """Return the controller `first-step:BLUEPRINT`; the argument is empty where only the name is given."""
    blueprint = argument or "bypass-mlp"
    return esper.ControllerSpec(
        name=f"first-step:{blueprint}",
        make=lambda config: FirstStep(blueprint),
        summary="plants one blueprint in the first step; first-step:BLUEPRINT says which",
    )


class Kinds:
    """Counts the rows of each kind that a run writes, into kinds.txt beside the run folder."""

    def __init__(self, folder):
        self.path, self.counts = folder.parent / "kinds.txt", Counter()

    def write(self, row):
        self.counts[type(row).__name__] += 1

    def close(self):
        self.path.write_text("".join(f"{name}: {count}\n" for name, count in sorted(self.counts.items())))


def picture(rows: Annotated[int, typer.Option(help="Rows of the picture.")] = 12):
    """Draw the rings with letters."""
    task = rings()
    x, y = task.train.x.numpy(), task.train.y.numpy()
    grid = [[" "] * (2 * rows) for _ in range(rows)]
    for (a, b), inner in zip(x, y, strict=True):
        row, column = int((b + 3) / 6 * rows), int((a + 3) / 6 * 2 * rows)
        if 0 <= row < rows and 0 <= column < 2 * rows:
            grid[row][column] = "o" if inner else "."
    typer.echo("\n".join(map("".join, grid)))
