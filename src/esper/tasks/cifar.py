"""CIFAR-10 from local files: the published binary version, or a copy of the Hugging Face data set.

This module downloads nothing. It does not read the published Python version, because unpickling can run code.
"""

import io
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from esper.leyline.data.task import Split
from esper.leyline.distribution import pip_install
from esper.leyline.errors import InputError, first_line
from esper.leyline.text import counted
from esper.store.disk import read_named

VARIABLE = "ESPER_DATA"
"""The environment variable that names the folder of data sets. The default folder is `data` in the current folder."""
BINARY = "cifar-10-batches-bin"
TRAIN, TEST = tuple(f"data_batch_{k}.bin" for k in range(1, 6)), ("test_batch.bin",)
LARGEST = 2**30  # largest unpacked size of a parquet file that is read [bytes]
CLASSES, SHAPE = 10, (3, 32, 32)
PUBLISHED = 10_000  # images in each binary file
RECORD = 1 + 3 * 32 * 32  # a label, then red, green and blue row by row [bytes]
_MEND = "unpack cifar-10-binary.tar.gz there again"


def read_cifar10(folder: Path | None = None) -> tuple[Split, Split]:
    """Read the training and the test images of CIFAR-10, uint8 (N, 3, 32, 32) with int64 labels (N,).

    folder: the folder of data sets. None takes the one that the environment variable ESPER_DATA names, or `data`.

    Raises InputError if the folder holds neither format, a file is missing, or a file is truncated or damaged.
    """
    root = folder or Path(os.environ.get(VARIABLE) or "data")
    for place in (root / BINARY, root):
        if any((place / name).exists() for name in (*TRAIN, *TEST)):
            return _read_binary(place)
    for place in (root / "cifar10", root):
        if any(place.rglob("*.parquet")):
            return _read_parquet(place)
    python = [place for place in (root / "cifar-10-batches-py", root) if (place / "data_batch_1").exists()]
    if python:
        raise InputError(
            f"{python[0]} holds the Python version of CIFAR-10, which is pickled and is not read; "
            f"unpack cifar-10-binary.tar.gz into {root} instead"
        )
    raise InputError(
        f"{root / BINARY} is not there, and {root} holds no parquet files of CIFAR-10; unpack cifar-10-binary.tar.gz into "
        f"{root}, or name the folder that holds it in {VARIABLE}"
    )


def _read_binary(folder: Path) -> tuple[Split, Split]:
    missing = [name for name in (*TRAIN, *TEST) if not (folder / name).is_file()]
    if missing:
        raise InputError(f"{folder} lacks {', '.join(missing)} of CIFAR-10; {_MEND}")
    records = {name: _records(folder / name) for name in (*TRAIN, *TEST)}
    counts = {name: len(rows) for name, rows in records.items()}
    most = max(counts.values())
    for name, count in counts.items():
        if count < most:  # all six files are published with the same number
            raise InputError(f"{folder / name} is truncated: it holds {count} images where others hold {most}; {_MEND}")
    return _split([records[name] for name in TRAIN]), _split([records[name] for name in TEST])


def _records(path: Path) -> NDArray[np.uint8]:
    """(n, RECORD) bytes of one file."""
    content = np.frombuffer(read_named(path, PUBLISHED * RECORD, _MEND), np.uint8)
    if not len(content) or len(content) % RECORD:
        raise InputError(
            f"{path} holds {len(content)} bytes, which is not a multiple of the {RECORD} bytes of a CIFAR-10 image: the file is "
            f"truncated, or of another format; {_MEND}"
        )
    records = content.reshape(-1, RECORD)
    wrong = np.flatnonzero(records[:, 0] >= CLASSES)
    if len(wrong):
        raise InputError(
            f"{path} is damaged, or of another format: image {wrong[0]} has the label {records[wrong[0], 0]}, and CIFAR-10 "
            f"has labels under {CLASSES}; {_MEND}"
        )
    return records


