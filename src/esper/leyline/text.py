"""Make text safe to print, and numbers into text."""

import difflib
import re
from collections.abc import Iterable, Sequence

_UNPRINTABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f"  # control characters: a terminal executes ESC and CSI sequences
    "\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"  # invisible characters and changes of the direction of text
    "\ud800-\udfff]"  # surrogates, which cannot be printed
)


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
