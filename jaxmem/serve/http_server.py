"""The HTTP server: connections, bounds, the token, and the table of routes."""

import contextlib
import hmac
import io
import json
import selectors
import socket
import sys
import threading
import time
import traceback
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from jaxmem._version import __version__
from jaxmem.base import messages
from jaxmem.serve.request_error import RequestError

_IDLE = 120.0  # seconds for the next request's head, then for its body
_CONNECTIONS = 1024  # at a time; each has a thread
_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n"
    b"\r\n"
)


class ServerRequest(NamedTuple):
    """A request as it came."""

    query: Mapping[str, str]
    fields: Mapping[str, Any]  # of the body's object; empty without a body
    is_gone: Callable[[], bool]  # True once the client has closed the connection


class ServerAnswer(NamedTuple):
    """An answer: an object as JSON, a text, or nothing."""

    content: dict[str, Any] | str | None = None
    status: HTTPStatus = HTTPStatus.OK


Route = Callable[[ServerRequest], ServerAnswer]
Routes = Mapping[tuple[str, str], Route]  # by method and path


class CompletionServer(ThreadingHTTPServer):
    """Answers requests by a table of routes, each connection in a thread.

    Args:
        address: host and port; port 0 takes a free one.
        token: that requests must have in `Authorization: Bearer`; None: none.
        max_body: bytes of a request's body.

    Attributes:
        routes: by method and path.

    Raises:
        OSError: the address cannot be used.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], token: str | None, max_body: int):
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        # Requests are refused until `server_activate`, when the model is loaded.
        super().__init__(address, _Handler, bind_and_activate=False)
        try:
            self.server_bind()
        except BaseException:
            self.server_close()
            raise
        self.token, self.max_body = token, max_body
        self.routes: Routes = {}
        self._connections = threading.BoundedSemaphore(_CONNECTIONS)
        self._answering = 0
        self._answered = threading.Condition()

    def close(self) -> None:
        """Free the address."""
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection's requests in a thread, unless there are too many."""
        if self._connections.acquire(blocking=False):
            super().process_request(request, client_address)
            return
        with contextlib.suppress(OSError):
            request.settimeout(0)
            request.send(_BUSY)
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer a connection's requests."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._connections.release()

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Count a request that is being answered."""
        with self._answered:
            self._answering += 1
        try:
            yield
        finally:
            with self._answered:
                self._answering -= 1
                self._answered.notify_all()

    def wait_for_answers(self, seconds: float) -> None:
        """Wait until all requests are answered, at most so many seconds."""
        with self._answered:
            self._answered.wait_for(lambda: not self._answering, seconds)

    def server_bind(self) -> None:
        """Bind the address; its name is not looked up, which may take long."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore

    @property
    def url(self) -> str:
        """The address for clients."""
        host, port = self.server_address[:2]
        host = str(host)
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print an error of the server's own; clients may leave whenever they like."""
        error = sys.exception()
        if not isinstance(error, ConnectionError | TimeoutError):
            traceback.print_exc()


