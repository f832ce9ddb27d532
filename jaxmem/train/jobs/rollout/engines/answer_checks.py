"""Checks of engines' answers; what fails them is never trained on."""

import base64
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxmem.base import messages
from jaxmem.models.truncation import SamplingConfig
from jaxmem.train.jobs.rollout.engines import weight_version
from jaxmem.train.jobs.rollout.engines.http_json import fields
from jaxmem.train.jobs.rollout.engines.patience import WrongAnswer
from jaxmem.train.jobs.rollout.engines.protocol import (
    EngineAnswer,
    EngineOptions,
    SamplingRequest,
)

_LARGEST_LOGPROB = 1e-3  # as of recorded rollouts: 0, and the rounding of an engine
_OUTSIDE = -9000.0  # engines write -9999 for the log of 0, which JSON does not have
_MISSING_MASS = 1e-2  # of a support; an engine's float32 sums are within 1e-3


def choices(answer: Any, count: int) -> list[Mapping[str, Any]]:
    """The `count` choices of an answer by their index."""
    found = fields(answer).get("choices")
    if not isinstance(found, list) or len(found) != count:
        number = len(found) if isinstance(found, list) else "no"
        raise WrongAnswer(f"the answer has {number} choices, {count} were asked for")
    indices = [fields(choice, "a choice").get("index") for choice in found]
    by_index = {i: x for i, x in zip(indices, found, strict=True) if type(i) is int}
    if by_index.keys() != set(range(count)):
        raise WrongAnswer(f"choices have the indices {messages.listing(indices)}")
    return [by_index[i] for i in range(count)]


def check_prompt(returned: Any, request: SamplingRequest) -> None:
    """Check that the engine has read the ids that were sent."""
    if returned == request.prompt_ids:
        return
    raise WrongAnswer(
        f"the prompt's ids come back as {messages.short(returned)}, sent were "
        f"{messages.short(request.prompt_ids)}; the server's tokenizer may change them"
    )


def check_answer(
    answer: EngineAnswer, request: SamplingRequest, options: EngineOptions
) -> None:
    """Check lengths, log-probabilities, the end and supports of one completion."""
    length = len(answer.ids)
    if not 1 <= length <= request.max_tokens:
        raise WrongAnswer(
            f"a completion has {length} tokens; 1 to {request.max_tokens} were asked "
            "for"
        )
    if not isinstance(answer.logprobs, list) or len(answer.logprobs) != length:
        raise WrongAnswer(
            f"{length} tokens have the log-probabilities "
            f"{messages.short(answer.logprobs)}"
        )
    for value in answer.logprobs:
        number = type(value) in (int, float)
        if not number or not _OUTSIDE < value <= _LARGEST_LOGPROB:  # nan as well
            raise WrongAnswer(
                f"a token has the log-probability {messages.short(value)}"
            )
    _check_end(answer, request, options.eos_ids)
    _check_supports(answer, request.sampling or options.sampling, options.vocab_size)


def checked_ids(ids: Any, name: str, vocab_size: int) -> list[int]:
    """The value, which must be a list of ids in the vocabulary."""
    if not isinstance(ids, list) or not all(
        type(i) is int and 0 <= i < vocab_size for i in ids
    ):
        raise WrongAnswer(
            f"{name} must be ids in [0, {vocab_size}), got {messages.short(ids)}; does "
            "the server have the run's checkpoint and tokenizer?"
        )
    return ids


def _check_end(
    answer: EngineAnswer, request: SamplingRequest, eos_ids: Sequence[int]
) -> None:
    ends = [i for i in answer.ids if i in eos_ids]
    if answer.ended != bool(ends) or (ends and answer.ids[-1] not in eos_ids):
        state = "is said to have ended" if answer.ended else "is said to be cut"
        raise WrongAnswer(
            f"a completion {state} with the id {answer.ids[-1]}; the ids that end "
            f"completions are {messages.listing(eos_ids)}"
        )
    if len(ends) > 1:
        raise WrongAnswer(f"a completion goes on after the id {ends[0]}, which ends it")
    if not answer.ended and len(answer.ids) < request.max_tokens:
        raise WrongAnswer(
            f"a completion is cut after {len(answer.ids)} tokens, before "
            f"sampling.max_new_tokens={request.max_tokens}"
        )


