"""Keeps files that survive a crash: atomic writes, bounded reads, locks, and checkpoints."""
