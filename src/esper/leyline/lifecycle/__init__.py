"""Holds what grows and how: slots and sites, stages, decisions with their masks and gates, and what a controller sees."""
