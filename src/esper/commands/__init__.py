"""Commands: one file for each group of subcommands of `esper`. A command reads its arguments, calls the library and prints."""
