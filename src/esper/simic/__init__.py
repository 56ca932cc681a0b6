"""Simic: learning. Rewards, rollouts, and the learner that trains a controller."""
