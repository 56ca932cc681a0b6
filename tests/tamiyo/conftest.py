"""Share the views of all tests of controllers."""

from views import allowed, random_view, view  # noqa: F401  fixtures for all
