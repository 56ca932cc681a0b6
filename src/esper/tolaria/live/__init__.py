"""Grows one network in the user's own training loop."""
