"""Defines blueprints, the kinds of seeds."""

from esper.kasmina.blueprints.catalog import (
    BLUEPRINTS,
    LIVE_BLUEPRINTS,
    Blueprint,
    blueprint,
    check,
    count,
    drawn_with,
    get_blueprint,
)

__all__ = ["BLUEPRINTS", "LIVE_BLUEPRINTS", "Blueprint", "blueprint", "check", "count", "drawn_with", "get_blueprint"]
