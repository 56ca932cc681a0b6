"""Trains controllers: rewards, rollouts, and the learner. Simic holds the learning."""
