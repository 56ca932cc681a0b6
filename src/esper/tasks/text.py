"""Make tasks whose examples are text: the next byte of what Python brings, and TinyStories from files. N sequences of L.

Nothing is downloaded. The training file of TinyStories is read window by window and is not held.
"""

import hashlib
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.leyline.data.task import SENSED, Split, Task
from esper.leyline.distribution import of_extra
from esper.leyline.messages import InputError, in_words, system_in_words
from esper.tasks.hosts import SEQUENCE_MENU, Transformer
from esper.tasks.images import VARIABLE, data_folder
from esper.tasks.objectives import NextByte, NextToken
from esper.tasks.own.examples import LEAST, DatasetSource, Windows
from esper.tasks.splits import Splits

SUMMARY = (
    "the next byte of Python's standard library, its sources and its help in English, 64 at a time; a small transformer"
)
LENGTH = 64
SIZES = (8192, 128, 128, 256)  # sequences in train, probe, validation and test
SHARES = (0.7, 0.8, 0.9, 1.0)  # of the files, up to which each split goes
HOST = Transformer(vocabulary=256, width=32, layers=2, heads=2, length=LENGTH)

STORIES = (
    "the next byte or token of short stories in English, from files of your own (`esper docs sequences`); a transformer"
)
FOLDER = "tinystories"
TEXTS = (
    ("TinyStoriesV2-GPT4-train.txt", "TinyStoriesV2-GPT4-valid.txt"),
    ("TinyStories-train.txt", "TinyStories-valid.txt"),
)
BINARY = ("train.bin", "val.bin")
SEPARATOR = b"<|endoftext|>"
STORY_LENGTH = 128
TRAIN, HELD = 131_072, 256
"""Most windows in the train split, and in each of the other three. Windows are chosen evenly apart."""
SEEN = 2**20
"""Bytes at the beginning of a text in which the separator of stories is looked for."""
UNPACKED = 2**28
"""Bytes of text that are read from the parquet files of a part."""
_MEND = "copy the file again"


def stdlib_text(host: Transformer = HOST, sizes: tuple[int, int, int, int] = SIZES) -> Task:
    """Read modules and help topics of the standard library of this Python, split by file: no two splits share one.

    The help topics are the English pages that `help("assert")` prints; each counts as a file. The data are those of the Python
    version: another version has other sources. InputError if the sources are not files.
    sizes: sequences of `host.length` bytes in train, probe, validation and test.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    splits = text_splits({**sources(folder), **topics()}, host.length, sizes, str(folder))
    return Task(
        name="stdlib-text",
        summary=SUMMARY,
        host=host,
        **splits._asdict(),
        objective=NextByte(host.vocabulary),
        menu=SEQUENCE_MENU,
        defaults={"steps": 24, "data": {"batch_size": 16, "batches_per_step": 32}},
    )


def sources(folder: Path) -> dict[str, bytes]:
    """Return every file `*.py` of a folder by its name, in the order of the names."""
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.py"))}


def topics() -> dict[str, bytes]:
    """Return by name, in their order, the topics that `help` of this Python explains in English, as UTF-8."""
    from pydoc_data.topics import topics as pages

    return {f"topics/{name}": pages[name].encode() for name in sorted(pages)}


def text_splits(files: Mapping[str, bytes], length: int, sizes: Iterable[int], origin: str) -> Splits:
    """Split files into sequences x (N, L) int64, with the byte that follows each of their bytes as y (N, L) int64.

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
        chosen = torch.cat(part)[evenly(found, wanted)].long()
        splits.append(Split(chosen[:, :-1].clone(), chosen[:, 1:].clone()))
    return Splits(*splits)


def tinystories() -> Task:
    """Make a task on the next byte of TinyStories (Eldan and Li, 2023), or the next token of a `.bin` file, from local files.

    The training file is the train split; consecutive thirds of the validation file are the probe, validation and test splits.
    """
    tokens, held_tokens, vocabulary, origin = read_stories()
    host = Transformer(vocabulary, 64, 2, 4, STORY_LENGTH, "rotary")
    windows = Windows(tokens, STORY_LENGTH, vocabulary)
    if len(windows) < SENSED:
        raise InputError(
            f"{origin} holds {len(tokens):,} tokens, and the train split takes at least {SENSED} windows of {STORY_LENGTH}; "
            "copy the whole file"
        )
    source = DatasetSource(windows, evenly(len(windows), TRAIN), "classification", vocabulary)
    held = Windows(held_tokens, STORY_LENGTH, vocabulary)
    third = len(held) // 3
    if third < LEAST:
        raise InputError(
            f"the validation file beside {origin} holds {len(held_tokens):,} tokens, and three splits take at least {LEAST} "
            f"windows of {STORY_LENGTH} each; copy the whole file"
        )
    places = evenly(third, min(HELD, held.most_held)).numpy()
    others = (Split(*held.stacked(start * third + places)) for start in range(3))
    return Task(
        name="tinystories",
        summary=STORIES,
        host=host,
        **Splits(source.read(np.arange(SENSED)), *others)._asdict(),
        objective=(NextByte if tokens.dtype == np.uint8 else NextToken)(vocabulary),
        menu=SEQUENCE_MENU,
        defaults={"steps": 24, "data": {"batch_size": 16, "batches_per_step": 32}},
        source=source,
    )


