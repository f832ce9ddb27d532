"""One JSON request over HTTP within a deadline, from any thread."""

import http.client
import json
import socket
import ssl
import threading
import time
import urllib.parse
from typing import Any

from jaxmem.base import messages
from jaxmem.train.jobs.rollout.engines.patience import EngineError, EngineFailure

_MAX_BYTES = 2**30  # of an answer
_PIECE = 2**16  # bytes read at a time
_LONGEST_DETAIL = 200  # characters of a server's own message
# A host that vanished is noticed within a minute, though an answer may take hours.
_KEEPALIVE = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))


class StatusError(EngineFailure):
    """A server answered with an HTTP status from 400."""

    def __init__(self, status: int, detail: str):
        super().__init__(f"answers {status}" + (f" ({detail})" if detail else ""))
        self.status = status
        # True for a route that the server does not have.
        self.is_bare = detail in ("", "Not Found", "Method Not Allowed")


class Http:
    """Requests to one server, each on a connection of its own."""

    def __init__(self, url: str, token: str | None):
        parts = urllib.parse.urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            expected = "addresses as in http://localhost:8000"
            raise EngineError(messages.must_be("rollouts.urls", expected, url))
        self._host, self._port = parts.hostname, port
        self._secure, self._base = parts.scheme == "https", parts.path.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._name = f"rollouts.urls: {url}"
        self._lock = threading.Lock()
        self._open: set[http.client.HTTPConnection] = set()
        self._closed = False

    def ask(self, method: str, path: str, body: Any, deadline: float) -> Any:
        """The parsed answer of a route; a text if it is no JSON, None if it is empty.

        Raises:
            StatusError: the status is 400 or above.
            EngineFailure: there is no complete answer before the deadline.
            EngineError: `close` has ended the request.
        """
        connection = self._connection(deadline)
        try:
            status, content = self._exchange(connection, method, path, body, deadline)
        except TimeoutError as error:
            raise EngineFailure(f"{path}: no answer in time") from error
        except (OSError, http.client.HTTPException) as error:
            self._check_open()
            raise EngineFailure(f"{path}: {_describe(error)}") from error
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()
        if status >= 400:
            raise StatusError(status, _detail(content))
        return _parsed(content)

    def close(self) -> None:
        """End the requests of all threads, and refuse later ones."""
        with self._lock:
            self._closed = True
            connections = [*self._open]
        for connection in connections:
            if connection.sock is not None:
                try:
                    connection.sock.shutdown(socket.SHUT_RDWR)
                except OSError:  # its thread has just closed it
                    continue

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError(f"{self._name} is asked no more, because the run ends")

    def _connection(self, deadline: float) -> http.client.HTTPConnection:
        # Not 0, which means no limit to a connection; `_exchange` ends late requests.
        timeout = max(deadline - time.monotonic(), 1e-3)
        if self._secure:
            context = ssl.create_default_context()
            connection = http.client.HTTPSConnection(
                self._host, self._port, timeout=timeout, context=context
            )
        else:
            connection = http.client.HTTPConnection(
                self._host, self._port, timeout=timeout
            )
        with self._lock:
            self._check_open()
            self._open.add(connection)
        return connection

    def _exchange(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: Any,
        deadline: float,
    ) -> tuple[int, bytes]:
        connection.connect()
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            if hasattr(socket, option):
                number = getattr(socket, option)
                connection.sock.setsockopt(socket.IPPROTO_TCP, number, value)
        sock = connection.sock  # `getresponse` may take it from the connection
        content = None if body is None else json.dumps(body).encode()
        connection.request(method, self._base + path, content, self._headers)
        sock.settimeout(_left(deadline))
        response = connection.getresponse()
        pieces, size = [], 0
        while response.length != 0:  # None: until the server ends the connection
            sock.settimeout(_left(deadline))
            piece = response.read1(_PIECE)
            if not piece:
                break
            pieces.append(piece)
            size += len(piece)
            if size > _MAX_BYTES:
                raise http.client.HTTPException(f"more than {_MAX_BYTES} bytes")
        if response.length:
            raise http.client.IncompleteRead(b"", response.length)
        return response.status, b"".join(pieces)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _describe(error: Exception) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "no server listens"
    if isinstance(error, http.client.IncompleteRead):
        return "the answer is cut off"
    closed = ConnectionResetError, BrokenPipeError, http.client.RemoteDisconnected
    if isinstance(error, closed):
        return "the server ended the connection"
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
