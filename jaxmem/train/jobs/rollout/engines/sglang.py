"""The client of SGLang's server, by its documented routes; nothing of it has run.

Start it with --enable-deterministic-inference, without which seeds have no effect, and
leave SGLANG_RETURN_ORIGINAL_LOGPROB unset: its log-probabilities are then tempered.
They are of the whole distribution, so a sampler that truncates is refused.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxmem.base import messages
from jaxmem.train.jobs.rollout.engines import answer_checks
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
    EngineOptions,
    SamplingRequest,
    stated_version,
)

_NOT_LOADED = 400  # the status if files cannot be loaded


class Sglang(Engine):
    """A client of one SGLang server."""

    length_flag = "--context-length={0}"

    def __init__(self, url: str, options: EngineOptions):
        super().__init__(url, options)
        if options.sampling.truncates:
            raise EngineError(
                "sampling.top_k, top_p and min_p must be None with rollouts.engine="
                "'sglang', whose log-probabilities are not of the truncated "
                "distribution; remove them, or use 'vllm'"
            )
        if options.wants_routes:
            raise EngineError(
                "grpo.replay_routing=True must stay False with rollouts.engine='sglang'"
            )

    def ask(self, request: SamplingRequest, deadline: Deadline) -> list[EngineAnswer]:
        members = range(request.count)
        body = {
            "input_ids": [request.prompt_ids for _ in members],
            "sampling_params": [self._sampling_fields(request, i) for i in members],
            "return_logprob": True,
        }
        found = self.call("/generate", deadline, body)
        if not isinstance(found, list) or len(found) != request.count:
            raise WrongAnswer(
                f"{request.count} completions were asked for, got "
                f"{messages.short(found)}"
            )
        return [self._answer(fields(item), request) for item in found]

    def _answer(
        self, item: Mapping[str, Any], request: SamplingRequest
    ) -> EngineAnswer:
        meta = fields(item.get("meta_info"), "meta_info")
        if meta.get("prompt_tokens", len(request.prompt_ids)) != len(
            request.prompt_ids
        ):
            raise WrongAnswer(
                f"the server read {meta['prompt_tokens']} tokens of a prompt of "
                f"{len(request.prompt_ids)}"
            )
        pairs: Any = meta.get("output_token_logprobs")
        try:
            ids, logprobs = [p[1] for p in pairs], [p[0] for p in pairs]
        except (TypeError, LookupError) as error:
            raise WrongAnswer(
                f"output_token_logprobs is {messages.short(pairs)}"
            ) from error
        answer_checks.checked_ids(ids, "the ids", self.options.vocab_size)
        if item.get("output_ids", ids) not in (ids, ids[:-1]):  # without the end
            raise WrongAnswer("output_ids are not those of output_token_logprobs")
        reason = fields(meta.get("finish_reason"), "finish_reason").get("type")
        if reason not in ("stop", "length"):
            raise EngineFailure(f"a completion's finish_reason is {reason!r}")
        stated = meta.get("weight_versions")
        answer = EngineAnswer(
            ids=ids,
            logprobs=logprobs,
            ended=reason == "stop",
            versions=answer_checks.spans(stated, len(ids), self.options, self.url),
        )
        answer_checks.check_answer(answer, request, self.options)
        return answer

    def _sampling_fields(self, request: SamplingRequest, member: int) -> dict[str, Any]:
        """Every field that decides on samples.

        With ignore_eos, SGLang would ignore stop_token_ids as well, so the server's own
        ends stay; a completion that one of them ends is refused.
        """
        sampling = request.sampling or self.options.sampling
        return {
            "n": 1,
            "max_new_tokens": request.max_tokens,
            "min_new_tokens": 0,
            "sampling_seed": request.seed + member,
            "temperature": sampling.temperature,
            "top_k": -1,
            "top_p": 1.0,
            "min_p": 0.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": [*self.options.eos_ids],
            "ignore_eos": False,
        }

    def update_steps(
        self, directory: Path, version: str, adapter: bool, deadline: Deadline
    ) -> Mapping[str, Callable[[], object]]:
        if adapter:
            raise EngineError(
                "rollouts.engine='sglang' loads whole checkpoints only; train all "
                "weights, or use 'vllm'"
            )
        # "in_place" would keep the keys and values of held requests, and then the
        # cache cannot be flushed.
        pause = {"mode": "retract"}
        return {
            "pause": lambda: self.call("/pause_generation", deadline, pause),
            "reload": lambda: self._reload(directory, version, deadline),
            "resume": lambda: self.resume(deadline),
            "check": lambda: self.check_version(version, deadline),
        }

    def _reload(self, directory: Path, version: str, deadline: Deadline) -> None:
        path = "/update_weights_from_disk"
        body = {
            "model_path": str(directory),
            "weight_version": version,
            "flush_cache": True,
            "abort_all_requests": False,
        }
        try:
            answer = self.call(path, deadline, body)
        except EngineError as error:
            if getattr(error.__cause__, "status", None) != _NOT_LOADED:
                raise
            raise EngineFailure(f"{path}: {error.__cause__}") from error
        if fields(answer, path).get("success") is not True:
            raise EngineFailure(f"{path}: it answers {messages.short(answer)}")

    def resume(self, deadline: Deadline) -> None:
        self.call("/continue_generation", deadline, {})

    def read_version(self, deadline: Deadline) -> str | None:
        answer = self.call("/model_info", deadline, post=False)
        return stated_version(fields(answer, "/model_info").get("weight_version"))

    def read_checksum(self, deadline: Deadline) -> str | None:
        try:
            answer = self.call("/weights_checker", deadline, {"action": "checksum"})
        except EngineError as error:
            if getattr(error.__cause__, "status", None) in (400, *ROUTE_MISSING):
                return None  # as of servers of before this action
            raise
        ranks = fields(answer, "/weights_checker").get("ranks")
        if not ranks:
            return None
        content = json.dumps(ranks, sort_keys=True).encode()
        return hashlib.sha256(content).hexdigest()
