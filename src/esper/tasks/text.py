"""The next byte of text that Python brings: the standard library's sources and its help in English. N sequences of L bytes."""

import hashlib
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from esper.leyline.data.task import Split, Task
from esper.leyline.errors import InputError
from esper.tasks.hosts.factories import SEQUENCE_MENU, Transformer
from esper.tasks.objectives import NextByte
from esper.tasks.splits import Splits

SUMMARY = (
    "the next byte of Python's standard library, its sources and its help in English, 64 at a time; a small transformer"
)
LENGTH = 64
SIZES = (8192, 128, 128, 256)  # sequences in train, probe, validation and test
SHARES = (0.7, 0.8, 0.9, 1.0)  # of the files, up to which each split goes
HOST = Transformer(vocabulary=256, width=32, layers=2, heads=2, length=LENGTH)


def stdlib_text() -> Task:
    """Modules and help topics of the standard library that this Python runs with, split by file: no two splits share one.

    The help topics are the English pages that `help("assert")` prints; each counts as a file. The data are those of the Python
    version: another version has other sources. InputError if the sources are not files.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    return text_task("stdlib-text", SUMMARY, {**sources(folder), **topics()}, str(folder), HOST, SIZES)


def text_task(
    name: str,
    summary: str,
    files: Mapping[str, bytes],
    origin: str,
    host: Transformer,
    sizes: tuple[int, int, int, int],
) -> Task:
    """A task on the bytes of files by name: at every position of `host.length` bytes, the byte behind it.

    origin: where the files are from, for messages. sizes: sequences in train, probe, validation and test.
    """
    splits = text_splits(files, host.length, sizes, origin)
    return Task(
        name=name,
        summary=summary,
        host=host,
        **splits._asdict(),
        objective=NextByte(host.vocabulary),
        menu=SEQUENCE_MENU,
        defaults={"steps": 24, "data": {"batch_size": 16, "batches_per_step": 32}},
    )


def sources(folder: Path) -> dict[str, bytes]:
    """Name and content of every file `*.py` in a folder, in the order of their names."""
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.py"))}


def topics() -> dict[str, bytes]:
    """Name and content, as UTF-8, of the topics that `help` of this Python explains in English, in the order of their names."""
    from pydoc_data.topics import topics as pages

    return {f"topics/{name}": pages[name].encode() for name in sorted(pages)}


def text_splits(files: Mapping[str, bytes], length: int, sizes: Iterable[int], origin: str) -> Splits:
    """Splits of sequences x (N, L) int64, with the byte that follows each of their bytes as y (N, L) int64.

    A hash of its name decides which split a file belongs to. Files are cut into sequences that do not overlap, and of those of
    its files a split takes as many as `sizes` says, evenly apart. InputError if a split would have too few.
    """
    parts: list[list[Tensor]] = [[], [], [], []]
    for name, content in files.items():
        share = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64
        count = (len(content) - 1) // length
        if count:
            read = torch.frombuffer(bytearray(content[: count * length + 1]), dtype=torch.uint8)
            parts[next(k for k, upto in enumerate(SHARES) if share < upto)].append(read.unfold(0, length + 1, length))
    splits = []
    for part, wanted, split in zip(parts, sizes, Splits._fields, strict=True):
        found = sum(map(len, part))
        if found < wanted:
            raise InputError(
                f"{origin} has {found:,} sequences of {length} bytes for the {split} split, which needs {wanted:,}; give a "
                "Python whose standard library is in files, not in an archive"
            )
        chosen = torch.cat(part)[torch.arange(wanted) * found // wanted].long()
        splits.append(Split(chosen[:, :-1].clone(), chosen[:, 1:].clone()))
    return Splits(*splits)
