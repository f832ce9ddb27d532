"""The routes of vLLM that trainers use, for one `DecodingLoop`."""

import functools
import time
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import tokenizers

from jaxmem._version import __version__
from jaxmem.base import messages
from jaxmem.serve.completion_answer import answer_of, token_answer_of
from jaxmem.serve.completion_request import RequestReader
from jaxmem.serve.decoding_loop import DecodingLoop, PauseMode
from jaxmem.serve.http_server import Route, Routes, ServerAnswer, ServerRequest
from jaxmem.serve.request_error import RequestError
from jaxmem.serve.served_weights import WeightRoots

_LONGEST_VERSION = 256  # characters; every completion repeats it


class EngineRoutes:
    """The functions of all routes.

    Args:
        loop: of the device.
        reader: of requests for completions.
        roots: folders of new weights.
    """

    def __init__(self, loop: DecodingLoop, reader: RequestReader, roots: WeightRoots):
        self._loop, self._reader, self._roots = loop, reader, roots
        self._tokenizer: tokenizers.Tokenizer = reader.model.vocabulary.tokenizer
        self._started = int(time.time())

    def table(self) -> Routes:
        """The routes by method and path."""
        named: dict[tuple[str, str], tuple[Route, str]] = {
            ("GET", "/health"): (self._health, ""),
            ("GET", "/version"): (self._server_version, ""),
            ("GET", "/v1/models"): (self._models, ""),
            ("POST", "/pause"): (self._pause, "mode"),
            ("POST", "/resume"): (self._resume, ""),
            ("GET", "/is_paused"): (self._is_paused, ""),
            ("POST", "/collective_rpc"): (self._collective_rpc, "method args kwargs"),
            ("POST", "/v1/load_lora_adapter"): (
                self._load_adapter, "lora_name lora_path load_inplace"
            ),
            ("POST", "/v1/unload_lora_adapter"): (self._unload_adapter, "lora_name"),
            ("POST", "/update_weight_version"): (self._update_version, "new_version"),
            ("GET", "/weight_info"): (self._weight_info, ""),
            ("POST", "/reset_prefix_cache"): (
                self._reset_prefix_cache, "reset_running_requests reset_external"
            ),
            ("POST", "/weight_checker"): (self._weight_checker, "action"),
        }  # fmt: skip
        routes = {key: _only(own, route) for key, (route, own) in named.items()}
        # Completions have many fields, and errors of their own for others.
        return routes | {
            ("POST", "/v1/completions"): self._completions,
            ("POST", "/inference/v1/generate"): self._generate,
        }

    def _health(self, _: ServerRequest) -> ServerAnswer:
        alive = self._loop.is_alive
        return ServerAnswer(
            None, HTTPStatus.OK if alive else HTTPStatus.SERVICE_UNAVAILABLE
        )

    def _server_version(self, _: ServerRequest) -> ServerAnswer:
        return ServerAnswer({"version": __version__, "server": "jaxmem"})

    def _models(self, _: ServerRequest) -> ServerAnswer:
        weights = self._loop.weights
        own = {
            "object": "model",
            "created": self._started,
            "owned_by": "jaxmem",
            "max_model_len": self._reader.max_len,
        }
        data = [{"id": weights.name, **own, "root": weights.name, "parent": None}]
        for name, directory in [*weights.adapters.items()]:
            more = {"root": str(directory), "parent": weights.name}
            data.append({"id": name, **own, **more})
        return ServerAnswer({"object": "list", "data": data})

    def _completions(self, sent: ServerRequest) -> ServerAnswer:
        request = self._reader(sent.fields, self._loop.weights.names)
        rows = self._loop.complete(request, sent.is_gone)
        return ServerAnswer(answer_of(request, rows, self._tokenizer))

    def _generate(self, sent: ServerRequest) -> ServerAnswer:
        request = self._reader.of_tokens(sent.fields, self._loop.weights.names)
        rows = self._loop.complete(request, sent.is_gone)
        return ServerAnswer(token_answer_of(request, rows))

    def _pause(self, sent: ServerRequest) -> ServerAnswer:
        mode = sent.query.get("mode", PauseMode.ABORT)
        if mode not in [*PauseMode]:
            expected = f"one of {', '.join(PauseMode)}"
            raise RequestError(messages.must_be("mode", expected, mode), param="mode")
        self._loop.pause(PauseMode(mode))
        return ServerAnswer({"status": "paused"})

    def _resume(self, _: ServerRequest) -> ServerAnswer:
        self._loop.resume()
        return ServerAnswer({"status": "resumed"})

    def _is_paused(self, _: ServerRequest) -> ServerAnswer:
        return ServerAnswer({"is_paused": self._loop.is_paused})

    def _collective_rpc(self, sent: ServerRequest) -> ServerAnswer:
        method = _text(sent.fields, "method")
        if method != "reload_weights":
            expected = "'reload_weights', the only one of jaxmem serve"
            raise RequestError(
                messages.must_be("method", expected, method), param="method"
            )
        arguments = sent.fields.get("kwargs")
        known = isinstance(arguments, dict) and arguments.keys() == {"weights_path"}
        if not known or sent.fields.get("args"):
            got = {k: sent.fields[k] for k in ("args", "kwargs") if k in sent.fields}
            expected = '{"weights_path": DIR}, without args'
            raise RequestError(
                messages.must_be("kwargs", expected, got), param="kwargs"
            )
        directory = self._roots.checked(
            _text(arguments or {}, "weights_path"), "weights_path"
        )
        weights = self._loop.weights
        self._loop.load(weights.name, functools.partial(weights.reload, directory))
        return ServerAnswer({"results": [None]})

    def _load_adapter(self, sent: ServerRequest) -> ServerAnswer:
        name = _text(sent.fields, "lora_name")
        directory = self._roots.checked(_text(sent.fields, "lora_path"), "lora_path")
        in_place = sent.fields.get("load_inplace", False)
        if not isinstance(in_place, bool):
            raise RequestError(
                messages.must_be("load_inplace", "true or false", in_place),
                param="load_inplace",
            )
        load = self._loop.weights.load_adapter
        self._loop.load(name, functools.partial(load, name, directory, in_place))
        return ServerAnswer(f"Success: LoRA adapter '{name}' added successfully.")

    def _unload_adapter(self, sent: ServerRequest) -> ServerAnswer:
        name = _text(sent.fields, "lora_name")
        self._loop.unload(name)
        return ServerAnswer(f"Success: LoRA adapter '{name}' removed successfully.")

    def _update_version(self, sent: ServerRequest) -> ServerAnswer:
        version = _text(sent.fields, "new_version")
        if len(version) > _LONGEST_VERSION:
            expected = f"a text of at most {_LONGEST_VERSION} characters"
            raise RequestError(
                messages.must_be("new_version", expected, version), param="new_version"
            )
        weights = self._loop.weights
        self._loop.call(lambda: setattr(weights, "version", version))
        return ServerAnswer({"success": True, "new_version": version})

    def _weight_info(self, _: ServerRequest) -> ServerAnswer:
        return ServerAnswer({"weight_version": self._loop.weights.version})

    def _reset_prefix_cache(self, sent: ServerRequest) -> ServerAnswer:
        for name, value in sent.query.items():
            if value.lower() not in ("true", "false"):
                raise RequestError(
                    messages.must_be(name, "true or false", value), param=name
                )
        self._loop.forget_keys()
        return ServerAnswer({"success": True})

    def _weight_checker(self, sent: ServerRequest) -> ServerAnswer:
        action = _text(sent.fields, "action")
        if action != "checksum":
            expected = "'checksum', the only one of jaxmem serve"
            raise RequestError(
                messages.must_be("action", expected, action), param="action"
            )
        if self._loop.is_paused:  # as in vLLM
            raise RequestError(
                "weight_checker requires an awake, unpaused engine; send /resume first",
                HTTPStatus.CONFLICT,
            )
        checksums = self._loop.call(self._loop.weights.checksums)
        return ServerAnswer({"checksums": checksums})


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or not value:
        raise RequestError(
            messages.must_be(name, "a text", value), param=f"body.{name}"
        )
    return value


def _only(names: str, route: Route) -> Route:
    """The route, which refuses what is not among the names it reads."""

    def checked(sent: ServerRequest) -> ServerAnswer:
        for name in {**sent.query, **sent.fields}:
            if name not in names.split():
                known = names.replace(" ", ", ") or "nothing"
                raise RequestError(
                    f"{messages.short(name)} is unknown; this route reads {known}",
                    param=messages.name(name),
                )
        return route(sent)

    return checked
