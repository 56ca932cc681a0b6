"""Load code of the user's own by reference to a function: `path.py:function` or `module:function`."""

import ast
import importlib
import importlib.util
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from hashlib import sha256
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from esper.leyline.config.arguments import required_arguments
from esper.leyline.messages import InputError, UserCodeError, did_you_mean, is_library, kind_of, typed_line
from esper.leyline.plugins import CONTROLLERS, plugins

_READ: dict[Path, tuple[bytes, ModuleType]] = {}
"""The files that were imported, with their content: a file runs again only after it was edited."""


def load_reference(reference: str, what: str, returns: str = "it", ready: Any = ()) -> Any:
    """Import `path.py:function` or `module:function`, call the function, and return what it returns.

    what, returns: what is wanted, in words. ready: types of objects that are returned as they are.
    """
    made = find_reference(reference, what)
    if isinstance(made, ready):
        return made
    if not callable(made):
        raise InputError(f"{reference} is {kind_of(made)}; name a function that returns {returns}")
    if needed := required_arguments(made):
        raise InputError(f"{reference} needs the argument {needed[0]!r}; name a function that takes none")
    return _run(reference, what, made)


def find_reference(reference: str, what: str) -> Any:
    """Import `path.py:function` or `module:function`, and return the function without calling it.

    A module is imported from the current folder or from `sys.path`. A file can import the modules of its own folder. InputError
    if there is no such file, module or function; UserCodeError, with its cause, if the code raises another error.
    """
    place, _, name = reference.rpartition(":")
    if not place or not name:
        raise InputError(f"the {what} {reference!r} names no function; give path.py:function or module:function")
    is_file = place.endswith(".py") or os.sep in place
    module = _run(reference, what, lambda: _read_file(Path(place)) if is_file else _import(place))
    if not hasattr(module, name):
        names = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
        hint = did_you_mean(name, names) or "define it there, or name another"
        raise InputError(f"{place} has no function {name!r}; {hint}")
    return getattr(module, name)


def digest_of(reference: str) -> str | None:
    """Return the first 16 hexadecimal digits of the sha256 of the file that a reference names; None if not imported."""
    place = reference.rpartition(":")[0]
    content, _ = _READ.get(Path(place).resolve(), (None, None))
    file = getattr(sys.modules.get(place), "__file__", None)
    if content is None and file is not None and Path(file).is_file():
        content = Path(file).read_bytes()
    return None if content is None else sha256(content).hexdigest()[:16]


def digest_of_sources() -> str:
    """Digest the sources of all imported modules of the user, without the script that runs, which no reference names."""
    digest = sha256()
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name != "__main__" and file is not None and not is_library(file) and Path(file).is_file():
            content = Path(file).read_bytes()
            digest.update(f"{Path(file).name} {len(content)} ".encode() + content)
    return digest.hexdigest()


def unnamed_function(file: str, what: str) -> str:
    """Return the message for a Python file without a function; it names the file's, and runs nothing. what: what is wanted."""
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return f"{file} names no function; give path.py:function"
    functions = [each for each in tree.body if isinstance(each, ast.FunctionDef) and not each.name.startswith("_")]
    names = [each.name for each in functions if not each.args.args[len(each.args.defaults) :]]
    places = [f"{file}:{name}" for name in names]
    shown = f", as in {places[0]}" if len(places) == 1 else f": {', '.join(places)}" if places else " of it"
    return f"{file} is a file; name the function that returns the {what}{shown}"


class _FromSource(SourceFileLoader):
    """Loads a module without its bytecode, which may be that of a content with as many bytes, written in the same second."""

    def get_code(self, fullname: str) -> CodeType:
        """Return the code of the file as it is."""
        return self.source_to_code(self.get_data(self.path), self.path)


def _read_file(path: Path) -> ModuleType:
    """Import a file as a module, with its folder on `sys.path`, unless it was imported with this content before."""
    if not path.is_file():
        raise InputError(f"there is no file {path}; give the path of a Python file as path.py:function")
    content = path.read_bytes()
    known, module = _READ.get(path.resolve(), (None, None))
    if module is not None and known == content:
        return module
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    name = path.stem if path.stem not in sys.modules else f"{path.stem} ({path.resolve()})"
    spec = importlib.util.spec_from_file_location(name, path, loader=_FromSource(name, str(path)))
    assert spec is not None
    assert spec.loader is not None, "it was given"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look it up here
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    _READ[path.resolve()] = content, module
    return module


def _import(name: str) -> ModuleType:
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module exists, and one that it imports does not
        raise InputError(
            f"there is no module {name!r} here or among the installed ones; give the path of a file as path.py:function"
        ) from None


def _run(reference: str, what: str, code: Callable[[], Any]) -> Any:
    """Call the user's code. UserCodeError, with the original error as its cause, where it raises one."""
    try:
        return code()
    except (InputError, UserCodeError):
        raise
    except SystemExit:
        raise InputError(
            f"{reference} left the interpreter (sys.exit) while it was read; put what it runs as a script under "
            "if __name__ == '__main__'"
        ) from None
    except Exception as error:
        raise UserCodeError(f"the {what} {reference} raised {typed_line(error)}") from error


PAID_BY = "ppo, paid by "
"""How the config of a training names its controller if the reward was given; the name of the reward follows."""


def is_reference(name: str) -> bool:
    """Return whether the name of a task refers to a function, `path.py:function` or `module:function`, that makes the task."""
    return ":" in name


def is_own_controller(name: str) -> bool:
    """Return whether the name of a controller refers to a function or a class that makes it."""
    return is_reference(name) and name.partition(":")[0] not in plugins(CONTROLLERS)


def own_code(controller: str) -> tuple[str, str] | None:
    """Return the argument of `resume`, controller or reward, and its reference, by a config's `controller`; None for neither."""
    if controller.startswith(PAID_BY):
        reward = controller.removeprefix(PAID_BY)
        return ("reward", reward) if is_reference(reward) else None
    return ("controller", controller) if is_own_controller(controller) else None


def resume_command(folder: Path, tasks: Sequence[str], controller: str = "") -> str:
    """Return the command that resumes a run on these tasks: `esper resume runs/mine --task path.py:function`.

    controller: that of the config. The command repeats what is made by functions, because a run folder alone may not start code.
    """
    named = [f"--task {shlex.quote(name)}" for name in tasks if is_reference(name)]
    if (own := own_code(controller)) is not None:
        named.append(f"--{own[0]} {shlex.quote(own[1])}")
    return " ".join([f"esper resume {shlex.quote(str(folder))}", *named])


def resume_call(folder: Path, tasks: Sequence[str], made: Sequence[str] = (), controller: str = "") -> str:
    """Return the call that resumes a run on these tasks: `esper.resume('runs/mine', task='path.py:function')`.

    made: the arguments, "task" or "controller", that were Python objects. controller: that of the config.
    """
    places = [name for name in tasks if is_reference(name)]
    given = []
    if "task" in made:
        given.append("task=...")
    elif places:
        given.append(f"task={places[0]!r}" if len(places) == 1 else f"task={places!r}")
    if "controller" in made:
        given.append("controller=...")
    elif (own := own_code(controller)) is not None:
        given.append(f"{own[0]}={own[1]!r}")
    return f"esper.resume({', '.join([repr(str(folder)), *given])})"
