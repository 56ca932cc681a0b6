"""Loss scaling for training passes that multiply in float16: `torch.amp.GradScaler` with a scale for each row. E rows."""

import torch
from torch import Tensor

from esper.kasmina.stack import Stack

SCALE, TRACKER = "loss_scale", "growth_tracker"
"""The columns of the hosts that hold the scale (E,) float32 and the updates since it last changed (E,) int32."""


class GradScaler:
    """Scale the loss of each row of a population by a number of its own, so that small gradients do not vanish in float16.

    The rule is that of `torch.amp.GradScaler` with its defaults: a scale begins at 65536; an update whose gradients are not
    finite in the host of a row, or in one of its seeds, is skipped for this row and halves its scale; 2000 updates
    without one double it (Micikevicius et al., "Mixed Precision Training", 2018, section 3.2). A row does not know the
    others. Nothing is read from the device.
    Both numbers are columns of the stack of the hosts, so checkpoints hold them, and a row that is rolled back gets those of
    its snapshot.
    """

    init_scale = 2.0**16
    growth_factor = 2.0
    backoff_factor = 0.5
    growth_interval = 2000

    def __init__(self, host: Stack) -> None:
        self._host = host
        host.columns[SCALE] = torch.zeros(host.capacity, device=host.device)
        host.columns[TRACKER] = torch.zeros(host.capacity, dtype=torch.int32, device=host.device)

    @classmethod
    def of(cls, host: Stack, products: torch.dtype | None) -> "GradScaler | None":
        """Return a scaler for passes that multiply in a type; None where that is not float16."""
        return cls(host) if products == torch.float16 else None

    @property
    def scale(self) -> Tensor:
        """The scale (E,) of each row."""
        return self._host.columns[SCALE]

    def begin(self) -> None:
        """Set every row to the initial scale, once its host is planted."""
        self._host.columns[SCALE].fill_(self.init_scale)
        self._host.columns[TRACKER].zero_()

    @torch.no_grad()
    def update(self, overflowed: Tensor) -> None:
        """Set the scales for the next update; overflowed (E,) bool says which rows skip the present one."""
        scale, tracker = self._host.columns[SCALE], self._host.columns[TRACKER]
        successful = tracker + 1
        due = successful >= self.growth_interval
        larger = scale * self.growth_factor
        grown = torch.where(due & larger.isfinite(), larger, scale)
        scale.copy_(torch.where(overflowed, scale * self.backoff_factor, grown))
        tracker.copy_(torch.where(overflowed | due, 0, successful))
