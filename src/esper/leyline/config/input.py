"""Read input to a config: dotted keys as nested sections, and one sentence for each error of validation.

The sentence names the key, the value that was given, and the values that are accepted. In this file, `model` is the class of a
config or of one of its sections.
"""

import dataclasses
import types
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Union, get_args, get_origin

import pydantic
from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel

from esper.leyline.messages import InputError, did_you_mean, either

SYNONYMS: Mapping[str, str] = {
    **dict.fromkeys(("learning_rate", "learningrate", "step_size"), "lr"),
    **dict.fromkeys(("batch", "batchsize", "minibatch"), "batch_size"),
    **dict.fromkeys(("epoch", "num_epochs", "n_epochs", "max_epochs"), "epochs"),
    **dict.fromkeys(("num_steps", "n_steps", "max_steps", "iterations"), "steps"),
    **dict.fromkeys(("num_envs", "n_envs", "environments", "population"), "envs"),
    **dict.fromkeys(("random_state", "random_seed"), "seed"),
    **dict.fromkeys(("l2", "decay"), "weight_decay"),
    **dict.fromkeys(("lam", "lambda_", "gae_lam"), "gae_lambda"),
    **dict.fromkeys(("clip_coef", "clip_eps", "clip_epsilon"), "clip_range"),
    **dict.fromkeys(("ent_coef", "entropy_coef"), "entropy_weight"),
    **dict.fromkeys(("vf_coef", "value_coef"), "value_weight"),
    **dict.fromkeys(("clip", "grad_clip", "clip_grad_norm"), "max_grad_norm"),
}
"""Names of other libraries, each with the last part of Esper's key for the same thing."""

SHOWN = 60
"""Longest text of a value in a sentence [characters]."""


def to_sections(layer: Mapping[Any, Any], model: type[BaseModel]) -> dict[str, Any]:
    """Return a layer of settings with dotted keys nested: `{"optimizer.lr": 1}` becomes `{"optimizer": {"lr": 1}}`.

    InputError if a key is not a text, or if a setting is given twice.
    """
    nested: dict[str, Any] = {}
    for name, value in layer.items():
        if not isinstance(name, str):
            raise InputError(
                f"the config key {show(name)} is not a text; give keys such as {next(iter(model.model_fields))!r}"
            )
        first, dot, rest = name.partition(".")
        inner = {rest: value} if dot else value
        section = _section(model, first)
        if section is not None and isinstance(inner, Mapping):
            inner = to_sections(inner, section)
        nested[first] = merged(nested[first], inner, first) if first in nested else inner
    return nested


def dotted(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield each setting of nested sections with its dotted key; an empty mapping is a setting."""
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from ((f"{name}.{key}", inner) for key, inner in dotted(value))
        else:
            yield str(name), value


def explain(error: pydantic.ValidationError, model: type[BaseModel]) -> str:
    """Return the first error of a validation as one sentence."""
    first = error.errors()[0]
    place, value = first["loc"], first["input"]
    path = ".".join(map(str, place))
    own = first["msg"].removeprefix("Value error, ") if first["type"] == "value_error" else None
    if first["type"] == "extra_forbidden":
        # Keys of the same or a synonymous name, in the same section if it has one; else the most similar key.
        keys, (section, _, last) = list(_keys(model)), path.rpartition(".")
        named = SYNONYMS.get(last.lower().replace("-", "_"), last)
        same = [key for key in keys if key.rpartition(".")[2] == named]
        here = [key for key in same if section and key.rpartition(".")[0] == section]
        hint = did_you_mean(path, keys, first=here or same, similarity=0.7)
        return f"unknown config key {show(path)}; {hint or '`esper config` lists the keys'}"
    for index, each in enumerate(map(str, place)):  # from section to section, to the field
        inner = _section(model, each)
        if inner is None:
            key, found = ".".join(map(str, place[: index + 1])), model.model_fields[each]
            holds = "is" if key == path else "holds"
            return f"{key} {holds} {show(value)}; {own or f'give {accepted(found.annotation, found.metadata)}'}"
        model = inner
    if own is not None:  # a section's own sentence begins with the name of a key of it
        return f"{path}.{own}" if path else own
    name, field = next(iter(model.model_fields.items()))
    return f"{path} is {show(value)}; give a mapping of its keys to values, such as {{{name!r}: {show(field.default)}}}"


def show(value: Any) -> str:
    """Return the `repr` of a value on one line, of at most `SHOWN` characters."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # repr of an int with more than 4,300 digits
        return "a whole number too long to write"
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def accepted(annotation: Any, metadata: Any = ()) -> str:
    """Return the values that a field accepts, in words: `a whole number of at least 1`."""
    if get_origin(annotation) in (Union, types.UnionType):
        kinds = [each for each in get_args(annotation) if each is not type(None)]
        return " or ".join([*(accepted(each, metadata) for each in kinds), "null"])
    if get_origin(annotation) is Literal:
        return either([str(each) for each in get_args(annotation)])
    if get_origin(annotation) is tuple:
        shortest = next((limit.min_length for limit in metadata if isinstance(limit, MinLen)), 0)
        return f"a list of {_PLURAL[get_args(annotation)[0]]}" + (f", at least {shortest}" if shortest else "")
    if get_origin(annotation) is not None and issubclass(get_origin(annotation), Mapping):
        return f"a mapping of names to {_PLURAL.get(get_args(annotation)[1], 'values')}"
    limits = {Ge: "of at least", Gt: "above", Le: "of at most", Lt: "below"}
    words = [f"{limits[type(each)]} {dataclasses.astuple(each)[0]}" for each in metadata if type(each) in limits]
    return " ".join([_SINGULAR.get(annotation, "another value"), " and ".join(words)]).strip()


_SINGULAR: Mapping[Any, str] = {int: "a whole number", float: "a finite number", bool: "true or false", str: "text"}
_PLURAL: Mapping[Any, str] = {int: "whole numbers", float: "numbers", str: "names"}


def _section(model: type[BaseModel], name: str) -> type[BaseModel] | None:
    """Return the class of a section; None if the field is not a section, or does not exist."""
    annotation = model.model_fields[name].annotation if name in model.model_fields else None
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _keys(model: type[BaseModel], path: str = "") -> Iterator[str]:
    for name in model.model_fields:
        yield path + name
        if (inner := _section(model, name)) is not None:
            yield from _keys(inner, f"{path}{name}.")


def merged(one: Any, other: Any, name: str = "") -> Any:
    """Return two values of a section merged, of which `other` wins; InputError if both set a key of the same layer, `name`."""
    if not isinstance(one, Mapping) or not isinstance(other, Mapping):
        if name:
            raise InputError(f"the config key {show(name)} is given twice in one mapping; keep one of them")
        return other
    inner = {key: merged(one[key], value, name and f"{name}.{key}") for key, value in other.items() if key in one}
    return {**one, **other, **inner}
