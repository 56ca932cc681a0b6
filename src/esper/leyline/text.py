"""Text that is safe to print, and numbers as text."""

import re

_UNPRINTABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f"  # control characters: a terminal executes ESC and CSI sequences
    "\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"  # invisible characters and changes of the direction of text
    "\ud800-\udfff]"  # surrogates, which cannot be printed
)


def printable(text: object) -> str:
    r"""The text on one line, with every character that could control a terminal escaped: ESC as `\x1b`.

    Markup of rich is not escaped: print the result as a `rich.text.Text` or with markup=False.
    """
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape", "surrogatepass").decode("ascii"), str(text))


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """A number with its noun: `1 row`, `1,200 rows`. `plural` is the plural if it is not the noun with an s."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def nothing_planted(count: int, envs: int) -> str:
    """The beginning of a sentence about `count` of `envs` environments; a single one is not counted."""
    return "nothing was planted" if envs == 1 else f"nothing was planted in {count} of {counted(envs, 'environment')}"


def rounded(value: float, form: str) -> str:
    """A number in a format such as `+.3f`; a number that rounds to zero has no minus sign."""
    text = f"{value:{form}}"
    return text.replace("-", "+" if form.startswith("+") else "") if float(text.replace(",", "")) == 0 else text
