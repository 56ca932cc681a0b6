"""Test the run folder of a network that becomes wider as a whole: the report, the window, the server, and a network restored."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import esper
from esper.leyline.messages import GrowthWarning, InputError, RunWarning
from esper.runs.folder.resume import read_config
from pages import Page


def batch(step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(16, 6, generator=generator)
    return x, x[:, :3].argmax(1)


def made(folder, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    settings = {"example": batch(0)[0], "ratio": 4, "sizes": [1, 2, 4], "warmup": 4, "run": folder, **settings}
    return model, optimizer, esper.AnytimeGrowth(model, optimizer, **settings)


def trained(run, first, last, spoilt=-1):
    model, optimizer, growth = run
    for step in range(first, last):
        x, y = batch(step)
        F.cross_entropy(model(x * (torch.nan if step == spoilt else 1)), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        growth.step(y)
    return growth


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Grow a run with a probe in which the network grew twice; return its folder and the growth."""
    path = tmp_path_factory.mktemp("runs") / "wider"
    probe, loss = [batch(999)], nn.CrossEntropyLoss()
    growth = trained(made(path, probe=probe, loss=loss), 0, 60)
    growth.finish()
    return path, growth


def test_the_events_have_the_sizes_over_time_and_why_each_growth_came(folder):
    path, growth = folder
    run = esper.open_run(path)
    assert (run.status, run.summary["sizes"]) == ("finished", [43, 83, 163])
    assert run.summary["verdict"] == repr(growth)
    rows = list(run.rows("size"))
    grown = [row for row in rows if row.widths]
    assert [(row.step, row.params, row.widths) for row in grown] == [
        (each["step"], each["parameters"], each["widths"]) for each in growth.growths
    ]
    assert grown[0].why == "176 targets were seen, which are 4 for each of 43 parameters"
    assert all(row.loss is not None and row.seconds > 0 for row in grown)
    assert (rows[0].step, rows[-1].step, rows[-1].why) == (1, 60, "sizes ends with 4 times the first widths")


def test_the_report_tells_the_sizes_their_curve_and_why_the_network_is_not_larger(folder, tmp_path):
    path, _ = folder
    page = Page(esper.report(path, tmp_path / "page.html").read_text(encoding="utf-8"))
    text = " ".join(" ".join(page.texts).split())
    assert "43 -> 83 -> 163 parameters after 60 steps and 960 targets" in text
    assert "It is not larger, as sizes ends with 4 times the first widths." in text
    assert "176 targets were seen, which are 4 for each of 43 parameters" in text
    assert "0 4 to 8" in text
    drawn = esper.draw_report(path, tmp_path / "figures")
    assert [each.name for each in drawn.paths] == ["01-result-parameters.png", "02-result-loss-on-the-probe.png"]


def test_a_run_in_which_nothing_grew_says_why_also_before_its_end(tmp_path):
    run = made(tmp_path / "small", ratio=60)
    trained(run, 0, 10)
    assert esper.open_run(tmp_path / "small").status == "running"
    html = esper.report(tmp_path / "small").read_text(encoding="utf-8")
    needed = "160 targets were seen, and 60 for each of 43 parameters are 2,580"
    assert f"Nothing grew: it is not larger, as {needed}" in html
    assert "the loss over time: growth had no probe" in html
    run[2].finish()
    assert esper.open_run(tmp_path / "small").summary["why"] == needed
    assert not (tmp_path / "small" / "lock").exists()


def test_the_window_shows_sizes_and_growths(folder):
    watched = pytest.importorskip("tests.karn.test_watch", reason="the extra tui is not installed")
    screen = "\n".join(watched.driven(folder[0], keys=("c",)))
    assert "wider: Sequential, widened as a whole, cpu: finished" in screen
    assert "163 parameters; 2 growths; 0 rollbacks" in screen
    assert "loss on the probe" in screen
    assert "sizes ends with 4 times" in screen


def test_the_server_shows_the_page_of_a_run(folder):
    served = pytest.importorskip("tests.karn.test_serve", reason="the extra web is not installed")
    browser = served.client([folder[0].parent])
    for address in ("/", f"/runs/{served.key_of(folder[0])}"):
        assert browser.get(address).status_code == 200
    assert "43 -&gt; 83 -&gt; 163 parameters" in browser.get(f"/runs/{served.key_of(folder[0])}").text


def test_a_resumed_run_has_the_rows_of_one_that_was_not_interrupted(tmp_path):
    trained(made(tmp_path / "straight"), 0, 40).finish()
    model, optimizer, growth = run = made(tmp_path / "resumed")
    trained(run, 0, 25)
    saved = [each.state_dict() for each in (growth, model, optimizer)]
    saved = torch.load(_saved(saved, tmp_path / "saved.pt"))
    trained(run, 25, 32)
    growth.finish()  # these rows are written again
    model, optimizer, growth = run = made(tmp_path / "resumed")
    for each, state in zip((growth, model, optimizer), saved, strict=True):
        each.load_state_dict(state)
    with pytest.warns(RunWarning, match="nothing is lost"):
        trained(run, 25, 40).finish()
    tables = [esper.open_run(tmp_path / name).frame("size") for name in ("straight", "resumed")]
    columns = ["step", "seen", "params", "widths", "why"]
    assert tables[0][columns].equals(tables[1][columns])
    assert esper.open_run(tmp_path / "resumed").summary["growths"] == growth.growths


