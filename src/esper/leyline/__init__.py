"""Leyline: the contracts. Stages, operations, slots, config, records and protocols; it imports no other package of Esper."""
