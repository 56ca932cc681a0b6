"""Define errors and warnings whose message is one sentence, and what the tracebacks of users' code show."""

import os
import re
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from esper.leyline.text import printable

_SHORTAGE = re.compile(
    r"out of memory|can't allocate memory|not enough memory|bad_alloc|ALLOC_FAILED"
    r"|can't start new thread|could not (?:create|execute) a primitive",  # Python's and oneDNN's, which do not say why
    re.IGNORECASE,
)
_LIBRARIES = (
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
    *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")),
)
_PACKAGES = re.compile(r"[\\/](site|dist)-packages[\\/]")
_ASKED = re.compile(r"(?:tried to|unable to) allocate ([\d.,]+ (?:bytes|[KMGTPE]iB))", re.IGNORECASE)


class InputError(ValueError):
    """Refuses bad input in one sentence: what was given, what is accepted and what to change. The command line exits with 2.

    The message may quote a file that someone else wrote: lines are joined, and control characters are escaped.
    """

    def __init__(self, sentence: object = "") -> None:
        super().__init__(printable(" ".join(str(sentence).splitlines())))


class DataWarning(UserWarning):
    """Says which examples are left out: one sentence with their number, their split and their indices."""


class RunWarning(UserWarning):
    """Reports a finding about a run folder that does not stop the run."""


class GrowthWarning(UserWarning):
    """Reports a finding about a network that grows in a training loop, which does not stop it."""


class DataFault(RuntimeError):
    """Says that examples in memory that were finite are no longer finite: one sentence. The command line exits with 1."""


class UserCodeError(RuntimeError):
    """Says that code of the user raised an error, which is the `__cause__` of this one. The command line exits with 1."""


class WorkerError(RuntimeError):
    """Says that workers were lost for good, or that the code of one failed: one sentence. The command line exits with 1."""


class LearningError(RuntimeError):
    """Says that an update of a policy failed; the policy keeps its earlier weights. The command line exits with 1."""


class RolledBack(RuntimeError):
    """Says that every environment was rolled back in every step, so that nothing was trained."""

    def __init__(self, rollbacks: Mapping[str, int]) -> None:
        """rollbacks: numbers of rollbacks by reason."""
        reasons = ", ".join(f"{count} for {name}" for name, count in rollbacks.items())
        mend = (
            "check the metric of the task" if set(rollbacks) == {"metric"} else "lower optimizer.lr, or check the loss"
        )
        super().__init__(f"every environment was rolled back in every step ({reasons}), so nothing was trained: {mend}")


class OutOfMemory(RuntimeError):
    """Says that memory ran out: one sentence with the device, the amount, and the key to lower. The command line exits with 1."""


def warn(sentence: str, category: type[Warning]) -> None:
    """Warn at the line of the user's code that called Esper; at the outermost frame if there is none, as on the command line."""
    frame = sys._getframe(1)
    while frame.f_back is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    place, known = frame.f_globals.get("__name__", "<unknown>"), frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(sentence, category, frame.f_code.co_filename, frame.f_lineno, place, known)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its type where the message is empty."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def typed_line(error: BaseException) -> str:
    """Return an error on one line: `ValueError: the first line of the message`, or `ValueError` where the message is empty."""
    return f"{type(error).__name__}: {first_line(error)}" if str(error) else type(error).__name__


def describe_error(error: BaseException) -> dict[str, str]:
    """Return the type and message of an error, as in summary.json."""
    return {"type": type(error).__name__, "message": str(error)}


def raised_in_user_code(error: BaseException) -> bool:
    """Return whether the traceback of an error has a frame that is not of Esper, Python or an installed package."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return not all(map(_is_hidden, files))


def user_traceback(error: BaseException) -> str:
    """Return an error as Python prints it, without the frames before the first frame of the user's code."""
    trace = error.__traceback__
    while trace is not None and _is_hidden(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


def _is_hidden(file: str) -> bool:
    return file.startswith("<") or is_library(file)


def is_library(file: str) -> bool:
    """Return whether a source file belongs to Esper, to Python or to an installed package."""
    return file.startswith(("<frozen", *_LIBRARIES)) or bool(_PACKAGES.search(file))


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error of Python, NumPy or torch says that memory ran out; on the CPU torch raises a RuntimeError."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and bool(_SHORTAGE.search(str(error))))


@contextmanager
def in_words(what: str, mend: str = "") -> Iterator[None]:
    """Raise InputError in one sentence if the person's model or loss, which can raise anything, fails inside the block."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        said = f"{what}: {typed_line(error).rstrip(' .')}"
        raise InputError(f"{said}; {mend}" if mend else said) from error


@contextmanager
def amended(before: str = "", after: str = "") -> Iterator[None]:
    """Raise an InputError of the block with words in front of its sentence and behind it."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{before}{error}{after}") from None


@contextmanager
def system_in_words(what: str | None, mend: str) -> Iterator[None]:
    """Raise InputError in one sentence if the operating system refuses what the block does with a file; None: to write it."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{what or f'cannot write to {error.filename}'}: {error.strerror}; {mend}") from None


def requested_memory(error: BaseException) -> str | None:
    """Return the amount of memory that could not be allocated, as the error says; None if it does not say."""
    found = _ASKED.search(str(error))
    if found is None:
        return None
    amount, unit = found[1].split()
    return f"{int(amount) / 2**20:,.0f} MiB" if unit == "bytes" and amount.isdigit() else f"{amount} {unit}"
