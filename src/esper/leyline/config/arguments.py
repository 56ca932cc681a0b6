"""Check the arguments of public functions; each check raises one sentence that says what to give."""

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from esper.leyline.config.input import show
from esper.leyline.messages import InputError, did_you_mean

if TYPE_CHECKING:
    from esper.leyline.data.task import AnyTask

_Arguments = ParamSpec("_Arguments")
_Returned = TypeVar("_Returned")


def known_as(
    name: str, elsewhere: Mapping[str, str] | None = None
) -> Callable[[Callable[_Arguments, _Returned]], Callable[_Arguments, _Returned]]:
    """Let a wrong argument raise an InputError with the public name of the function and the most similar name; a decorator.

    elsewhere: what to call in place of the function, by an argument that it does not have.
    """

    def decorate(function: Callable[_Arguments, _Returned]) -> Callable[_Arguments, _Returned]:
        signature = inspect.signature(function)
        names = [each for each in signature.parameters if each != "self"]

        @functools.wraps(function)
        def called(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Returned:
            check_names(name, kwargs, names, elsewhere or {})
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                raise InputError(f"{name}: {error}") from None
            return function(*args, **kwargs)

        return called

    return decorate


def check_names(function: str, given: Iterable[str], names: Sequence[str], elsewhere: Mapping[str, str]) -> None:
    """Raise InputError for an argument that is none of `names`, with what `elsewhere` says of it, or the most similar name."""
    for name in given:
        if name not in names:
            hint = elsewhere.get(name) or did_you_mean(name, names) or f"it takes {', '.join(names)}"
            raise InputError(f"{function} has no argument {name!r}; {hint}")


def required_arguments(function: Callable[..., Any]) -> list[str]:
    """Return names of the arguments without which `function` cannot be called; none where its signature is not known."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some callables that are written in C have no signature
        return []
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [each.name for each in parameters if each.default is each.empty and each.kind not in optional]


def takes_one_argument(function: Callable[..., Any]) -> bool:
    """Return whether `function` can be called with one argument, as far as its signature is known."""
    try:
        inspect.signature(function).bind(None)
    except ValueError:  # some callables that are written in C have no signature
        return True
    except TypeError:
        return False
    return True


def check_outputs(outputs: Any) -> None:
    """Raise InputError if `outputs` is not a sequence of objects with the methods write and close."""
    if not isinstance(outputs, list | tuple):
        raise InputError(f"outputs is {show(outputs)}; give a list of objects with the methods write(row) and close()")
    for index, output in enumerate(outputs):
        if isinstance(output, type) or not all(callable(getattr(output, name, None)) for name in ("write", "close")):
            raise InputError(
                f"outputs[{index}] is {show(output)}; give an object with the methods write(row) and close()"
            )


def to_path(value: str | PathLike[str], name: str) -> Path:
    """Return the value as a path. InputError if it is not a text or a path, or is empty."""
    path = fspath(value) if isinstance(value, str | PathLike) else None
    if not isinstance(path, str) or not path:
        raise InputError(f"{name} is {show(value)}; give the path of a folder, such as 'runs/first'")
    return Path(path)


def check_switch(value: Any, name: str) -> None:
    """Raise InputError if the value is not a bool."""
    if not isinstance(value, bool):
        raise InputError(f"{name} is {show(value)}; give True or False")


def is_number(value: Any, kinds: Any = int | float) -> bool:
    """Return whether the value is of a kind of numbers, and no bool, which Python counts among the whole ones."""
    return isinstance(value, kinds) and not isinstance(value, bool)


def check_integer(
    value: Any, name: str, least: int = 1, mend: str = "", *, below: float = math.inf, kinds: Any = int
) -> None:
    """Raise InputError if the value is no whole number from `least` on; mend: what to give, in words of its own."""
    if not is_number(value, kinds) or not least <= value < below:
        raise InputError(f"{name} is {value!r}; give {mend or f'a whole number from {least} on'}")


def check_choice(value: Any, name: str, choices: Sequence[str]) -> None:
    """Raise InputError if the value is not one of the choices."""
    if value not in choices:
        raise InputError(f"{name} is {show(value)}; give one of {', '.join(map(repr, choices))}")


def check_callable(value: Any, name: str, what: str) -> None:
    """Raise InputError if the value cannot be called; `what` describes the callable that is expected."""
    if not callable(value):
        raise InputError(f"{name} is {show(value)}; give {what}")


def check_settings(settings: Any, tasks: Sequence["AnyTask"]) -> None:
    """Raise InputError if the settings are not a mapping, or name a task that is not one of the given tasks."""
    if not isinstance(settings, Mapping):
        raise InputError(f"config is {show(settings)}; give a mapping of keys to values, such as {{'steps': 24}}")
    names = [task.name for task in tasks]
    if settings.get("task", names[0]) not in names:
        raise InputError(
            f"config names the task {show(settings['task'])}, but the given task is {', '.join(map(repr, names))}; "
            "leave the key out"
        )
