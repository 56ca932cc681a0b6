"""Static networks as contenders of an evaluation, of the sizes that one controller grew. E environments, S slots."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from esper.kasmina.lifecycle import dormant
from esper.kasmina.static import Absent
from esper.leyline.config import Config
from esper.leyline.stages import Stage
from esper.leyline.task import AnyTask
from esper.runs.baselines import Grown, train_baseline
from esper.simic.rewards import objective

Arrays = Mapping[str, NDArray[Any]]

_KEPT = ("stage", "blueprint", "blend", "alpha")


def grown_as_arrays(grown: Grown) -> Arrays:
    """Return the result of growth as arrays. `grown_from` is the inverse."""
    seeds = {f"seeds_{name}": getattr(grown.kept, name) for name in _KEPT}
    return {"instance": grown.instance, "params": grown.params, **seeds}


def grown_from(arrays: Arrays) -> Grown:
    """Return the result of growth from its arrays, the inverse of `grown_as_arrays`. Raises KeyError if an array is missing."""
    kept = dormant(*arrays["seeds_stage"].shape)
    kept = kept._replace(**{name: arrays[f"seeds_{name}"] for name in _KEPT})
    return Grown(arrays["instance"], kept, arrays["params"])


def static_figures(
    name: str, task: AnyTask, config: Config, grown: Grown, host_params: NDArray[np.int64]
) -> Arrays | Absent:
    """Train the static networks of one baseline, and return their figures (E,) by the names of `Figures`.

    config, grown: those of the population that grew. host_params: (E,) parameters of its hosts. The figure `kept` is nan for
    networks without seeds.
    """
    trained = train_baseline(name, task, config, grown, config.steps)
    if isinstance(trained, Absent):
        return trained
    value = trained.metric if config.reward.objective == "metric" else -trained.loss
    added = trained.params - host_params
    seeds = (grown.kept.stage == Stage.FOSSILIZED).sum(1).astype(np.float64)
    assert trained.seconds is not None
    return {
        "objective": objective(value, added, host_params, config.reward.rent, config.reward.rent_size),
        "metric": trained.metric,
        "added_params": added.astype(np.float64),
        "kept": seeds if name == "same-size" else np.full(len(seeds), np.nan),
        "seconds": np.full(len(seeds), trained.seconds / len(seeds)),
    }
