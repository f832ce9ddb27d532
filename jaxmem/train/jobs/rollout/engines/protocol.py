"""Requests to an inference engine, its answers, and the interface of its clients."""

import abc
import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxmem.base import messages
from jaxmem.models.truncation import SamplingConfig
from jaxmem.train.jobs.rollout.engines import weight_version
from jaxmem.train.jobs.rollout.engines.http_json import Http, StatusError, fields
from jaxmem.train.jobs.rollout.engines.patience import (
    Deadline,
    EngineError,
    EngineFailure,
    Patience,
    Reporter,
)

__all__ = ["Engine", "EngineAnswer", "EngineError", "EngineInfo", "EngineOptions"]

ROUTE_MISSING = 403, 404, 405  # statuses of a server that lacks a route or a flag
_MAY_IMPROVE = 408, 409, 425, 429
_LARGEST_SEED = 2**63 - 1
_RESUMING = 5.0  # seconds


class SamplingRequest(NamedTuple):
    """A prompt of which an engine samples `count` completions.

    Completion i is drawn with `seed + i`. Another `sampling` than that of the engine's
    options serves the probe before a run.
    """

    prompt_ids: list[int]
    count: int
    max_tokens: int
    seed: int  # within the 64 bits of a signed integer
    sampling: SamplingConfig | None = None


class EngineAnswer(NamedTuple):
    """One completion as an engine sampled it."""

    ids: list[int]
    logprobs: list[float]  # one for each id, of the distribution it was drawn from
    ended: bool  # True: by the last id, an end; False: by the limit of tokens
    supports: list[list[int]] | None = None  # the ids each token was drawn from
    routes: np.ndarray | None = None  # [tokens read, layers with experts, K]
    # (version of the weights, tokens sampled with it), where weights of before the run
    # are UNVERSIONED; None: the engine does not say
    versions: list[tuple[int, int]] | None = None


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """Properties of a run that every client of its engines shares."""

    sampling: SamplingConfig
    eos_ids: tuple[int, ...]
    vocab_size: int
    run: str  # the run's name, part of each version of the weights
    timeout: float = 600.0  # seconds without any success, after which a run ends
    wants_routes: bool = False  # answers need the experts of each token
    # answers need the version of each token's weights, which change in flight
    wants_spans: bool = False
    # returns True once the run is to end; requests that fail are then not sent again
    is_stopping: Callable[[], bool] = bool  # bool() is False
    say: Callable[[str], None] = print  # gets a line for failures and recoveries
    first_pause: float = 0.5  # seconds before a request is sent again; it doubles
    token: str | None = dataclasses.field(
        default_factory=lambda: os.environ.get("JAXMEM_ENGINE_TOKEN") or None,
        repr=False,
    )

    def __post_init__(self):
        """Raise a ValueError if the run's name cannot be part of a version."""
        weight_version.check_run(self.run)


class EngineInfo(NamedTuple):
    """Facts that a server states about itself."""

    model: str  # the name under which requests ask for the model
    max_length: int | None  # tokens of a prompt and its completion; None: not stated
    version: str | None  # of its weights, as it states it


