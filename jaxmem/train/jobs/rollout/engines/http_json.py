"""One JSON request over HTTP within a deadline, from any thread."""

import functools
import http.client
import io
import json
import re
import socket
import ssl
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from jaxmem.base import messages
from jaxmem.train.jobs.rollout.engines.patience import (
    Deadline,
    EngineError,
    EngineFailure,
    LateAnswer,
)

_Result = TypeVar("_Result")

_MAX_BYTES = 2**30  # of an answer
_PIECE = 2**16  # bytes read at a time
_SLICE = (
    0.2  # seconds of waiting, after which deadline and end of the run are looked at
)
_LONGEST_CONNECT = 10.0  # seconds for one address of a host
_LONGEST_DETAIL = 200  # characters of a server's own message
_MOVED = range(300, 400)  # statuses
# A host that vanished is noticed within a minute, though an answer may take hours.
_KEEPALIVE = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))
_POLL = 0.2  # seconds between two looks at whether the run is to end
_PATH = re.compile(r"[!-~]*")


def fields(value: Any, name: str = "the answer") -> Mapping[str, Any]:
    """The value, which must be a JSON object; an EngineFailure if it is none."""
    if not isinstance(value, dict):
        raise EngineFailure(f"{name} is not a JSON object: {messages.short(value)}")
    return value


class StatusError(EngineFailure):
    """A server answered with an HTTP status from 400."""

    def __init__(self, status: int, detail: str):
        super().__init__(f"answers {status}" + (f" ({detail})" if detail else ""))
        self.status = status
        # True for a route that the server does not have.
        self.is_bare = detail in ("", "Not Found", "Method Not Allowed")


