"""Name the opponents that are compared with the controllers of an evaluation, by task."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from esper.leyline.data.task import AnyTask

ORACLE = "oracle"
"""Name of the opponent that takes the best plan of each instance, which it knows from other runs of that instance."""
FITTED = "fitted-tree"
"""Name of the opponent whose trees are fitted on training instances of the evaluated task."""
SEARCHED = "best fixed plan"
"""Name of the fixed plan of the highest J on training instances. It takes part in every evaluation."""
PLACED = ("uniform", "participation", "inner-use")
"""The rules that an evaluation adds on a task that declares no others."""


class Reference(NamedTuple):
    """Names an opponent on a task of its own, whose instances have the keys of those of the evaluated task.

    Attributes:
        task (callable): returns the task, as `heal_unfrozen`
        controller (str): the controller that grows there; `never` trains the hosts as they are, and SEARCHED stands for the
            fixed plan that is searched for on that task
    """

    task: Callable[[], AnyTask]
    controller: str = "never"


NO_REFERENCES: Mapping[str, Reference] = MappingProxyType({})


class Opponents(NamedTuple):
    """Names the opponents of an evaluation on one task, beside the rules and the best fixed plan, which always take part.

    Attributes:
        rules (names): built-in controllers
        references (mapping): opponents on tasks of their own, by name
        oracle (bool): whether ORACLE takes part
    """

    rules: tuple[str, ...] = PLACED
    references: Mapping[str, Reference] = NO_REFERENCES
    oracle: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all, in the order in which they are shown. FITTED takes part beside the rule `tree`."""
        trees = (FITTED,) if "tree" in self.rules else ()
        return (*self.rules, *trees, *self.references, *((ORACLE,) if self.oracle else ()))


DEFAULT, NONE = Opponents(), Opponents(rules=(), oracle=False)
"""The opponents of a task of no suite, and of the tasks that are references of others."""
HEALING = ("uniform", "participation", "collapse", "sites", "inner-use", "tree")
"""The rules that an evaluation on damaged networks adds."""


def opponents_of(task: str) -> Opponents:
    """Return the opponents of a task, by its name."""
    from esper_bench import tasks  # its hosts and data are imported only here
    from esper_bench.healing import heal, heal_bytes
    from esper_bench.healing.hosts import FULL, VECTORS
    from esper_bench.healing.images import IMAGES
    from esper_bench.healing.unknown import UNKNOWN_HOSTS

    if task == "repair":
        ruled = {f"{rule}-full-menu": Reference(tasks.repair_full, rule) for rule in PLACED}
        return Opponents(references={"full-menu": Reference(tasks.repair_full, SEARCHED)} | ruled)
    for hosts in (VECTORS, FULL, IMAGES, UNKNOWN_HOSTS):
        others = {
            "fine-tuning": Reference(partial(heal.heal_unfrozen, hosts)),
            "fine-tuning-redrawn": Reference(partial(heal.heal_redrawn, hosts)),
            "from-scratch": Reference(partial(heal.heal_scratch, hosts)),
            "closed-form": Reference(partial(heal.heal_eora, hosts)),
        }
        if task == hosts.name:
            return Opponents(HEALING, {"drift-taught": Reference(partial(heal.heal_taught, hosts), "drift"), **others})
        if task == f"{hosts.name}-taught":
            return Opponents((*HEALING, "drift"), others)
    others = {
        "fine-tuning": Reference(heal_bytes.heal_bytes_unfrozen),
        "from-scratch": Reference(heal_bytes.heal_bytes_scratch),
        "closed-form": Reference(heal_bytes.heal_bytes_eora),
    }
    if task == "heal-bytes":
        return Opponents(HEALING, {"drift-taught": Reference(heal_bytes.heal_bytes_taught, "drift"), **others})
    if task == "heal-bytes-taught":
        return Opponents((*HEALING, "drift"), others)
    return NONE if task.startswith("heal") else DEFAULT
