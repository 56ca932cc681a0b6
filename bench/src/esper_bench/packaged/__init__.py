"""Offers trained networks that come inside packages, to be damaged and repaired: letters to phonemes, pitch, and speech."""
