"""Kasmina: the body. Stacked hosts, seeds, blueprints, blending and the lifecycle."""
