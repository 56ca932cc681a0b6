"""The objective J: what a network is worth, less rent for the parameters that it added."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from esper.leyline.config import Config
from esper.leyline.view import Floats, Scores


def objective(
    metric: ArrayLike, added_params: ArrayLike, host_params: ArrayLike, rent: float, rent_size: int
) -> NDArray[np.float64]:
    """J = metric - rent * ln(1 + added_params / max(host_params, rent_size)).

    `metric` is accuracy, R2 or minus the loss; the three arrays broadcast. A network that added nothing pays nothing.
    Parameters count whole whatever their alpha, as a price by alpha would be evaded by holding at a small one. nan
    where the metric was not measured.
    """
    charged = np.maximum(host_params, rent_size)
    return np.asarray(metric, np.float64) - rent * np.log1p(growth_of(added_params, charged))


def growth_of(added_params: ArrayLike, host_params: ArrayLike) -> Floats:
    """Added parameters as a share of the host's; the arrays broadcast."""
    return np.asarray(np.asarray(added_params, np.float64) / np.asarray(host_params, np.float64))


def selection_score(scores: Scores, host_params: NDArray[np.int64], config: Config) -> Floats:
    """(E,) what `select` asks the best network to have: the metric, or J by `reward`."""
    if config.select == "metric":
        return scores.metric
    value = scores.metric if config.reward.objective == "metric" else -scores.loss
    return objective(value, scores.added_params, host_params, config.reward.rent, config.reward.rent_size)
