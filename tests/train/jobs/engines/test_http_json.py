"""Requests over HTTP to servers that send what no engine should."""

import contextlib
import json
import socket
import ssl
import threading
import time

import pytest

from jaxmem.train.jobs.rollout.engines import http_json
from jaxmem.train.jobs.rollout.engines.http_json import Http, StatusError
from jaxmem.train.jobs.rollout.engines.patience import EngineError, EngineFailure
from tests.helpers.engine_stub import EngineStub

HEAD = b"HTTP/1.1 200 OK\r\n"


def within(seconds):
    end = time.monotonic() + seconds
    return lambda: end


@contextlib.contextmanager
def serving(serve, family=socket.AF_INET, host="127.0.0.1"):
    """The port of a server which calls `serve` with each connection, in a thread."""
    listener = socket.create_server((host, 0), family=family)
    threads = []

    def answer(connection):
        with connection, contextlib.suppress(OSError):
            serve(connection)

    def accept():
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                thread = threading.Thread(target=answer, args=(connection,))
                thread.start()
                threads.append(thread)

    accepting = threading.Thread(target=accept)
    accepting.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        accepting.join()
        for thread in threads:
            thread.join()


def requested(connection):
    """The bytes of a request without a body."""
    content = b""
    while b"\r\n\r\n" not in content:
        piece = connection.recv(4096)
        if not piece:
            break
        content += piece
    return content


def drip(connection, start, piece=b"x"):
    """Send ever more, until the client is gone."""
    requested(connection)
    connection.sendall(start)
    while True:
        connection.sendall(piece)
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("start", "piece"),
    [
        (b"", b"H"),
        (b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (HEAD, b"X: y\r\n"),
        (HEAD + b"X: ", b"y"),
        (HEAD + b"Content-Length: 1000000\r\n\r\n", b" "),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"0"),
        (HEAD + b"\r\n", b" "),
    ],
)
def test_ask_ends_at_the_deadline_of_a_slow_answer(start, piece):
    """Each byte comes in time, and the whole never."""
    with serving(lambda connection: drip(connection, start, piece)) as port:
        http = Http(f"http://127.0.0.1:{port}", None)
        began = time.monotonic()
        with pytest.raises(EngineFailure):
            http.ask("GET", "/health", None, within(0.4))
        assert time.monotonic() - began < 5


def test_ask_ends_at_the_deadline_of_a_server_that_does_not_read():
    done = threading.Event()
    with serving(lambda _: done.wait()) as port:
        http = Http(f"http://127.0.0.1:{port}", None)
        began = time.monotonic()
        with pytest.raises(EngineFailure, match="/x: no answer in time"):
            http.ask("POST", "/x", "x" * 2**24, within(0.4))
        assert time.monotonic() - began < 5
        done.set()


def test_ask_waits_longer_if_the_deadline_moves():
    def slowly(connection):
        requested(connection)
        time.sleep(0.6)
        connection.sendall(HEAD + b"Content-Length: 2\r\n\r\n17")

    with serving(slowly) as port:
        began = time.monotonic()

        def deadline():
            return began + (0.3 if time.monotonic() < began + 0.2 else 20.0)

        http = Http(f"http://127.0.0.1:{port}", None)
        assert http.ask("GET", "/x", None, deadline) == 17


