"""Help in two letters, and completion in the shell."""

import pytest
from typer.testing import CliRunner

from esper.cli import app

COMMANDS = [
    "grow",
    "train",
    "resume",
    "eval",
    "stream",
    "heal",
    "tasks",
    "blueprints",
    "controller",
    "config",
    "export",
    "events",
    "export-events",
    "watch",
    "report",
    "compare",
    "serve",
    "doctor",
]


@pytest.mark.parametrize(
    "command", [[], *([name] for name in COMMANDS)], ids=lambda command: " ".join(command) or "esper"
)
def test_h_is_help_everywhere(command):
    short, long = (CliRunner().invoke(app, [*command, option]) for option in ("-h", "--help"))
    assert short.exit_code == 0
    assert "Usage: " in short.output
    assert short.output == long.output


def test_every_command_is_asked_for_its_help():
    assert [command.name or command.callback.__name__ for command in app.registered_commands] == COMMANDS


def test_the_shell_completes_the_names_of_commands():
    asked = {"_ESPER_COMPLETE": "complete_bash", "COMP_WORDS": "esper ta", "COMP_CWORD": "1"}
    assert CliRunner().invoke(app, [], env=asked, prog_name="esper").output.split() == ["tasks"]
