"""Test the figures of a report as pictures: one file for each figure that there are data for, and a name for every other."""

import numpy as np
import pytest
from PIL import Image

import esper
from esper.cli import main
from esper.karn.report.drawing import ForestRow, Series, curves, forest, heat_map, timeline
from esper.karn.report.frame import Content, ReportSection, write_pictures
from esper.karn.run_model import Stay
from esper.leyline.lifecycle.vocabulary import Stage
from esper.leyline.messages import InputError
from iris import grow_iris
from pages import EVIL

NAN = float("nan")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return grow_iris(tmp_path_factory.mktemp("runs") / "iris")


def figures(name):
    """Make one figure of every kind, whose texts are `name`."""
    stay = Stay(0, 0, 1, 3, Stage.BLENDING, name, 0.5, name)
    planted, removed = (
        Stay(0, 0, 1, 1, Stage.GERMINATED, name, 0.0, None),
        Stay(0, 0, 3, 3, Stage.PRUNED, name, 0.0, name),
    )
    return [
        curves(name, [0, 1], [Series(name, np.array([[0.0, 1.0], [NAN, 2.0]]), "grown")], "step", name),
        timeline(name, [stay, planted, removed], 1, 0, 4),
        forest(
            name, [ForestRow(name, 0.5, NAN, NAN, "kept", name), ForestRow(name, 0.1, 0.0, 0.2, "plain", name)], name
        ),
        heat_map(name, [name], ["0", "1"], np.array([[1.0, NAN]]), "step"),
    ]


def content(drawn):
    return Content("run", "", [ReportSection("key", "Section", figures=drawn)])


@pytest.mark.parametrize(("form", "start"), [("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<?xml")])
def test_every_kind_of_figure_can_be_drawn_whatever_its_names_are(tmp_path, form, start):
    paths = write_pictures(content(figures(EVIL + "$_{")), tmp_path, form).paths
    assert [path.name[:7] for path in paths] == ["01-key-", "02-key-", "03-key-", "04-key-"]
    assert all(path.read_bytes().startswith(start) for path in paths)
    assert all(b"<script" not in path.read_bytes() for path in paths)


def test_figures_without_data_are_named_and_not_drawn(tmp_path):
    empty = [
        curves("a", [0], [Series("x", np.array([[NAN]]), "grown")], "step", ""),
        timeline("b", [], 2, 0, 3),
        forest("c", [], ""),
        heat_map("d", ["r"], ["0"], np.array([[NAN]]), "step"),
    ]
    drawn = write_pictures(content(empty)._replace(missing=["sensors: none"]), tmp_path)
    assert drawn.paths == []
    assert drawn.absent == [
        "sensors: none",
        "Section, a: nothing was measured",
        "Section, b: no seed was planted here",
        "Section, c: nothing was measured",
        "Section, d: nothing was measured",
    ]
    assert list(tmp_path.iterdir()) == []


def test_the_same_data_give_the_same_pictures(tmp_path):
    for form in ("pdf", "svg"):
        one, other = (write_pictures(content(figures("a")[:1]), tmp_path / name, form).paths for name in "xy")
        assert one[0].read_bytes() == other[0].read_bytes()


def test_the_command_writes_the_figures_of_the_page_and_says_what_was_not_drawn(run, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["report", str(run), "--out", str(tmp_path / "page.html"), "--png", str(tmp_path / "pictures")])
    assert not ended.value.code
    said, names = capsys.readouterr().out, {path.name for path in (tmp_path / "pictures").iterdir()}
    assert f"{len(names)} pictures: {tmp_path / 'pictures'}" in said
    for part in ("curves-loss", "growth-environments-with-each-seed", "machine-seconds-of-a-step"):
        assert any(part in name for name in names)
    assert all(Image.open(tmp_path / "pictures" / name).width == 1300 for name in names)


def test_pictures_of_a_comparison_have_its_curves(run, tmp_path, capsys):
    settings = {"envs": 3, "steps": 6, "models": "none", "baselines": []}
    esper.grow("iris", settings, controller="never", run=tmp_path / "never", progress=False)
    with pytest.raises(SystemExit) as ended:
        main(["compare", str(run), str(tmp_path / "never"), "--png", str(tmp_path / "p"), "--format", "svg"])
    assert not ended.value.code
    assert "3 pictures: " in capsys.readouterr().out
    assert all("<svg" in path.read_text() for path in (tmp_path / "p").iterdir())


def test_bad_arguments_are_named(run, tmp_path):
    with pytest.raises(InputError, match="unknown format of pictures 'gif'; choose one of png, pdf, svg"):
        esper.draw_report(run, tmp_path, "gif")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot write pictures to .*file: File exists; name another folder"):
        esper.draw_report(run, tmp_path / "file")
