"""Makes tasks: data sets and hosts, with their slots and splits."""
