"""Run `python -m esper` as `esper`."""

from esper.cli import command

command()
