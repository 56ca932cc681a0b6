"""Store: files that survive a crash. Atomic writes, bounded reads, locks, and checkpoints."""
