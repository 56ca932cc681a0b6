"""Nissa: telemetry. Event rows and the hub that writes them."""
