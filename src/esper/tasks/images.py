"""Make tasks whose examples are images: handwritten digits of 8 x 8 pixels, and CIFAR-10 from local files.

CIFAR-10 is read from the published binary version, or from a copy of the Hugging Face data set. Nothing is downloaded, and the
published Python version is not read, because unpickling can run code.
"""

import io
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from esper.leyline.data.batches import Batch, picked
from esper.leyline.data.task import Pixels, Split, Task, one_tensor
from esper.leyline.distribution import of_extra
from esper.leyline.messages import InputError, counted, in_words
from esper.store.disk import read_named
from esper.tasks.hosts import CNN, MAP_MENU, ResidualCNN
from esper.tasks.objectives import Classification
from esper.tasks.small import DIGITS_SIZES
from esper.tasks.splits import Splits, cut, dealt

_DIGITS = "1,797 handwritten digits as images of 8 x 8 pixels in 10 classes"
DIGITS = f"{_DIGITS}; a residual CNN"
DIGITS_NARROW = f"{_DIGITS}; a CNN that is narrow in both of its blocks"
CIFAR10 = "60,000 photographs of 32 x 32 pixels in 10 classes, from files of your own (`esper docs images`); a slim CNN"
HELD = 0.05  # share of CIFAR's training images that is in the probe split, and again in the validation split
HOST = ResidualCNN(inputs=(1, 8, 8), channels=(8, 16), outputs=10)

VARIABLE = "ESPER_DATA"
"""The environment variable that names the folder of data sets."""
BINARY = "cifar-10-batches-bin"
TRAIN, TEST = tuple(f"data_batch_{k}.bin" for k in range(1, 6)), ("test_batch.bin",)
LARGEST = 2**30  # largest unpacked size of a parquet file that is read [bytes]
CLASSES, SHAPE = 10, (3, 32, 32)
PUBLISHED = 10_000  # images in each binary file
RECORD = 1 + 3 * 32 * 32  # a label, then red, green and blue row by row [bytes]
_MEND = "unpack cifar-10-binary.tar.gz there again"


def digits_image() -> Task:
    """Make a task of scikit-learn's digits (Alpaydin and Kaynak, UCI 1998) as uint8 images of one channel, on a residual CNN.

    The splits hold the same examples as those of `digits`.
    """
    from sklearn.datasets import load_digits  # a second of imports that no other task needs

    data = load_digits()
    x = torch.from_numpy(data.images).to(torch.uint8)[:, None]  # values from 0 to 16
    y = torch.from_numpy(data.target).to(torch.int64)
    splits = cut(x, y, dealt(y, DIGITS_SIZES, seed=0))
    return Task(
        name="digits-image",
        summary=DIGITS,
        host=HOST,
        **splits._asdict(),
        objective=Classification(10),
        menu=MAP_MENU,
        defaults={"steps": 24, "data": {"batch_size": 64, "batches_per_step": 16}},
        pixels=standardizing(splits.train.x),
    )


def digits_image_narrow() -> Task:
    """Make `digits-image` on a damaged host without skip connections, whose two blocks are too narrow, to test controllers."""
    host = CNN(inputs=(1, 8, 8), channels=(8, 16), hidden=(3, 4), outputs=10)
    return replace(digits_image(), name="digits-image-narrow", summary=DIGITS_NARROW, host=host)


def cifar10() -> Task:
    """Read CIFAR-10 (Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009) from local files.

    A twentieth of the published training images is the probe split, and another twentieth the validation split. The published
    test images are the test split. Training images are shifted by up to 4 pixels and mirrored at random.
    """
    published, test = read_cifar10()
    held = max(round(HELD * len(published.y)), 2)
    parts = dealt(published.y, (len(published.y) - 2 * held, held, held), seed=0)
    train, probe, validation = (Split(picked(published.x, part), published.y[part]) for part in parts)
    return Task(
        name="cifar10",
        summary=CIFAR10,
        host=CNN(inputs=(3, 32, 32), channels=(8, 16, 32), outputs=10),
        **Splits(train, probe, validation, test)._asdict(),
        objective=Classification(10),
        menu=MAP_MENU,
        defaults={"steps": 24, "data": {"batch_size": 64, "batches_per_step": 32}, "optimizer": {"lr": 2e-3}},
        pixels=standardizing(train.x, pad=4, flip=True),
    )


def standardizing(x: Batch, *, pad: int = 0, flip: bool = False) -> Pixels:
    """Return the `Pixels` by which every channel of x (N, C, H, W) uint8 has mean 0 and standard deviation 1 over N, H and W."""
    levels = torch.arange(256, dtype=torch.float64)
    means, deviations = [], []
    for channel in one_tensor(x, "pixels").unbind(1):
        share = torch.bincount(channel.reshape(-1).to(torch.int64), minlength=256) / channel.numel()
        mean = float((share * levels).sum())
        means.append(mean)
        deviations.append(max(float((share * (levels - mean).square()).sum()) ** 0.5, 1e-6))
    return Pixels(tuple(means), tuple(deviations), pad, flip)


def data_folder() -> Path:
    """Return the folder of data sets: the one that `VARIABLE` names, or `data`."""
    return Path(os.environ.get(VARIABLE) or "data")


def read_cifar10(folder: Path | None = None) -> tuple[Split, Split]:
    """Read the training and test images of CIFAR-10 from a folder, uint8 (N, 3, 32, 32) with int64 labels (N,)."""
    root = folder or data_folder()
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
    records = {}  # (n, RECORD) bytes of each file
    for name in (*TRAIN, *TEST):
        path = folder / name
        content = np.frombuffer(read_named(path, PUBLISHED * RECORD, _MEND), np.uint8)
        if not len(content) or len(content) % RECORD:
            raise InputError(
                f"{path} holds {len(content)} bytes, which is not a multiple of the {RECORD} bytes of a CIFAR-10 image: the file "
                f"is truncated, or of another format; {_MEND}"
            )
        records[name] = content.reshape(-1, RECORD)
        labels = records[name][:, 0]
        wrong = np.flatnonzero(labels >= CLASSES)
        if len(wrong):
            raise InputError(
                f"{path} is damaged, or of another format: image {wrong[0]} has the label {labels[wrong[0]]}, and CIFAR-10 has "
                f"labels under {CLASSES}; {_MEND}"
            )
    most = max(map(len, records.values()))
    for name, rows in records.items():
        if len(rows) < most:  # all six files are published with the same number
            raise InputError(
                f"{folder / name} is truncated: it holds {len(rows)} images where others hold {most}; {_MEND}"
            )
    return _split([records[name] for name in TRAIN]), _split([records[name] for name in TEST])


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
    with of_extra("vision", f"{folder} holds parquet files, and reading them needs pyarrow and pillow, which are"):
        from PIL import Image
        from pyarrow import parquet
    train, test = (_split([_rows(path, parquet, Image) for path in files[part]]) for part in ("train", "test"))
    return train, test


def _rows(path: Path, parquet: Any, image: Any) -> NDArray[np.uint8]:
    """Read (n, RECORD) bytes of one parquet file, in the layout of the binary version."""
    with in_words(f"{path} is truncated or damaged", "copy it again"):
        metadata = parquet.read_metadata(path)  # checked first, so that a small file cannot unpack to fill the memory
        size = sum(metadata.row_group(index).total_byte_size for index in range(metadata.num_row_groups))
        if metadata.num_rows > 5 * PUBLISHED or size > LARGEST:
            raise ValueError(f"it says that it holds {metadata.num_rows:,} rows of {size:,} bytes")
        table = parquet.read_table(path)
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
