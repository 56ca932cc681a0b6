"""Serve until interrupted, on a port that is taken before anything else is done.

What a stranger can use up is bounded: connections by the files that the process may open, and the time of half a request.
"""

import asyncio
import errno
import ipaddress
import resource
import socket
from http import HTTPStatus

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from esper.leyline.messages import InputError

LAST_WORDS = 2  # longest wait for answers that are being sent when the server ends [seconds]
HEADER_TIME = 10.0  # longest wait for the whole head of a request [seconds]
MOST_CONNECTIONS = 256
"""Most connections at a time, each an open page, a download or a browser that keeps one for its next request."""
ACCEPTED_AT_ONCE = 8
"""Connections that are accepted before the first of them is looked at; the others wait in the queue of the system."""
OWN_FILES = 48  # files that the process holds for itself and for the connections that it turns away; a generous bound
HEADERS = {
    "Server": "esper",
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""The headers of every answer, also of those that no route gives."""


def most_connections() -> int:
    """Return the most connections at a time: each may need four open files, itself and three of an archive that is packed."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return max(1, min(MOST_CONNECTIONS, (files - OWN_FILES) // 4))


class Connection(H11Protocol):
    """Turns a connection away if there are too many, and closes it if the head of a request does not come in time."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        most = most_connections()
        if len(self.connections) > most:
            self._refuse(503, f"This server has {most} open connections, its most; close a page or try again.\n")
        else:
            self._late = self.loop.call_later(HEADER_TIME, transport.close)

    def data_received(self, data: bytes) -> None:
        """Read a part of a request; the clock runs from the first byte of its head to the last."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_clock()
        elif self._late is None:
            self._late = self.loop.call_later(HEADER_TIME, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, f"{msg}\n")

    def _refuse(self, status: int, sentence: str) -> None:
        """Send a status and a sentence in place of what a route would answer, unless that has begun, and close the connection."""
        if self.cycle is not None:
            self.cycle.disconnected = True  # a route that is at work on the request is not heard any more
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            own = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close")]
            lines = [b"%s: %s" % header for header in (*self.server_state.default_headers, *own)]
            start = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}".encode()
            # Without h11, which refuses to send a body behind half a request that began with HEAD.
            self.transport.write(b"\r\n".join([start, *lines, b"", sentence.encode()]))
        self.transport.close()

    def _stop_clock(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


class Server(uvicorn.Server):
    """Serves an application with the limits and the headers of this file."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=Connection,
                backlog=ACCEPTED_AT_ONCE,
                headers=list(HEADERS.items()),
                access_log=False,
                log_config=None,
                log_level="error",  # a warning is a line for each request that is no HTTP, as many as a stranger sends
                server_header=False,
                proxy_headers=False,
                lifespan="off",
                ws="none",
                timeout_graceful_shutdown=LAST_WORDS,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen()  # the queue of the system is long again, which asyncio makes as long as `backlog`


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens. InputError if the port is none, is in use or may not be used, or the host is unknown."""
    if not 0 <= port <= 65535:
        raise InputError(f"--port is {port}; give 1 to 65535, or 0 for any free port")
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family)
    except (OSError, UnicodeError) as error:
        if isinstance(error, socket.gaierror | UnicodeError) or error.errno == errno.EADDRNOTAVAIL:
            why = f"--host is {host!r}, which is not an address of this machine; give 127.0.0.1 or one that is"
        elif error.errno == errno.EADDRINUSE:
            why = f"port {port} of {host} is in use; end what uses it, or give --port 0 for any free port"
        else:
            why = f"port {port} of {host} cannot be used: {error.strerror}; give another --port"
        raise InputError(why) from None


def is_loopback(listening: socket.socket) -> bool:
    """Return whether only this machine can reach a socket."""
    return ipaddress.ip_address(listening.getsockname()[0]).is_loopback


def address_of(host: str, listening: socket.socket) -> str:
    """Return the address to open in a browser on this machine or, for a host that is not all addresses, on others."""
    port = listening.getsockname()[1]
    if host in ("", "0.0.0.0", "::"):
        host = socket.gethostname()
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"
