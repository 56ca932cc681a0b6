"""What early stopping chose, as a summary says it."""

from typing import Any

from esper.leyline.config import Config
from esper.leyline.text import counted
from esper.tolaria.engine import VectorizedEngine


def stopping_figures(engine: VectorizedEngine, config: Config, steps: int) -> dict[str, Any]:
    """`best_step` of every host and grown network, whether the run `stopped_early`, and why, in one sentence.

    `best_step` counts the steps after which a network was at its best on its validation split, and 0 is the network before
    the first step; it is null where `early_stopping.enabled` is false. `steps` is how many the run took.
    """
    stopping = engine.stopping
    if stopping is None:
        return {"best_step": None, "stopped_early": False, "stopped_because": None}
    best = stopping.best_step[: engine.rows].tolist()
    early = stopping.over and steps < config.steps
    patience = config.early_stopping.patience
    why = (
        f"no validation score rose and no seed was fossilized for {counted(patience, 'step')} (early_stopping.patience)"
        if early
        else None
    )
    pair = {"host": best[config.envs :] if config.twin else None, "grown": best[: config.envs]}
    return {"best_step": pair, "stopped_early": early, "stopped_because": why}
