"""Trained networks that come inside packages: letters to phonemes, pitch, and speech, to be damaged and repaired."""
