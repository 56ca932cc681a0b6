"""Worlds with known answers, and instruments that break things on purpose."""
