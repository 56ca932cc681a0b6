"""A config as text: YAML that is read back to an equal config, and the table of all keys that `esper config` prints."""

import json
from collections.abc import Iterator
from typing import Any

import yaml
from pydantic import BaseModel

from esper.leyline.config import Config
from esper.leyline.parsing import NUMBERS


def dump_config(config: Config) -> str:
    """The config as YAML, from which `runs.configuration.load_config_file` reads an equal config."""
    return yaml.dump(config.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """PyYAML's writer of plain objects, without aliases, which the reader refuses."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _tag, _pattern, _first in NUMBERS:  # text that would be read as a number is quoted
    _Dumper.add_implicit_resolver(_tag, _pattern, list(_first))


def reference(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """(key, type, default, meaning) of every key, depth first, as strings."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from reference(field.annotation, f"{prefix}{name}.")
        else:
            default = field.default if isinstance(field.default, str) else json.dumps(field.default)
            yield prefix + name, _type_name(field.annotation), default, field.description or ""


def _type_name(annotation: Any) -> str:
    """A type as the table shows it: `list[int]`, `float | null`, `adamw | sgd`."""
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    for old, new in (
        ("typing.", ""),
        ("collections.abc.Mapping", "mapping"),
        ("Literal", ""),
        ("tuple[", "list["),
        (", ...", ""),
        ("None", "null"),
        ("['", ""),
        ("']", ""),
        ("', '", " | "),
    ):
        text = text.replace(old, new)
    return text
