"""Define a trained policy, and write its two files: weights as safetensors, everything else as JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch.utils import _pytree as pytree

from esper.leyline.config.parsing import parse_json
from esper.leyline.config.tree import check_controller_settings
from esper.leyline.data.keys import Purpose, scalar
from esper.leyline.lifecycle.view import Space
from esper.leyline.lifecycle.vocabulary import Blend, Op, Stage
from esper.leyline.messages import InputError
from esper.leyline.records import as_tree, brief, from_tree
from esper.store.disk import Retry, checksum_of, find_folder, read_kept, sha256_of, write_folder, write_once
from esper.tamiyo.policy.network import Batch, FactoredRecurrentActorCritic
from esper.tamiyo.policy.observation import Normaliser, Observation, input_names, normalise, slot_features
from esper.tamiyo.policy.packages import INNER

VERSION = 2
"""Version of the file format."""
WEIGHTS, FACTS = "controller.safetensors", "controller.json"
_LARGEST, _LARGEST_FACTS = 64 * 2**20, 2**20  # sizes of the files [bytes]


class Language(NamedTuple):
    """Names the sensors and the choices that a policy was trained with. A space must have the same, and any blueprints."""

    sensors: tuple[str, ...]  # growth sensors
    # those that the policy has met; of others it knows what their cost and their sensors tell
    blueprints: tuple[str, ...]
    tempos: tuple[int, ...]  # lengths of ramps [steps]
    targets: tuple[float, ...]  # targets of ramps
    packages: tuple[str, ...] = ()  # blueprints that one decision can plant in every slot (`tamiyo.policy.packages`)

    @classmethod
    def of(cls, spaces: Sequence[Space], packages: Sequence[str] = ()) -> "Language":
        """Join the languages of several spaces, with the blueprints of all.

        InputError if sensors, tempos or targets differ, or if a space lacks a package.
        """
        names = dict.fromkeys(info.name for space in spaces for info in space.blueprints)
        first = spaces[0]
        language = cls(first.sensors, tuple(names), first.tempos, first.targets, tuple(dict.fromkeys(packages)))
        for space in spaces:
            language.check(space)
        return language

    def check(self, space: Space) -> None:
        """Raise InputError if a space has other sensors or choices."""
        for what, mine, theirs, advice in (
            ("growth sensors", self.sensors, space.sensors, ""),
            ("tempos", self.tempos, space.tempos, "set lifecycle.tempos to those of the controller, or "),
            ("targets", self.targets, space.targets, "set lifecycle.targets to those of the controller, or "),
        ):
            if mine != theirs:
                raise InputError(
                    f"the controller knows the {what} {list(mine)}, the task has {list(theirs)}; {advice}train a controller "
                    "on the task"
                )
        menu = [info.name for info in space.blueprints]
        if self.packages and (missing := [name for name in (*self.packages, INNER) if name not in menu]):
            raise InputError(
                f"the packages of the controller ({', '.join(self.packages)}; ppo.packages) need {missing[0]}, which the menu "
                f"lacks: add it with --set blueprints=[...], or train a controller without packages"
            )


@brief
@dataclass
class Policy:
    """Holds a policy network with the normalisation of its inputs. A learner updates `network` and `normaliser`."""

    network: FactoredRecurrentActorCritic
    normaliser: Normaliser  # moments of the observations
    language: Language
    # config that a run with this policy uses, keys of `leyline.config.OF_CONTROLLERS`
    settings: Mapping[str, Any] = field(default_factory=dict)
    origin: Mapping[str, Any] = field(default_factory=dict)  # tasks, rounds and validation results of the training
    decisions_per_step: int = 1  # largest number of decisions for an environment in one step

    @classmethod
    def fresh(
        cls,
        language: Language,
        seed: int,
        settings: Mapping[str, Any] | None = None,
        decisions_per_step: int = 1,
        undo_bias: float = 0.0,
    ) -> "Policy":
        """Return an untrained policy with random weights. undo_bias: added to the logits of PRUNE and SET_ALPHA."""
        env, slot = input_names(language.sensors)
        choices = (len(language.blueprints), len(language.tempos), len(language.targets))
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(scalar(seed, Purpose.POLICY_WEIGHTS))  # weights are drawn on the CPU
            network = FactoredRecurrentActorCritic(len(env), len(slot), *choices, len(language.packages))
        network.bias_ops({Op.PRUNE: undo_bias, Op.SET_ALPHA: undo_bias})
        normaliser = Normaliser.prior(language.sensors)
        return cls(network, normaliser, language, dict(settings or {}), decisions_per_step=decisions_per_step)

    @property
    def device(self) -> torch.device:
        """The device of the weights. Observations and decisions are on the CPU."""
        return self.network.value_scale.device

    def to(self, device: torch.device) -> "Policy":
        """Move the weights to a device. Actors and learners of the policy are made afterwards."""
        self.network.to(device)
        return self

    def normalised(self, observation: Observation) -> Observation:
        """Return an observation on the scale of the network. A study may show the policy something else by a subclass."""
        return normalise(observation, self.normaliser, slot_features(self.language.sensors))

    def input_weights(self) -> dict[str, float]:
        """Return how strongly the first layer reads each input: the sum of its squared weights / the mean of that over inputs.

        The inputs are normalised, so their weights can be compared. An untrained policy has values close to 1. Inputs of the
        environment and of the slots are read by different layers, and each is compared with its own layer.
        """
        env, slot = input_names(self.language.sensors)
        weights: dict[str, float] = {}
        for part, names, layer in (
            ("environment", env, self.network.pooled[0]),
            ("slot", slot, self.network.encoder[0]),
        ):
            own = layer.get_parameter("weight").detach().cpu()[:, : len(names)]  # the other columns are encodings
            shares = (own.square().sum(0) / own.square().sum(0).mean()).tolist()
            weights |= {f"{part}: {name}": share for name, share in zip(names, shares, strict=True)}
        return weights

    def state(self) -> dict[str, Any]:
        """Return the weights and moments as a tree of arrays. The tensors share memory with the policy."""
        return {"network": dict(self.network.state_dict()), "normaliser": as_tree(self.normaliser)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`. ValueError if it belongs to a policy of other shapes."""
        try:
            self.network.load_state_dict(state["network"])
        except RuntimeError as error:  # torch raises it for missing names and other shapes
            raise ValueError(" ".join(str(error).split())[:160]) from None
        self.normaliser = from_tree(self.normaliser, state["normaliser"], "normaliser")

    def batch(self, observation: Observation, menu: Sequence[str]) -> Batch:
        """Turn an observation (T, E, ...) into inputs on the device of the weights.

        Indices into the menu become indices into the vocabulary, where packages come last.
        """
        inputs = self.normalised(observation)
        known = {name: i for i, name in enumerate(self.language.blueprints)}
        vocabulary = [known.get(name, -1) for name in menu]
        empty = len(known)
        index = np.array([*vocabulary, empty])[inputs.blueprint]  # -1, an empty slot, takes the last entry
        menu_index = [*vocabulary, *(empty + 1 + package for package in range(len(self.language.packages)))]
        fields = inputs.env, inputs.slot, index, inputs.cost, inputs.prospects, np.array(menu_index)
        return Batch(*(torch.from_numpy(each).to(self.device) for each in fields))


