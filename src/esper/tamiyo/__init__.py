"""Tamiyo: the brain. Rules and, later, networks that decide when, where and what to grow."""
