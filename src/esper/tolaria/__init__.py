"""Tolaria: the engine. Data feed, train and probe passes; it knows no learner and no reward."""
