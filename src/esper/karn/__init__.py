"""Karn: the windows. What a person sees of a run."""
