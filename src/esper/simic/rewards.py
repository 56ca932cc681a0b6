"""The objective: what a grown network is worth."""

import numpy as np
from numpy.typing import ArrayLike, NDArray


def objective(metric: ArrayLike, added_params: ArrayLike, host_params: ArrayLike, rent: float) -> NDArray[np.float64]:
    """J = metric - rent * ln(1 + added_params / host_params).

    `metric` is accuracy, R2 or minus the loss; the three arrays broadcast. A network that added nothing pays nothing.
    Parameters count whole whatever their alpha, as a price by alpha would be evaded by holding at a small one. nan
    where the metric was not measured.
    """
    ratio = np.asarray(added_params, np.float64) / np.asarray(host_params, np.float64)
    return np.asarray(metric, np.float64) - rent * np.log1p(ratio)
