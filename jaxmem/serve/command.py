"""`jaxmem serve`: load the model, compile, answer requests until a signal."""

import contextlib
import dataclasses
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from jaxmem.base import messages
from jaxmem.base.stopping import Stop
from jaxmem.generate.model import Model, load
from jaxmem.serve.completion_request import RequestReader
from jaxmem.serve.decoding_loop import DecodingLoop
from jaxmem.serve.engine_routes import EngineRoutes
from jaxmem.serve.http_server import CompletionServer
from jaxmem.serve.request_error import RequestError
from jaxmem.serve.served_weights import ServedWeights, WeightRoots
from jaxmem.serve.slot_pool import PoolShape

_LONGEST = 2048  # tokens of a prompt and its completion, by default
_TOKEN = "JAXMEM_ENGINE_TOKEN"
_LOCAL = ("127.0.0.1", "localhost", "::1")  # addresses of this machine
_POLL = 0.2  # seconds between two looks for a signal
_STOPPING = "after requests in progress get the status 503"
_FAREWELL = 2.0  # seconds for the last answers


@dataclasses.dataclass(frozen=True)
class ServeRequest:
    """Options of the command; the first ones are as for `jaxmem generate`."""

    model: str
    adapter: str | None = None
    dtype: str | None = None
    base: str | None = None
    trust_code: bool = False
    host: str = "127.0.0.1"  # only programs of the same machine can connect
    port: int = 8000  # 0: a free one
    slots: int = 16  # rows that are decoded at a time
    max_len: int | None = None  # None: what the model has room for, at most 2048
    weights: tuple[str, ...] = ()  # folders below which new weights are loaded
    token: str | None = None  # that requests must send; None: $JAXMEM_ENGINE_TOKEN
    name: str | None = None  # of the model in requests; None: `model`
    # True if answers have the experts of each token
    enable_return_routed_experts: bool = False
    max_body: int = 16  # MiB of a request's body
    max_waiting: int = 4096  # completions that wait for a slot
    max_logprobs: int = 256  # most probable tokens that a request may ask for

    def __post_init__(self):
        """Raise a ValueError that names an option with an impossible value."""
        _check("port", self.port, 0 <= self.port < 2**16, "from 0 to 65535")
        for name in ("slots", "max_body", "max_waiting"):
            value = getattr(self, name)
            _check(name, value, value >= 1, "at least 1")
        _check("max_logprobs", self.max_logprobs, self.max_logprobs >= 0, "at least 0")
        enough = self.max_len is None or self.max_len >= 2
        _check("max_len", self.max_len, enough, "at least 2")
        secret = self.secret or ""  # an error must not print it
        if secret != secret.strip() or not secret.isascii():
            raise ValueError(
                f"--token, or ${_TOKEN}, must be ASCII characters without spaces "
                "around them"
            )

    @property
    def secret(self) -> str | None:
        """The token that requests must send; None: none."""
        return self.token or os.environ.get(_TOKEN) or None

    @property
    def roots(self) -> WeightRoots:
        """The folders of new weights.

        Raises:
            ValueError: one is no folder.
        """
        folders = tuple(Path(name).expanduser().resolve() for name in self.weights)
        for name, folder in zip(self.weights, folders, strict=True):
            if not folder.is_dir():
                raise ValueError(f"--weights {messages.name(name)}: no such folder")
        return WeightRoots(folders)

    def longest(self, model: Model) -> int:
        """Maximum tokens of a prompt and its completion.

        Raises:
            ValueError: `max_len` is above the positions of the model.
        """
        positions = model.max_positions
        if self.max_len is None:
            return min(_LONGEST, positions)
        expected = f"at most the {positions:,} positions of the model"
        _check("max_len", self.max_len, self.max_len <= positions, expected)
        return self.max_len


class RunningServer(NamedTuple):
    """A server that answers requests."""

    url: str
    loop: DecodingLoop


def run(request: ServeRequest) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        ValueError: the address is taken, or the model cannot be served.
        KeyboardInterrupt, SystemExit: after a signal.
    """
    if request.host not in _LOCAL and request.secret is None:
        print(
            f"jaxmem: warning: --host {request.host} without --token or ${_TOKEN}: "
            "everybody who reaches the port can sample, pause and load weights",
            file=sys.stderr,
        )
    with Stop(_STOPPING) as stop, served(request) as server, stop.deferred():
        print(f"jaxmem: serving {name_of(request)} at {server.url}", flush=True)
        while not stop.signal and server.loop.is_alive:
            time.sleep(_POLL)
        if not stop.signal:
            raise RuntimeError("the thread that decodes has ended by an error")


@contextlib.contextmanager
def served(request: ServeRequest) -> Iterator[RunningServer]:
    """Load the model, compile its programs, and answer requests inside the context.

    Raises:
        ValueError: as in `run`.
    """
    roots = request.roots
    with contextlib.closing(_bound(request)) as server:
        model = load(
            request.model,
            adapter=request.adapter,
            dtype=request.dtype,
            trust_code=request.trust_code,
            base=request.base,
        )
        max_len = request.longest(model)
        weights = ServedWeights(name_of(request), model)
        records = request.enable_return_routed_experts
        if records and model.decoder.config.experts is None:
            raise ValueError(
                f"--enable-return-routed-experts: {request.model} has no experts; "
                "leave the option out"
            )
        shape = PoolShape.of(request.slots, max_len, records)
        loop = DecodingLoop(weights, shape, request.max_waiting)
        bounds = max_len, request.max_waiting, request.max_logprobs
        reader = RequestReader(model, *bounds)
        server.routes = EngineRoutes(loop, reader, roots).table()
        decoding = threading.Thread(target=loop.run, name="decoding", daemon=True)
        decoding.start()
        try:
            # Programs of the default options, before the address is printed.
            fields = {"prompt": [0], "max_tokens": 2, "seed": 0, "logprobs": 0}
            try:
                loop.compile(reader(fields, weights.names))
            except RequestError as error:
                raise ValueError(
                    f"--slots {request.slots} --max-len {max_len}: {error}; if memory "
                    "ran out, choose smaller ones"
                ) from error
            server.server_activate()
            listening = threading.Thread(
                target=server.serve_forever, args=(_POLL,), daemon=True
            )
            listening.start()
            try:
                yield RunningServer(server.url, loop)
            finally:
                server.shutdown()
        finally:
            loop.stop()
            decoding.join()
            server.wait_for_answers(_FAREWELL)


def name_of(request: ServeRequest) -> str:
    """The model's name in requests."""
    return request.model if request.name is None else request.name


def _bound(request: ServeRequest) -> CompletionServer:
    """The server at its address, before the model is loaded, which takes longer."""
    address = request.host, request.port
    try:
        return CompletionServer(address, request.secret, request.max_body * 2**20)
    except OSError as error:
        reason = messages.reason(error)
        raise ValueError(
            f"--host {request.host} --port {request.port}: {reason}; choose another "
            "address, or --port 0 for a free one"
        ) from error


def _check(name: str, value: object, is_valid: bool, expected: str) -> None:
    if not is_valid:
        flag = f"--{name.replace('_', '-')}"
        raise ValueError(messages.must_be(flag, expected, value))
