"""Check that a run does not notice that its output cannot be written."""

import errno
import io
import os

import pytest
from rich.console import Console

from esper.karn.standard_output import Steady, lost_output, steady, steady_output
from esper.karn.terminal.console import print_summary
from esper.karn.terminal.progress import Aside, Display
from esper.store import disk as full_disk
from esper.store.disk import DiskFull, DiskRetry
from karn.test_console import GROWING, SUMMARY


def broken_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


def test_a_pipe_whose_reader_is_gone_takes_everything():
    with broken_pipe() as pipe:
        stream = Steady(pipe)
        assert stream.write("a\n") == 2
        stream.flush()
        assert stream.lost.errno == errno.EPIPE


def test_a_device_without_room_takes_everything_and_the_reason_is_known(full_device):
    with open(full_device, "w") as file:
        stream = Steady(file)
        stream.write("a\n")
        assert "No space left" in stream.lost.strerror


def test_a_stream_that_was_closed_takes_everything(tmp_path):
    memory = io.StringIO()
    with open(tmp_path / "log", "w") as file:
        inside, outside = Steady(memory), Steady(file)
    memory.close()
    for stream in (inside, outside):
        assert stream.write("a\n") == 2
        stream.flush()
        assert stream.lost.errno == errno.EBADF


def test_what_is_written_arrives_in_order_with_what_was_written_before(tmp_path):
    with open(tmp_path / "log", "w") as file:
        file.write("one ")
        steady(file).write("two")
    assert (tmp_path / "log").read_text() == "one two"


def test_what_an_encoding_lacks_is_written_plainly_in_as_many_columns(tmp_path):
    with open(tmp_path / "log", "w", encoding="ascii") as file:
        steady(file).write("0.80 ± 0.05 ─ ±1 \u2603 \udcff")
    assert (tmp_path / "log").read_text() == "0.80 +-0.05 - +-1 \\u2603 \\udcff"


def test_names_that_are_no_text_are_written_as_escapes_where_the_encoding_is_utf_8(tmp_path):
    with open(tmp_path / "log", "w", encoding="utf-8") as file:
        steady(file).write("± \udcff")
    assert (tmp_path / "log").read_text() == "+- \\udcff"


def test_the_closing_table_in_ascii_has_its_columns_where_they_are_elsewhere(tmp_path):
    lines = {}
    for encoding in ("ascii", "utf-8"):
        with open(tmp_path / encoding, "w", encoding=encoding) as file:
            print_summary(SUMMARY, Console(file=steady(file), width=80))
        lines[encoding] = (tmp_path / encoding).read_text(encoding=encoding).splitlines()
    assert any("0.8000 +-0.0577" in line for line in lines["ascii"])
    assert list(map(len, lines["ascii"])) == list(map(len, lines["utf-8"]))


@pytest.mark.parametrize("width", [1, 20, 40])
def test_no_terminal_is_so_narrow_that_a_figure_is_cut(width):
    file = io.StringIO()
    print_summary(SUMMARY, Console(file=file, width=width))
    for figure in (
        "0.8000 ± 0.0577",
        "0.8667 ± 0.0333",
        "+0.067 [-0.077, +0.210]",
        "1,333 ± 167",
        "J = accuracy",
    ):
        assert figure in file.getvalue()
    assert "…" not in file.getvalue()


def test_progress_goes_on_where_its_output_is_gone():
    with broken_pipe() as pipe, Aside(lines := Display(Console(file=pipe), 3, "accuracy")) as progress:
        assert lines.drawn is None
        progress.step(GROWING._replace(step=1), 10.0, 0)
        progress.note("exporting")
    assert lines._console.file.lost.errno == errno.EPIPE


def test_a_log_on_the_full_disk_does_not_shorten_the_waiting_for_room(tmp_path, full_device, monkeypatch):
    monkeypatch.setattr(full_disk, "EVERY", 0.005)
    tries = []

    def write():
        tries.append(1)
        raise OSError(28, "No space left on device")

    with (
        open(full_device, "w") as log,
        Aside(Display(Console(file=log), 3, "accuracy")) as lines,
        pytest.raises(DiskFull),
    ):
        DiskRetry(0.05, lines.note, tmp_path, lambda: False)(tmp_path / "a", write)
    assert len(tries) > 2


def test_what_stdout_lost_is_known_unless_its_reader_went_away(full_device, monkeypatch):
    with open(full_device, "w") as file, broken_pipe() as pipe:
        for stream, lost in ((file, True), (pipe, False)):
            monkeypatch.setattr("sys.stdout", stream)
            with steady_output():
                print("a")
                assert (lost_output() is not None) == lost
