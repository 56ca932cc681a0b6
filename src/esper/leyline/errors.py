"""The error for what a person gave us."""


class InputError(ValueError):
    """Bad input: one sentence that names what was given, what is accepted, and the mend. The command line exits with 2."""