class Http:
    """Requests to one server, each on a connection of its own, without a proxy.

    Args:
        url: of the server.
        token: that it wants, if any.
        is_stopping: returns True once the run is to end; waits then end as by `close`.
    """

    def __init__(
        self,
        url: str,
        token: str | None,
        is_stopping: Callable[[], bool] = lambda: False,
    ):
        self._is_stopping = is_stopping
        self._name = f"rollouts.urls: {url}"
        parts, self._port = _split(url)
        self._host = parts.hostname or ""
        self._base = parts.path.rstrip("/")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._headers = {"Content-Type": "application/json"} | _authorization(token)
        self._closed = threading.Event()

    def ask(self, method: str, path: str, body: Any, deadline: Deadline) -> Any:
        """The parsed answer of a route; a text if it is no JSON, None if it is empty.

        Args:
            method: of HTTP.
            path: of the route.
            body: sent as JSON; None: nothing is sent.
            deadline: when the request ends.

        Raises:
            StatusError: the status is 400 or above.
            EngineFailure: there is no complete answer before the deadline.
            EngineError: `close` has ended the request, or no answer can ever come.
        """
        content = None if body is None else json.dumps(body).encode()
        try:
            status, content = self._exchange(method, path, content, deadline)
        except TimeoutError as error:
            raise LateAnswer(f"{path}: no answer in time") from error
        except ssl.SSLCertVerificationError as error:
            raise EngineError(
                f"{self._name}: its certificate is not trusted "
                f"({error.verify_message}); set $SSL_CERT_FILE to a file with the "
                "certificate of its authority"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise EngineFailure(f"{path}: {_describe(error)}") from error
        if status >= 400:
            raise StatusError(status, _detail(content))
        return _parsed(content)

    def wait(self, seconds: float) -> None:
        """Wait, unless the end of the run ends it, which raises an EngineError."""
        end = time.monotonic() + seconds
        while not self._is_stopping():
            left = end - time.monotonic()
            if self._closed.wait(min(max(left, 0.0), _POLL)):
                break
            if left <= _POLL:
                return
        raise self._ended()

    def close(self) -> None:
        """End the requests of all threads within a second, and refuse later ones.

        A connection that is being made may take ten seconds.
        """
        self._closed.set()

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise self._ended()

    def _ended(self) -> EngineError:
        return EngineError(f"{self._name} is not asked again, because the run ends")

    def _exchange(
        self,
        method: str,
        path: str,
        content: bytes | None,
        deadline: Deadline,
    ) -> tuple[int, bytes]:
        def seconds_left() -> float:
            self._check_open()
            left = deadline() - time.monotonic()
            if left <= 0:
                raise TimeoutError
            return left

        sock = _connected(self._host, self._port, self._tls, seconds_left)
        with sock:
            kind = http.client.HTTPConnection
            if self._tls is not None:  # the port in the Host header differs
                kind = http.client.HTTPSConnection
            connection = kind(self._host, self._port)
            connection.sock = _TimedSocket(sock, seconds_left)
            connection.request(method, self._base + path, content, self._headers)
            response = connection.getresponse()
            if response.status in _MOVED:
                target = messages.short(response.headers.get("Location"))
                raise EngineError(
                    f"{self._name}{path}: answers {response.status}, moved to {target};"
                    " set rollouts.urls to the new address"
                )
            return response.status, _content(response)


class _TimedSocket:
    """A connected socket for http.client, each of whose operations has a deadline.

    A socket's own timeout begins anew with each byte, so that a slow server would
    never reach it. Whoever made the socket closes it.
    """

    def __init__(self, sock: socket.socket, seconds_left: Callable[[], float]):
        self._sock, self._seconds_left = sock, seconds_left

    def sendall(self, content: bytes) -> None:
        """Send all of a content; a TimeoutError after the deadline."""
        unsent = memoryview(content)
        while unsent:
            sent = self.patiently(functools.partial(self._sock.send, unsent))
            unsent = unsent[sent:]

    def receive(self, buffer: Any) -> int:
        """Read the bytes that have come; a TimeoutError after the deadline."""
        return self.patiently(lambda: self._sock.recv_into(buffer))

    def makefile(self, mode: str) -> io.BufferedReader:
        """A file of the received bytes, which http.client reads the answer from."""
        del mode
        return io.BufferedReader(_ReceivedBytes(self), _PIECE)

    def close(self) -> None:
        """http.client calls it before it reads the answer."""

    def patiently(self, operation: Callable[[], _Result]) -> _Result:
        """Repeat an operation until it succeeds or the deadline is over."""
        while True:
            self._sock.settimeout(min(_SLICE, self._seconds_left()))
            try:
                return operation()
            except TimeoutError:
                continue  # at the deadline, `seconds_left` raises it


class _ReceivedBytes(io.RawIOBase):
    """The bytes that a stream receives."""

    def __init__(self, stream: _TimedSocket):
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Read the bytes that have come; a TimeoutError after the deadline."""
        return self._stream.receive(buffer)


def _connected(
    host: str,
    port: int | None,
    tls: ssl.SSLContext | None,
    seconds_left: Callable[[], float],
) -> socket.socket:
    """A socket connected with the first address of a host that answers."""
    sock = _first_connected(host, port or (443 if tls else 80), seconds_left)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            if hasattr(socket, option):
                number = getattr(socket, option)
                sock.setsockopt(socket.IPPROTO_TCP, number, value)
        if tls is not None:
            sock = tls.wrap_socket(
                sock, server_hostname=host, do_handshake_on_connect=False
            )
            _TimedSocket(sock, seconds_left).patiently(sock.do_handshake)
    except BaseException:
        sock.close()
        raise
    return sock


def _first_connected(
    host: str, port: int, seconds_left: Callable[[], float]
) -> socket.socket:
    failure = OSError("the host has no address")
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for family, kind, protocol, _, address in found:
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(min(_LONGEST_CONNECT, seconds_left()))
            sock.connect(address)
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise failure


def _split(url: str) -> tuple[urllib.parse.SplitResult, int | None]:
    """The parts of an address and its port, which is None for the usual one."""
    expected = "addresses as in http://localhost:8000"
    refusal = EngineError(messages.must_be("rollouts.urls", expected, url))
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port
        (parts.hostname or "").encode("idna")
    except ValueError as error:
        raise refusal from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise refusal
    if not _PATH.fullmatch(parts.path):
        raise refusal
    if parts.username is not None or parts.password is not None:
        raise EngineError(
            "rollouts.urls must be addresses without a user and a password; set "
            "$JAXMEM_ENGINE_TOKEN to the server's key"
        )
    if parts.query or parts.fragment:
        expected = "addresses without a query and a fragment"
        raise EngineError(messages.must_be("rollouts.urls", expected, url))
    return parts, port


def _authorization(token: str | None) -> dict[str, str]:
    if token is None:
        return {}
    token = token.strip()
    if not token.isascii() or not token.isprintable():
        raise EngineError(
            "$JAXMEM_ENGINE_TOKEN must consist of printable ASCII characters; set it "
            "to the server's key"
        )
    return {"Authorization": f"Bearer {token}"}


def _content(response: http.client.HTTPResponse) -> bytes:
    pieces, size = [], 0
    while response.length != 0:  # None: until the server ends the connection
        piece = response.read1(_PIECE)
        if not piece:
            break
        pieces.append(piece)
        size += len(piece)
        if size > _MAX_BYTES:
            raise http.client.HTTPException(f"more than {_MAX_BYTES} bytes")
    if response.length:
        raise http.client.IncompleteRead(b"", response.length)
    return b"".join(pieces)


def _describe(error: Exception) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "no server listens"
    if isinstance(error, http.client.IncompleteRead):
        return "the answer is cut off"
    closed = ConnectionResetError, BrokenPipeError, http.client.RemoteDisconnected
    if isinstance(error, closed):
        return "the server ended the connection"
    if isinstance(error, ssl.SSLError) and error.reason == "WRONG_VERSION_NUMBER":
        return "the server does not speak https"
    return messages.reason(error)


def _parsed(content: bytes) -> Any:
    if not content.strip():
        return None
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return content.decode("utf-8", "replace")


def _detail(content: bytes) -> str:
    """The message in the body of an error."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        value = content[:1000].decode("utf-8", "replace")
    for key in ("error", "message", "detail"):
        if isinstance(value, dict) and key in value:
            value = value[key]
    if isinstance(value, dict | list):
        value = json.dumps(value)
    return messages.cut(str(value).strip(), _LONGEST_DETAIL)
