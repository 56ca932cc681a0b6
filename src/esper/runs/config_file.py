"""A config that a person wrote to a file."""

from pathlib import Path
from typing import Any

from esper.leyline.errors import InputError
from esper.leyline.parsing import LARGEST_YAML, parse_yaml
from esper.store.reading import read_named


def load_config_file(path: str) -> dict[str, Any]:
    """A YAML file as a nested mapping. InputError where it cannot be read or is no mapping."""
    data = read_named(Path(path), LARGEST_YAML, "give a readable YAML file with --config")
    content = parse_yaml(data, f"--config {path}", "`esper config --yaml` prints one to start from")
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise InputError(f"--config {path} holds a {type(content).__name__}, not a mapping of keys to values")
    return content
