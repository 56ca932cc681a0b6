"""Benchmarks Esper, as a package that plugs into it: tasks, opponents, fitted controllers, and streams of changing data."""
