"""Keep the optimizer and the schedulers of a person's own loop in step, while parameters come and go."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils import _pytree as pytree

from esper.kasmina.graft.sharding import in_parts, placed
from esper.leyline.messages import InputError, kind_of

OWNER = "esper"
"""The entry of a parameter group that names the site of its seed."""

_BY_GROUP = ("base_lrs", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums", "_last_lr")
"""Lists of schedulers that have an entry for each parameter group."""

_KNOWN = (
    lr_scheduler.LambdaLR,
    lr_scheduler.MultiplicativeLR,
    lr_scheduler.StepLR,
    lr_scheduler.MultiStepLR,
    lr_scheduler.ConstantLR,
    lr_scheduler.LinearLR,
    lr_scheduler.ExponentialLR,
    lr_scheduler.PolynomialLR,
    lr_scheduler.CosineAnnealingLR,
    lr_scheduler.CosineAnnealingWarmRestarts,
    lr_scheduler.CyclicLR,
    lr_scheduler.OneCycleLR,
    lr_scheduler.ReduceLROnPlateau,
)
_MADE_OF_OTHERS = (lr_scheduler.SequentialLR, lr_scheduler.ChainedScheduler)

Group = dict[str, Any]
Named = tuple[str, nn.Parameter]
"""A parameter with its name."""


class Groups:
    """Adds the parameters of seeds to an optimizer and takes them away, and keeps its schedulers in step.

    A seed gets groups of its own: one for its matrices, which begins as the group of a matrix beside it is now, and one for its
    biases and norms, which begins as the group of a bias or a norm beside it. So each has the weight decay that parameters of its
    sort have. A seed gets a single group where both would be like the same one. The rate of a group follows the schedule of the
    group that it is like, whatever that is computed from: each scheduler gets the same entries for both.

    On a CPU, Adam and AdamW step the groups of seeds by torch's fused kernel unless the person has chosen (`_fuses`): the four
    tensors of a seed otherwise take as long as those of a small network.
    """

    def __init__(self, optimizer: Any, scheduler: Any, model: nn.Module) -> None:
        """scheduler: one, several in a list, or None.

        InputError if a seed cannot be added to the optimizer, or if a scheduler is of another optimizer or of a kind whose rates
        for new groups are not known.
        """
        optimizer = unwrapped(optimizer)
        check_held(optimizer, model.parameters())
        if isinstance(optimizer, torch.optim.Muon | torch.optim.SparseAdam):
            kind = "matrices" if isinstance(optimizer, torch.optim.Muon) else "sparse gradients"
            raise InputError(
                f"{type(optimizer).__name__} takes {kind} alone, and seeds have vectors of parameters with dense gradients too; "
                "give another optimizer that holds parameters of the model, as torch.optim.AdamW"
            )
        self.optimizer = optimizer
        given = pytree.tree_leaves(scheduler, is_leaf=lambda each: not isinstance(each, list | tuple))
        self.schedulers = tuple(each for each in given if each is not None)
        for each in _parts(self.schedulers):
            name = type(each).__name__
            if not isinstance(each, (*_KNOWN, *_MADE_OF_OTHERS)):
                known = ", ".join(kind.__name__ for kind in (*_KNOWN, *_MADE_OF_OTHERS))
                raise InputError(
                    f"{name} is not a scheduler whose rates for a new group of parameters are known; use one of {known}"
                )
            if unwrapped(getattr(each, "optimizer", optimizer)) is not optimizer:
                raise InputError(
                    f"{name} schedules another optimizer; give the scheduler of the optimizer that Growth is given"
                )
        if not self.schedulers and any("initial_lr" in group for group in optimizer.param_groups):
            raise InputError(
                "the optimizer has a learning rate scheduler that Growth was not given, whose rates would be wrong once the "
                "network has grown; give it, as esper.Growth(model, optimizer, scheduler, ...)"
            )

    def add(
        self,
        name: str,
        parameters: Sequence[Named],
        nearest: Sequence[Named],
        copied: Mapping[str, nn.Parameter] | None = None,
    ) -> None:
        """Give a seed groups like those of the first `nearest` parameters of the same sort that the optimizer holds.

        copied: by name, those that parameters are copies of, whose groups they are like if the optimizer holds them. Where there
        are none of a sort, the group is that of the nearest parameter, or else the first group.
        """
        place = {id(p): index for index, group in enumerate(self.optimizer.param_groups) for p in group["params"]}
        held = [(path, parameter) for path, parameter in nearest if id(parameter) in place]
        by_group: dict[int, list[tuple[int, nn.Parameter]]] = {}
        for number, (path, parameter) in enumerate(parameters):
            like = (copied or {}).get(path)
            if like is None or id(like) not in place:
                like = next((p for other, p in held if is_matrix(other, p) == is_matrix(path, parameter)), None)
            like = held[0][1] if like is None and held else like
            by_group.setdefault(0 if like is None else place[id(like)], []).append((number, parameter))
        for index, members in by_group.items():
            like_group, count = self.optimizer.param_groups[index], len(self.optimizer.param_groups)
            group = {
                key: copy.deepcopy(value) for key, value in like_group.items() if key not in ("params", "param_names")
            }
            if _fuses(self.optimizer, group, [parameter for _, parameter in members]):
                group["fused"] = True
            if "param_names" in like_group:
                group["param_names"] = [f"{name}.{number}" for number, _ in members]
            self.optimizer.add_param_group({**group, "params": [parameter for _, parameter in members], OWNER: name})
            begin_state(self.optimizer, group, [parameter for _, parameter in members])
            for entries in self._lists(count):
                entries.append(copy.copy(entries[index]))

    def remove(self, name: str) -> None:
        """Take the groups of a seed away, with all that the optimizer remembers of its parameters."""
        for index, group in reversed(list(enumerate(self.optimizer.param_groups))):
            if group.get(OWNER) == name:
                for parameter in group["params"]:
                    self.optimizer.state.pop(parameter, None)
                self._delete(index)

    def join(self, name: str) -> None:
        """Put the parameters of a seed into groups of the host with the same options, if there are any; moments stay."""

        def options(group: Group) -> Group:  # a seed on a CPU may have the fused kernel alone (`_fuses`)
            return {key: group[key] for key in group if key not in ("params", "param_names", "fused", OWNER)}

        for index, group in reversed(list(enumerate(self.optimizer.param_groups))):
            if group.get(OWNER) != name:
                continue
            others = (each for each in self.optimizer.param_groups if OWNER not in each)
            if (other := next((each for each in others if options(each) == options(group)), None)) is None:
                del group[OWNER]
                continue
            other["params"] += group["params"]
            if "param_names" in other:
                other["param_names"] += group["param_names"]
            self._delete(index)

    def disown(self) -> None:
        """Make the groups of the seeds that are left groups like any others, with which another growth can begin."""
        for group in self.optimizer.param_groups:
            group.pop(OWNER, None)

    def names(self) -> list[str]:
        """Return the sites whose seeds have groups, in the order of the groups."""
        return list(dict.fromkeys(group[OWNER] for group in self.optimizer.param_groups if OWNER in group))

    def step(self, names: Sequence[str]) -> None:
        """Take a step of the groups of these seeds alone, without the hooks of the optimizer, which are for steps of the loop."""
        if not names:
            return
        whole, step = self.optimizer.param_groups, type(self.optimizer).step
        self.optimizer.param_groups = [group for group in whole if group.get(OWNER) in names]
        try:
            # torch wraps the step of every optimizer class in the calls of its hooks.
            getattr(step, "__wrapped__", step)(self.optimizer)
        finally:
            self.optimizer.param_groups = whole

    def maximizes(self, name: str) -> bool:
        """Return whether the optimizer steps a seed along its gradients, and not against them."""
        return any(group.get("maximize", False) for group in self.optimizer.param_groups if group.get(OWNER) == name)

    def moments(self, names: Mapping[Tensor, str]) -> dict[str, dict[str, Any]]:
        """Return what the optimizer remembers of each parameter, by name; its tensors are copies."""
        state = self.optimizer.state
        return {
            name: {
                key: value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
                for key, value in state[p].items()
            }
            for p, name in names.items()
            if p in state
        }

    def set_moments(self, names: Mapping[Tensor, str], moments: Mapping[str, Mapping[str, Any]]) -> None:
        """Let the optimizer remember of each parameter what is given, by name, and nothing of those that are not."""
        for parameter, name in names.items():
            self.optimizer.state.pop(parameter, None)
            begin_state(self.optimizer, self.optimizer.defaults, [cast(nn.Parameter, parameter)])
            if name in moments:
                self.optimizer.state[parameter] = placed_moments(moments[name], parameter)

    def state(self, names: Mapping[Tensor, str]) -> dict[str, Any]:
        """Return the groups by the names of their parameters, the moments, and what the schedulers remember."""
        groups = [
            {
                **{key: value for key, value in group.items() if key not in ("params", "param_names")},
                "names": self._named(group, names),
            }
            for group in self.optimizer.param_groups
        ]
        return {
            "groups": copy.deepcopy(groups),
            "moments": self.moments(names),
            "schedulers": [copy.deepcopy(each.state_dict()) for each in self.schedulers],
        }

    def check(self, state: Mapping[str, Any], names: Mapping[Tensor, str], of_seed: Callable[[str], bool]) -> None:
        """Raise InputError if the optimizer that a `state` came from had the parameters of the host in other groups.

        of_seed: whether a name is that of a parameter of a seed; they may be others.
        """
        named = [self._named(group, names) for group in self.optimizer.param_groups]
        own, saved = (
            [part for group in groups if (part := sorted(name for name in group if not of_seed(name)))]
            for groups in (named, [group["names"] for group in state["groups"]])
        )
        if sorted(own) != sorted(saved):
            other = next((group for group in own if group not in saved), own[-1])
            raise InputError(
                f"the saved optimizer has no group of {len(other)} parameters that begins with {other[0]!r}; make the "
                "optimizer with the same groups as when it was saved"
            )

    def load_state(self, state: Mapping[str, Any], names: Mapping[Tensor, str]) -> None:
        """Go on from what `state` gave, with the same parameters in any order of groups."""
        own = [self._named(group, names) for group in self.optimizer.param_groups]
        saved = [list(group["names"]) for group in state["groups"]]
        order = [next(i for i, mine in enumerate(own) if sorted(mine) == sorted(theirs)) for theirs in saved]
        for entries in self._lists(len(own)):
            entries[:] = [entries[i] for i in order]
        groups = [self.optimizer.param_groups[i] for i in order]
        by_name = {name: parameter for parameter, name in names.items()}
        for group, kept in zip(groups, state["groups"], strict=True):
            # The device of the parameters decides by which kernel the group of a seed is stepped.
            own_keys = ("names", "fused") if OWNER in group else ("names",)
            group.update({key: copy.deepcopy(value) for key, value in kept.items() if key not in own_keys})
            own_names = {
                id(parameter): name
                for parameter, name in zip(group["params"], group.get("param_names", ()), strict=False)
            }
            group["params"] = [by_name[name] for name in kept["names"]]
            if own_names:
                group["param_names"] = [own_names[id(parameter)] for parameter in group["params"]]
        self.optimizer.param_groups[:] = groups
        self.set_moments(names, state["moments"])
        for each, kept in zip(self.schedulers, state["schedulers"], strict=True):
            each.load_state_dict(copy.deepcopy(kept))

    def _named(self, group: Group, names: Mapping[Tensor, str]) -> list[str]:
        return [names[parameter] for parameter in group["params"]]

    def _delete(self, index: int) -> None:
        """Drop a group, with its entries in the schedulers."""
        for entries in (self.optimizer.param_groups, *self._lists(len(self.optimizer.param_groups))):
            del entries[index]

    def _lists(self, count: int) -> list[list[Any]]:
        """Return the lists of the schedulers with one entry for each of so many groups, each once: schedulers share some."""
        found: dict[int, list[Any]] = {}
        for each in _parts(self.schedulers):
            for name in _BY_GROUP:
                entries = getattr(each, name, None)
                if isinstance(entries, list) and len(entries) == count:
                    found[id(entries)] = entries
        return list(found.values())


def check_held(optimizer: Any, parameters: Iterable[nn.Parameter]) -> None:
    """Raise InputError if an optimizer holds none of the parameters of a model, or takes no others."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(f"the optimizer is {kind_of(optimizer)}; give a torch.optim.Optimizer")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InputError(
            "LBFGS takes one group of parameters that never changes, so the network cannot grow; use another optimizer"
        )
    own = {id(parameter) for parameter in parameters}
    if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
        raise InputError(
            f"the {type(optimizer).__name__} holds no parameter of the model; make it with model.parameters()"
        )


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Return whether a parameter multiplies features with each other, as weights and kernels do, and is no bias, scale or shift.

    The name decides beside the shape: a norm for sequences has its scale as (1, 1, features).
    """
    return parameter.dim() > 1 and name.rpartition(".")[2] not in ("bias", "scale", "shift")


def begin_state(optimizer: torch.optim.Optimizer, group: Group, parameters: Sequence[nn.Parameter]) -> None:
    """Let the optimizer remember of new parameters of a group what it needs before their first step.

    Adagrad of torch 2.11 has this from its own construction on, and never afterwards; all other optimizers of torch begin with a
    parameter in its first step.
    """
    if isinstance(optimizer, torch.optim.Adagrad):
        value = group["initial_accumulator_value"]
        made = torch.optim.Adagrad(parameters, initial_accumulator_value=value, fused=group.get("fused"))
        optimizer.state.update(made.state)


def _fuses(optimizer: torch.optim.Optimizer, group: Group, parameters: Sequence[nn.Parameter]) -> bool:
    """Return whether new parameters on a CPU are stepped by the fused kernel: the same formula, to rounding, in one call.

    Nothing is chosen for a person who set `foreach` or `fused`, or an option that this kernel does not take. Nor where several
    processes train: a network that lies in parts there, which this kernel does not step, has the bits of a whole one.
    """
    alone = not (dist.is_available() and dist.is_initialized())
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW) or not alone:
        return False
    plain = (
        group["foreach"] is None and group["fused"] is None and not group["capturable"] and not group["differentiable"]
    )
    numbers = not any(isinstance(value, Tensor) for value in (group["lr"], *group["betas"]))
    kinds = {(parameter.device.type, parameter.dtype, in_parts(parameter)) for parameter in parameters}
    return plain and numbers and kinds <= {("cpu", torch.float32, False), ("cpu", torch.float64, False)}


def placed_moments(moments: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
    """Return a copy of what an optimizer remembers of a parameter, on its device, and in parts where that is."""
    return {
        key: placed(value, parameter) if isinstance(value, Tensor) else copy.deepcopy(value)
        for key, value in moments.items()
    }


def without_seeds(optimizer: Mapping[str, Any], scheduler: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the state dicts of an optimizer and its scheduler without the groups of seeds."""
    groups = optimizer["param_groups"]
    own = [OWNER not in group for group in groups]
    held = {index for group, mine in zip(groups, own, strict=True) if mine for index in group["params"]}
    # A state dict numbers parameters in the order of the groups, and the host's groups need not all be first.
    number = {index: place for place, index in enumerate(sorted(held))}
    kept = [
        {**group, "params": [number[index] for index in group["params"]]}
        for group, mine in zip(groups, own, strict=True)
        if mine
    ]
    moments = {number[index]: state for index, state in optimizer["state"].items() if index in held}
    return {"state": moments, "param_groups": kept}, _entries(scheduler, own)


def _entries(scheduler: Mapping[str, Any], own: Sequence[bool]) -> dict[str, Any]:
    """Return the state dict of a scheduler with the entries of some groups alone."""
    kept = dict(scheduler)
    for name in _BY_GROUP:
        entries = kept.get(name)
        if isinstance(entries, list) and len(entries) == len(own):
            kept[name] = [entry for entry, mine in zip(entries, own, strict=True) if mine]
    if "_schedulers" in kept:
        kept["_schedulers"] = [_entries(each, own) for each in kept["_schedulers"]]
    return kept


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer inside of one that another library has wrapped, such as the AcceleratedOptimizer of Hugging Face."""
    if isinstance(optimizer, torch.optim.lr_scheduler.LRScheduler):  # which has an optimizer, and is none
        return optimizer
    inner = getattr(optimizer, "optimizer", None)
    return unwrapped(inner) if isinstance(inner, torch.optim.Optimizer) else optimizer


def _parts(schedulers: Iterable[Any]) -> Iterator[Any]:
    """Yield schedulers with those that they are made of."""
    for each in schedulers:
        yield each
        if isinstance(each, _MADE_OF_OTHERS):
            yield from _parts(each._schedulers)
