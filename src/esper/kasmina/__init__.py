"""Computes networks: stacked hosts, seeds, blueprints, blending and the lifecycle of a slot. Kasmina holds the networks."""
