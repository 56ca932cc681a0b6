"""`python -m esper` is `esper`."""

from esper.cli import command

command()