def _check_supports(
    answer: EngineAnswer, sampling: SamplingConfig, vocab_size: int
) -> None:
    limit = sampling.support_size
    if limit is None:
        return
    supports = answer.supports
    if supports is None or len(supports) != len(answer.ids):
        raise WrongAnswer("the answer lacks the tokens that each was drawn from")
    for token, ids in zip(answer.ids, supports, strict=True):
        checked_ids(ids, "the support of a token", vocab_size)
        if token not in ids or len(ids) > limit:
            raise WrongAnswer(
                f"the support of token {token} must contain it and has at most "
                f"{limit} ids, got {messages.short(ids)}; raise sampling.support where "
                "equal logits widen it"
            )


def support(logprobs: Mapping[int, Any]) -> list[int]:
    """The ids of a support, from log-probabilities of the most probable ids.

    They are of the truncated distribution, so those of the support sum to 1.
    """
    if not all(type(x) in (int, float) for x in logprobs.values()):
        raise WrongAnswer(f"top_logprobs has {messages.short(logprobs)}")
    inside = {i: x for i, x in logprobs.items() if x > _OUTSIDE}
    mass = math.fsum(math.exp(min(x, 1.0)) for x in inside.values())
    if not abs(mass - 1) <= _MISSING_MASS:
        raise WrongAnswer(
            f"a token was drawn from {len(inside)} ids with the probability {mass:.3f} "
            "in sum instead of 1; start the server with --logprobs-mode "
            "processed_logprobs, and raise sampling.support where it is cut"
        )
    return [*inside]


def routes(encoded: Any, request: SamplingRequest, ids: Sequence[int]) -> np.ndarray:
    """The experts [tokens read, layers with experts, K], from base64 of an npy file.

    The last token of a completion is sampled and never read.
    """
    try:
        data = io.BytesIO(base64.b64decode(encoded, validate=True))
        array = np.load(data, allow_pickle=False)
    except (TypeError, ValueError, EOFError, OSError) as error:
        raise WrongAnswer(f"routed_experts is not an array: {error}") from error
    read = len(request.prompt_ids) + len(ids) - 1
    if array.ndim != 3 or array.dtype.kind not in "iu" or len(array) != read:
        raise WrongAnswer(
            f"routed_experts is {array.dtype}{list(array.shape)}, expected are integers"
            f" [{read}, layers with experts, K]"
        )
    return array


def spans(
    stated: Any, length: int, options: EngineOptions, url: str
) -> list[tuple[int, int]] | None:
    """Versions of the weights with their numbers of tokens; None if none are stated.

    Both forms are read: [["RUN:7", 12], …] and [{"version", "start", "end"}, …].
    """
    if stated is None:
        return None
    wrong = f"weight_versions is {messages.short(stated)}"
    if not isinstance(stated, list):
        raise WrongAnswer(wrong)
    result: list[tuple[int, int]] = []
    for span in stated:
        match span:
            case {"version": str(text), "start": int(start), "end": int(end)}:
                tokens = end - start
            case [str(text), int(tokens)]:
                pass
            case _:
                raise WrongAnswer(wrong)
        version = weight_version.number(text, options.run, url)
        if version is None:
            version = weight_version.UNVERSIONED
        if tokens < 0 or (result and version < result[-1][0]):
            raise WrongAnswer(wrong)
        if tokens:
            result.append((version, tokens))
    total = sum(tokens for _, tokens in result)
    if total != length:
        raise WrongAnswer(f"weight_versions cover {total} of {length} tokens")
    return result
