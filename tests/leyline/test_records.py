"""Check that `help` of a record or an enumeration says what each of its fields or members is."""

import dataclasses
import enum
import importlib
import inspect
import pkgutil
import re

import pytest

import esper
from esper import leyline


def records():
    """Find the NamedTuples, dataclasses and enumerations of `esper.leyline`, and all public ones, with fields of their own."""
    modules = [importlib.import_module(f"esper.leyline.{each.name}") for each in pkgutil.iter_modules(leyline.__path__)]
    own = [value for module in modules for value in vars(module).values() if inspect.isclass(value)]
    public = [getattr(esper, name) for name in esper.__all__]
    found = {each for each in [*own, *public] if inspect.isclass(each) and names(each) and not inherits_fields(each)}
    return sorted((each for each in found if each.__module__.startswith("esper.")), key=lambda each: each.__name__)


def inherits_fields(record):
    """Return whether a dataclass has the fields of its base and no others, as `Map` has those of `Stream`."""
    return any(dataclasses.is_dataclass(base) and names(base) == names(record) for base in record.__bases__)


def names(record):
    if issubclass(record, enum.Enum):
        return list(record.__members__)
    if dataclasses.is_dataclass(record):
        return [field.name for field in dataclasses.fields(record) if not field.name.startswith("_")]
    return list(getattr(record, "_fields", ()))


@pytest.mark.parametrize("record", records(), ids=lambda record: record.__name__)
def test_the_docstring_of_a_record_names_each_of_its_fields_in_order(record):
    _, found, listed = (inspect.getdoc(record) or "").partition("\n\nAttributes:\n")
    assert found, "the docstring has no section 'Attributes:'"
    entries = re.findall(r"^    (\w+)(?: \((.+?)\))?: \S", listed, re.MULTILINE)
    assert [name for name, _ in entries] == names(record)
    if not issubclass(record, enum.Enum):
        assert all(kind for _, kind in entries), "each field has its shape or type in brackets"
