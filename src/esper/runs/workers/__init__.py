"""Starts the processes that play for a training or an evaluation, and gives them work."""
