"""Test readers of public data sets, on small files of their formats."""

import gzip
import struct
from importlib.util import find_spec

import numpy as np
import pytest

from esper.leyline.messages import InputError
from esper_bench.public_sets import fashion_mnist, letter_recognition, read_idx


def write_idx(path, array):
    head = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    path.write_bytes(gzip.compress(head + array.tobytes()))


def made(folder, labels=(3, 2)):
    images = np.random.default_rng(0).integers(0, 256, (5, 28, 28), np.uint8)
    for name, count, classes in (("train", 3, labels[0]), ("t10k", 2, labels[1])):
        write_idx(folder / f"{name}-images-idx3-ubyte.gz", images[:count])
        write_idx(folder / f"{name}-labels-idx1-ubyte.gz", np.arange(classes, dtype=np.uint8))
    return images


def test_images_and_classes_are_read_from_idx_files(tmp_path):
    images = made(tmp_path)
    (x, y), (x_test, y_test) = fashion_mnist(tmp_path)
    assert np.allclose(x * 255, images[:3])
    assert x.dtype == np.float32
    assert (x_test.shape, y.tolist(), y_test.tolist()) == ((2, 28, 28), [0, 1, 2], [0, 1])


def test_what_is_missing_or_damaged_is_named(tmp_path):
    with pytest.raises(InputError, match="is not there; install the Debian package dataset-fashion-mnist"):
        fashion_mnist(tmp_path)
    with pytest.raises(InputError, match="is not there; install the Debian package r-cran-mlbench"):
        letter_recognition(tmp_path / "LetterRecognition.rda")
    made(tmp_path, (2, 2))
    with pytest.raises(InputError, match="has 3 images and 2 labels of train"):
        fashion_mnist(tmp_path)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    whole = path.read_bytes()
    for data in (whole[:-20], b"no gzip", gzip.compress(b"\0\0\x08\x03"), gzip.compress(gzip.decompress(whole)[:-1])):
        path.write_bytes(data)
        with pytest.raises(InputError, match=r"train-images-idx3-ubyte\.gz is damaged"):
            read_idx(path)
    write_idx(path, np.zeros((3, 20, 20), np.uint8))
    with pytest.raises(InputError, match=r"has arrays of \(3, 20, 20\) and \(2,\) as train; give images of 28 by 28"):
        fashion_mnist(tmp_path)
    path.write_bytes(gzip.compress(b"\0\0\x0d\x01\0\0\0\0"))
    with pytest.raises(InputError, match="holds no array of bytes in the IDX format"):
        read_idx(path)


@pytest.mark.skipif(find_spec("rdata") is None, reason="needs the package rdata")
def test_a_table_of_another_format_or_cut_short_is_named(tmp_path):
    path = tmp_path / "LetterRecognition.rda"
    for data in (b"no table", gzip.compress(b"RDX3\nX\n\0\0"), b"\x1f\x8b cut"):
        path.write_bytes(data)
        with pytest.raises(
            InputError, match=r"LetterRecognition.rda does not hold the table LetterRecognition"
        ) as caught:
            letter_recognition(path)
        assert "\n" not in str(caught.value)
