"""Holds tasks, splits and batches of examples, and the keys by which everything is drawn."""
