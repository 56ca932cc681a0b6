"""Shows run folders in a browser: a list of them, a page of each that follows its run, comparisons, decisions and files."""

from esper.leyline.distribution import of_extra

with of_extra("web", "esper serve needs starlette and uvicorn, which are"):
    import starlette  # noqa: F401
    import uvicorn  # noqa: F401
