"""Run the `esper` command on a disk that becomes full just before a certain file is written to.

    python -m faults.victim PATTERN NUMBER SECONDS BALLAST ARGUMENTS...

Before the NUMBER-th write to a file whose path holds the regular expression PATTERN the room that is left is filled with the
file BALLAST, and so the write fails by what the file system itself says. SECONDS later the room is back; with 0 it stays filled.
Where BALLAST is `-`, no disk is filled, and the write fails with ENOSPC for as long.
"""

import errno
import os
import re
import sys
import threading
import time
from pathlib import Path


class Disk:
    """Watches what is written, and fills the disk once."""

    def __init__(self, pattern: str, number: int, seconds: float, ballast: str) -> None:
        self.pattern, self.left, self.seconds = re.compile(pattern), number, seconds
        self.ballast = None if ballast == "-" else Path(ballast)
        self.until = 0.0  # while nothing can be written, where no disk is filled [seconds of the clock]
        self.names: dict[int, str] = {}
        self.really_open, self.really_write = os.open, os.write

    def open(self, path: str | os.PathLike[str], *rest: object, **more: object) -> int:
        """Open as `os.open` does, and keep the path."""
        descriptor = self.really_open(path, *rest, **more)  # type: ignore[arg-type]
        self.names[descriptor] = os.fspath(path)
        return descriptor

    def write(self, descriptor: int, data: bytes) -> int:
        """Write as `os.write` does; before that the disk may become full."""
        name = self.names.get(descriptor, "")
        if self.left and isinstance(name, str) and self.pattern.search(name):
            self.left -= 1
            if not self.left:
                self.fill()
        if time.monotonic() < self.until:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
        return self.really_write(descriptor, data)

    def fill(self) -> None:
        """Take all room there is."""
        if self.ballast is None:
            self.until = time.monotonic() + (self.seconds or 1e9)
            return
        descriptor, block = self.really_open(self.ballast, os.O_WRONLY | os.O_CREAT, 0o666), bytes(2**16)
        try:
            while True:
                self.really_write(descriptor, block)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
        finally:
            os.close(descriptor)
        if self.seconds:
            threading.Timer(self.seconds, self.ballast.unlink).start()


def main() -> None:
    """Run the command."""
    pattern, number, seconds, ballast, *arguments = sys.argv[1:]
    disk = Disk(pattern, int(number), float(seconds), ballast)
    os.open, os.write = disk.open, disk.write  # type: ignore[assignment]
    sys.argv = ["esper", *arguments]
    from esper.cli import main as command

    command()


if __name__ == "__main__":
    main()
