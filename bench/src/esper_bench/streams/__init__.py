"""Streams of data that change: networks that are scored on each batch before they train on it, and what they store and reuse."""
