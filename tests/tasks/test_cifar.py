"""Check that CIFAR-10 is read from files as it was written, and anything else is refused with the file and the mend."""

import io
import sys

import numpy as np
import pytest
import torch

from esper.leyline.messages import InputError
from esper.tasks.images import TEST, TRAIN, VARIABLE, cifar10, read_cifar10
from pictures import cifar_records, write_cifar


def refusal(folder):
    with pytest.raises(InputError) as error:
        read_cifar10(folder)
    sentence = str(error.value)
    assert "\n" not in sentence
    return sentence


def test_the_binary_files_are_read_as_they_were_written(tmp_path):
    write_cifar(tmp_path)
    train, test = read_cifar10(tmp_path)
    assert train.x.shape == (200, 3, 32, 32)
    assert train.x.dtype == test.x.dtype == torch.uint8
    assert train.x.is_contiguous(memory_format=torch.channels_last)
    for split, seeds in ((train, range(5)), (test, [5])):
        records = np.concatenate([cifar_records(40, seed) for seed in seeds])
        assert split.y.tolist() == records[:, 0].tolist()
        for index in (0, 17, 39, len(records) - 1):
            for channel, row, column in ((0, 0, 0), (1, 3, 5), (2, 31, 31)):
                byte = records[index, 1 + 1024 * channel + 32 * row + column]
                assert split.x[index, channel, row, column] == byte


def test_the_folder_itself_may_be_named(tmp_path):
    place = write_cifar(tmp_path)
    assert len(read_cifar10(place)[0].y) == 200


def test_the_environment_names_the_folder(tmp_path, monkeypatch):
    write_cifar(tmp_path)
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    assert len(read_cifar10()[1].y) == 40


def test_without_the_variable_the_folder_is_data(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    write_cifar(tmp_path / "data")
    assert len(read_cifar10()[1].y) == 40


def test_a_folder_that_is_absent_is_refused_with_what_to_put_where(tmp_path):
    sentence = refusal(tmp_path / "nothing")
    assert "nothing/cifar-10-batches-bin is not there" in sentence
    assert "unpack cifar-10-binary.tar.gz" in sentence
    assert VARIABLE in sentence


def test_an_empty_folder_is_refused(tmp_path):
    assert "is not there" in refusal(tmp_path)


@pytest.mark.parametrize("name", [*TRAIN, *TEST])
def test_a_partial_folder_is_refused_with_the_file_it_lacks(tmp_path, name):
    (write_cifar(tmp_path) / name).unlink()
    assert f"lacks {name} of CIFAR-10" in refusal(tmp_path)


@pytest.mark.parametrize("cut", [1, 100, 3072])
def test_a_file_that_is_cut_inside_an_image_is_refused(tmp_path, cut):
    path = write_cifar(tmp_path) / "data_batch_3.bin"
    path.write_bytes(path.read_bytes()[:-cut])
    assert f"{path} holds {40 * 3073 - cut} bytes, which is not a multiple of" in refusal(tmp_path)


def test_a_file_that_is_cut_between_two_images_is_refused(tmp_path):
    path = write_cifar(tmp_path) / "test_batch.bin"
    path.write_bytes(path.read_bytes()[: -3 * 3073])
    assert f"{path} is truncated: it holds 37 images where others hold 40" in refusal(tmp_path)


def test_an_empty_file_is_refused(tmp_path):
    (write_cifar(tmp_path) / "data_batch_1.bin").write_bytes(b"")
    assert "holds 0 bytes" in refusal(tmp_path)


def test_a_damaged_file_is_refused_with_the_image(tmp_path):
    path = write_cifar(tmp_path) / "data_batch_2.bin"
    content = bytearray(path.read_bytes())
    content[7 * 3073] = 200
    path.write_bytes(content)
    sentence = refusal(tmp_path)
    assert f"{path} is damaged, or of another format: image 7 has the label 200" in sentence


def test_the_pickled_version_is_refused(tmp_path):
    (tmp_path / "cifar-10-batches-py").mkdir()
    (tmp_path / "cifar-10-batches-py" / "data_batch_1").write_bytes(b"\x80\x03")
    sentence = refusal(tmp_path)
    assert "the Python version of CIFAR-10, which is pickled and is not read" in sentence


def test_the_task_deals_the_published_parts_and_varies_training_images_alone(tmp_path, monkeypatch):
    write_cifar(tmp_path)
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    task = cifar10()
    assert [len(part.y) for part in (task.train, task.probe, task.validation, task.test)] == [180, 10, 10, 40]
    assert sorted(torch.cat([task.train.y, task.probe.y, task.validation.y]).tolist()) == sorted(list(range(10)) * 20)
    assert task.train.x.dtype == torch.uint8
    assert (task.pixels.pad, task.pixels.flip) == (4, True)
    read = task.read(task.train.x)
    torch.testing.assert_close(read.mean((0, 2, 3)), torch.zeros(3), atol=1e-4, rtol=0)
    torch.testing.assert_close(read.std((0, 2, 3), correction=0), torch.ones(3), atol=1e-4, rtol=0)


def test_parquet_files_without_the_extra_are_refused_with_the_command(tmp_path, monkeypatch):
    for name in ("train-00000-of-00001.parquet", "test-00000-of-00001.parquet"):
        (tmp_path / name).write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "pip install 'esper-grow[vision]'" in refusal(tmp_path)


def test_a_parquet_copy_that_lacks_a_part_is_refused(tmp_path):
    (tmp_path / "cifar10" / "plain_text").mkdir(parents=True)
    (tmp_path / "cifar10" / "plain_text" / "train-00000-of-00001.parquet").write_bytes(b"PAR1")
    assert "lacks test-*.parquet of CIFAR-10" in refusal(tmp_path)


@pytest.mark.parametrize("more", ["train-00001-of-00003.parquet", "copy/train-00000-of-00001.parquet"])
def test_a_parquet_copy_with_more_or_fewer_files_than_they_say_is_refused(tmp_path, more):
    for name in ("train-00000-of-00001.parquet", "test-00000-of-00001.parquet", more):
        path = tmp_path / "cifar10" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"PAR1")
    assert "holds 2 files of the train part of CIFAR-10" in refusal(tmp_path)


