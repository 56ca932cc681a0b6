"""Read public data sets that Debian packages bring, from their files."""

import gzip
import struct
import zlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from esper.leyline.messages import InputError

FASHION = Path("/usr/share/datasets/fashion-mnist")
"""Folder of the Debian package dataset-fashion-mnist."""
LETTER = Path("/usr/lib/R/site-library/mlbench/data/LetterRecognition.rda")
"""File of the Debian package r-cran-mlbench."""

Labelled = tuple[NDArray[np.float32], NDArray[np.int64]]
"""Inputs and classes."""


def fashion_mnist(folder: Path = FASHION) -> tuple[Labelled, Labelled]:
    """Read Fashion-MNIST (Xiao et al., 2017): 60,000 training and 10,000 test images (n, 28, 28) in [0, 1], 10 classes.

    InputError if the folder lacks a file, or one is damaged.
    """

    def part(name: str) -> Labelled:
        images = read_idx(_there(folder / f"{name}-images-idx3-ubyte.gz", "dataset-fashion-mnist"))
        labels = read_idx(_there(folder / f"{name}-labels-idx1-ubyte.gz", "dataset-fashion-mnist"))
        if images.shape[1:] != (28, 28) or labels.ndim != 1 or labels.max(initial=0) > 9:
            raise InputError(
                f"{folder} has arrays of {images.shape} and {labels.shape} as {name}; give images of 28 by 28 and a class of 0 "
                "to 9 for each"
            )
        if len(images) != len(labels):
            raise InputError(f"{folder} has {len(images)} images and {len(labels)} labels of {name}; install it anew")
        return images.astype(np.float32) / np.float32(255), labels.astype(np.int64)

    return part("train"), part("t10k")


def letter_recognition(path: Path = LETTER) -> Labelled:
    """Read Letter Recognition (Frey and Slate, 1991): 20,000 letters as 16 numbers each, 26 classes. It needs `rdata`.

    InputError if the file is not there or damaged.
    """
    path = _there(path, "r-cran-mlbench")
    if find_spec("rdata") is None:
        raise InputError(f"{path} is read by rdata, which is not installed; run pip install 'esper-bench[letter]'")
    import rdata

    try:
        frame = rdata.read_rda(path, default_encoding="ascii")["LetterRecognition"]
        letters = np.asarray(frame["lettr"].astype(str))
        x = frame.drop(columns="lettr").to_numpy(np.float32)
        if x.shape[1] != 16:
            raise ValueError(f"it has {x.shape[1]} columns of numbers")
    except Exception as error:  # rdata has errors of many kinds for a damaged file
        raise InputError(
            f"{path} does not hold the table LetterRecognition of mlbench; install r-cran-mlbench anew"
        ) from error
    return x, np.unique(letters, return_inverse=True)[1].astype(np.int64)


def read_idx(path: Path) -> NDArray[Any]:
    """Read an array of bytes from a file in the IDX format, packed by gzip. InputError if it is damaged."""
    try:
        data = gzip.decompress(path.read_bytes())
        zero, kind, axes = struct.unpack_from(">HBB", data)
        shape = struct.unpack_from(f">{axes}I", data, 4)
        if (zero, kind) != (0, 8):
            raise InputError(f"{path} holds no array of bytes in the IDX format; give one that begins with 0, 0, 8")
        return np.frombuffer(data, np.uint8, offset=4 + 4 * axes).reshape(shape)
    except (gzip.BadGzipFile, EOFError, zlib.error, struct.error, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} is damaged: {error}; install it anew") from None


def _there(path: Path, package: str) -> Path:
    if not path.is_file():
        raise InputError(f"{path} is not there; install the Debian package {package}, or give the path of the file")
    return path
