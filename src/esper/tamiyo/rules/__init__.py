"""Holds controllers that are rules."""
