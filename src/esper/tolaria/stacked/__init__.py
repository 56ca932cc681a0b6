"""Trains a population of stacked hosts: its data, passes and optimizer."""
