"""Define what people read: errors and warnings of one sentence, tracebacks of users' code, and names and numbers in words."""

import difflib
import os
import re
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

_SHORTAGE = re.compile(
    r"out of memory|can't allocate memory|not enough memory|bad_alloc|ALLOC_FAILED"
    r"|can't start new thread|could not (?:create|execute) a primitive",  # Python's and oneDNN's, which do not say why
    re.IGNORECASE,
)
_UNPRINTABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f"  # control characters: a terminal executes ESC and CSI sequences
    "\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"  # invisible characters and changes of the direction of text
    "\ud800-\udfff]"  # surrogates, which cannot be printed
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


def printable(text: object) -> str:
    r"""Return the text on one line, with every character that could control a terminal escaped: ESC as `\x1b`.

    Markup of rich is not escaped: print the result as a `rich.text.Text` or with markup=False.
    """
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape", "surrogatepass").decode("ascii"), str(text))


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun: `1 row`, `1,200 rows`. `plural` is the plural if it is not the noun with an s."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def kind_of(value: object) -> str:
    """Return the type of a value with its article: `an int`, `a Tensor`, `an LSTM`."""
    return with_article(type(value).__name__)


def with_article(name: str) -> str:
    """Return a name behind `a` or `an`, by how it is said: `an Embedding`, `an RMSNorm`, `an ndarray`, `a UserDict`."""
    spelled = name == "ndarray" or (name[:1] in "FHLMNRSX" and (len(name) == 1 or name[1].isupper()))
    return f"{'an' if spelled or name[:1] in 'AEIOaeio' else 'a'} {name}"


def either(words: Sequence[str]) -> str:
    """Write words as a choice: `a`, `a or b`, `a, b or c`."""
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def listed(values: Sequence[object], most: int = 3) -> str:
    """Write the first values with commas between them, and how many more there are: `a, b and 3 more`."""
    more = f" and {len(values) - most} more" if len(values) > most else ""
    return ", ".join(map(str, values[:most])) + more


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of cells as lines with columns of equal width; the last column ends where its text does."""
    sizes = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(size) for cell, size in zip(row, sizes, strict=True)).rstrip() for row in rows]


def did_you_mean(
    given: object, known: Iterable[str], *, first: Sequence[str] = (), most: int = 1, similarity: float = 0.6
) -> str:
    """Ask `did you mean 'digits'?` for a name that is not among the known ones; "" where there is nothing to suggest.

    first: names to suggest in any case; where there are some, similar names are not looked for. most: the largest number of
    similar names. similarity: the least similarity of a name, from 0 to 1 (`difflib.SequenceMatcher.ratio`).
    """
    near = list(first) or difflib.get_close_matches(str(given), list(known), most, similarity)
    return f"did you mean {either([repr(name) for name in near])}?" if near else ""


def nothing_planted(count: int, envs: int) -> str:
    """Return the beginning of a sentence about `count` of `envs` environments; a single one is not counted."""
    return "nothing was planted" if envs == 1 else f"nothing was planted in {count} of {counted(envs, 'environment')}"


def rounded(value: float, form: str) -> str:
    """Return a number in a format such as `+.3f`; a number that rounds to zero has no minus sign."""
    text = f"{value:{form}}"
    return text.replace("-", "+" if form.startswith("+") else "") if float(text.replace(",", "")) == 0 else text


def duration(seconds: float) -> str:
    """Return a time in a readable unit: `14 seconds`, `3 minutes`, `2.5 hours`."""
    if seconds < 90:
        return f"{seconds:.2g} seconds" if seconds < 10 else f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 90 * 60 else f"{seconds / 3600:.1f} hours"
