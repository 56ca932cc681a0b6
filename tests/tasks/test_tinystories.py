"""Check that TinyStories is read from files as it was written, and anything else is refused with the file and the mend."""

import json
import sys

import numpy as np
import pytest

from esper.cli import main
from esper.leyline.data.task import SENSED
from esper.leyline.messages import InputError
from esper.tasks.catalog import get_task
from esper.tasks.images import VARIABLE
from esper.tasks.objectives import NextByte, NextToken
from esper.tasks.text import HELD, STORY_LENGTH, read_stories
from stories import write_parquet, write_text, write_tokens


@pytest.fixture(autouse=True)
def _data(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path))


def refusal(folder):
    with pytest.raises(InputError) as error:
        read_stories(folder)
    sentence = str(error.value)
    assert "\n" not in sentence
    return sentence


@pytest.mark.parametrize("version", ["TinyStoriesV2-GPT4", "TinyStories"])
def test_the_published_text_is_the_text_of_the_splits(tmp_path, version):
    place = write_text(tmp_path, (f"{version}-train.txt", f"{version}-valid.txt"))
    train, validation = ((place / f"{version}-{part}.txt").read_bytes() for part in ("train", "valid"))
    task = get_task("tinystories")
    places = np.array([0, 3, len(task.source) - 1])
    read = task.source.read(places)
    for x, y, place in zip(read.x, read.y, places, strict=True):
        assert bytes(x.tolist()) == train[place * STORY_LENGTH : (place + 1) * STORY_LENGTH]
        assert bytes(y.tolist()) == train[place * STORY_LENGTH + 1 : (place + 1) * STORY_LENGTH + 1]
    held = [bytes(part.x.flatten().tolist()) for part in (task.probe, task.validation, task.test)]
    assert b"".join(held) == validation[: sum(map(len, held))]
    assert len(task.train.y) == SENSED
    assert isinstance(task.objective, NextByte)


def test_tokens_of_any_tokenizer_are_read_with_their_vocabulary(tmp_path):
    place = write_tokens(tmp_path)
    task = get_task("tinystories")
    tokens = np.fromfile(place / "train.bin", np.uint16)
    assert np.array_equal(task.source.read(np.array([5])).x[0], tokens[5 * STORY_LENGTH : 6 * STORY_LENGTH])
    assert (task.objective.metric, task.host.vocabulary) == ("neg_bits_per_token", 90)
    assert type(task.objective) is NextToken


def test_the_parquet_copy_is_the_published_text(tmp_path):
    write_parquet(tmp_path / "parquet")
    place = write_text(tmp_path / "text")
    train, validation, *_ = read_stories(tmp_path / "parquet")
    assert train.tobytes() == (place / "TinyStoriesV2-GPT4-train.txt").read_bytes()
    assert validation.tobytes() == (place / "TinyStoriesV2-GPT4-valid.txt").read_bytes()


def test_a_large_vocabulary_leaves_fewer_windows_in_the_held_splits(tmp_path):
    sizes = {}
    for vocabulary in (90, 50_000):
        write_tokens(tmp_path, vocabulary, (40_000, 3 * STORY_LENGTH * (HELD + 1)))
        task = get_task("tinystories")
        sizes[vocabulary] = [len(part.y) for part in (task.probe, task.validation, task.test)]
    assert sizes == {90: [HELD] * 3, 50_000: [41] * 3}


@pytest.mark.slow
def test_stories_are_grown_from_the_command_line(tmp_path, capsys):
    write_text(tmp_path)
    small = ["--envs", "1", "--set", "data={batch_size: 4, batches_per_step: 1}", "--steps", "2", "--json"]
    with pytest.raises(SystemExit, match="0"):
        main(["grow", "tinystories", *small, "--baselines", "none", "--models", "none", "--run", str(tmp_path / "run")])
    summary = json.loads(capsys.readouterr().out)
    assert (summary["status"], summary["metric"]) == ("finished", "neg_bits_per_byte")
    assert all(np.isfinite(summary["test_neg_bits_per_byte"]["grown"]))


def test_without_files_the_task_is_listed_with_what_to_put_where(tmp_path, capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["tasks"])
    printed = capsys.readouterr().out
    assert "tinystories: the next byte or token of short stories" in printed
    assert (
        f"missing   {tmp_path}/tinystories holds no files of TinyStories; put TinyStoriesV2-GPT4-train.txt and "
        in printed
    )


@pytest.mark.parametrize("name", ["train.bin", "val.bin", "TinyStories-train.txt", "TinyStories-valid.txt"])
def test_a_file_without_its_partner_is_refused(tmp_path, name):
    (tmp_path / name).write_bytes(b"ab")
    assert f"{tmp_path} lacks " in refusal(tmp_path)
    assert f"; copy it beside {name}" in refusal(tmp_path)


def test_files_of_another_format_are_refused(tmp_path):
    place = write_text(tmp_path)
    (place / "TinyStoriesV2-GPT4-train.txt").write_bytes(b"\x1f\x8b" + bytes(5000))
    assert "TinyStoriesV2-GPT4-train.txt has no <|endoftext|> in its first 5,002 bytes" in refusal(tmp_path)
    (place / "TinyStoriesV2-GPT4-train.txt").write_bytes(b"")
    assert "TinyStoriesV2-GPT4-train.txt is empty; copy the file again" in refusal(tmp_path)
    write_tokens(tmp_path)
    (place / "val.bin").write_bytes(bytes(7))
    assert "val.bin holds 7 bytes, which are not a whole number of 2-byte tokens" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ((2_000, 12_000), "train.bin holds 2,000 tokens, and the train split takes at least 256 windows of 128"),
        ((40_000, 2_000), "train.bin holds 2,000 tokens, and three splits take at least 16 windows of 128 each"),
    ],
)
def test_too_few_tokens_are_refused(tmp_path, counts, words):
    write_tokens(tmp_path, counts=counts)
    with pytest.raises(InputError) as error:
        get_task("tinystories")
    assert words in str(error.value)


def test_a_parquet_copy_that_cannot_be_used_is_refused(tmp_path, monkeypatch):
    place = write_parquet(tmp_path, columns=("story",))
    assert "has the columns story; TinyStories has text" in refusal(tmp_path)
    (place / "train-00000-of-00001.parquet").write_bytes(b"PAR1")
    assert "train-00000-of-00001.parquet is truncated or damaged" in refusal(tmp_path)
    (place / "validation-00000-of-00001.parquet").unlink()
    assert "lacks validation-*.parquet of TinyStories" in refusal(tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "pip install 'esper-grow[vision]'" in refusal(tmp_path)
