"""The compute of an episode beyond that of the hosts. R rows.

One unit is one training step of the host of a row. A seed of a parameters beside a host of h takes a / h units a step from its
planting on, whether it incubates, blends or is kept: on a stream of one width the multiplications of forward and backward pass
are proportional to the parameters. A copy of a row in which a candidate is tried takes 1 unit a step and that of its seeds.
Probes are not counted.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from esper.leyline.brief import brief
from esper.leyline.config import Config
from esper.leyline.view import Floats


@brief
class Compute(NamedTuple):
    """The units that every row has taken since its episode began.

    Attributes:
        seeds ((R,) float64): of the seeds of the row
        forks ((R,) float64): of copies of the row
    """

    seeds: Floats
    forks: Floats

    @classmethod
    def none(cls, rows: int) -> "Compute":
        """No compute."""
        return cls(np.zeros(rows), np.zeros(rows))

    def after(self, added: NDArray[np.int64], host: NDArray[np.int64], forks: Floats | None) -> "Compute":
        """The compute after a further step with seeds of `added` (R,) parameters in hosts of `host` (R,), and copies."""
        return Compute(self.seeds + added / host, self.forks if forks is None else self.forks + forks)

    def share(self, steps: int) -> Floats:
        """(R,) the units as a share of those that the host takes in an episode of so many steps."""
        return (self.seeds + self.forks) / steps

    def price(self, config: Config) -> Floats:
        """What the compute takes from J (`reward.compute_price`) for the environments (E,), or (2E,) with their twins' 0."""
        paid: Floats = config.reward.compute_price * self.share(config.steps)[: config.envs * (2 if config.twin else 1)]
        return paid