def _split(files: Sequence[NDArray[np.uint8]]) -> Split:
    records = np.concatenate(files)
    images = torch.from_numpy(records[:, 1:].reshape(-1, *SHAPE))
    return Split(images.contiguous(memory_format=torch.channels_last), torch.from_numpy(records[:, 0].astype(np.int64)))


def _read_parquet(folder: Path) -> tuple[Split, Split]:
    """Read train-*.parquet and test-*.parquet of the Hugging Face data set, with the columns img and label."""
    files = {
        part: [path for path in sorted(folder.rglob("*.parquet")) if path.name.startswith(part)]
        for part in ("train", "test")
    }
    missing = [part for part, paths in files.items() if not paths]
    if missing:
        raise InputError(
            f"{folder} lacks {' and '.join(f'{part}-*.parquet' for part in missing)} of CIFAR-10; copy the whole data set"
        )
    for part, paths in files.items():
        declared = {name.group(1) for path in paths if (name := re.search(r"-of-([0-9]+)\.parquet$", path.name))}
        if declared and {int(count) for count in declared} != {len(paths)}:
            raise InputError(
                f"{folder} holds {counted(len(paths), 'file')} of the {part} part of CIFAR-10, but the file names say that the "
                f"part has {' or '.join(sorted(declared))}; copy the whole data set, and nothing else, into the folder"
            )
    try:
        from PIL import Image
        from pyarrow import parquet
    except ImportError:
        raise InputError(
            f"{folder} holds parquet files, and reading them needs pyarrow and pillow: {pip_install('vision')}"
        ) from None
    train, test = (_split([_rows(path, parquet, Image) for path in files[part]]) for part in ("train", "test"))
    return train, test


def _rows(path: Path, parquet: Any, image: Any) -> NDArray[np.uint8]:
    """(n, RECORD) bytes of one parquet file, in the layout of the binary version."""
    try:
        metadata = parquet.read_metadata(path)  # checked first, so that a small file cannot unpack to fill the memory
        size = sum(metadata.row_group(index).total_byte_size for index in range(metadata.num_row_groups))
        if metadata.num_rows > 5 * PUBLISHED or size > LARGEST:
            raise ValueError(f"it says that it holds {metadata.num_rows:,} rows of {size:,} bytes")
        table = parquet.read_table(path)
    except Exception as error:  # pyarrow raises errors of many types for a file that it cannot read
        raise InputError(f"{path} is truncated or damaged: {first_line(error)}; copy it again") from None
    names = table.column_names
    if "img" not in names or "label" not in names:
        raise InputError(f"{path} has the columns {', '.join(names)}; CIFAR-10 has img and label")
    records = np.empty((table.num_rows, RECORD), np.uint8)
    for index, (picture, label) in enumerate(
        zip(table.column("img").to_pylist(), table.column("label").to_pylist(), strict=True)
    ):
        try:
            # The data set is published as PNG. Pillow starts other programs to read some other formats.
            opened = image.open(io.BytesIO(picture["bytes"]), formats=("PNG",))
            fits = opened.size == SHAPE[1:]  # checked first, so that a small file cannot unpack to fill the memory
            pixels = np.asarray(opened.convert("RGB")) if fits else np.zeros(0, np.uint8)
        except Exception:  # pillow raises errors of many types for bytes that are not a picture
            raise InputError(
                f"{path} is damaged: row {index} does not hold a readable PNG picture; copy it again"
            ) from None
        if not fits or not isinstance(label, int) or not 0 <= label < CLASSES:
            raise InputError(
                f"{path} is damaged, or of another format: row {index} is a picture of {opened.size[0]} x "
                f"{opened.size[1]} pixels with the label {label!r}; CIFAR-10 has 32 x 32 and labels under {CLASSES}"
            )
        records[index, 0], records[index, 1:] = label, pixels.transpose(2, 0, 1).reshape(-1)
    return records
