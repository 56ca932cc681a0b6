"""Opponents of an evaluation, and the search for the best fixed plan."""
