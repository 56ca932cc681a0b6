"""List the methods that learn streams, by name, at about the same size: 8.2 to 8.5 thousand numbers for each stream."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from esper.leyline.config.input import show
from esper.leyline.messages import InputError, did_you_mean
from esper_bench.streams.additions import Consolidation, Replacement, Replay
from esper_bench.streams.bank import EVERY_PART, SEED_PARTS
from esper_bench.streams.controllers import Adaptive, OnAlarm, StoreAndReactivate
from esper_bench.streams.data import StreamSet
from esper_bench.streams.ensemble import EnsembleLearner
from esper_bench.streams.fitted import NUMBERS, RATES, SHIPPED, SUFFIX, Fitted, read_numbers
from esper_bench.streams.learner import Addition, Learner, NetworkLearner
from esper_bench.streams.network import TrunkAndHead

Settings = Mapping[str, Any]
WIDE, NARROW, STORING, MEMBER = (40, 32, 2), (32, 28, 2), (32, 32, 2), (12, 20, 1)
"""Width, hidden units and number of residual blocks: of one network, beside a replay buffer, beside a bank, and of a member."""
RECOGNISING, RECOGNISING_MEMBER = (42, 32, 1), (12, 18, 1)
"""Beside a bank and the means of the inputs of its contexts, and of a member with such a mean."""
SEEDED, SEEDED_BOTH = (28, 24, 2), (26, 22, 2)
RANK, RANK_BOTH = 5, 4
"""Sizes beside a bank of seeds, and of seeds and heads, and the hidden units of their seeds."""
MEMBERS, BANK, CAPACITY = 6, 5, 128


class Method(NamedTuple):
    """Describes a way to learn a stream.

    Attributes:
        summary (str): what it does, in one line
        settings (Settings): the settings and their defaults
        build (Callable): makes the learners of streams from all settings
    """

    summary: str
    settings: Settings
    build: Callable[[StreamSet, Settings], Learner]


def _module(streams: StreamSet, settings: Settings, size: tuple[int, int, int], rank: int = 0) -> TrunkAndHead:
    return TrunkAndHead(streams.inputs, *size, streams.classes, norm=settings["norm"], rank=rank)


def _rates(settings: Settings) -> dict[str, Any]:
    """Return the learning rates of one network that stores nothing. They fall with the updates since the last alarm."""
    falls = {name: settings[each] for each in ("halving", "least") for name in (each, f"trunk_{each}")}
    return {**falls, **{name: settings[name] for name in ("lr", "head_rate", "decay")}, "restarts": True}


def _static(streams: StreamSet, settings: Settings, **rule: Any) -> Learner:
    """Make one network with the same decision at every alarm."""
    own = _rates(settings)
    return NetworkLearner(streams, _module(streams, settings, WIDE), OnAlarm(**rule), **own)


def _l2_init(streams: StreamSet, settings: Settings) -> Learner:
    own = _rates(settings)
    return NetworkLearner(streams, _module(streams, settings, WIDE), OnAlarm(), to_first=True, **own)


def _with_addition(
    addition: Callable[[NetworkLearner, Settings], Addition], size: tuple[int, int, int] = WIDE
) -> Callable[[StreamSet, Settings], Learner]:
    """Return the maker of one network that ignores alarms, with an addition to its training."""

    def build(streams: StreamSet, settings: Settings) -> Learner:
        own = _rates(settings)
        make = _module(streams, settings, size)
        return NetworkLearner(streams, make, OnAlarm(), addition=lambda learner: addition(learner, settings), **own)

    return build


def _ensemble(streams: StreamSet, settings: Settings) -> Learner:
    own = {name: settings[name] for name in settings if name != "norm"}
    size = RECOGNISING_MEMBER if "same" in settings else MEMBER
    return EnsembleLearner(streams, _module(streams, settings, size), members=MEMBERS, **own)


def _reactivate(streams: StreamSet, settings: Settings) -> Learner:
    own = {name: settings[name] for name in ("lr", "head_rate", "decay", "halving", "least")}
    rule = StoreAndReactivate(trunk_rate=settings["trunk_rate"])
    return NetworkLearner(streams, _module(streams, settings, STORING), rule, bank=BANK, **own)


def _reactivate_seeds(streams: StreamSet, settings: Settings, *, heads: bool) -> Learner:
    """Make a network that stores seeds, or with `heads` seeds and heads together."""
    own = {name: settings[name] for name in ("lr", "head_rate", "decay", "halving", "least")}
    rule = StoreAndReactivate(trunk_rate=settings["trunk_rate"], support=settings["support"])
    size, rank, holds = (SEEDED_BOTH, RANK_BOTH, EVERY_PART) if heads else (SEEDED, RANK, SEED_PARTS)
    return NetworkLearner(streams, _module(streams, settings, size, rank), rule, bank=BANK, holds=holds, **own)


def _adaptive(streams: StreamSet, settings: Settings) -> Learner:
    own = {name: settings[name] for name in ("lr", "head_rate", "decay")}
    rule = Adaptive(len(streams.keys), trunk_rate=settings["trunk_rate"], patience=settings["patience"])
    return NetworkLearner(streams, _module(streams, settings, STORING), rule, bank=BANK, **own)


def build_fitted(streams: StreamSet, settings: Settings) -> NetworkLearner:
    """Make the learner with fitted numbers: `norm`, `decay`, and a float or an array (N,) for each of `fitted.NUMBERS`."""
    own = {name: settings[name] for name in (*RATES, "decay")}
    rule = Fitted(len(streams.keys), {name: settings[name] for name in NUMBERS})
    make = _module(streams, settings, RECOGNISING)
    return NetworkLearner(streams, make, rule, bank=BANK, recognise=rule.recognise, **own)


def _read_method(path: Path) -> Method:
    """Make the method whose numbers a file has. Raises InputError if it is missing or damaged."""
    summary = "as adaptive, with thresholds and rates that were fitted to the return of whole training streams"
    return Method(summary, {"norm": True, "decay": 0.01, **read_numbers(path)}, build_fitted)


_COMMON: Settings = MappingProxyType({"lr": 0.01, "head_rate": 1.0, "decay": 0.01, "norm": True})
_STATIC: Settings = MappingProxyType({**_COMMON, "halving": 0.0, "least": 0.125})
_ANNEALED: Settings = MappingProxyType(
    {**_COMMON, "lr": 0.015, "head_rate": 2.0, "trunk_rate": 0.2, "halving": 40.0, "least": 0.125}
)
_GATED: Settings = MappingProxyType({"lr": 0.0306, "head_rate": 1.621, "halving": 52.56, "least": 0.1464})
_FALLING: Mapping[str, tuple[str, Settings]] = MappingProxyType(
    {
        "ensemble": (
            "with the updates that a member has trained for",
            {**_GATED, "memory": 0.06133},
        ),
        "reset": (
            "with the updates since the last alarm",
            {"lr": 0.01252, "head_rate": 1.758, "halving": 16.79, "least": 0.1355},
        ),
        "reset-blocks": (
            "with the updates since the last alarm",
            {"lr": 0.01297, "head_rate": 2.715, "halving": 46.52, "least": 0.1174},
        ),
        "continual-backprop": (
            "with the updates since the last alarm",
            {"norm": False, "lr": 0.00638, "head_rate": 1.505, "halving": 29.92, "least": 0.1019},
        ),
        "replay": (
            "with the updates since the last alarm",
            {"drawn": 48, "lr": 0.008292, "head_rate": 0.6788, "halving": 46.76, "least": 0.1486},
        ),
    }
)
"""Baselines that are played with a falling learning rate too: with what it falls, and their settings."""
_KNOWN: Mapping[str, Method] = MappingProxyType(
    {
        "adamw": Method("one network that trains on, whatever happens", _STATIC, _static),
        "l2-init": Method("decay toward the first weights", {**_STATIC, "decay": 0.3}, _l2_init),
        "shrink-perturb": Method(
            "at an alarm, all weights move toward fresh ones",
            {**_STATIC, "keep": 0.5},
            lambda streams, settings: _static(streams, settings, keep=settings["keep"]),
        ),
        "continual-backprop": Method(
            "hidden units of little use are drawn anew all the time",
            {**_STATIC, "rate": 0.001},
            _with_addition(lambda learner, settings: Replacement(learner, rate=settings["rate"])),
        ),
        "replay": Method(
            "trains on 128 stored examples too",
            {**_STATIC, "drawn": 24},
            _with_addition(
                lambda learner, settings: Replay(learner, capacity=CAPACITY, drawn=settings["drawn"]), NARROW
            ),
        ),
        "ewc": Method(
            "weights that mattered before an alarm are held",
            {**_STATIC, "strength": 1.0},
            _with_addition(lambda learner, settings: Consolidation(learner, strength=settings["strength"])),
        ),
        "ensemble": Method(
            "six small networks; the one with the least recent loss predicts and learns",
            {**_STATIC, "lr": 0.02, "memory": 0.5},
            _ensemble,
        ),
        "reset": Method(
            "at an alarm, the whole network is drawn anew",
            _STATIC,
            lambda streams, settings: _static(streams, settings, keep=0.0),
        ),
        "reset-blocks": Method(
            "at an alarm, the blocks are drawn anew and the head starts at zero; the embedding stays",
            {**_STATIC, "head_rate": 2.0},
            lambda streams, settings: _static(streams, settings, reset=True, new_head=True),
        ),
        "reactivate": Method(
            "at an alarm, the head is stored, and a stored head that fits returns, or a new one starts",
            {**_COMMON, "lr": 0.015, "head_rate": 2.0, "trunk_rate": 0.1, "halving": 0.0, "least": 0.125},
            _reactivate,
        ),
        "reactivate-annealed": Method(
            "as reactivate; the learning rate of a head falls with the updates that it has trained for",
            _ANNEALED,
            _reactivate,
        ),
        "reactivate-seeds": Method(
            "as reactivate-annealed, with seeds in place of heads; one head serves all contexts",
            {**_ANNEALED, "support": 0.0},
            lambda streams, settings: _reactivate_seeds(streams, settings, heads=False),
        ),
        "reactivate-both": Method(
            "as reactivate-annealed, with a head and the seeds of all slots together",
            {**_ANNEALED, "support": 0.0},
            lambda streams, settings: _reactivate_seeds(streams, settings, heads=True),
        ),
        "reactivate-doses": Method(
            "as reactivate-both; the stored seeds of least loss act beside new ones, by a dose table",
            {**_ANNEALED, "support": 0.5},
            lambda streams, settings: _reactivate_seeds(streams, settings, heads=True),
        ),
        "adaptive": Method(
            "reactivates where the past returns, and resets the blocks where it does not",
            {**_COMMON, "lr": 0.0125, "head_rate": 2.0, "trunk_rate": 0.1, "patience": 4},
            _adaptive,
        ),
        "shipped": _read_method(SHIPPED),
    }
)
METHODS: Mapping[str, Method] = MappingProxyType(
    {
        **_KNOWN,
        **{
            f"{name}-annealed": _KNOWN[name]._replace(
                summary=f"as {name}; the learning rate falls {falls}", settings={**_KNOWN[name].settings, **tuned}
            )
            for name, (falls, tuned) in _FALLING.items()
        },
        "ensemble-recognising": Method(
            "as ensemble-annealed; the member whose inputs were like those of the batch predicts",
            {**_KNOWN["ensemble"].settings, **_GATED, "memory": 0.0, "same": 1.576, "away": 1.862},
            _ensemble,
        ),
    }
)


def build_learner(name: str, streams: StreamSet, **settings: Any) -> Learner:
    """Make the learners of a method for streams. Raises InputError if the method or a setting is unknown or a value is bad."""
    full = full_settings(name, settings)
    return find_method(name).build(streams, full)


def find_method(name: str) -> Method:
    """Find a method by name, or by the path of a .json file of fitted numbers. Raises InputError if there is none."""
    if name in METHODS:
        return METHODS[name]
    if name.endswith(SUFFIX):
        return _read_method(Path(name))
    hint = did_you_mean(name, METHODS)
    raise InputError(
        f"unknown method {name!r}; the methods are {', '.join(METHODS)}, or the path of a .json file"
        + (f"; {hint}" if hint else "")
    )


def full_settings(name: str, given: Settings) -> Settings:
    """Return all settings of a method. Raises InputError if the method or a setting is unknown, or a value has another type."""
    known = find_method(name).settings
    for key, value in given.items():
        if key not in known:
            raise InputError(f"{name} has no setting {show(key)}; its settings are {', '.join(known)}")
        kind = type(known[key])
        if isinstance(value, bool) != (kind is bool) or not isinstance(value, int if kind is int else int | float):
            what = {bool: "true or false", int: "a whole number of at least 1", float: "a number of at least 0"}[kind]
            raise InputError(f"{name}.{key} is {show(value)}; give {what}")
        if key in NUMBERS and known.keys() >= NUMBERS.keys():  # a fitted number, which may be negative
            if not NUMBERS[key].low <= value <= NUMBERS[key].high:
                raise InputError(
                    f"{name}.{key} is {value}; give a number from {NUMBERS[key].low:g} to {NUMBERS[key].high:g}"
                )
        elif kind is not bool and not (1 if kind is int else 0) <= value < math.inf:
            raise InputError(
                f"{name}.{key} is {value}; give {'at least 1' if kind is int else 'a finite number of at least 0'}"
            )
    return {**known, **given}
