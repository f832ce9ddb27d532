"""The HTTP server: bounds, tokens, slow and lost clients; its routes are stand-ins."""

import contextlib
import http.client
import json
import socket
import threading

import pytest

from jaxmem.serve import http_server
from jaxmem.serve.http_server import CompletionServer, ServerAnswer
from tests.helpers.served import send


@contextlib.contextmanager
def serving(routes=None, token=None, max_body=1000):
    server = CompletionServer(("127.0.0.1", 0), token, max_body)
    server.routes = routes or {
        ("GET", "/health"): lambda _: ServerAnswer(),
        ("POST", "/echo"): lambda sent: ServerAnswer(
            {"fields": sent.fields, "query": sent.query}
        ),
    }
    server.server_activate()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.close()
        thread.join()


@pytest.fixture(scope="module")
def server():
    with serving() as made:
        yield made


def talk(server, content, end=False):
    """The whole answer to some bytes on a connection of their own."""
    with socket.create_connection(server.server_address, timeout=20) as sock:
        sock.sendall(content)
        if end:
            sock.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: sock.recv(2**16), b""))


def test_routes_get_fields_and_query(server):
    answer = send(server.url, "/echo?mode=keep&x=", {"a": [1, None]})
    assert answer == (
        200,
        {"fields": {"a": [1, None]}, "query": {"mode": "keep", "x": ""}},
    )
    assert send(server.url, "/echo", "") == (200, {"fields": {}, "query": {}})
    assert send(server.url, "/health") == (200, "")


@pytest.mark.parametrize(
    ("path", "body", "headers", "status", "message"),
    [
        ("/none", {}, {}, 404, "Not Found"),
        ("/health", {}, {}, 405, "Method Not Allowed"),
        ("/echo", "{", {}, 400, "the body is not JSON"),
        ("/echo", "[" * 900, {}, 400, "the body is not JSON"),
        ("/echo", b"\xff\xfe", {}, 400, "the body is not JSON"),
        ("/echo", '{"a": NaN}', {}, 400, "NaN is not a number of JSON"),
        ("/echo", "[1]", {}, 400, "the body must be a JSON object, got [1]"),
        ("/echo", "x" * 1001, {}, 413, "has 1,001 bytes, and may have 1,000"),
        ("/echo", {}, {"Content-Length": "-1"}, 400, "Content-Length must be a number"),
        ("/echo", {}, {"Content-Length": "9" * 30}, 413, "and may have 1,000"),
        ("/echo", {}, {"Transfer-Encoding": "chunked"}, 411, "send the body's Content"),
        ("/echo", {}, {"Origin": "http://x.org"}, 403, "Origin header"),
    ],
)
def test_bad_requests_are_refused(server, path, body, headers, status, message):
    got, answer = send(server.url, path, body, headers=headers)
    assert got == status
    assert message in answer["error"]["message"]
    assert answer["error"]["code"] == status


def test_other_methods_are_refused_as_json(server):
    status, answer = send(server.url, "/echo", {}, method="PUT")
    assert status == 501
    assert answer["error"]["message"] == "Unsupported method ('PUT')"
    answer = talk(server, b"GET /a b HTTP/1.1\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400") or b'"code": 400' in answer


def test_a_connection_serves_several_requests(server):
    connection = http.client.HTTPConnection(*server.server_address, timeout=20)
    for number in range(3):
        connection.request("POST", "/echo", json.dumps({"n": number}))
        assert json.loads(connection.getresponse().read())["fields"] == {"n": number}
    connection.close()


def test_refused_body_ends_the_connection(server):
    # What was not read must not be taken for the next request.
    inner = b"POST /echo HTTP/1.1\r\nContent-Length: 0\r\n\r\n"
    head = b"POST /none HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(inner)
    answer = talk(server, head + inner)
    assert answer.count(b"HTTP/1.1 ") == 1 and b"Connection: close" in answer


def test_token_is_required():
    with serving(token="secret") as server:
        for sent in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "secret"},
        ):
            status, answer = send(server.url, "/echo", {}, headers=sent)
            assert status == 401
            assert "Authorization: Bearer TOKEN" in answer["error"]["message"]
        right = {"Authorization": "Bearer secret"}
        assert send(server.url, "/echo", {}, headers=right)[0] == 200
        assert send(server.url, "/health")[0] == 200  # monitors have no token


@pytest.mark.parametrize(
    "sent",
    [
        b"POST /echo HT",
        b"POST /echo HTTP/1.1\r\nContent-Length: 9\r\n",
        b"POST /echo HTTP/1.1\r\nContent-Length: 9\r\n\r\n{",
    ],
)
def test_slow_clients_are_left(server, sent, monkeypatch):
    monkeypatch.setattr(http_server, "_IDLE", 0.1)
    assert talk(server, sent) == b""


def test_trickle_does_not_renew_the_time(server, monkeypatch):
    monkeypatch.setattr(http_server, "_IDLE", 0.3)
    with socket.create_connection(server.server_address, timeout=20) as sock:
        pause = threading.Event()
        with pytest.raises(ConnectionError):
            for _ in range(200):
                sock.sendall(b"x")
                pause.wait(0.02)
        assert _ < 100


def test_client_that_leaves_within_the_body_is_no_error(server, capfd):
    head = b"POST /echo HTTP/1.1\r\nContent-Length: 9\r\n\r\n{"
    assert talk(server, head, end=True) == b""
    assert send(server.url, "/health")[0] == 200
    assert capfd.readouterr().err == ""


def test_is_gone_tells_that_the_client_has_left():
    left, told = threading.Event(), threading.Event()

    def route(sent):
        before = sent.is_gone()
        assert left.wait(20)
        if not before and sent.is_gone():
            told.set()
        return ServerAnswer()

    with serving({("POST", "/wait"): route}) as server:
        with socket.create_connection(server.server_address) as sock:
            sock.sendall(b"POST /wait HTTP/1.1\r\nContent-Length: 0\r\n\r\n")
            pause = threading.Event()
            pause.wait(0.05)
        left.set()
        assert told.wait(20)


def test_connections_are_bounded(monkeypatch):
    monkeypatch.setattr(http_server, "_CONNECTIONS", 2)
    with serving() as server, contextlib.ExitStack() as stack:
        for _ in range(2):
            sock = socket.create_connection(server.server_address, timeout=20)
            stack.enter_context(sock)
            sock.sendall(b"GET /health HTTP/1.1\r\n\r\n")
            assert sock.recv(99).startswith(b"HTTP/1.1 200")
        assert talk(server, b"").startswith(b"HTTP/1.1 503")


def test_failing_route_is_answered(capfd):
    def fail(_):
        raise RuntimeError("the device is gone")

    with serving({("POST", "/fail"): fail}) as server:
        status, answer = send(server.url, "/fail", {})
        assert status == 500
        assert answer["error"]["message"] == "RuntimeError: the device is gone"
    assert "the device is gone" in capfd.readouterr().err
