"""Holds what a user takes home: a grown network, how it is saved, exported, drawn and grown further."""
