"""Makes tasks of a person's own data."""
