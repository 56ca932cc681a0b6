"""Defines the subcommands of `esper`, one file for each group. A command reads its arguments, calls the library and prints."""