def test_a_run_is_not_resumed_in_the_folder_of_another_one(folder, tmp_path):
    run = made(tmp_path / "own")
    trained(run, 0, 5)
    again = made(folder[0])
    again[2].load_state_dict(run[2].state_dict())
    events = (folder[0] / "events.jsonl").read_bytes()
    with pytest.raises(InputError, match="holds another run than the one that is resumed; give run= the folder"):
        trained(again, 5, 6)
    assert (folder[0] / "events.jsonl").read_bytes() == events
    assert esper.open_run(folder[0]).status == "finished"


def _saved(tree, path):
    torch.save(tree, path)
    return path


@pytest.mark.parametrize("first", [7, 107], ids=["before a growth", "behind the growths"])
def test_a_network_whose_parameters_are_not_finite_is_restored_and_grows_on(first, tmp_path):
    run = made(tmp_path / "spoilt", ratio=30, sizes=[1, 2])
    model, optimizer, growth = run
    trained(run, 0, first)
    with pytest.warns(GrowthWarning, match="not finite after step"):
        trained(run, first, 240, spoilt=first)
    (only,) = growth.rollbacks
    assert only["restored"] <= first < only["step"] <= first + 100
    tensors = [*model.parameters(), *growth.average.parameters()]
    tensors += [value for state in optimizer.state.values() for value in state.values()]
    assert all(bool(each.isfinite().all()) for each in tensors)
    assert model[0].out_features == 8
    assert "restored 1 time, as values were not finite" in repr(growth)
    growth.finish()
    (row,) = esper.open_run(tmp_path / "spoilt").rows("rollback")
    assert (row.step, row.reason) == (only["step"], "parameter")
    assert "a parameter is not finite" in esper.report(tmp_path / "spoilt").read_text(encoding="utf-8")


def test_the_snapshot_that_is_restored_is_bit_for_bit_that_of_its_step(tmp_path):
    straight = made(None, ratio=30, sizes=[1, 2])
    trained(straight, 0, 100)
    run = made(None, ratio=30, sizes=[1, 2])
    with pytest.warns(GrowthWarning):
        trained(run, 0, 200, spoilt=150)
    assert run[2].rollbacks == [{"step": 200, "restored": 100}]
    for mine, own in ((run[0], straight[0]), (run[2].average, straight[2].average)):
        assert all(torch.equal(value, own.state_dict()[name]) for name, value in mine.state_dict().items())
    mine, own = (each[1].state_dict()["state"] for each in (run, straight))
    assert all(torch.equal(value, own[key][name]) for key in mine for name, value in mine[key].items())


def test_a_network_that_is_spoilt_behind_the_last_look_is_restored_at_the_end():
    run = made(None, ratio=30, sizes=[1, 2])
    trained(run, 0, 160, spoilt=150)
    with pytest.warns(GrowthWarning, match="not finite after step 160"):
        network = run[2].finish()
    assert run[2].rollbacks == [{"step": 160, "restored": 100}]
    assert all(bool(each.isfinite().all()) for each in (*network.parameters(), *run[2].snapshot().parameters()))


def test_what_cannot_be_is_refused_in_a_sentence(folder, tmp_path):
    with pytest.raises(InputError, match="already holds a run; name another"):
        trained(made(folder[0]), 0, 1)
    with pytest.raises(InputError, match="run is 3; give the path of a folder"):
        made(3)
    with pytest.raises(InputError, match="overwrite is 1; give True or False"):
        made(tmp_path / "run", overwrite=1)
    with pytest.raises(InputError, match=re.escape("is a run of esper.AnytimeGrowth, whose loop")):
        read_config(folder[0])
    with pytest.raises(InputError, match="parameters or moments of Sequential are not finite after step 1"):
        trained(made(None), 0, 1, spoilt=0)
    run = made(None)
    trained(run, 0, 1).finish()
    with pytest.raises(InputError, match=re.escape("the network is finished; make another esper.AnytimeGrowth")):
        run[2].step(1)


def test_a_run_whose_events_are_of_another_version_is_refused_and_left_alone(tmp_path):
    growth = trained(made(tmp_path / "run"), 0, 8)
    state, path = growth.state_dict(), tmp_path / "run" / "events.jsonl"
    growth.finish()
    path.write_bytes(path.read_bytes().replace(b'"schema":4', b'"schema":3', 1))
    before = path.read_bytes()
    _, _, again = resumed = made(tmp_path / "run")
    again.load_state_dict(state)
    for _ in range(2):  # the folder is not kept from another attempt either
        with pytest.raises(
            InputError, match="holds rows of version 3, this Esper reads version 4; read them, or resume"
        ):
            trained(resumed, 8, 9)
    assert path.read_bytes() == before
