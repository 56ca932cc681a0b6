"""Writes telemetry: the rows of the events, and the hub that hands them on. Nissa holds the telemetry."""
