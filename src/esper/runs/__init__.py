"""A run from start to end: its folder, growing, training, evaluating, and going on where it was left."""
