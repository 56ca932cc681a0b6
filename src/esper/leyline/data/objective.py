"""Compute the objective J: the metric of a network less rent for its added parameters."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from esper.leyline.config.tree import Config, RewardConfig
from esper.leyline.lifecycle.view import Floats, Scores


def objective(
    metric: ArrayLike, added_params: ArrayLike, host_params: ArrayLike, rent: float, rent_size: int
) -> NDArray[np.float64]:
    """Compute J = metric - rent * ln(1 + added_params / max(host_params, rent_size)).

    `metric` is accuracy, R2 or minus the loss; the three arrays broadcast. A network without added parameters pays no rent.
    All parameters of a seed count, whatever its alpha: if rent rose with alpha, a controller could evade it by holding seeds at
    a small alpha. nan where the metric is nan.
    """
    charged = np.maximum(host_params, rent_size)
    return np.asarray(metric, np.float64) - rent * np.log1p(growth_of(added_params, charged))


def growth_of(added_params: ArrayLike, host_params: ArrayLike) -> Floats:
    """Return added parameters as a share of the host's; the arrays broadcast."""
    return np.asarray(np.asarray(added_params, np.float64) / np.asarray(host_params, np.float64))


def objective_of(scores: Scores, host_params: ArrayLike, reward: RewardConfig) -> Floats:
    """Return J (E,) of networks from their scores on a split, without compute."""
    value = scores.metric if reward.objective == "metric" else -scores.loss
    return objective(value, scores.added_params, host_params, reward.rent, reward.rent_size)


def selection_score(scores: Scores, host_params: NDArray[np.int64], config: Config) -> Floats:
    """Return (E,) the score that `config.select` names: the metric, or J with the settings of `config.reward`."""
    return scores.metric if config.select == "metric" else objective_of(scores, host_params, config.reward)
