"""Tolaria: the engine. Data feed, training and probe passes. It imports no learner and no reward."""