def evenly(there: int, most: int) -> torch.Tensor:
    """Return the indices of at most `most` of so many examples, evenly apart."""
    wanted = min(there, most)
    return torch.arange(wanted) * there // wanted


def read_stories(folder: Path | None = None) -> tuple[NDArray[Any], NDArray[Any], int, Path]:
    """Return the tokens of the training and of the validation file, mapped or read, the vocabulary, and where they are from.

    The files are in `tinystories` of a folder of data sets, or in the folder itself. Tokens are the bytes of a text, or uint16 of
    a `.bin` file, as nanoGPT writes it, whose vocabulary is the largest token and one.
    """
    root = folder or data_folder()
    for place in (root / FOLDER, root):
        for names in (BINARY, *TEXTS):
            missing = [name for name in names if not (place / name).is_file()]
            if len(missing) == 1:
                other = next(name for name in names if name not in missing)
                raise InputError(f"{place} lacks {missing[0]}; copy it beside {other}")
            if missing:
                continue
            train, validation = (_mapped(place / name, np.uint16 if names is BINARY else np.uint8) for name in names)
            vocabulary = 256
            if names is BINARY:
                starts = [(part, start) for part in (train, validation) for start in range(0, len(part), SEEN)]
                vocabulary = 1 + max(int(part[start : start + SEEN].max()) for part, start in starts)
            elif SEPARATOR not in train[:SEEN].tobytes():
                raise InputError(
                    f"{place / names[0]} has no {SEPARATOR.decode()} in its first {min(len(train), SEEN):,} bytes, by which "
                    "stories are parted; give the published text, unpacked"
                )
            return train, validation, vocabulary, place / names[0]
    # the folder of data sets may hold parquet files of others
    for place, depth in ((root / FOLDER, "**/"), (root, "")):
        files = {part: sorted(place.glob(f"{depth}{part}-*.parquet")) for part in ("train", "validation")}
        if files["train"]:
            with of_extra("vision", f"{place} holds parquet files, and reading them needs pyarrow, which is"):
                from pyarrow import parquet
            if not files["validation"]:
                raise InputError(f"{place} lacks validation-*.parquet of TinyStories; copy the whole data set")
            return _text_of(files["train"], parquet), _text_of(files["validation"], parquet), 256, place
    raise InputError(
        f"{root / FOLDER} holds no files of TinyStories; put {TEXTS[0][0]} and {TEXTS[0][1]}, or train.bin and val.bin with "
        f"tokens of your own, into it, or name the folder that holds it in {VARIABLE}"
    )


def _mapped(path: Path, dtype: type[np.generic]) -> NDArray[Any]:
    """Return the content of a file as numbers, read where it is used. InputError if it is empty or ends within a number."""
    size, item = path.stat().st_size, np.dtype(dtype).itemsize
    if not size or size % item:
        what = f"holds {size:,} bytes, which are not a whole number of {item}-byte tokens" if size else "is empty"
        raise InputError(f"{path} {what}; {_MEND}")
    with system_in_words(f"{path} cannot be read", _MEND):
        content: NDArray[Any] = np.memmap(path, dtype, "r")
    return content


def _text_of(paths: Sequence[Path], parquet: Any) -> NDArray[np.uint8]:
    """Return the first `UNPACKED` bytes of the column `text` of the files of a part, with the separator behind each story."""
    text = bytearray()
    for path in paths:
        with in_words(f"{path} is truncated or damaged", _MEND):
            file = parquet.ParquetFile(path)
            names = file.schema_arrow.names
            batches = file.iter_batches(batch_size=1024, columns=["text"]) if "text" in names else None
            for batch in batches or ():
                for story in batch.column("text").to_pylist():
                    text += (story or "").encode() + b"\n" + SEPARATOR + b"\n"
                if len(text) >= UNPACKED:
                    return np.frombuffer(bytes(text[:UNPACKED]), np.uint8)
        if batches is None:
            raise InputError(f"{path} has the columns {', '.join(names)}; TinyStories has text")
    return np.frombuffer(bytes(text), np.uint8)
