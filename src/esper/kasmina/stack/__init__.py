"""Computes many hosts at once: their parameters are tensors with a leading environment axis."""
