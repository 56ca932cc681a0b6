"""Text that comes from files, names and metrics, as a terminal may show it."""

import re

_UNPRINTABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f"  # control characters: a terminal takes ESC and CSI for commands
    "\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"  # invisible ones, and those that turn the direction of text
    "\ud800-\udfff]"  # bytes of a file name that are no text, which no output takes
)


def printable(text: object) -> str:
    r"""The text on one line, with every character that could steer a terminal written as an escape: ESC as `\x1b`.

    Nothing else is changed, so that text for rich has to be printed without markup, as a `rich.text.Text` or with markup=False.
    """
    return _UNPRINTABLE.sub(_escape, str(text))


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """A number with its noun: `1 row`, `1,200 rows`. `plural` is the noun's own where an s is not enough."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def rounded(value: float, form: str) -> str:
    """A number in a format such as `+.3f`; what rounds to zero has the sign of zero, never a minus."""
    text = f"{value:{form}}"
    return text.replace("-", "+" if form.startswith("+") else "") if float(text.replace(",", "")) == 0 else text


def _escape(found: re.Match[str]) -> str:
    character = found[0]
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")
