"""The client of vLLM's server, and of servers with the same routes.

Start it with VLLM_SERVER_DEV_MODE=1, and with --logprobs-mode processed_logprobs, so
that log-probabilities are of the distribution that tokens are drawn from.
"""

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxmem.base import messages
from jaxmem.train.jobs.rollout.engines import answer_checks, weight_version
from jaxmem.train.jobs.rollout.engines.http_json import fields
from jaxmem.train.jobs.rollout.engines.patience import (
    Deadline,
    EngineError,
    EngineFailure,
    WrongAnswer,
)
from jaxmem.train.jobs.rollout.engines.protocol import (
    ROUTE_MISSING,
    Engine,
    EngineAnswer,
    EngineInfo,
    SamplingRequest,
    stated_version,
)

_COMPLETIONS, _TOKENS = "/v1/completions", "/inference/v1/generate"
_LOAD, _UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
_FAREWELL = 5.0  # seconds for the last request of a run
_DEV_MODE = "start the server with VLLM_SERVER_DEV_MODE=1"
_LORA = (
    "start the server with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 to "
    "train adapters"
)
_OF_NOTHING = hashlib.sha256(b"").hexdigest()


class Vllm(Engine):
    """A client of one vLLM server.

    An adapter has the name of its version, as in "sums:7". A request in flight keeps
    its adapter when the next one is loaded. vLLM can also load one in place of another,
    but then a request goes on with the keys and values of the first, and the server
    reads the files again for each token.
    """

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._adapter: str | None = None  # that new requests ask for; None: the model
        self._noted = False
        self._route = _TOKENS if self.options.wants_spans else _COMPLETIONS

    def read_info(self, deadline: Deadline) -> EngineInfo:
        self.call("/health", deadline, post=False)
        return super().read_info(deadline)

    def ask(self, request: SamplingRequest, deadline: Deadline) -> list[EngineAnswer]:
        if self._route == _TOKENS:
            try:
                return self._ask_tokens(request, deadline)
            except EngineError as error:
                if getattr(error.__cause__, "status", None) not in ROUTE_MISSING:
                    raise
                self._route = _COMPLETIONS
        answers = self._ask_completions(request, deadline)
        if self.options.wants_spans and answers[0].versions is None:
            self._note_no_spans()
        return answers

    def _ask_completions(
        self, request: SamplingRequest, deadline: Deadline
    ) -> list[EngineAnswer]:
        """Ask the route that every server has."""
        model = self._model_name()
        body = {
            "model": model,
            "prompt": request.prompt_ids,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            **self._sampling_fields(request),
        }
        answer = self._post_samples(_COMPLETIONS, deadline, body)
        found = answer_checks.choices(answer, request.count)
        answers = []
        for choice in found:
            answer_checks.check_prompt(choice.get("prompt_token_ids"), request)
            logprobs = fields(choice.get("logprobs"), "logprobs")
            values = logprobs.get("token_logprobs")
            tops = _by_id(logprobs.get("top_logprobs") or [])
            sampled = self._answer(choice, request, values, tops)
            answers.append(self._with_adapter(sampled, model))
        return answers

    def _ask_tokens(
        self, request: SamplingRequest, deadline: Deadline
    ) -> list[EngineAnswer]:
        """Ask the route that states versions by token."""
        model = self._model_name()
        body = {
            "model": model,
            "token_ids": request.prompt_ids,
            "return_token_ids": True,
            "sampling_params": self._sampling_fields(request),
        }
        answer = self._post_samples(_TOKENS, deadline, body)
        found = answer_checks.choices(answer, request.count)
        answer_checks.check_prompt(answer.get("prompt_token_ids"), request)
        answers = []
        for choice in found:
            content = fields(choice.get("logprobs"), "logprobs").get("content") or []
            try:
                values = [token["logprob"] for token in content]
                tops = [
                    {top["token_id"]: top["logprob"] for top in token["top_logprobs"]}
                    for token in content
                ]
            except (TypeError, KeyError) as error:
                raise WrongAnswer(
                    f"logprobs.content is {messages.short(content)}"
                ) from error
            sampled = self._answer(choice, request, values, tops)
            answers.append(self._with_adapter(sampled, model))
        return answers

    def _post_samples(self, path: str, deadline: Deadline, body: Any) -> Any:
        try:
            return self.call(path, deadline, body)
        except EngineError as error:
            if "logprobs of" not in str(error):  # more than --max-logprobs, 20 of vLLM
                raise
            size = self.options.sampling.support_size
            raise EngineError(
                f"{error}; start the server with --max-logprobs {size}"
            ) from error

    def _answer(
        self,
        choice: Mapping[str, Any],
        request: SamplingRequest,
        logprobs: Any,
        tops: Sequence[Mapping[int, Any]],
    ) -> EngineAnswer:
        """A checked completion from the fields that both routes share."""
        options = self.options
        ids = answer_checks.checked_ids(
            choice.get("token_ids"), "token_ids", options.vocab_size
        )
        reason = choice.get("finish_reason")
        if reason not in ("stop", "length"):
            raise EngineFailure(f"a completion's finish_reason is {reason!r}")
        supports = routes = None
        if (request.sampling or options.sampling).truncates:
            supports = [answer_checks.support(top) for top in tops]
        if options.wants_routes:
            if choice.get("routed_experts") is None:
                raise EngineError(
                    f"rollouts.urls: {self.url} returns no routed_experts, which "
                    "grpo.replay_routing needs; start the server with "
                    "--enable-return-routed-experts"
                )
            routes = answer_checks.routes(choice["routed_experts"], request, ids)
        answer = EngineAnswer(
            ids=ids,
            logprobs=logprobs,
            ended=reason == "stop",
            supports=supports,
            routes=routes,
            versions=answer_checks.spans(
                choice.get("weight_versions"), len(ids), options, self.url
            ),
        )
        answer_checks.check_answer(answer, request, options)
        return answer

    def _with_adapter(self, answer: EngineAnswer, model: str) -> EngineAnswer:
        """The answer with the version of the adapter that sampled all of it.

        The server states the version that was loaded last, also for its older requests.
        """
        if self.info is not None and model == self.info.model:
            return answer
        version = weight_version.number(model, self.options.run, self.url)
        assert version is not None, "adapters have the name of a version"
        return answer._replace(versions=[(version, len(answer.ids))])

    def _sampling_fields(self, request: SamplingRequest) -> dict[str, Any]:
        """Every field that decides on samples.

        A checkpoint's generation_config.json changes the defaults of those that are
        left out, and the ids that end completions.
        """
        sampling = request.sampling or self.options.sampling
        return {
            "n": request.count,
            "max_tokens": request.max_tokens,
            "min_tokens": 0,
            "seed": request.seed,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k or 0,
            "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
            "min_p": sampling.min_p or 0.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "stop": [],
            "stop_token_ids": [*self.options.eos_ids],
            "ignore_eos": True,  # those of the run end completions, and no others
            "logprobs": sampling.support_size or 0,
        }

    def update_steps(
        self, directory: Path, version: str, adapter: bool, deadline: Deadline
    ) -> Mapping[str, Callable[[], object]]:
        def state() -> None:
            self._post("/update_weight_version", deadline, {"new_version": version})

        def check() -> None:
            self.check_version(version, deadline)

        if adapter:  # requests in flight keep theirs, so that nothing is held
            return {
                "load": lambda: self._load_adapter(directory, version, deadline),
                "version": state,
                "resume": lambda: self.resume(deadline),  # after a run that was killed
                "check": check,
                "unload": lambda: self._turn_to(version, deadline),
            }
        return {
            "pause": lambda: self._post("/pause?mode=keep", deadline),
            "reload": lambda: self._reload(directory, deadline),
            "version": state,
            "reset": lambda: self._reset_cache(deadline),
            "resume": lambda: self.resume(deadline),
            "check": check,
        }

    def _reload(self, directory: Path, deadline: Deadline) -> None:
        arguments = {"weights_path": str(directory)}
        body = {"method": "reload_weights", "kwargs": arguments}
        with _refusals(f"{directory}; serve the run's model.checkpoint"):
            self._post("/collective_rpc", deadline, body)

    def _load_adapter(self, directory: Path, name: str, deadline: Deadline) -> None:
        """Load an adapter under a name, in place of an older one of that name.

        There is one if the answer to this request was lost, or if an earlier process of
        the run has loaded it.
        """
        body = {"lora_name": name, "lora_path": str(directory)}
        with _refusals(f"{directory}; does --max-lora-rank allow model.lora_rank?"):
            try:
                self.call(_LOAD, deadline, body, _LORA)
            except EngineError as error:
                if "already been loaded" not in str(error):
                    raise
                self._unload_adapter(name, deadline)
                self.call(_LOAD, deadline, body, _LORA)
                self._reset_cache(deadline)  # it finds keys and values by the name

    def _unload_adapter(self, name: str, deadline: Deadline) -> None:
        try:
            self.call(_UNLOAD, deadline, {"lora_name": name}, _LORA)
        except EngineFailure as error:
            if getattr(error.__cause__, "status", None) != 404:  # it has lost it
                raise

    def release(self) -> None:
        if self._adapter is not None:
            end = time.monotonic() + _FAREWELL
            with contextlib.suppress(EngineError, EngineFailure):
                self._unload_adapter(self._adapter, lambda: end)

    def _turn_to(self, name: str, deadline: Deadline) -> None:
        """Ask for another adapter from now on, and unload the one before it."""
        before, self._adapter = self._adapter, name
        if before not in (None, name):
            self._unload_adapter(before, deadline)

    def _reset_cache(self, deadline: Deadline) -> None:
        """Forget keys and values of the old weights, those of held requests as well.

        These are computed again. Otherwise the cache would not be reset while requests
        are held, and new requests would read the old values of the same prompts.
        """
        path = "/reset_prefix_cache?reset_running_requests=true"
        answer = self._post(path, deadline)
        if isinstance(answer, dict) and answer.get("success") is False:
            raise EngineFailure("/reset_prefix_cache: the cache was not reset")

    def resume(self, deadline: Deadline) -> None:
        self._post("/resume", deadline)

    def read_version(self, deadline: Deadline) -> str | None:
        answer = self.call("/weight_info", deadline, remedy=_DEV_MODE, post=False)
        return stated_version(fields(answer, "/weight_info").get("weight_version"))

    def read_checksum(self, deadline: Deadline) -> str | None:
        try:
            answer = self.call("/weight_checker", deadline, {"action": "checksum"})
        except EngineError as error:
            if getattr(error.__cause__, "status", None) in ROUTE_MISSING:
                return None  # as of servers of before this route
            raise
        checksums = fields(answer, "/weight_checker").get("checksums")
        if not isinstance(checksums, dict) or _OF_NOTHING in checksums.values():
            return None  # as on CPUs, where matrices are packed and not looked into
        content = json.dumps(checksums, sort_keys=True).encode()
        return hashlib.sha256(content).hexdigest()

    def _post(self, path: str, deadline: Deadline, body: Any = None) -> Any:
        return self.call(path, deadline, body, _DEV_MODE)

    def _model_name(self) -> str:
        if self._adapter is not None:
            return self._adapter
        if self.info is None:
            raise RuntimeError("wait_ready comes before requests")
        return self.info.model

    def _note_no_spans(self) -> None:
        if self._noted:
            return
        self._noted = True
        self.options.say(
            f"rollouts.urls: {self.url} does not state which weights sampled each "
            "token, so all tokens of an answer count as old as its first; vLLM states "
            "it with --enable-scale-out"
        )


@contextlib.contextmanager
def _refusals(weights: str) -> Iterator[None]:
    """Make a status of 500 a wrong answer, unless the engine ends by it.

    Asking again for long does not help: vLLM has it for weights that do not fit.
    """
    try:
        yield
    except EngineFailure as failure:
        status = getattr(failure.__cause__, "status", None)
        if status != 500 or "Engine" in str(failure):  # as in EngineDeadError
            raise
        raise WrongAnswer(f"{failure}; it cannot load {weights}") from failure


def _by_id(tops: Any) -> list[dict[int, Any]]:
    """The log-probabilities by id of `top_logprobs`."""
    try:
        return [{_id_of(key): x for key, x in top.items()} for top in tops]
    except (TypeError, AttributeError) as error:
        raise WrongAnswer(f"top_logprobs is {messages.short(tops)}") from error


def _id_of(key: str) -> int:
    """The id in a key of `top_logprobs`, as in "token_id:17"."""
    prefix, _, number = key.partition(":")
    if prefix != "token_id" or not number.isdecimal():
        raise WrongAnswer(f"top_logprobs has the key {messages.short(key)}, not an id")
    return int(number)
