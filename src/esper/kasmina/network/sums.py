"""SHA256SUMS: the sha256 of every file of a folder, in the format that the command `sha256sum -c` reads."""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

from esper.leyline.errors import InputError
from esper.store.disk import Content, open_regular, read_kept

SUMS = "SHA256SUMS"
_LARGEST = 2**16  # largest SHA256SUMS that is read, in bytes
_LINE = re.compile(r"([0-9a-f]{64})  ([\w.-]+)")


def sums_of(files: Mapping[str, Content]) -> bytes:
    """Return the content of SHA256SUMS for files by name."""
    lines = []
    for name, content in files.items():
        digest = hashlib.sha256()
        for part in (content,) if isinstance(content, bytes) else content:
            digest.update(part)
        lines.append(f"{digest.hexdigest()}  {name}\n")
    return "".join(lines).encode()


def check_sum(path: Path, mend: str = "export the network again") -> None:
    """Raise InputError if the sha256 of a file differs from that in SHA256SUMS beside it. A folder without SHA256SUMS
    is not checked.

    The check finds damage, not attacks: whoever can alter the file can alter SHA256SUMS too.
    """
    listed = path.parent / SUMS
    if not listed.exists() and not listed.is_symlink():
        return
    text = read_kept(listed, _LARGEST, mend).decode("utf-8", "replace")
    lines = [_LINE.fullmatch(line) for line in text.splitlines()]
    known = {line[2]: line[1] for line in lines if line is not None}
    if len(known) < len(lines) or path.name not in known:
        raise InputError(f"{listed} does not list {path.name}, or is damaged; {mend}")
    with open_regular(path, mend) as file:
        digest = hashlib.sha256()
        while block := file.read(2**20):
            digest.update(block)
    if digest.hexdigest() != known[path.name]:
        raise InputError(f"{path} is damaged: its sha256 is not the one in {SUMS}; {mend}")
