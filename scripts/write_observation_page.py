"""Write docs/observation.md from the table of features and that of the growth sensors, the one source of every column."""

from collections.abc import Iterable
from pathlib import Path

from esper.leyline.config.tree import SENSOR_FAMILIES
from esper.tamiyo.policy.observation import (
    CLIP,
    GLOBAL,
    GLOBAL_FLAGS,
    RELATIVE,
    SLOT,
    SLOT_FLAGS,
    Feature,
    Flag,
    slot_features,
)
from esper.tolaria.measure.sensors import SENSORS

HEAD = f"""# What a trained controller sees

One row of columns for each [environment](glossary.md#environment), one for each of its slots, and the price of every
blueprint at every slot. A continuous column is normalised: less its mean, over its standard deviation, both over all
rounds of training so far, and clipped to {CLIP:g} standard deviations. Before a first round the mean is 0 and the standard
deviation the column's *scale*.

A column that is marked under `?` is not always measured. It is 0 if it was not, and a further column `name?` beside it
is 1 if it was measured and else 0. Flags are 0 or 1 and are not normalised. The stages GERMINATED and PRUNED pass
within a step, so their columns are 0 at every decision. The tables of `tamiyo/policy/observation.py` hold the function that
computes each column; the [architecture](architecture.md) says where they are read.
"""

RELATIVE_LINE = f"""Every column of the tables "A slot" and "Growth sensors of a slot" comes a second time as `name{RELATIVE}`:
the same, less its mean over the slots of the environment where it was measured. One `name?` serves both.
"""

FAMILIES_LINE = """`probe.sensors` names the families that are measured. A sensor of another family is not measured.
[What each costs](../bench/docs/heal.md#what-the-sensors-cost) differs tenfold. A rule whose class has `sensor_families`, as
`participation`, `collapse`, `sites`, `inner-use` and `drift` have, gets these alone unless the config says otherwise; every other
controller gets all. `explained` misranks the places of seeds and no rule reads it; the fitted trees do.
"""
NEEDS = {
    "inner": "a forward pass that computes the inner features again",
    "dead": "the same",
    "drift": "a forward pass, and once an episode one of the intact networks",
    "gradient": "a forward and a backward pass",
    "explained": "a forward and a backward pass on two samples, and ridge regressions",
}

REST = """## Blueprints

| column | unit | meaning |
|---|---|---|
| `blueprint` | index | of each slot: its seed's place in the controller's vocabulary; empty has a place of its own |
| `cost` | ln parameters | of each slot and blueprint of the menu: ln(1 + parameters it would add / host parameters) |
| `prospects` | | of each slot and blueprint of the menu: its three sensors there, normalised, and flags `?` |

The three sensors of a blueprint are `heldout`, `explained` and `map_gradient`, of the tap that it reads, and of a linear map or
of a hidden layer, as its seeds are. A blueprint is scored from these columns, from the encoding of its slot and from a learned
embedding of its name, so the order of the menu does not matter. One that was not in the menus of the training has the mean of
the embeddings that were; the policy then knows what its cost and its sensors tell.

The costs of the [packages](training.md#imitation) follow: of each, for all seeds that it would plant now.
"""


def main() -> None:
    (Path(__file__).parents[1] / "docs" / "observation.md").write_text(page(), encoding="utf-8")


def page() -> str:
    """Return the whole page."""
    raw = slot_features([sensor.name for sensor in SENSORS])[: len(SLOT) + len(SENSORS)]
    sensors = (
        feature._replace(
            meaning=f"{sensor.meaning}; {_form(feature)}" if feature.unit != sensor.unit else sensor.meaning
        )
        for feature, sensor in zip(raw[len(SLOT) :], SENSORS, strict=True)
    )
    return "\n".join(
        [
            HEAD,
            "## An environment\n",
            _features(GLOBAL),
            "### Flags\n",
            _flags(GLOBAL_FLAGS),
            "## A slot\n",
            _features(SLOT),
            "### Growth sensors of a slot\n",
            "Taken every `probe.sensors_every` steps; h is the stream at the slot, g the gradient of the loss by it.\n",
            _features(sensors),
            FAMILIES_LINE,
            _families(),
            RELATIVE_LINE,
            "### Flags\n",
            _flags(SLOT_FLAGS),
            REST,
        ]
    )


def _features(features: Iterable[Feature]) -> str:
    rows = (
        f"| `{f.name}` | {f.unit} | {f.scale:g} | {'?' if f.missing else ''} | {f.meaning.replace('|', '&#124;')} |"
        for f in features
    )
    return "\n".join(["| column | unit | scale | ? | meaning |", "|---|---|---|---|---|", *rows, ""])


def _families() -> str:
    rows = []
    for family in SENSOR_FAMILIES:
        names = ", ".join(f"`{sensor.name}`" for sensor in SENSORS if sensor.family == family)
        rows.append(f"| `{family}` | {names} | {NEEDS.get(family, 'a forward pass')} |")
    return "\n".join(["| family | sensors | what it takes |", "|---|---|---|", *rows, ""])


def _flags(flags: Iterable[Flag]) -> str:
    lines = (f"| `{flag.name}` | {flag.meaning} |" for flag in flags)
    return "\n".join(["| column | 1 where |", "|---|---|", *lines, ""])


def _form(sensor: Feature) -> str:
    """Say how a sensor's value becomes a feature, where it does not enter as it is."""
    return "as a share of gradient_rms^2, between -1 and 1" if sensor.unit == "1" else "as a logarithm"


if __name__ == "__main__":
    main()