def write_parquet(folder, records, *, side=32, names=("img", "label"), label=None, form="PNG"):
    """Write both parts as the Hugging Face data set lays them out."""
    import pyarrow
    from PIL import Image
    from pyarrow import parquet

    place = folder / "cifar10" / "plain_text"
    place.mkdir(parents=True)
    rows = []
    for record in records:
        stored = io.BytesIO()
        pixels = record[1:].reshape(3, 32, 32).transpose(1, 2, 0)[:side]
        Image.fromarray(np.ascontiguousarray(pixels)).save(stored, form)
        rows.append({"bytes": stored.getvalue(), "path": None})
    labels = [int(record[0]) if label is None else label for record in records]
    table = pyarrow.table({names[0]: rows, names[1]: labels})
    for part in ("train", "test"):
        parquet.write_table(table, place / f"{part}-00000-of-00001.parquet")
    return place


def test_a_parquet_copy_is_read_as_the_binary_files_are(tmp_path):
    records = cifar_records(20, 3)
    write_parquet(tmp_path, records)
    train, test = read_cifar10(tmp_path)
    for split in (train, test):
        assert np.array_equal(split.x.reshape(20, -1).numpy(), records[:, 1:])
        assert split.y.tolist() == records[:, 0].tolist()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"side": 16}, "picture of 32 x 16 pixels"),
        ({"names": ("image", "label")}, "has the columns image, label; CIFAR-10 has img and label"),
        ({"label": 11}, "with the label 11"),
        ({"form": "EPS"}, "row 0 does not hold a readable PNG picture"),
    ],
)
def test_a_parquet_copy_of_something_else_is_refused(tmp_path, options, reason):
    write_parquet(tmp_path, cifar_records(4, 0), **options)
    assert reason in refusal(tmp_path)


def test_a_truncated_parquet_file_is_refused(tmp_path):
    path = write_parquet(tmp_path, cifar_records(4, 0)) / "train-00000-of-00001.parquet"
    path.write_bytes(path.read_bytes()[:200])
    assert f"{path} is truncated or damaged" in refusal(tmp_path)
