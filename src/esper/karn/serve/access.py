"""Decide who may send requests. Nothing behind the guard needs to check it."""

import asyncio
import hashlib
import hmac
import ipaddress
import socket
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from esper.karn.serve.pages import error_page, login_page
from esper.leyline.messages import InputError
from esper.store.disk import read_named

SHORTEST_TOKEN = 16  # characters
LARGEST_FORM = 4096  # bytes
FORM_TIME = 10.0  # longest wait for the whole form of the token [seconds]
LOGIN = "/login"


class Door(NamedTuple):
    """Decides who may send requests, by their token and their Host header."""

    token: str | None  # what every request must bring; None if none is needed
    host: str  # the host that the user named
    loopback: bool  # whether the server can be reached from this machine alone
    port: int  # of the server, which names the cookie

    @property
    def cookie(self) -> str:
        """Name of the cookie: those of two servers on one machine differ by port."""
        return f"esper-{self.port}"

    @property
    def session(self) -> str:
        """Value of the cookie: made from the token, which cannot be found from it."""
        assert self.token is not None
        return hmac.new(self.token.encode(), b"esper serve session", hashlib.sha256).hexdigest()

    def admits(self, headers: Headers, cookies: dict[str, str]) -> bool:
        """Return whether a request brings the token, in its header or as the cookie; compared in constant time."""
        if self.token is None:
            return True
        scheme, _, given = headers.get("authorization", "").partition(" ")
        by_header = _same(given.strip(), self.token) and scheme.lower() == "bearer"
        return _same(cookies.get(self.cookie, ""), self.session) or by_header

    def knows(self, host: str | None) -> bool:
        """Return whether a Host header names this server. Others that lead here are refused, as in DNS rebinding."""
        try:
            name = urlsplit(f"//{host or ''}").hostname or ""
        except ValueError:
            return False
        if not host or "@" in host or "/" in host:
            return False
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            local = {"localhost"} if self.loopback else {"localhost", self.host.lower(), socket.gethostname().lower()}
            return name in local
        return address.is_loopback or not self.loopback


class Guard:
    """Passes a request on to another ASGI application only if its host, method and token are right."""

    def __init__(self, app: ASGIApp, door: Door) -> None:
        self.app, self.door = app, door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        login = self.door.token is not None and request.scope["path"] == LOGIN
        answer: ASGIApp = self.app
        if not self.door.knows(request.headers.get("host")) or len(request.headers.getlist("host")) != 1:
            answer = PlainTextResponse(
                "This server has another name; open the address that esper serve printed.\n", 421
            )
        elif login and request.method == "POST":
            answer = await self._log_in(request)
        elif request.method not in ("GET", "HEAD"):
            answer = PlainTextResponse("Only GET is answered here.\n", 405, headers={"Allow": "GET, HEAD"})
        elif login:
            answer = login_page()
        elif not self.door.admits(request.headers, request.cookies):
            answer = login_page(401)
        await answer(scope, receive, send)

    async def _log_in(self, request: Request) -> Response:
        """Return the answer to the form of the token: the cookie if it is right."""
        assert self.door.token is not None
        origin = request.headers.get("origin", "null")
        if origin != "null" and origin.partition("://")[2] != request.headers["host"]:
            return PlainTextResponse("The form was sent from another site.\n", 403)
        body = b""
        try:
            async with asyncio.timeout(FORM_TIME):
                async for part in request.stream():
                    body += part
                    if len(body) > LARGEST_FORM:
                        return error_page("The form is too long", f"A form has at most {LARGEST_FORM:,} bytes.", 413)
        except TimeoutError:
            late = f"The form was not complete within {FORM_TIME:g} seconds.\n"
            return PlainTextResponse(late, 408, headers={"Connection": "close"})
        except ClientDisconnect:
            return PlainTextResponse("The form was cut off.\n", 400)  # which nobody reads
        given = parse_qs(body.decode("utf-8", "replace")).get("token", [""])[0].strip()
        if not _same(given, self.door.token):
            return login_page(401, wrong=True)
        answer = RedirectResponse("/", 303)
        answer.set_cookie(self.door.cookie, self.door.session, httponly=True, samesite="strict", path="/")
        return answer


def read_token(path: Path) -> str:
    """Return the token in a file. InputError if the file cannot be read or holds no token."""
    try:
        token = read_named(path, LARGEST_FORM, "name a file that holds the token").decode("ascii").strip()
    except UnicodeDecodeError:
        token = ""
    if len(token) < SHORTEST_TOKEN or not token.isprintable() or " " in token:
        raise InputError(
            f"{path} holds no token: write one line of at least {SHORTEST_TOKEN} letters, digits and signs without spaces"
        )
    return token


def _same(given: str, right: str) -> bool:
    """Return whether two texts are equal, in a time that depends on neither."""
    digests = (hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest() for text in (given, right))
    return hmac.compare_digest(*digests)
