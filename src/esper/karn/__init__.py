"""Karn: the windows. Progress, tables and figures of runs."""
