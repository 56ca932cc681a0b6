"""Plays streams of data that change: networks are scored on each batch before they train on it, and store and reuse parts."""
