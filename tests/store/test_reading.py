"""Check that what load paths read is bounded, plain and behind no link; what is not is one sentence."""

import os

import pytest

from esper.leyline.config.parsing import LARGEST_YAML, parse_json, parse_yaml
from esper.leyline.config.tree import Config, build_config, dump_config, parse_setting
from esper.leyline.messages import InputError
from esper.runs.configuration import load_config_file
from esper.store.disk import read_kept, read_named


def refusal(read, *arguments):
    with pytest.raises(InputError) as refused:
        read(*arguments)
    sentence = str(refused.value)
    assert "\n" not in sentence
    return sentence


def test_a_file_is_read_up_to_its_bound_and_refused_above_it(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"12345")
    for read in (read_kept, read_named):
        assert read(path, 5, "mend it") == b"12345"
        assert refusal(read, path, 4, "mend it") == f"{path} has more than 4 bytes, more than any of its kind; mend it"


def test_a_sparse_file_of_a_terabyte_is_refused_without_being_read(tmp_path):
    path = tmp_path / "a"
    path.touch()
    os.truncate(path, 2**40)
    assert "more than any of its kind" in refusal(read_kept, path, 2**20, "mend it")


def test_what_esper_kept_is_no_link_and_no_pipe_but_what_a_person_names_may_be(tmp_path):
    path, link, pipe = (tmp_path / name for name in ("a", "link", "pipe"))
    path.write_bytes(b"1")
    link.symlink_to(path)
    os.mkfifo(pipe)
    assert refusal(read_kept, link, 9, "mend it") == f"{link} is a link, which is not followed; mend it"
    assert refusal(read_kept, pipe, 9, "mend it") == f"{pipe} is not a regular file; mend it"
    assert read_named(link, 9, "mend it") == b"1"


@pytest.mark.parametrize("read", [read_kept, read_named])
def test_what_is_absent_or_a_folder_is_refused(tmp_path, read):
    assert refusal(read, tmp_path / "none", 9, "mend it") == f"{tmp_path / 'none'}: No such file or directory; mend it"
    assert refusal(read, tmp_path, 9, "mend it").endswith("; mend it")


@pytest.mark.parametrize("data", [b"", b"{", b"[" * 100_000, b"\xff\xfe\x00", b"9" * 10_000])
def test_what_is_no_json_is_refused(tmp_path, data):
    assert refusal(parse_json, data, tmp_path, "mend it") == f"{tmp_path} is not valid JSON; mend it"


@pytest.mark.parametrize(
    "text",
    [
        "a: [",
        "[" * 100_000,
        "!!python/object/apply:os.system ['true']",
        "!!python/name:os.system",
        "!mine {a: 1}",
        "a: 2001-13-45",
        b"\xff\xfe\x00",
        "a: 1\n---\nb: 2",
        "{[1]: 2}",
        "a: \x00",
    ],
)
def test_what_is_no_plain_yaml_is_refused(text):
    assert refusal(parse_yaml, text, "it", "mend it") == "it is not valid YAML; mend it"


@pytest.mark.parametrize("text", ["a: 1\na: 2", "x: [{a: 1, 'a': 2}]", "{1: a, 0x1: b}", "x: {y: {b: 1, c: 2, b: 3}}"])
def test_a_key_that_stands_twice_is_refused(text):
    assert refusal(parse_yaml, text, "it", "mend it").endswith("twice in one mapping; keep one of them")


def test_one_key_in_two_mappings_is_none_that_stands_twice():
    assert parse_yaml("a: {b: 1}\nc: {b: 2}\nd: [{b: 3}, {b: 4}]", "it", "") == {
        "a": {"b": 1},
        "c": {"b": 2},
        "d": [{"b": 3}, {"b": 4}],
    }


def test_a_kilobyte_of_aliases_that_would_fill_the_memory_is_refused():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 9)}]" for k in range(1, 12)]
    assert refusal(parse_yaml, "\n".join(lines), "it", "mend it").startswith("it holds an alias (*name)")


def test_a_config_is_written_without_aliases_and_read_back_equal():
    shared = {"prune": 0.5}
    config = build_config({"cohorts": {"a": {"reward": {"fees": shared}}, "b": {"reward": {"fees": shared}}}})
    text = dump_config(config)
    assert "*" not in text.replace("|", "")
    assert build_config(parse_yaml(text, "it", "")) == config
    assert build_config(parse_yaml(dump_config(Config()), "it", "")) == Config()


def test_a_config_file_and_a_setting_with_a_key_twice_name_it(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("envs: 4\nsteps: 3\nenvs: 5\n")
    assert refusal(load_config_file, str(path)) == (
        f"--config {path} names the key 'envs' twice in one mapping; keep one of them"
    )
    assert "names the key 'batch_size' twice" in refusal(parse_setting, "data={batch_size: 1, batch_size: 2}")


def test_a_config_file_of_more_than_a_mebibyte_is_refused(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("#" * (LARGEST_YAML + 1))
    assert "more than any of its kind" in refusal(load_config_file, str(path))
