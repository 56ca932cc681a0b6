"""Nissa: telemetry. The rows of the events, and the hub that writes them."""
