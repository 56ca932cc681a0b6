"""Freeze parameters and statistics of a host while seeds are trained in it."""

import difflib
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from esper.kasmina.grown import anchor, hold, let_go
from esper.leyline.errors import GrowthWarning, InputError, warn

Freeze = Literal["host", "none"] | Sequence[str]


class Frozen:
    """The part of a network that does not train, until `release`.

    Its parameters require no gradient. Its normalisation layers with running statistics, such as BatchNorm, stay in
    evaluation mode whatever mode the network is set to: in training mode they would update those statistics in every
    pass and normalise by the batch, so the host would change. Other layers, such as Dropout, follow the network's mode.

    If no parameter of the network requires a gradient, its outputs are made to require one that reaches no parameter,
    so that `loss.backward()` in a training loop does not fail while there is no seed.
    """

    def __init__(self, network: nn.Module, freeze: Freeze) -> None:
        """freeze: 'none', 'host', or names of submodules or parameters, with the wildcards of fnmatch.

        Raises InputError if a name matches nothing.
        """
        self.network = network
        whole, names = _names(freeze)
        if not whole:
            _check_names(network, names)
        matched = {name for name in _named(network) if whole or _within(name, names)}
        self._before = [
            (parameter, parameter.requires_grad)
            for name, parameter in network.named_parameters(remove_duplicate=False)
            if name in matched
        ]
        for parameter, _ in self._before:
            parameter.requires_grad_(False)
            parameter.grad = None  # an optimizer moves every parameter that has a gradient
        norms = [(name, part) for name, part in network.named_modules() if isinstance(part, _NormBase)]
        self._held = [part for name, part in norms if name in matched and part.track_running_stats]
        for part in self._held:
            hold(part)
        self._buffers = {name: buffer for name, buffer in network.named_buffers() if name in matched}
        self._versions: dict[str, int] = {}
        self._warned = False
        self.note()
        anchor(network, not any(parameter.requires_grad for parameter in network.parameters()))

    def note(self) -> None:
        """Record the present buffers as those that later checks expect."""
        self._versions = {name: buffer._version for name, buffer in self._buffers.items()}

    def check(self) -> None:
        """Warn once if a forward pass has written to a frozen buffer."""
        written = [name for name, buffer in self._buffers.items() if buffer._version != self._versions[name]]
        if written and not self._warned:
            self._warned = True
            warn(
                f"the model is frozen, but its buffer {written[0]!r} was written to since the last decision; put the submodule "
                "that it belongs to into evaluation mode after each model.train()",
                GrowthWarning,
            )

    def release(self) -> None:
        """Make everything trainable that was trainable before."""
        for parameter, trained in self._before:
            parameter.requires_grad_(trained)
        for part in self._held:
            let_go(part)
        anchor(self.network, False)


def _names(freeze: Any) -> tuple[bool, tuple[str, ...]]:
    """Return whether the whole host freezes, or else the names that freeze."""
    if freeze in ("host", "none"):
        return freeze == "host", ()
    if isinstance(freeze, str) or not isinstance(freeze, list | tuple) or not all(isinstance(n, str) for n in freeze):
        raise InputError(
            f"freeze is {freeze!r}; give 'host', 'none', or a list of names of submodules or parameters, as ['layers.*']"
        )
    return False, tuple(freeze)


def _named(network: nn.Module) -> Iterator[str]:
    """Yield the names of all submodules, parameters and buffers, without that of the network itself."""
    for named in (network.named_modules, network.named_parameters, network.named_buffers):
        for name, _ in named(remove_duplicate=False):
            if name:
                yield name


def _within(name: str, patterns: Sequence[str]) -> bool:
    """Whether a name, or the name of a submodule around it, matches a pattern."""
    parts = name.split(".")
    around = [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
    return any(fnmatchcase(each, pattern) for each in around for pattern in patterns)


def _check_names(network: nn.Module, patterns: Sequence[str]) -> None:
    """Raise InputError if a pattern matches nothing that can be frozen."""
    known = list(dict.fromkeys(_named(network)))
    trained: dict[str, Tensor] = dict(network.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        if not any(_within(name, [pattern]) for name in trained):
            near = difflib.get_close_matches(pattern, known, 3, 0.4) or known[:3]
            raise InputError(
                f"freeze has {pattern!r}, which matches no submodule with parameters and no parameter; the nearest names are "
                f"{', '.join(map(repr, near))}"
            )
