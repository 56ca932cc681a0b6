"""Holds the hosts of the built-in tasks, which can be used for tasks of one's own."""
