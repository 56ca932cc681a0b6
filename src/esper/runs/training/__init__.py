"""Trains a controller."""
