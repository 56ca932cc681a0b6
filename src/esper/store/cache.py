"""The folder in which Esper keeps what it can make again: trained hosts, and measured times of compiled passes."""

import os
from pathlib import Path

VARIABLE = "ESPER_CACHE"
"""The environment variable that names the cache folder of Esper. The default is `esper` in the user's cache folder, which is
XDG_CACHE_HOME or `.cache` in the home folder."""


def cache_root() -> Path:
    """The folder that ESPER_CACHE names, or `esper` in the user's cache folder (XDG_CACHE_HOME, or ~/.cache)."""
    user = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get(VARIABLE) or Path(user) / "esper")
