"""The results of early stopping for the summary of a run."""

from typing import Any

from esper.leyline.config import Config
from esper.leyline.text import counted
from esper.tolaria.engine import VectorizedEngine


def stopping_figures(engine: VectorizedEngine, config: Config, steps: int) -> dict[str, Any]:
    """Return the entries `best_step`, `stopped_early` and `stopped_because` of a summary.

    `best_step` is the number of steps after which each network had its best validation score; 0 is before the first
    step, and None stands for runs without early stopping.

    steps: number of steps of the run.
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
