"""Measures seeds: probe, coalitions, sensors, and certificates of what is kept."""
