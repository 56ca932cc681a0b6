"""Output that takes everything: a terminal that is gone, a full disk or an ASCII one never ends a run."""

import errno
import io
import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, TextIO, cast

PLAIN = str.maketrans(
    {
        "±": "+-",
        "≤": "<=",
        "≥": ">=",
        "×": "x",
        "…": "...",
        "–": "-",
        "—": "-",
        "−": "-",
        "─": "-",
        "━": "-",
        "╸": "-",
        "╺": "-",
        "│": "|",
        "•": "*",
        "→": "->",
    }
)
"""What stands for a character that an output's encoding lacks; any other becomes its escape, as \\u2603."""


class Steady(io.TextIOBase):
    """A text stream over another one that never raises where it is written to.

    What the encoding lacks is written in plain characters, and what cannot be written is dropped; `lost` has the first
    reason. The stream that it covers keeps nothing back, so the interpreter finds nothing to write at its end either.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self.lost: OSError | None = None
        try:
            stream.flush()
            self._descriptor: int | None = stream.fileno()
        except (OSError, ValueError):  # a stream in memory has none
            self._descriptor = None

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Of the stream that is covered; UTF-8 where that says nothing, as in memory."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """The descriptor of the stream that is covered."""
        return self._stream.fileno()

    def writable(self) -> bool:
        """Always."""
        return True

    def write(self, text: str) -> int:
        """Write what can be written."""
        try:
            data = text.encode(self.encoding)
        except UnicodeEncodeError:
            # a space less beside the sign, so that columns stay where they are
            text = text.replace(" ± ", " +-").translate(PLAIN)
            data = text.encode(self.encoding, "backslashreplace")
        try:
            if self._descriptor is None:
                self._stream.write(data.decode(self.encoding))
            else:
                _write(self._descriptor, data)
        except (OSError, ValueError) as error:  # a ValueError where the stream was closed
            self.lost = self.lost or (error if isinstance(error, OSError) else OSError(errno.EBADF, "it is closed"))
        return len(text)

    def flush(self) -> None:
        """Nothing is kept back, but in a stream without a descriptor."""
        if self._descriptor is None and not self._stream.closed:
            self._stream.flush()


def steady(stream: IO[str]) -> TextIO:
    """A stream as one that never raises; itself where it is one already."""
    return cast(TextIO, stream if isinstance(stream, Steady) else Steady(stream))


@contextmanager
def steady_output() -> Iterator[None]:
    """Let the standard streams of the process take everything, those too that are closed and None in Python."""
    before = sys.stdout, sys.stderr
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        sys.stdout, sys.stderr = (steady(stream or nowhere) for stream in before)
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before


def lost_output() -> OSError | None:
    """Why something that was written to stdout did not arrive; None where it did, or where its reader went away."""
    lost = sys.stdout.lost if isinstance(sys.stdout, Steady) else None
    return None if lost is None or lost.errno == errno.EPIPE else lost


def plug_closed_streams() -> None:
    """Open the null device where the process was started without stdin, stdout or stderr.

    The next file that is opened would get that number, and a library's warning would be written into it.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free, which is this one


def _write(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:  # a pipe that does not block and is full for now
            select.select([], [descriptor], [])
