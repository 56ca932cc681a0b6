"""Adds opponents to an evaluation, and searches for the best fixed plan."""
