"""Check the public names: one table, which Python and type checkers read."""

import ast
import shutil
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import esper
import typed_program
from esper.kasmina.blueprints import BLUEPRINTS

ROOT = Path(__file__).parents[1]
SOURCE = ast.parse((ROOT / "src" / "esper" / "__init__.pyi").read_text(encoding="utf-8"))


def test_every_name_of_the_stub_is_public_once_and_says_what_it_is():
    imports = [name.asname for node in SOURCE.body if isinstance(node, ast.ImportFrom) for name in node.names]
    names = [name for name in imports if name] + [
        ast.unparse(node.targets[0]) for node in SOURCE.body if isinstance(node, ast.Assign)
    ]
    assert esper.__all__ == sorted(names) == sorted(set(names))
    assert [name for name in dir(esper) if not name.startswith("__")] == esper.__all__, "what a shell completes"
    assert [name for name in names if not getattr(esper, name).__doc__] == []


def test_every_type_that_a_view_and_an_outcome_hold_is_public():
    """Check what an author of a controller or a reward annotates with."""
    fields = [*typing.get_type_hints(esper.View).values(), *typing.get_type_hints(esper.Outcome).values()]
    fields += typing.get_type_hints(esper.Space).values()
    held = {each for field in fields for each in (field, *typing.get_args(field)) if hasattr(each, "_fields")}
    assert len(held) > 8
    assert all(getattr(esper, each.__name__) is each for each in held)


def test_the_package_is_marked_as_typed():
    assert (ROOT / "src" / "esper" / "py.typed").is_file()


def test_a_typed_program_runs(tmp_path, monkeypatch):
    monkeypatch.setattr("esper.kasmina.blueprints.catalog.BLUEPRINTS", BLUEPRINTS)
    known = dict(BLUEPRINTS)
    try:
        summary, answer = typed_program.run(str(tmp_path / "r"))
    finally:
        BLUEPRINTS.clear()
        BLUEPRINTS.update(known)
    assert summary["seeds"]["germinated"] == 1
    assert answer.shape[1] == 2


@pytest.mark.slow
def test_a_typed_program_passes_mypy_strict(tmp_path):
    shutil.copy(ROOT / "tests" / "typed_program.py", tmp_path)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--config-file=",
        "--follow-imports=silent",
        "typed_program.py",
    ]
    environment = {"MYPYPATH": str(ROOT / "src"), "PATH": ""}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_a_name_that_is_not_public_is_an_error_for_a_type_checker(tmp_path):
    (tmp_path / "program.py").write_text("import esper\nesper.grwo()\n")
    command = [sys.executable, "-m", "mypy", "--config-file=", "--follow-imports=silent", "program.py"]
    environment = {"MYPYPATH": str(ROOT / "src"), "PATH": ""}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert 'Module has no attribute "grwo"' in done.stdout