class _PatientReader(io.RawIOBase):
    """Bytes of a connection, until a deadline that is renewed for each request."""

    def __init__(self, connection: socket.socket):
        self._connection, self._deadline = connection, 0.0
        self.renew()

    def renew(self) -> None:
        """Start the time again."""
        self._deadline = time.monotonic() + _IDLE

    def readable(self) -> bool:
        """True, as `io.BufferedReader` asks."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read what has come; a TimeoutError after the deadline."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)
        try:
            return self._connection.recv_into(buffer)
        finally:
            self._connection.settimeout(_IDLE)


class _Handler(BaseHTTPRequestHandler):
    server: CompletionServer  # type: ignore[assignment]
    protocol_version = "HTTP/1.1"
    server_version, sys_version = f"jaxmem/{__version__}", ""
    timeout = _IDLE

    def setup(self) -> None:
        """Make the files of a connection."""
        super().setup()
        self.rfile.close()
        self._reader = _PatientReader(self.connection)
        self.rfile = io.BufferedReader(self._reader)

    def handle_one_request(self) -> None:
        """Answer the next request, whose time begins now."""
        self._reader.renew()
        super().handle_one_request()

    def do_GET(self) -> None:
        """Answer a request without a body."""
        self._answer()

    def do_POST(self) -> None:
        """Answer a request with a body."""
        self._answer()

    def send_error(
        self, code: int, message: str | None = None, explain: str | None = None
    ) -> None:
        """Refuse what is no request of HTTP, or has another method."""
        del explain
        self.close_connection = True
        status = HTTPStatus(code)
        error = RequestError(messages.cut(message or status.phrase), status)
        self._send(ServerAnswer(error.body, status))

    def log_message(self, format: str, *args: Any) -> None:
        """Print no line for a request."""

    def _answer(self) -> None:
        with self.server.answering():
            self._answer_counted()

    def _answer_counted(self) -> None:
        try:
            answer = self._routed()
        except RequestError as error:
            answer = ServerAnswer(error.body, error.status)
        except (ConnectionError, TimeoutError):
            self.close_connection = True
            return
        except Exception as error:
            traceback.print_exc()
            reason = f"{type(error).__name__}: {messages.cut(str(error))}"
            failed = RequestError(reason, HTTPStatus.INTERNAL_SERVER_ERROR)
            answer = ServerAnswer(failed.body, failed.status)
        self._send(answer)

    def _routed(self) -> ServerAnswer:
        """The answer of a route; the connection is closed if a body was not read."""
        close, self.close_connection = self.close_connection, True
        address = urllib.parse.urlsplit(self.path)
        routes = self.server.routes
        route = routes.get((self.command, address.path))
        if route is None:
            # Clients know by these words that a server lacks a route.
            is_known = any(path == address.path for _, path in routes)
            status = HTTPStatus.METHOD_NOT_ALLOWED if is_known else HTTPStatus.NOT_FOUND
            raise RequestError(status.phrase, status)
        self._check_sender(address.path)
        fields = self._fields()
        self.close_connection = close
        query = dict(urllib.parse.parse_qsl(address.query, keep_blank_values=True))
        return route(ServerRequest(query, fields, self._is_gone))

    def _check_sender(self, path: str) -> None:
        """Raise a RequestError for a wrong token, and for pages in a browser."""
        if self.headers.get("Origin") is not None:
            raise RequestError(
                "requests with an Origin header, of pages in a browser, are refused",
                HTTPStatus.FORBIDDEN,
            )
        if self.server.token is None or path == "/health":
            return
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        expected = self.server.token.encode()
        is_right = hmac.compare_digest(token.strip().encode("latin-1"), expected)
        if scheme.lower() != "bearer" or not is_right:
            raise RequestError(
                "send the server's token as `Authorization: Bearer TOKEN`",
                HTTPStatus.UNAUTHORIZED,
            )

    def _fields(self) -> dict[str, Any]:
        if "Transfer-Encoding" in self.headers:
            raise RequestError(
                "send the body's Content-Length instead of a Transfer-Encoding",
                HTTPStatus.LENGTH_REQUIRED,
            )
        length = self.headers.get("Content-Length", "0")
        if not (length.isascii() and length.isdigit()):
            raise RequestError(
                messages.must_be("Content-Length", "a number of bytes", length)
            )
        size, most = int(length[:20]), self.server.max_body
        if size > most:
            raise RequestError(
                f"the body has {size:,} bytes, and may have {most:,} (--max-body)",
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            )
        self._reader.renew()
        body = self.rfile.read(size)
        if len(body) < size:
            raise ConnectionError("the client left within the body")
        if not body:
            return {}
        try:
            fields = json.loads(body, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            reason = messages.cut(str(error))
            raise RequestError(f"the body is not JSON: {reason}") from error
        if not isinstance(fields, dict):
            raise RequestError(messages.must_be("the body", "a JSON object", fields))
        return fields

    def _is_gone(self) -> bool:
        """True if the client has closed the connection."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.connection, selectors.EVENT_READ)
            if not selector.select(0):
                return False
        try:
            return self.connection.recv(1, socket.MSG_PEEK) == b""
        except OSError:
            return True

    def _send(self, answer: ServerAnswer) -> None:
        content = answer.content
        body, kind = b"", None
        if isinstance(content, str):
            body, kind = content.encode(), "text/plain; charset=utf-8"
        elif content is not None:
            body, kind = (
                json.dumps(content, allow_nan=False).encode(),
                "application/json",
            )
        self.send_response(answer.status)
        if kind is not None:
            self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        if answer.status == HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        try:
            self.end_headers()
            self.wfile.write(body)
        except (ConnectionError, TimeoutError):  # a part of it may have been sent
            self.close_connection = True


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")