def test_close_ends_all_that_wait():
    http, errors, started = None, [], threading.Barrier(5)

    def hold(connection):
        requested(connection)
        started.wait()
        connection.recv(1)  # until the client has gone

    def ask():
        try:
            http.ask("GET", "/x", None, within(60))
        except EngineError as error:
            errors.append(str(error))

    with serving(hold) as port:
        http = Http(f"http://127.0.0.1:{port}", None)
        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        started.wait()
        began = time.monotonic()
        http.close()
        for thread in threads:
            thread.join()
        assert time.monotonic() - began < 5
    assert len(errors) == 4 and all("because the run ends" in x for x in errors)
    with pytest.raises(EngineError, match="because the run ends"):
        http.wait(60)


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        (b"", "the server ended the connection"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "SSH-2.0"),
        (b"HTTP/1.1 999999 \xff\r\n\r\n", "999999"),
        (HEAD + b"Content-Length: 9\r\n\r\n{}", "the answer is cut off"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{", "the answer is cut off"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", "the answer is cut off"),
        (HEAD + b"X: " + b"y" * 2**17, "header line"),
        (HEAD + b"X: y\r\n" * 200 + b"\r\n", "headers"),
    ],
)
def test_ask_describes_what_is_no_answer(answer, line):
    def serve(connection):
        requested(connection)
        connection.sendall(answer)
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)

    with serving(serve) as port:
        http = Http(f"http://127.0.0.1:{port}", None)
        with pytest.raises(EngineFailure, match=line):
            http.ask("GET", "/x", None, within(5))


def test_ask_reads_long_answers():
    """Routes of experts: megabytes of base64."""
    text = "QUJD" * 2**21  # 8 MiB

    def serve(connection):
        requested(connection)
        content = json.dumps({"routed_experts": text}).encode()
        length = b"Content-Length: %d\r\n\r\n" % len(content)
        connection.sendall(HEAD + length + content)

    with serving(serve) as port:
        http = Http(f"http://127.0.0.1:{port}", None)
        assert http.ask("GET", "/x", None, within(60)) == {"routed_experts": text}


def test_ask_refuses_endless_answers(monkeypatch):
    monkeypatch.setattr(http_json, "_MAX_BYTES", 2**18)
    with serving(lambda c: drip(c, HEAD + b"\r\n" + b" " * 2**19)) as port:
        http = Http(f"http://127.0.0.1:{port}", None)
        with pytest.raises(EngineFailure, match="more than 262144 bytes"):
            http.ask("GET", "/x", None, within(5))


def test_ask_names_the_address_that_a_server_has_moved_to():
    def serve(connection):
        requested(connection)
        location = b"Location: https://gpu7:8000/x\r\nContent-Length: 0\r\n\r\n"
        connection.sendall(b"HTTP/1.1 308 Permanent Redirect\r\n" + location)

    with serving(serve) as port:
        http = Http(f"http://127.0.0.1:{port}", None)
        line = "answers 308, moved to 'https://gpu7:8000/x'; set rollouts.urls"
        with pytest.raises(EngineError, match=line):
            http.ask("GET", "/x", None, within(5))


def test_ask_reaches_a_server_that_came_back():
    """No connection of the old server is used again."""
    with EngineStub() as stub:
        http, port = Http(stub.url, None), int(stub.url.rpartition(":")[2])
        assert http.ask("GET", "/v1/models", None, within(5))
    with pytest.raises(EngineFailure, match="/v1/models: no server listens"):
        http.ask("GET", "/v1/models", None, within(5))

    def serve():
        connection, _ = listener.accept()
        with connection:
            requested(connection)
            connection.sendall(HEAD + b"Content-Length: 2\r\n\r\n17")

    listener = socket.create_server(("127.0.0.1", port))
    with listener:
        thread = threading.Thread(target=serve)
        thread.start()
        assert http.ask("GET", "/v1/models", None, within(5)) == 17
        thread.join()


