"""Simic: the school. Rewards, attribution, and the learner that trains a controller."""
