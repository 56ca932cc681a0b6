"""Runs: growing, training, evaluating and resuming, with the folder that each run writes."""