def test_ask_does_not_use_a_proxy(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    with EngineStub() as stub:
        assert Http(stub.url, None).ask("GET", "/weight_info", None, within(5))


@pytest.mark.parametrize("ending", ["", "/"])
@pytest.mark.parametrize("prefix", ["", "/engines/one"])
def test_ask_sends_path_host_and_token(prefix, ending):
    received = []

    def serve(connection):
        received.append(requested(connection).decode())
        connection.sendall(HEAD + b"Connection: close\r\n\r\n{}")

    with serving(serve) as port:
        http = Http(f"http://localhost:{port}{prefix}{ending}", " secret\n")
        assert http.ask("GET", "/health", None, within(5)) == {}
    lines = received[0].split("\r\n")
    assert lines[0] == f"GET {prefix}/health HTTP/1.1"
    assert f"Host: localhost:{port}" in lines
    assert "Authorization: Bearer secret" in lines


def test_ask_reaches_an_address_of_ipv6():
    def serve(connection):
        content = requested(connection)
        good = b"Host: [::1]:" in content
        connection.sendall(HEAD + b"Content-Length: 1\r\n\r\n%d" % good)

    try:
        with serving(serve, socket.AF_INET6, "::1") as port:
            assert Http(f"http://[::1]:{port}", None).ask("GET", "/", None, within(5))
    except OSError:
        pytest.skip("this host has no IPv6")


def test_ask_says_that_a_server_does_not_speak_https():
    with EngineStub() as stub:
        http = Http(stub.url.replace("http:", "https:"), None)
        with pytest.raises(EngineFailure, match="the server does not speak https"):
            http.ask("GET", "/health", None, within(5))


def test_ask_ends_at_the_deadline_of_a_handshake():
    done = threading.Event()
    with serving(lambda _: done.wait()) as port:
        began = time.monotonic()
        with pytest.raises(EngineFailure, match="no answer in time"):
            Http(f"https://127.0.0.1:{port}", None).ask("GET", "/", None, within(0.3))
        assert time.monotonic() - began < 5
        done.set()


@pytest.mark.parametrize(
    "url",
    ["localhost:8000", "http://", "http://h:x", "http://h:99999", "ftp://h",
     "http://h/a b", "http://[::1", "http://" + "h" * 70],
)  # fmt: skip
def test_an_address_must_be_one_of_http(url):
    with pytest.raises(EngineError, match=r"rollouts.urls must be addresses as in"):
        Http(url, None)


def test_an_address_has_nothing_else():
    with pytest.raises(EngineError, match="without a user and a password") as caught:
        Http("http://me:secret@h:1", None)
    assert "secret" not in str(caught.value)
    with pytest.raises(EngineError, match="without a query and a fragment, got"):
        Http("http://h:1/?level=1", None)


@pytest.mark.parametrize("token", ["a\nb", "ключ"])
def test_a_token_fits_into_a_header(token):
    with pytest.raises(EngineError, match=r"\$JAXMEM_ENGINE_TOKEN must") as caught:
        Http("http://h:1", token)
    assert token not in str(caught.value)


def test_status_errors_quote_one_line():
    def serve(connection):
        requested(connection)
        content = json.dumps({"error": {"message": "no\n\x1b[31m" + "x" * 999}})
        length = f"Content-Length: {len(content)}\r\n\r\n{content}"
        connection.sendall(b"HTTP/1.1 500 Oh\r\n" + length.encode())

    with serving(serve) as port:
        with pytest.raises(StatusError) as caught:
            Http(f"http://127.0.0.1:{port}", None).ask("GET", "/", None, within(5))
    assert str(caught.value).isprintable() and len(str(caught.value)) < 250


def test_https_refuses_an_unknown_certificate(monkeypatch):
    def refuse(*_, **__):
        error = ssl.SSLCertVerificationError("certificate verify failed")
        error.verify_message = "self-signed certificate"
        raise error

    monkeypatch.setattr(ssl.SSLContext, "wrap_socket", refuse)
    with EngineStub() as stub:
        http = Http(stub.url.replace("http:", "https:"), None)
        line = r"not trusted \(self-signed certificate\); set \$SSL_CERT_FILE"
        with pytest.raises(EngineError, match=line):
            http.ask("GET", "/health", None, within(5))


def test_wait_ends_when_the_run_is_to_end():
    http = Http("http://127.0.0.1:1", None, lambda: True)
    with pytest.raises(EngineError, match="is not asked again, because the run ends"):
        http.wait(60)
