"""Decides when, where and what to grow, by rules and by networks. Tamiyo is the brain."""
