"""Leyline: the contracts. Stages, operations, slots, config, records and protocols; it imports nothing of ours."""
