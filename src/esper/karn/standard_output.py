"""Write output without ever raising: a closed terminal, a full disk or an ASCII encoding does not end a run."""

import errno
import io
import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import IO, TextIO, cast

PLAIN = str.maketrans(
    {"±": "+-", "≤": "<=", "≥": ">=", "…": "...", "→": "->", "×": "x", "│": "|", "•": "*"}
    | dict.fromkeys("–—−─━╸╺", "-")
)
"""Replacements for characters that the encoding of an output lacks; other characters are escaped, as \\u2603."""


class Steady(io.TextIOBase):
    """Writes text to another stream and never raises.

    Characters that the encoding lacks are replaced. Text that cannot be written is dropped, and `lost` is the first error.
    Nothing is buffered, so that the interpreter has nothing to flush at its exit.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self.lost: OSError | None = None
        try:
            stream.flush()
            self._descriptor: int | None = stream.fileno()
        except (OSError, ValueError):  # a stream in memory has no descriptor
            self._descriptor = None

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of the underlying stream; UTF-8 if it has none, as in memory."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        try:
            data = text.encode(self.encoding)
        except UnicodeEncodeError:
            # one space less, so that columns stay aligned
            text = text.replace(" ± ", " +-").translate(PLAIN)
            data = text.encode(self.encoding, "backslashreplace")
        try:
            if self._descriptor is None:
                self._stream.write(data.decode(self.encoding))
            else:
                rest = memoryview(data)
                while rest:
                    try:
                        rest = rest[os.write(self._descriptor, rest) :]
                    except BlockingIOError:  # a non-blocking pipe that is full
                        select.select([], [self._descriptor], [])
        except (OSError, ValueError) as error:  # ValueError: the stream is closed
            self.lost = self.lost or (error if isinstance(error, OSError) else OSError(errno.EBADF, "it is closed"))
        return len(text)

    def flush(self) -> None:
        """Flush a stream without a descriptor; others have no buffer."""
        if self._descriptor is None and not self._stream.closed:
            self._stream.flush()


def steady(stream: IO[str]) -> TextIO:
    """Return the stream wrapped in a `Steady`, unless it is one already."""
    return cast(TextIO, stream if isinstance(stream, Steady) else Steady(stream))


@contextmanager
def steady_output() -> Iterator[None]:
    """Wrap stdout and stderr in `Steady`; a closed one, which is None in Python, discards its text."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        out, err = (steady(stream or nowhere) for stream in (sys.stdout, sys.stderr))
        with redirect_stdout(out), redirect_stderr(err):
            yield


def lost_output() -> OSError | None:
    """Return the error that dropped text of stdout; None if there was none, or if the reader of a pipe went away."""
    lost = sys.stdout.lost if isinstance(sys.stdout, Steady) else None
    return None if lost is None or lost.errno == errno.EPIPE else lost


def plug_closed_streams() -> None:
    """Open the null device for each of stdin, stdout and stderr that the process was started without.

    Otherwise the next file would get that descriptor, and warnings of libraries would be written into it.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor, which is this one
