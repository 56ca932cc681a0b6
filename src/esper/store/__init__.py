"""Store: files that are not lost. Atomic writes, bounded reads, locks, and checkpoints."""
