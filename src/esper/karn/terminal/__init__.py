"""Shows runs in the terminal."""
