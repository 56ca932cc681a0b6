"""Which controller `esper grow` takes if none is named: `shipped` where its card says that it beats the rule, else the rule."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from esper.kasmina.host import SegmentedHost
from esper.leyline.config import Config
from esper.leyline.task import AnyTask
from esper.tamiyo.shipped import NAME, facts_of, resolved

RULE = "heuristic"
"""The default on hosts of no kind of the card. A kind has a rule of its own."""
CARD = "`esper controller shipped`"


class Choice(NamedTuple):
    """A controller, and a line that says why it was taken; None for a rule, about whose rivals nobody asked."""

    controller: str
    why: str | None = None


def default_controller(task: AnyTask, config: Config) -> Choice:
    """The controller for a task whose config names none, by the kinds of hosts in the card of the latest version.

    A host is of a kind if its slots have the stream of the kind, it trains or is frozen as the kind says, and the menu has the
    blueprints that the kind needs. The host is built only where the menu has them.
    """
    version = resolved(NAME)
    menu = set(config.blueprints or task.menu)
    possible = [kind for kind in facts_of(version)["kinds"] if kind["recognised"] and set(kind["needs"]) <= menu]
    if possible:
        host = _host(task)
        for kind in possible:
            if _is_of(kind, host):
                return _by_card(version, kind)
    return Choice(RULE)


def _by_card(version: str, kind: Mapping[str, Any]) -> Choice:
    if not kind["wins"]:
        return Choice(kind["rule"])
    where = f"on {kind['hosts']} it beats the rule {kind['rule']} on families that it was not trained on ({CARD})"
    return Choice(version, f"controller {version}: {where}")


def _host(task: AnyTask) -> SegmentedHost:
    with torch.random.fork_rng(devices=[]):
        host = task.largest()
    assert isinstance(host, SegmentedHost)
    return host


def _is_of(kind: Mapping[str, Any], host: SegmentedHost) -> bool:
    frozen = not any(parameter.requires_grad for parameter in host.parameters())
    streams: Sequence[str] = sorted({str(slot.kind) for slot in host.slots})
    return frozen == kind["frozen"] and streams == [kind["stream"]]
