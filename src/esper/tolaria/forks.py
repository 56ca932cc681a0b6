"""Copies of the rows of a population, in which candidates are tried for some steps. n copies, E environments, R rows.

A copy has the weights, buffers, optimizer state and seeds of its row, the row's instance, and therefore its order of data and the
initial weights of its next seeds: under the same decisions it becomes, bit for bit, what its row becomes. Copies are rows of a
population of their own, which is trained and read like any other, and end with the trial.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from esper.leyline.config import Config, EarlyStoppingConfig
from esper.leyline.errors import InputError
from esper.leyline.objective import objective
from esper.leyline.protocols import Proposed
from esper.leyline.view import Floats, take
from esper.tolaria.play import Until, play
from esper.tolaria.population import Indices

if TYPE_CHECKING:
    from esper.tolaria.engine import VectorizedEngine


def config_of_copies(config: Config, count: int) -> Config:
    """The config of a population of copies: without twins and without early stopping.

    Raises InputError with `gates.certify`, because a trial would read the fresh examples that the certificates are about.
    """
    if config.gates.certify is not None:
        raise InputError(
            f"gates.certify is {config.gates.certify:g}, but a trial would use up fresh examples of its rows; set it to null, or "
            "take the rule without trials"
        )
    return config.model_copy(update={"envs": count, "baselines": (), "early_stopping": EarlyStoppingConfig()})


def become(copies: "VectorizedEngine", origin: "VectorizedEngine", env: Indices) -> None:
    """Make each environment of a new engine a copy of one of another, env (n,), as that is between two steps."""
    rows, state = env[copies.population.environment], origin.state
    tree = origin.population.snapshot()
    copies.population.load({**tree, "body": _body_of_copies(tree["body"], rows)}, state.instance[rows], state.episode)
    seeds = take(state.seeds, rows)
    copies.population.body.arrange(seeds)
    copies.resume_at(state, rows)
    governor = copies.governor
    if origin.governor.history is not None:
        governor.history = take(origin.governor.history, rows)
        governor.keeper.take(seeds, np.ones(len(rows), bool), state.step)


def tried(copies: "VectorizedEngine", proposed: Proposed) -> tuple[Floats, Floats]:
    """Play the trial. Returns (n,) J on the probe split of the copies as they then compute, and (n,) their compute.

    A step of a copy is one unit of compute, and its seeds are further ones (`tolaria.compute`).
    """
    state, config = copies.state, copies.config.reward
    begin = state.step
    before = state.compute.seeds[: copies.config.envs].copy()
    play(copies, proposed.client, Until(lambda: state.step - begin >= proposed.steps))
    view, envs = copies.view(), slice(0, copies.config.envs)
    value = state.scores.metric if config.objective == "metric" else -state.scores.loss
    worth = objective(value[envs], view.added_params, view.host_params, config.rent, config.rent_size)
    return worth, state.step - begin + state.compute.seeds[envs] - before


def _body_of_copies(body: dict[str, Any], rows: NDArray[np.int64]) -> dict[str, Any]:
    """The state of a body (`Body.state`) whose row i is the row rows[i] (R,) of the given one."""
    seeds = []
    for entry in body["seeds"]:
        places = {env: place for place, env in enumerate(entry["envs"].tolist())}
        copies = np.array([copy for copy, row in enumerate(rows.tolist()) if row in places], np.int64)
        if len(copies):
            stack = _picked(entry["stack"], np.array([places[row] for row in rows[copies].tolist()]))
            seeds.append({**entry, "envs": copies, "stack": stack})
    return {
        "host": _picked(body["host"], rows),
        "widths": {name: array[rows] for name, array in body["widths"].items()},
        "seeds": seeds,
    }


def _picked(stack: dict[str, Any], rows: NDArray[np.int64]) -> dict[str, Any]:
    """The state of a stack whose row i is the row rows[i] of the given one."""
    columns = {
        name: column.index_select(0, torch.from_numpy(rows).to(column.device))
        for name, column in stack["columns"].items()
    }
    return {**stack, "columns": columns, "steps": stack["steps"][rows]}
