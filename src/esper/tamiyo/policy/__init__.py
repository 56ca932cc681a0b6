"""Holds the recurrent policy that is trained by PPO."""
