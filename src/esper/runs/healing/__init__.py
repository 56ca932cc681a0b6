"""Holds `esper.heal`, which regrows a network that was damaged."""
