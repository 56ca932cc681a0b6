"""Settings of one network that grows in the user's own training loop."""

from collections.abc import Mapping
from typing import Any

from esper.kasmina.blueprints import BLUEPRINTS, Blueprint, get_blueprint
from esper.leyline.config import Config, build_config, merge_settings
from esper.leyline.errors import InputError
from esper.leyline.sites import Site
from esper.leyline.streams import Kind
from esper.leyline.view import Space
from esper.tolaria.choosing import chooses
from esper.tolaria.live import LivePopulation

MENU: Mapping[Kind, tuple[str, ...]] = {
    Kind.VECTOR: ("bypass-linear", "bypass-mlp", "mlp-small"),
    Kind.MAP: ("bypass-conv-1x1", "bypass-conv-3x3", "conv-light"),
    Kind.SEQUENCE: ("bypass-linear", "bypass-mlp", "mlp-small"),
}
"""Blueprints that may be planted at sites of each kind, if the settings name none."""
MOST_SITES = 62
"""Largest number of sites: a coalition of seeds is a bit mask in one integer."""
ENDLESS = 10**6
"""Number of decisions of a training whose length is not given."""


def whole(name: str, value: Any) -> int:
    """Return a number of optimizer steps. Raises InputError if it is not a whole number from 1 on."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{name} is {value!r}; give a whole number of optimizer steps from 1 on")
    return value


def share_of(budget: Any) -> float:
    """Return the largest share, parameters of all seeds / parameters of the model. Raises InputError if it is not above 0."""
    if isinstance(budget, bool) or not isinstance(budget, int | float) or not 0 < budget < float("inf"):
        raise InputError(
            f"budget is {budget!r}; give a number above 0, the largest share of parameters that seeds may add, as 0.1"
        )
    return float(budget)


def growth_config(
    sites: Mapping[str, Site], budget: float, every: int, steps: Any, seed: int, settings: Mapping[str, Any]
) -> Config:
    """Return the settings of one network in the user's own loop."""
    if len(sites) > MOST_SITES:
        raise InputError(f"the model has {len(sites)} sites, and at most {MOST_SITES} can grow; graft fewer of them")
    usual = {
        "envs": 1,
        "baselines": [],
        "seed": seed,
        "steps": ENDLESS if steps is None else max(whole("steps", steps) // every, 1),
        "lifecycle": {"max_seeds": len(sites)},
        "probe": {"sensors_every": 0},
        "reward": {"objective": "log_loss"},
        # The loss on the probe stands in for the training loss. It has no upper bound, and rises when a network overfits, which
        # is not a failure.
        "governor": {"param_limit": budget, "min_metric_drop": 1e9, "loss_rise_z": 1e9},
    }
    config = build_config(merge_settings(usual, settings))
    fixed = {
        "envs": config.envs == 1,
        "baselines": not config.baselines,
        "early_stopping": not config.early_stopping.enabled,
        "amp": config.amp == "off",
        "compile": config.compile == "off",
        "activation_checkpointing": not config.activation_checkpointing,
        "data.microbatch": not config.data.microbatch,
    }
    for name, right in fixed.items():
        if not right:
            raise InputError(
                f"settings sets {name}, which a network in your own training loop does not have; leave it out"
            )
    return config


def growth_menu(sites: Mapping[str, Site], config: Config) -> list[Blueprint]:
    """Return the blueprints that may be planted: the named blueprints of every kind that a site has."""
    kinds = dict.fromkeys(site.stream.kind for site in sites.values())
    if config.blueprints is None:
        return [BLUEPRINTS[kind, name] for kind in kinds for name in MENU[kind] if (kind, name) in BLUEPRINTS]
    named = [(kind, name) for name in config.blueprints for kind in kinds if (kind, name) in BLUEPRINTS]
    for name in config.blueprints:
        if not any(name == known for _, known in named):
            get_blueprint(name, next(iter(kinds)))  # raises InputError, with the known names
    menu = [BLUEPRINTS[each] for each in named]
    for entry in menu:
        if chooses(entry.build(8, 8)):
            raise InputError(
                f"blueprint {entry.name!r} chooses its rows from the training examples of a task, which a network in your own "
                "training loop does not have; leave it out of blueprints"
            )
    return menu


def within_budget(population: LivePopulation, budget: float) -> Space:
    """Return the space of a population without the seeds that exceed the whole budget. Raises InputError if nothing fits."""
    space, host = population.space, int(population.host_params[0])
    if not space.fits.any():
        raise InputError(
            f"no blueprint of the menu fits a site: the menu is {', '.join(entry.name for entry in space.blueprints)}; name "
            "others, as settings={'blueprints': [...]}"
        )
    least = int(space.cost[0][space.fits].min())
    if least > budget * host:
        raise InputError(
            f"budget {budget:g} of a model of {host:,} parameters allows {int(budget * host):,}, and the smallest seed has "
            f"{least:,}; give at least {least / host:.3g}"
        )
    return space._replace(fits=space.fits & (space.cost[0] <= budget * host))
