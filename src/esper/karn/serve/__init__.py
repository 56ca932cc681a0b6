"""Shows run folders in a browser: a list of them, a page of each that follows its run, comparisons, decisions and files."""

from esper.leyline.distribution import pip_install
from esper.leyline.errors import InputError

try:
    import starlette  # noqa: F401
    import uvicorn  # noqa: F401
except ImportError:
    raise InputError(
        f"esper serve needs starlette and uvicorn, which are not installed; run {pip_install('web')}"
    ) from None
