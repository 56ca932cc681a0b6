"""TinyStories from files of the user: the published text, a parquet copy, or tokens of any tokenizer. N tokens.

This module downloads nothing. It reads the training file window by window and does not hold it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from esper.leyline.data.task import SENSED, Split, Task
from esper.leyline.distribution import pip_install
from esper.leyline.errors import InputError, first_line
from esper.tasks.hosts.factories import SEQUENCE_MENU, Transformer
from esper.tasks.images import VARIABLE, data_folder
from esper.tasks.objectives import NextByte, NextToken
from esper.tasks.own.dataset import LEAST, DatasetSource, Windows

SUMMARY = (
    "the next byte or token of short stories in English, from files of your own (`esper docs sequences`); a transformer"
)
FOLDER = "tinystories"
TEXTS = (
    ("TinyStoriesV2-GPT4-train.txt", "TinyStoriesV2-GPT4-valid.txt"),
    ("TinyStories-train.txt", "TinyStories-valid.txt"),
)
BINARY = ("train.bin", "val.bin")
PARQUET = ("train", "validation")  # what the names of the files begin with
SEPARATOR = b"<|endoftext|>"
WIDTH, LAYERS, HEADS, LENGTH = 64, 2, 4, 128
TRAIN, HELD = 131_072, 256
"""Most windows in the train split, and in each of the other three. Windows are chosen evenly apart."""
SEEN = 2**20
"""Bytes at the beginning of a text in which the separator of stories is looked for."""
UNPACKED = 2**28
"""Bytes of text that are read from the parquet files of a part."""
_MEND = "copy the file again"


class Stories(NamedTuple):
    """The tokens of the training and of the validation file, in the order of the files."""

    train: NDArray[Any]
    validation: NDArray[Any]
    vocabulary: int
    origin: Path  # the training file


def tinystories() -> Task:
    """TinyStories (Eldan and Li, 2023), from local files: a task on the next byte, or on the next token of a `.bin` file.

    The training file is the train split; consecutive thirds of the validation file are the probe, validation and test splits.
    """
    stories = read_stories()
    host = Transformer(stories.vocabulary, WIDTH, LAYERS, HEADS, LENGTH, "rotary")
    windows = Windows(stories.train, LENGTH, stories.vocabulary)
    if len(windows) < SENSED:
        raise InputError(
            f"{stories.origin} holds {len(stories.train):,} tokens, and the train split takes at least {SENSED} windows of "
            f"{LENGTH}; copy the whole file"
        )
    source = DatasetSource(windows, evenly(len(windows), TRAIN), "classification", stories.vocabulary)
    held = Windows(stories.validation, LENGTH, stories.vocabulary)
    third = len(held) // 3
    if third < LEAST:
        raise InputError(
            f"the validation file beside {stories.origin} holds {len(stories.validation):,} tokens, and three splits take at "
            f"least {LEAST} windows of {LENGTH} each; copy the whole file"
        )
    places = evenly(third, min(HELD, held.most_held)).numpy()
    probe, validation, test = (Split(*held.stacked(start * third + places)) for start in range(3))
    return Task(
        name="tinystories",
        summary=SUMMARY,
        host=host,
        train=source.read(np.arange(SENSED)),
        probe=probe,
        validation=validation,
        test=test,
        objective=(NextByte if stories.train.dtype == np.uint8 else NextToken)(stories.vocabulary),
        menu=SEQUENCE_MENU,
        defaults={"steps": 24, "data": {"batch_size": 16, "batches_per_step": 32}},
        source=source,
    )


def evenly(there: int, most: int) -> torch.Tensor:
    """Indices of at most `most` of so many examples, evenly apart."""
    wanted = min(there, most)
    return torch.arange(wanted) * there // wanted


def read_stories(folder: Path | None = None) -> Stories:
    """The tokens of local files, mapped or read, in `tinystories` of a folder of data sets, or in the folder itself."""
    root = folder or data_folder()
    for place in (root / FOLDER, root):
        if any((place / name).exists() for name in BINARY):
            return _read_binary(place)
        for names in TEXTS:
            if any((place / name).exists() for name in names):
                train, validation = (_mapped(path, np.uint8) for path in _both(place, names))
                if SEPARATOR not in train[:SEEN].tobytes():
                    raise InputError(
                        f"{place / names[0]} has no {SEPARATOR.decode()} in its first {min(len(train), SEEN):,} bytes, by which "
                        "stories are parted; give the published text, unpacked"
                    )
                return Stories(train, validation, 256, place / names[0])
    # the folder of data sets may hold parquet files of others
    for place, depth in ((root / FOLDER, "**/"), (root, "")):
        files = {part: sorted(place.glob(f"{depth}{part}-*.parquet")) for part in PARQUET}
        if files["train"]:
            return _read_parquet(place, files)
    raise InputError(
        f"{root / FOLDER} holds no files of TinyStories; put {TEXTS[0][0]} and {TEXTS[0][1]}, or train.bin and val.bin with "
        f"tokens of your own, into it, or name the folder that holds it in {VARIABLE}"
    )


def _both(folder: Path, names: Sequence[str]) -> list[Path]:
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise InputError(f"{folder} lacks {missing[0]}; copy it beside {next(n for n in names if n not in missing)}")
    return [folder / name for name in names]


def _mapped(path: Path, dtype: type[np.generic]) -> NDArray[Any]:
    """The content of a file as numbers, read where it is used. InputError if it is empty or ends within a number."""
    size, item = path.stat().st_size, np.dtype(dtype).itemsize
    if not size or size % item:
        what = f"holds {size:,} bytes, which are not a whole number of {item}-byte tokens" if size else "is empty"
        raise InputError(f"{path} {what}; {_MEND}")
    try:
        return np.memmap(path, dtype, "r")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {first_line(error)}; {_MEND}") from None


def _read_binary(folder: Path) -> Stories:
    """Tokens as uint16, as nanoGPT writes them. The vocabulary is the largest token and one."""
    paths = _both(folder, BINARY)
    train, validation = (_mapped(path, np.uint16) for path in paths)
    starts = [(part, start) for part in (train, validation) for start in range(0, len(part), SEEN)]
    largest = max(int(part[start : start + SEEN].max()) for part, start in starts)
    return Stories(train, validation, largest + 1, paths[0])


def _read_parquet(folder: Path, files: Mapping[str, Sequence[Path]]) -> Stories:
    """The first `UNPACKED` bytes of the column `text` of each part, with the separator behind each story."""
    try:
        from pyarrow import parquet
    except ImportError:
        raise InputError(
            f"{folder} holds parquet files, and reading them needs pyarrow: {pip_install('vision')}"
        ) from None
    if not files["validation"]:
        raise InputError(f"{folder} lacks validation-*.parquet of TinyStories; copy the whole data set")
    return Stories(_text_of(files["train"], parquet), _text_of(files["validation"], parquet), 256, folder)


def _text_of(paths: Sequence[Path], parquet: Any) -> NDArray[np.uint8]:
    text = bytearray()
    for path in paths:
        try:
            file = parquet.ParquetFile(path)
            names = file.schema_arrow.names
            batches = file.iter_batches(batch_size=1024, columns=["text"]) if "text" in names else None
            for batch in batches or ():
                for story in batch.column("text").to_pylist():
                    text += (story or "").encode() + b"\n" + SEPARATOR + b"\n"
                if len(text) >= UNPACKED:
                    return np.frombuffer(bytes(text[:UNPACKED]), np.uint8)
        except Exception as error:  # pyarrow raises errors of many types for a file that it cannot read
            raise InputError(f"{path} is truncated or damaged: {first_line(error)}; {_MEND}") from None
        if batches is None:
            raise InputError(f"{path} has the columns {', '.join(names)}; TinyStories has text")
    return np.frombuffer(bytes(text), np.uint8)
