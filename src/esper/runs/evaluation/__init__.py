"""Compares controllers and static networks."""
