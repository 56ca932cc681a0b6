"""Serves until it is interrupted, on a port that is taken before anything else is done."""

import errno
import ipaddress
import socket
import threading
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from esper.leyline.errors import InputError

LAST_WORDS = 2
"""Longest wait for answers that are being sent when the server ends [seconds]."""


class Server(uvicorn.Server):
    """A server that sets `stop` when it is asked to end."""

    def __init__(self, app: ASGIApp, stop: threading.Event) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                access_log=False,
                log_config=None,
                log_level="warning",
                server_header=False,
                proxy_headers=False,
                lifespan="off",
                ws="none",
                timeout_graceful_shutdown=LAST_WORDS,
            )
        )
        self.stop = stop

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Ends the answers that would go on."""
        self.stop.set()
        super().handle_exit(sig, frame)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens. InputError if the port is not a port, is in use or may not be used, or the host is unknown."""
    if not 0 <= port <= 65535:
        raise InputError(f"--port is {port}; give 1 to 65535, or 0 for any free port")
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family)
    except (socket.gaierror, UnicodeError):
        raise InputError(
            f"--host is {host!r}, which is not the address of a machine; give 127.0.0.1 or a name"
        ) from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            why = f"port {port} of {host} is in use; end what uses it, or give --port 0 for any free port"
        elif error.errno == errno.EADDRNOTAVAIL:
            why = f"--host is {host}, which is not an address of this machine; give 127.0.0.1 or one that is"
        else:
            why = f"port {port} of {host} cannot be used: {error.strerror}; give another --port"
        raise InputError(why) from None


def is_loopback(listening: socket.socket) -> bool:
    """Whether only this machine can reach a socket."""
    return ipaddress.ip_address(listening.getsockname()[0]).is_loopback


def address_of(host: str, listening: socket.socket) -> str:
    """The address to open in a browser on this machine or, for a host that is not all addresses, on others."""
    port = listening.getsockname()[1]
    if host in ("", "0.0.0.0", "::"):
        host = socket.gethostname()
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"
