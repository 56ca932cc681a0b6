"""Tests controllers: problems whose best policy is known, scripted exploits, and injected faults."""
