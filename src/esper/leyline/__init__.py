"""Defines contracts: stages, operations, slots, config, records and protocols. Leyline imports no other package of Esper."""
