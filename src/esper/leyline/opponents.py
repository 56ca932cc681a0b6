"""The opponents that an evaluation adds to the controllers that it is given, as a task declares them."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from esper.leyline.task import AnyTask

ORACLE = "oracle"
"""Name of the opponent that takes the best plan of each instance, which it knows from other runs of that instance."""
FITTED = "fitted-tree"
"""Name of the opponent whose trees are fitted on training instances of the evaluated task."""
SEARCHED = "best fixed plan"
"""Name of the fixed plan of the highest J on training instances. It takes part in every evaluation."""
PLACED = ("uniform", "participation", "inner-use")
"""The rules that an evaluation adds on a task that declares no others."""


class Reference(NamedTuple):
    """An opponent on a task of its own, whose instances have the keys of those of the evaluated task.

    Attributes:
        task (callable): returns the task, as `heal_unfrozen`
        controller (str): the controller that grows there; `never` trains the hosts as they are, and SEARCHED stands for the
            fixed plan that is searched for on that task
    """

    task: "Callable[[], AnyTask]"
    controller: str = "never"


NO_REFERENCES: Mapping[str, Reference] = {}  # a plain mapping, because tasks are pickled to be sent to actors


class Opponents(NamedTuple):
    """The opponents of an evaluation on one task, beside the rules and the best fixed plan, which always take part.

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


DEFAULT = Opponents()
"""The opponents of a task that declares none."""
