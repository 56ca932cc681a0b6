"""Name the benchmark controllers: entry points of the group `esper.controllers`."""

from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Any

from esper.leyline.messages import InputError
from esper.tamiyo.catalog import ControllerSpec
from esper_bench.controllers.bandit import load_bandit
from esper_bench.controllers.placement import Collapse, DriftRise, InnerUse, ParticipationDrop, Placement, Uniform
from esper_bench.controllers.regrow import Regrow
from esper_bench.controllers.several import Sites
from esper_bench.controllers.shipped import NAME, Shipped, card_of, deciding_facts, episodes_of_version, resolved
from esper_bench.controllers.trees import SHIPPED, Trees, load_trees
from esper_bench.controllers.trials import TRIALS, Trials

KEEPS: Mapping[str, Any] = MappingProxyType({"gates": {"permissive": True}})
"""The settings of a placement, which take precedence over the config of a task: it keeps what it planted."""
_RULES: Mapping[str, tuple[type[Placement], str]] = MappingProxyType(
    {
        "uniform": (Uniform, "plants a bypass of rank 1 at every slot in the first step, and keeps all of them"),
        "participation": (
            ParticipationDrop,
            "plants a bypass where the participation of the stream drops by more than half, else as uniform does",
        ),
        "collapse": (Collapse, "plants a bypass around a block of dead units, else as participation does"),
        "sites": (
            Sites,
            "plants a bypass around every block that stands out where several do, else as collapse or drift does",
        ),
        "inner-use": (InnerUse, "plants a bypass around a narrow or dead block, else as uniform does"),
        "drift": (
            DriftRise,
            "plants a bypass where the activations leave those of the intact network, where the task has one (heal-taught)",
        ),
    }
)
PLACEMENTS: Mapping[str, type[Placement]] = MappingProxyType({name: rule for name, (rule, _) in _RULES.items()})


def _rule(name: str) -> Callable[[str], ControllerSpec]:
    """Return the entry point of a rule that places seeds by sensors."""
    made, summary = _RULES[name]

    def entry(argument: str) -> ControllerSpec:
        _check_none(name, argument)
        return ControllerSpec(name, lambda config: made(), summary, KEEPS)

    return entry


uniform, participation, collapse = _rule("uniform"), _rule("participation"), _rule("collapse")
sites, inner_use, drift = _rule("sites"), _rule("inner-use"), _rule("drift")


def regrow(argument: str) -> ControllerSpec:
    """Return the rule that moves the budget of parameters from seed to seed."""
    _check_none("regrow", argument)
    summary = "plants small bypasses, reads what incubation says of them, prunes the losers, and plants again where the gain is"
    return ControllerSpec("regrow", lambda config: Regrow(), summary, KEEPS)


def tree(argument: str) -> ControllerSpec:
    """Return the controller of fitted trees: those of this package, or those of a file, `tree:FILE.safetensors`."""
    path = _file("tree", argument) if argument else SHIPPED
    return ControllerSpec(
        f"tree:{argument}" if argument else "tree",
        lambda config: Trees(path),
        "plants what fitted trees expect most of; tree:FILE takes the trees of a file",
        KEEPS,
        load_trees(path).episodes,
        lambda: sha256(path.read_bytes()).hexdigest(),
    )


def bandit(argument: str) -> ControllerSpec:
    """Return the controller of a contextual bandit, `bandit:FILE`."""
    summary = "plants the plan of the largest gain that a contextual bandit expects; bandit:FILE"
    if not argument:
        return ControllerSpec("bandit", _lacks_a_file, summary, KEEPS, None)
    path = _file("bandit", argument)
    content = sha256(path.read_bytes()).hexdigest()
    return ControllerSpec(f"bandit:{argument}", lambda config: load_bandit(path), summary, KEEPS, None, lambda: content)


def shipped(argument: str) -> ControllerSpec:
    """Return the latest version of the controller `shipped`."""
    return _version(NAME, argument)


def shipped_1(argument: str) -> ControllerSpec:
    """Return version 1 of the controller `shipped`."""
    return _version("shipped-1", argument)


def shipped_2(argument: str) -> ControllerSpec:
    """Return version 2 of the controller `shipped`."""
    return _version("shipped-2", argument)


def trials(argument: str) -> ControllerSpec:
    """Return the controller that tries the first candidates of a rule in copies of the network, `trials:RULE`."""
    summary = f"tries the first choices of a rule in copies of the network; {TRIALS}collapse, for example"
    if not argument:
        return ControllerSpec("trials", _lacks_a_file, summary, KEEPS)
    name = f"{TRIALS}{argument}"
    rules = {"tree": tree, "shipped": shipped, "bandit": bandit, **{each: _rule(each) for each in _RULES}}
    head, _, rest = argument.partition(":")
    if head not in rules or head == "shipped":
        raise InputError(f"{name} would try candidates of {argument}, which ranks none; name another rule")
    spec = rules[head](rest)

    def make(config: Any) -> Trials:
        rule = spec.make(config)
        assert isinstance(rule, Placement)
        return Trials(rule, argument, config.trials)

    return ControllerSpec(name, make, summary, spec.settings, spec.episodes, spec.content)


def _version(name: str, argument: str) -> ControllerSpec:
    _check_none(name, argument)
    version = resolved(name)
    return ControllerSpec(
        version,
        lambda config: Shipped(version, config),
        "a rule and fitted trees in versions; `esper controller shipped` prints the card of the latest",
        KEEPS,
        episodes_of_version(version),
        lambda: sha256(deciding_facts(version).encode()).hexdigest(),
        lambda: card_of(version),
    )


def _file(name: str, argument: str) -> Path:
    if not Path(argument).is_file():
        raise InputError(f"there is no file {argument}; give {name}:FILE with the path of a file that was fitted")
    return Path(argument)


def _check_none(name: str, argument: str) -> None:
    if argument:
        raise InputError(f"the controller {name} takes no argument, but {argument!r} was given; give {name}")


def _lacks_a_file(config: Any) -> Any:
    raise InputError("this controller needs an argument, NAME:ARGUMENT; `esper controller` says which")
