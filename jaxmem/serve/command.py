"""`jaxmem serve`: load the model, compile, answer requests until a signal."""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from jaxmem.base import messages
from jaxmem.base.stopping import Stop
from jaxmem.generate.model import Model
from jaxmem.serve.completion_request import RequestReader
from jaxmem.serve.config import TOKEN, ServeRequest
from jaxmem.serve.decoding_loop import DecodingLoop
from jaxmem.serve.engine_routes import EngineRoutes
from jaxmem.serve.http_server import CompletionServer
from jaxmem.serve.request_error import RequestError
from jaxmem.serve.served_weights import ServedWeights, WeightRoots
from jaxmem.serve.slot_pool import PoolShape

_LONGEST = 2048  # tokens of a prompt and its completion, by default
_LOCAL = ("127.0.0.1", "localhost", "::1")  # addresses of this machine
_POLL = 0.2  # seconds between two looks for a signal
_STOPPING = "after requests in progress get the status 503"
_FAREWELL = 2.0  # seconds for the last answers


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
            f"jaxmem: warning: --host {request.host} without --token or ${TOKEN}: "
            "everybody who reaches the port can sample, pause and load weights",
            file=sys.stderr,
        )
    with Stop(_STOPPING) as stop, served(request) as server, stop.deferred():
        print(f"jaxmem: serving {request.served_name} at {server.url}", flush=True)
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
    roots = _roots(request)
    with contextlib.closing(_bound(request)) as server:
        model = Model.of(request)
        max_len = _longest(request, model)
        weights = ServedWeights(request.served_name, model)
        records = request.enable_return_routed_experts
        if records and model.decoder.config.experts.count is None:
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


def _roots(request: ServeRequest) -> WeightRoots:
    """The folders of new weights.

    Raises:
        ValueError: one is no folder.
    """
    folders = tuple(Path(name).expanduser().resolve() for name in request.weights)
    for name, folder in zip(request.weights, folders, strict=True):
        if not folder.is_dir():
            raise ValueError(f"--weights {messages.name(name)}: no such folder")
    return WeightRoots(folders)


def _longest(request: ServeRequest, model: Model) -> int:
    """Maximum tokens of a prompt and its completion.

    Raises:
        ValueError: `max_len` is above the positions of the model.
    """
    positions = model.max_positions
    if request.max_len is None:
        return min(_LONGEST, positions)
    if request.max_len > positions:
        expected = f"at most the {positions:,} positions of the model"
        raise ValueError(messages.must_be("--max-len", expected, request.max_len))
    return request.max_len


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
