"""Holds the tree of the configuration, and reads it from YAML, from `--set` and from mappings."""
