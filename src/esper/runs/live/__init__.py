"""Holds `esper.Growth`, growth in the user's own training loop."""
