"""Kasmina: the networks. Stacked hosts, seeds, blueprints, blending and the lifecycle of a slot."""
