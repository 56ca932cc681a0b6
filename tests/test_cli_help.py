"""Help in two letters, its groups and examples, the pages it names, and completion in the shell."""

import contextlib
import os
import pty
import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from esper.cli import COMMANDS, EXAMPLES, app, main
from esper.commands.listing import docs_folder, find_page, first_sentence, pages_of

ROOT = Path(__file__).parents[1]
PAGES = pages_of(docs_folder())


@pytest.mark.parametrize(
    "command", [[], *([name] for name in COMMANDS)], ids=lambda command: " ".join(command) or "esper"
)
def test_h_is_help_everywhere(command):
    short, long = (CliRunner().invoke(app, [*command, option]) for option in ("-h", "--help"))
    assert short.exit_code == 0
    assert "Usage: " in short.output
    assert short.output == long.output


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_ends_in_two_examples_that_parse_and_a_page_that_is_there(name):
    _, _, page = COMMANDS[name]
    shown = " ".join(CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200"}).output.split())
    assert shown.endswith(f"More: `esper docs {page}`")
    assert page in PAGES
    examples = [line for line in EXAMPLES if line.split()[1] == name]
    assert len(examples) == 2
    for example in examples:
        assert " ".join(example.split()) in shown
        line = re.split(r" [|>] ", example.partition("  # ")[0])[0]
        program, called, *arguments = shlex.split(line)
        assert (program, called) == ("esper", name)
        get_command(app).commands[name].make_context(name, arguments).close()


def test_the_help_lists_every_command_in_a_group():
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).output
    panels = dict(re.findall(r"─ ([A-Z][\w ]*) ─(.*?)╰", shown, re.DOTALL))
    for name, (_, group, _) in COMMANDS.items():
        assert f"│ {name} " in panels[group], name
    assert "Commands" not in panels


def test_the_options_of_grow_are_in_groups():
    shown = CliRunner().invoke(app, ["grow", "--help"], env={"COLUMNS": "200"}).output
    panels = dict(re.findall(r"─ ([A-Z][\w ]*) ─(.*?)╰", shown, re.DOTALL))
    assert {"Settings", "Where it runs", "Output"} < set(panels)
    assert "--set " in panels["Settings"]
    assert "--device " in panels["Where it runs"]


def test_every_page_that_the_package_names_is_one():
    named = set()
    for path in (ROOT / "src").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"docs/[\w/-]+\.md", text), f"{path} names a file that an installed package does not have"
        named |= set(re.findall(r"`esper docs ([a-z/-]+)`", text))
    assert len(named) > 20
    assert named - set(PAGES) == set()


def test_the_pages_are_in_the_wheel_where_the_command_looks_for_them():
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert "docs" in wheel["only-include"]
    assert wheel["sources"]["docs"] == "esper/docs"


def test_docs_lists_every_page_with_a_sentence():
    lines = CliRunner().invoke(app, ["docs"]).output.splitlines()[1:]
    assert [line.split()[0] for line in lines] == list(PAGES)
    assert all(len(line.split()) > 4 for line in lines)


@pytest.mark.parametrize("given", ["growth", "growth.md", "docs/growth.md", "Growth", "growth#adapters"])
def test_docs_prints_the_page_as_it_is_where_nobody_reads_it(given):
    page = ROOT / "docs" / "growth.md"
    assert CliRunner().invoke(app, ["docs", given]).output == page.read_text(encoding="utf-8")


def test_a_page_of_a_folder_is_found_by_the_last_part_of_its_name():
    assert find_page("gpt", PAGES) == "walkthroughs/gpt"
    assert find_page("benchmarks/README.md", PAGES) == "benchmarks"


def test_an_unknown_page_is_one_sentence_that_names_the_nearest(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["docs", "grwoth"])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: there is no page 'grwoth'; did you mean 'growth'")
    assert line.endswith("`esper docs` lists all pages")


def test_docs_shows_a_page_in_a_terminal_through_the_pager_and_without_marks():
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "PAGER": "cat", "TERM": "xterm", "COLUMNS": "100"}
    shown = b""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(sys.executable, [sys.executable, "-m", "esper", "docs", "serve"], environment)
    with contextlib.suppress(OSError):  # how Linux says that the other side has been closed
        while part := os.read(terminal, 2**16):
            shown += part
    assert os.waitpid(pid, 0)[1] == 0
    text = re.sub(r"\x1b\[[0-9;]*m", "", shown.decode())
    assert "Runs in a browser" in text
    assert "# Runs in a browser" not in text
    assert "glossary.md" not in text


def test_the_first_sentence_of_a_page_has_no_links_and_skips_the_glossary():
    text = "# Title\n\n![a](b.png)\n\nThe [glossary](g.md) explains the words. A `host` is *grown* by\n[seeds](s.md). More.\n"
    assert first_sentence(text) == "A host is grown by seeds."


def test_the_shell_completes_the_names_of_commands():
    asked = {"_ESPER_COMPLETE": "complete_bash", "COMP_WORDS": "esper ta", "COMP_CWORD": "1"}
    assert CliRunner().invoke(app, [], env=asked, prog_name="esper").output.split() == ["tasks"]