class Engine(abc.ABC):
    """A client of one server; its methods may be called from many threads.

    What `generate` and `load_weights` need may fail: a refused or cut connection, an
    answer that is late, garbled or wrong, a status from 500. Such a request is sent
    again, after pauses that grow, with a line through `options.say`.

    Raises:
        EngineError: the server can never serve the request, or it has served nothing
            for `options.timeout` seconds. The line names the url, what came, and
            what to do.
    """

    def __init__(self, url: str, options: EngineOptions):
        self.url = url.rstrip("/")
        self.options = options
        self.http = Http(self.url, options.token, options.is_stopping)
        self.reporter = Reporter(f"rollouts.urls: {self.url}", options.say)
        self.info: EngineInfo | None = None

    # What kinds of engines define.

    def read_info(self, deadline: Deadline) -> EngineInfo:
        """Ask once if the server is ready, for which model and lengths.

        Not by SGLang's /health, which samples a token and so fails while the server is
        paused, as a killed run may leave it.
        """
        answer = fields(self.call("/v1/models", deadline, post=False))
        try:
            first = answer["data"][0]
            model, length = first["id"], first.get("max_model_len")
        except (TypeError, LookupError, AttributeError) as error:
            raise EngineFailure(
                f"/v1/models: no model is named in {messages.short(answer)}"
            ) from error
        return EngineInfo(model, length, self.read_version(deadline))

    @abc.abstractmethod
    def ask(self, request: SamplingRequest, deadline: Deadline) -> list[EngineAnswer]:
        """Send a request once; its checked answers."""

    @abc.abstractmethod
    def update_steps(
        self, directory: Path, version: str, adapter: bool, deadline: Deadline
    ) -> Mapping[str, Callable[[], object]]:
        """The requests of an update by their names, in their order."""

    @abc.abstractmethod
    def read_version(self, deadline: Deadline) -> str | None:
        """Ask once for the version of the weights, as the server states it."""

    @abc.abstractmethod
    def read_checksum(self, deadline: Deadline) -> str | None:
        """Ask once for a digest of all weights; None if the server has none."""

    @abc.abstractmethod
    def resume(self, deadline: Deadline) -> None:
        """Ask once that sampling goes on after a pause."""

    # What all of them share.

    def wait_ready(self) -> EngineInfo:
        """Wait until the server is ready; its model, its length and its version."""
        self.info = self._patience().until_success(self.read_info)
        return self.info

    def generate(self, request: SamplingRequest) -> list[EngineAnswer]:
        """The `count` checked completions of a prompt."""
        self.check_request(request)
        return self._patience().until_success(
            lambda deadline: self.ask(request, deadline)
        )

    def load_weights(
        self, directory: Path, version: int, adapter: bool
    ) -> Mapping[str, float]:
        """Load the weights of a directory; the seconds by step.

        Requests in flight are held meanwhile and go on with the new weights. The
        server sees the same directory, which must stay until the next version.
        """
        text = weight_version.text(self.options.run, version)
        try:
            return self._patience().until_success(
                lambda deadline: self.load_once(directory, text, adapter, deadline)
            )
        except BaseException:
            self._resume_anyway()
            raise

    def load_once(
        self, directory: Path, version: str, adapter: bool, deadline: Deadline
    ) -> dict[str, float]:
        """Go once through the steps of an update; the seconds of each step."""
        if not directory.is_dir():  # vLLM does not survive a missing directory
            raise EngineError(
                f"rollouts.weights: {directory} is not a directory, so "
                f"{self.url} does not get it"
            )
        steps = self.update_steps(directory, version, adapter, deadline)
        seconds = {}
        for name, step in steps.items():
            start = time.monotonic()
            step()
            seconds[name] = time.monotonic() - start
        return seconds

    def check_version(self, version: str, deadline: Deadline) -> None:
        """Raise an EngineFailure unless the server states a version."""
        stated = self.read_version(deadline)
        if stated != version:
            raise EngineFailure(
                f"states the version {messages.short(stated)} of its weights after "
                f"{messages.short(version)} was loaded"
            )

    def version(self) -> int | None:
        """The number of the weights' version; None for weights of before the run.

        Raises:
            EngineError: another run has loaded its weights.
        """
        text = self._patience().until_success(self.read_version)
        return weight_version.number(text, self.options.run, self.url)

    def checksum(self) -> str | None:
        """A digest of all weights; None if the server has no checksums."""
        return self._patience().until_success(self.read_checksum)

    def release(self) -> None:
        """Free what the run has loaded beside the model, if the server answers."""
        return None

    def close(self) -> None:
        """End all requests at once; they and later ones raise an EngineError."""
        self.http.close()

    def check_request(self, request: SamplingRequest) -> None:
        """Raise an EngineError for seeds or lengths that the server cannot have."""
        if not 0 <= request.seed <= _LARGEST_SEED - request.count:
            expected = f"in [0, {_LARGEST_SEED} - count]"
            raise EngineError(messages.must_be("seed", expected, request.seed))
        limit = self.info and self.info.max_length
        length = len(request.prompt_ids) + request.max_tokens
        if limit is not None and length > limit:
            raise EngineError(
                f"rollouts.urls: {self.url} reads at most {limit} tokens, and a prompt "
                f"of {len(request.prompt_ids)} with sampling.max_new_tokens="
                f"{request.max_tokens} needs {length}; start it with "
                f"{self.length_flag.format(length)} or more"
            )

    length_flag = "--max-model-len={0} (jaxmem serve: --max-len={0})"

    def call(
        self,
        path: str,
        deadline: Deadline,
        body: Any = None,
        remedy: str = "",
        post: bool = True,
    ) -> Any:
        """The JSON of a route's answer.

        Raises:
            EngineError: the status says that the request can never succeed; `remedy`
                is what the server needs to have the route.
            EngineFailure: anything else that is no answer.
        """
        try:
            return self.http.ask("POST" if post else "GET", path, body, deadline)
        except StatusError as error:
            raise self._verdict(error, path, remedy) from error

    def _verdict(self, error: StatusError, path: str, remedy: str) -> Exception:
        if error.status >= 500 or error.status in _MAY_IMPROVE:
            return EngineFailure(f"{path}: {error}")
        line = f"rollouts.urls: {self.url}{path}: {error}"
        if error.status == 401:
            return EngineError(f"{line}; set $JAXMEM_ENGINE_TOKEN to the server's key")
        if error.status == 404 and not error.is_bare:  # as of an adapter it has lost
            return EngineFailure(f"{path}: {error}")
        if error.status in ROUTE_MISSING and error.is_bare:  # else it says what to do
            if self.url.rstrip("/").endswith("/v1"):
                remedy = "leave /v1 out of the address"
            return EngineError(f"{line}; {remedy}" if remedy else line)
        return EngineError(line)

    def _patience(self) -> Patience:
        options = self.options
        return Patience(
            [self.reporter], options.timeout, options.first_pause, self.http.wait
        )

    def _resume_anyway(self) -> None:
        """Do not leave a server paused that an update has failed on."""
        end = time.monotonic() + min(_RESUMING, self.options.timeout)
        try:
            self.resume(lambda: end)
        except (EngineError, EngineFailure):
            return


def stated_version(value: Any) -> str | None:
    """The version in an answer, which must be text or null."""
    if value is None or isinstance(value, str):
        return value
    raise EngineFailure(
        f"states the version {messages.short(value)}, which is not a text"
    )
