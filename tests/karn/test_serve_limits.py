"""Send to a real server what strangers send: too many connections, half requests, and what is no HTTP; it answers or closes."""

import http.client
import logging
import select
import socket
import time

import pytest

from served import TOKEN, make_runs, served_here, serving

pytest.importorskip("starlette", reason="the extra web is not installed")

from esper.karn.serve import access, library, server
from esper.karn.serve.library import key_of

PATIENCE = 60  # seconds after which a silent server fails a test


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return make_runs(tmp_path_factory.mktemp("limits").resolve())


@pytest.fixture
def silent():
    """Check that the server logs nothing in a test."""
    records = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = records.append
    logging.getLogger().addHandler(handler)
    yield
    logging.getLogger().removeHandler(handler)
    assert [record.getMessage() for record in records] == []


def answer_of(address, sent):
    """Return everything that the server answers to some bytes until it closes the connection."""
    with socket.create_connection(address, PATIENCE) as connection:
        connection.sendall(sent)
        return read_all(connection)


def read_all(connection):
    data = b""
    try:
        while part := connection.recv(2**16):
            data += part
    except ConnectionResetError:  # closed before it read everything that was sent
        pass
    return data


def head(address, method="GET", path="/", *lines):
    host = f"Host: 127.0.0.1:{address[1]}"
    return "\r\n".join((f"{method} {path} HTTP/1.1", host, *lines, "", "")).encode()


def assert_has_headers(answer):
    lines = answer.partition(b"\r\n\r\n")[0].decode().splitlines()[1:]
    found = [line.partition(": ")[::2] for line in lines]
    for name, value in server.HEADERS.items():
        assert [text for key, text in found if key.lower() == name.lower()] == [value], (name, answer)


def test_every_answer_has_the_headers_that_let_nothing_in(runs, silent, monkeypatch):
    monkeypatch.setattr(access, "FORM_TIME", 0.1)
    key, close = key_of(runs / "finished"), "Connection: close"
    with served_here([runs], TOKEN) as address:
        allowed = (close, f"Authorization: Bearer {TOKEN}")
        requests = {
            200: head(address, "GET", f"/runs/{key}", *allowed),
            401: head(address, "GET", "/", close),
            404: head(address, "HEAD", "/none", *allowed),
            405: head(address, "PUT", "/", *allowed),
            421: head(address, "GET", "/", close).replace(b"127", b"evil"),
            422: head(address, "GET", f"/runs/{key}/decisions?env=x", *allowed),
            400: b"nothing\r\n\r\n",
            408: head(address, "POST", "/login", close, "Content-Length: 9"),
        }
        for status, sent in requests.items():
            answer = answer_of(address, sent)
            assert answer.startswith(f"HTTP/1.1 {status} ".encode()), answer
            assert_has_headers(answer)
        monkeypatch.setattr(server, "most_connections", lambda: 0)
        answer = answer_of(address, b"")
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert_has_headers(answer)
    assert "unsafe" not in server.HEADERS["Content-Security-Policy"]


def test_nothing_that_is_sent_makes_the_server_log_or_end(runs, silent):
    with served_here([runs], TOKEN) as address:
        chunked = head(address, "POST", "/login", "Transfer-Encoding: chunked")
        for sent in (
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
            b"GET / HTTP/9.9\r\n\r\n",
            b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20_000 + b"\r\n",
            head(address, "POST", "/login", "Origin: http://["),
            head(address, "GET", "/", "Connection: upgrade", "Upgrade: websocket") + b"\xff" * 50,
            head(address, "PUT", "/", "Transfer-Encoding: chunked") + b"zz\r\n",  # answered before its body
            chunked + b"zz\r\n",
            head(address, "HEAD", "/", "Transfer-Encoding: chunked") + b"zz\r\n",
            chunked + b"3\r\nabc\r\n" + b"zz\r\n",
            chunked + b"ffffff\r\n" + b"x" * 100_000,
            head(address, "GET", "/") + b"nothing\r\n\r\n",
            head(address, "GET", "//[/%ff%00?q=%ff&run=%00"),
        ):
            with socket.create_connection(address, PATIENCE) as connection:
                connection.sendall(sent)
                select.select([connection], [], [], 0.3)
        with socket.create_connection(address, PATIENCE) as connection:
            connection.sendall(head(address, "POST", "/login", "Content-Length: 9") + b"token")  # and then goes away
        assert answer_of(address, head(address, "GET", "/login", "Connection: close")).startswith(b"HTTP/1.1 200 ")


def test_half_a_head_is_dropped_on_a_new_and_on_a_used_connection(runs, silent, monkeypatch):
    monkeypatch.setattr(server, "HEADER_TIME", 0.2)
    with served_here([runs]) as address:
        assert answer_of(address, b"") == b""
        assert answer_of(address, b"GET / HTTP/1.1\r\nHost: ") == b""
        with socket.create_connection(address, PATIENCE) as connection:
            connection.sendall(head(address, "HEAD", "/assets/serve.js"))
            assert connection.recv(2**16).startswith(b"HTTP/1.1 200 ")
            connection.sendall(b"GET / HT")
            assert read_all(connection) == b""
        monkeypatch.setattr(library, "render_content", lambda content: time.sleep(0.5) or "late")
        late = head(address, "GET", f"/runs/{key_of(runs / 'finished')}/content", "Connection: close")
        assert answer_of(address, late).endswith(b"late")  # as long as it takes, once the head is there


def test_two_hundred_connections_are_answered_or_refused_by_a_process_of_few_files(runs):
    with serving(runs, files=128) as (process, address):
        host, port = address.removeprefix("http://").split(":")
        connections = [socket.create_connection((host, int(port)), PATIENCE) for _ in range(200)]
        for connection in connections:
            try:
                connection.sendall(head((host, port), "GET", "/", "Connection: close"))
            except (BrokenPipeError, ConnectionResetError):  # it has its answer
                continue
        codes = [read_all(connection)[9:12] for connection in connections]
        assert set(codes) == {b"200", b"503"}
        for connection in connections:
            connection.close()
        last = http.client.HTTPConnection(host, int(port), timeout=PATIENCE)
        last.request("GET", f"/runs/{key_of(runs / 'finished')}")
        assert last.getresponse().status == 200
        process.kill()
        assert process.stderr.read() == ""