def save_policy(policy: Policy, folder: Path, retry: Retry = write_once) -> None:
    """Write the two files as a folder, which replaces an existing one. A crash leaves either the old or the new folder."""
    weights = save({name: tensor.cpu().contiguous() for name, tensor in policy.network.state_dict().items()})
    facts = {
        "version": VERSION,
        "sha256": sha256_of(weights),
        "vocabulary": _vocabulary(),
        "language": {name: known for name, known in policy.language._asdict().items() if known or name != "packages"},
        "normaliser": pytree.tree_map(np.ndarray.tolist, as_tree(policy.normaliser)),
        "settings": dict(policy.settings),
        "origin": dict(policy.origin),
        **({"decisions_per_step": policy.decisions_per_step} if policy.decisions_per_step > 1 else {}),
    }
    text = json.dumps({**facts, "checksum": checksum_of(facts)}, indent=2, allow_nan=False) + "\n"
    retry(folder, lambda: write_folder(folder, {WEIGHTS: weights, FACTS: text.encode()}))


def load_policy(folder: Path) -> Policy:
    """Read a folder that `save_policy` wrote. InputError if a file is missing, damaged, or of another format."""
    facts, weights = read_facts(folder), find_folder(folder) / WEIGHTS
    data = read_kept(weights, _LARGEST, "train the controller again")
    if sha256_of(data) != facts["sha256"]:
        raise InputError(f"{weights} is not the file that {FACTS} names, by its sha256; take both files from one run")
    try:
        language = Language(**{name: tuple(known) for name, known in facts["language"].items()})
        decisions, state = facts.get("decisions_per_step", 1), load(data)
        if type(decisions) is not int or decisions < 1:
            raise ValueError(f"decisions_per_step is {decisions!r}, which is no whole number from 1 on")
        for name, count in (  # before a network is built
            ("blueprint.weight", len(language.blueprints) + 1 + len(language.packages)),
            ("tempo_head.2.bias", len(language.tempos)),
            ("target_head.2.bias", len(language.targets)),
        ):
            if len(state[name]) != count:
                raise ValueError(f"tensor {name} has {len(state[name])} rows, but the language has {count}")
        policy = Policy.fresh(language, 0, facts["settings"], decisions)
        wanted = policy.network.state_dict()
        if odd := [name for name, tensor in state.items() if name in wanted and tensor.dtype != wanted[name].dtype]:
            raise ValueError(f"tensor {odd[0]} is {state[odd[0]].dtype}, the network has {wanted[odd[0]].dtype}")
        policy.network.load_state_dict(state)
        if odd := [name for name, tensor in state.items() if not bool(torch.isfinite(tensor).all())]:
            raise ValueError(f"weights of {odd[0]} are not finite")
        known = {
            part: {name: np.array(field, np.float64) for name, field in moments.items()}
            for part, moments in facts["normaliser"].items()
        }
        policy.normaliser = from_tree(policy.normaliser, known, "normaliser")
        if not all(np.isfinite(field).all() for moments in policy.normaliser for field in moments):
            raise ValueError("the normaliser does not hold finite moments")
        if any((moments.var < 0).any() or (moments.n < 0).any() for moments in policy.normaliser):
            raise ValueError("the normaliser has a variance or a count below 0")
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:160]
        raise InputError(f"{folder} does not hold a controller of this version ({reason}); train it again") from None
    policy.origin = facts["origin"]
    return policy


