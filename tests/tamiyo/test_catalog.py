import pytest

from esper.leyline.config.tree import Config
from esper.leyline.messages import InputError
from esper.leyline.protocols import Controller
from esper.tamiyo.catalog import CONTROLLERS, get_controller, with_sensors
from esper.tamiyo.rules.schedule import Schedule


@pytest.mark.parametrize("name", CONTROLLERS)
def test_every_controller_of_the_list_can_be_made(name, view):
    controller = get_controller(name, Config())
    assert isinstance(controller, Controller)
    assert len(controller.act(view()).op) == 1
    assert controller.update() == {}


@pytest.mark.parametrize("suffix", ["yaml", "yml"])
def test_the_path_of_a_schedule_is_a_controller(tmp_path, suffix):
    path = tmp_path / f"plan.{suffix}"
    path.write_text("- {at: 0, op: wait}\n")
    assert isinstance(get_controller(str(path), Config()), Schedule)


def test_every_call_makes_a_controller_of_its_own():
    assert get_controller("heuristic", Config()) is not get_controller("heuristic", Config())


def test_the_heuristic_has_the_settings_of_the_config():
    config = Config.model_validate({"heuristic": {"plant_below": 0.5}, "gates": {"contribution_z": 2.0}})
    controller = get_controller("heuristic", config)
    assert (controller.config, controller.gates) == (config.heuristic, config.gates)


@pytest.mark.parametrize("name", ["always", "none.yaml", "plan.txt", ""])
def test_an_unknown_controller_gets_the_known_ones_named(name):
    with pytest.raises(InputError) as caught:
        get_controller(name, Config())
    assert str(caught.value) == (
        f"unknown controller {name!r}; give one of {', '.join(CONTROLLERS)}, the path of a schedule file (.yaml or .yml), "
        "the run folder of a trained controller, which must exist, or path.py:function for one of your own"
    )


def test_a_folder_without_a_controller_is_told_apart_from_an_unknown_name(tmp_path):
    with pytest.raises(
        InputError, match=r"holds no trained controller, because it has no file controller/controller\.json;"
    ):
        get_controller(str(tmp_path), Config())


@pytest.mark.parametrize(("asked", "name", "every"), [(None, "heuristic", 4), (None, "never", 0), (0, "heuristic", 0)])
def test_the_growth_sensors_are_measured_as_the_controller_needs_them_unless_the_config_says_how_often(
    asked, name, every
):
    config = Config.model_validate({"probe": {"sensors_every": asked}})
    assert with_sensors(config, get_controller(name, config)).probe.sensors_every == every
