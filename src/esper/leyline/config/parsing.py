"""Parse JSON and YAML safely: the results are plain objects, and no code is executed."""

import json
import re
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from esper.leyline.messages import InputError

LARGEST_YAML = 2**17  # bytes; the config of a training on twenty tasks has 90 KB, and larger files are slow to parse


def parse_json(data: bytes, path: Path, mend: str) -> Any:
    """Parse JSON to plain objects. InputError, which ends in `mend`, if the data are not JSON."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise InputError(f"{path} is not valid JSON; {mend}") from None


Model = TypeVar("Model", bound=BaseModel)


def parse_model(data: bytes, model: type[Model], formats: Sequence[int], path: Path, mend: str) -> tuple[Any, Model]:
    """Parse JSON with a key `format` to plain objects and to a model. InputError if it is damaged, or of another format."""
    tree = parse_json(data, path, mend)
    found = tree.get("format") if isinstance(tree, dict) else None
    if found not in formats:
        known = f"format{'s' * (len(formats) > 1)} {', '.join(map(str, formats))}"
        raise InputError(
            f"{path} has format {found!r}, but this version of Esper reads {'the ' * (len(formats) > 1)}{known}; {mend}"
        )
    try:
        return tree, model.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InputError(f"{path} is damaged at {where!r}: {first['msg']}; {mend}") from None


def parse_yaml(data: str | bytes, where: str, mend: str) -> Any:
    """Return one YAML document as plain objects. InputError if it is not valid YAML, or if a mapping has a key twice.

    Aliases are refused, because a kilobyte of them can expand to more than the memory of a machine.
    """
    try:
        return _Plain(data).get_single_data()
    except _Refused as error:
        raise InputError(f"{where} {error}") from None
    except (yaml.YAMLError, ValueError, RecursionError):  # ValueError: a date that does not exist
        raise InputError(f"{where} is not valid YAML; {mend}") from None


class _Refused(Exception):
    """Says why valid YAML is not accepted, and what to change."""


_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"

NUMBERS = (
    (_INT, re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+"), "-+0123456789"),
    (_FLOAT, re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"), "-+.0123456789"),
    (_FLOAT, re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"), "-+."),
)
"""Numbers of YAML 1.2 (core schema, 10.3.2): tag, pattern, and the possible first characters."""

LONGEST_NUMBER = 100  # characters


_Events = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""What makes events of a text: libyaml, which takes a quarter of the time, where PyYAML was built with it. Both read what a run
writes alike; of what a person writes, libyaml takes a tab between values, too."""


class _Plain(yaml.composer.Composer, _Events):  # type: ignore[misc, valid-type]
    """Loads YAML as PyYAML's safe loader, without aliases and repeated keys, and with the numbers of YAML 1.2.

    YAML 1.1 also has numbers to the base 60 (1:30), of which a megabyte takes minutes to parse.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012 (as in PyYAML)
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_INT, _FLOAT)]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, stream: Any) -> None:
        _Events.__init__(self, stream)
        yaml.composer.Composer.__init__(self)

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise _Refused("holds an alias (*name), which is not read; write out what it stands for")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for place, _ in node.value:
            name = self.construct_object(place, deep=True) if isinstance(place, yaml.ScalarNode) else None
            if isinstance(place, yaml.ScalarNode) and name in seen:
                raise _Refused(f"names the key {str(name)[:60]!r} twice in one mapping; keep one of them")
            seen.add(name)
        return super().construct_mapping(node, deep=deep)


def _number(loader: _Plain, node: yaml.ScalarNode) -> int | float:
    """Return the value of a scalar that matches `NUMBERS`. `_Refused` if it is longer than `LONGEST_NUMBER`."""
    text = loader.construct_scalar(node)
    if len(text) > LONGEST_NUMBER:
        raise _Refused(f"holds a number of {len(text):,} characters, of which at most {LONGEST_NUMBER} are read")
    if node.tag == _INT:
        return int(text, {"0x": 16, "0o": 8}.get(text[:2].lower(), 10))
    return float(re.sub(r"\.(inf|nan)$", r"\1", text, flags=re.IGNORECASE))


for _tag, _pattern, _first in NUMBERS:
    _Plain.add_implicit_resolver(_tag, re.compile(rf"(?:{_pattern.pattern})\Z"), list(_first))
    _Plain.add_constructor(_tag, _number)
