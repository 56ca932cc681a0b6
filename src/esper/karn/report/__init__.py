"""Makes the report, one self-contained page about a run."""