def read_facts(folder: Path) -> dict[str, Any]:
    """Return what the JSON file of a controller holds, read without its weights. InputError as in `load_policy`."""
    path = find_folder(folder) / FACTS
    data = read_kept(path, _LARGEST_FACTS, "give the folder of a trained controller")
    facts = parse_json(data, path, "train the controller again")
    if not isinstance(facts, dict) or facts.get("version") != VERSION:
        found = facts.get("version") if isinstance(facts, dict) else None
        raise InputError(
            f"{path} is of format {found!r}, this Esper reads format {VERSION}; train the controller again"
        )
    needed = {"sha256", "checksum", "vocabulary", "language", "normaliser", "settings", "origin"}
    if missing := sorted(needed - set(facts)):
        raise InputError(f"{path} lacks {', '.join(missing)}; train the controller again")
    for name in sorted(needed - {"sha256", "checksum"}):
        if not isinstance(facts[name], dict):
            raise InputError(f"{path}: {name} is not a JSON object; train the controller again")
    for name, mine in _vocabulary().items():
        theirs = facts["vocabulary"].get(name)
        if theirs != mine:
            odd = sorted(set(mine).symmetric_difference(map(str, theirs) if isinstance(theirs, list) else ()))
            raise InputError(
                f"{path} was trained with other {name.replace('_', ' ')}; they differ in {', '.join(odd) or 'their order'}: "
                "train the controller again"
            )
    if facts["checksum"] != checksum_of(facts):
        raise InputError(f"{path} was altered, by its checksum; train the controller again")
    check_controller_settings(facts["settings"], str(path))
    return facts


def _vocabulary() -> dict[str, list[str]]:
    """Return the names of columns and indices that are fixed in the source, other than those of the language."""
    env, slot = input_names(())
    return {
        "environment_features": list(env),
        "slot_features": list(slot),
        "operations": [op.name for op in Op],
        "blends": [blend.name for blend in Blend],
        "stages": [stage.name for stage in Stage],
    }
