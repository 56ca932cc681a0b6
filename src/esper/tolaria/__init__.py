"""Trains and measures populations: data feed, training and probe passes. Tolaria, the engine, imports no learner or reward."""
