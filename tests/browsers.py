"""Pages in a real browser."""

from contextlib import contextmanager
from urllib.parse import urlsplit


@contextmanager
def watched(browser, missing=0, **options):
    """Open a page whose console and requests are watched; what a page of ours never does fails the test at the end.

    `missing` is how many pages are opened that are not there: the browser itself says so in the console.
    """
    context = browser.new_context(service_workers="block", **options)
    page, faults, asked = context.new_page(), [], set()
    page.on("console", lambda message: faults.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("request", lambda request: asked.add(urlsplit(request.url)[:2]))
    try:
        yield page
        assert [fault for fault in faults if "404 (Not Found)" not in fault] == []
        assert len(faults) == missing
        assert {scheme for scheme, _ in asked} <= {"http", "file", "data"}
        assert {host.partition(":")[0] for scheme, host in asked if scheme == "http"} <= {"127.0.0.1"}
    finally:
        context.close()
