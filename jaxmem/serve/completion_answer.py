"""Answers to requests for completions, as vLLM writes them."""

import base64
import io
import itertools
import math
import secrets
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any

import numpy as np
import tokenizers

from jaxmem.base import messages
from jaxmem.generate.completion_text import CompletionText
from jaxmem.serve.completion_request import CompletionRequest
from jaxmem.serve.request_error import RequestError
from jaxmem.serve.served_rows import ServedRow


def answer_of(
    request: CompletionRequest,
    rows: Sequence[ServedRow],
    tokenizer: tokenizers.Tokenizer,
) -> dict[str, Any]:
    """The answer of `/v1/completions` to a request whose rows have ended.

    Raises:
        RequestError: a log-probability is not finite, as with damaged weights.
    """
    _check_finite(rows)
    return {
        "id": f"cmpl-{secrets.token_hex(16)}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": request.model,
        "choices": [_text_choice(row, tokenizer) for row in rows],
        "usage": _usage(request, rows),
    }


def token_answer_of(
    request: CompletionRequest, rows: Sequence[ServedRow]
) -> dict[str, Any]:
    """The answer of `/inference/v1/generate`, which has ids and no texts.

    Raises:
        RequestError: as in `answer_of`.
    """
    _check_finite(rows)
    returned = request.return_token_ids
    return {
        "request_id": f"generate-tokens-{secrets.token_hex(16)}",
        "created": int(time.time()),
        "model": request.model,
        "output_mode": "tokens",
        "prompt_token_ids": list(request.prompts[0]) if returned else None,
        "prompt_logprobs": None,
        "choices": [_token_choice(row) for row in rows],
        "usage": _usage(request, rows),
    }


def _check_finite(rows: Sequence[ServedRow]) -> None:
    for row in rows:
        bad = [x for x in row.logprobs if not math.isfinite(x)]
        if bad:
            raise RequestError(
                f"a log-probability is {bad[0]}: weights of the versions "
                f"{messages.listing(v for v, _ in row.versions)} give logits that are "
                "not finite; load others",
                HTTPStatus.INTERNAL_SERVER_ERROR,
            )


def _usage(request: CompletionRequest, rows: Sequence[ServedRow]) -> dict[str, int]:
    prompt_tokens = sum(map(len, request.prompts))
    completion_tokens = sum(len(row.ids) for row in rows)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def _token_choice(row: ServedRow) -> dict[str, Any]:
    ends = [*itertools.accumulate(tokens for _, tokens in row.versions)]
    starts = [0, *ends]
    spans = zip(row.versions, starts, ends, strict=False)
    logprobs = None
    if row.job.request.logprobs is not None:
        each = zip(row.ids, row.logprobs, _beside(row), strict=True)
        content = [
            {
                "token_id": id_,
                "logprob": logprob,
                "top_logprobs": [{"token_id": k, "logprob": x} for k, x in top.items()],
            }
            for id_, logprob, top in each
        ]
        logprobs = {"content": content}
    return {
        "index": row.index,
        "token_ids": row.ids,
        "logprobs": logprobs,
        "finish_reason": row.finish,
        "stop_reason": row.stop_reason,
        "routed_experts": _routes(row),
        "weight_versions": [
            {"version": version, "start": start, "end": end}
            for (version, _), start, end in spans
        ],
    }


def _routes(row: ServedRow) -> str | None:
    """The experts [tokens read, layers with experts, K], as base64 of an npy file."""
    if not row.routes:
        return None
    file = io.BytesIO()
    np.save(file, np.concatenate(row.routes))
    return base64.b64encode(file.getvalue()).decode()


def _beside(row: ServedRow) -> list[dict[int, float]]:
    """Log-probabilities of the most probable ids; the sampled one comes first."""
    others = row.top or [{}] * len(row.ids)
    sampled = zip(row.ids, row.logprobs, others, strict=True)
    return [{id_: logprob} | top for id_, logprob, top in sampled]


def _text_choice(row: ServedRow, tokenizer: tokenizers.Tokenizer) -> dict[str, Any]:
    request = row.job.request
    text = CompletionText(tokenizer, row.prompt, ())
    text.add(row.ids)
    returned = request.return_token_ids
    return {
        "index": row.index,
        "text": text.whole,
        "logprobs": _logprobs(row, tokenizer),
        "finish_reason": row.finish,
        "stop_reason": row.stop_reason,
        "token_ids": row.ids if returned else None,
        "prompt_token_ids": list(row.prompt) if returned else None,
        "prompt_logprobs": None,
        "routed_experts": _routes(row),
        "weight_versions": [list(span) for span in row.versions],
    }


def _logprobs(row: ServedRow, tokenizer: tokenizers.Tokenizer) -> dict[str, Any] | None:
    """Log-probabilities of tokens, and of the most probable ones beside each."""
    request = row.job.request
    if request.logprobs is None:
        return None
    name = _token_name(request, tokenizer)
    names = [name(id_) for id_ in row.ids]
    ends = itertools.accumulate(map(len, names), initial=0)
    return {
        "text_offset": [*ends][: len(names)],
        "token_logprobs": row.logprobs,
        "tokens": names,
        "top_logprobs": [
            {name(id_): logprob for id_, logprob in top.items()} for top in _beside(row)
        ],
    }


def _token_name(
    request: CompletionRequest, tokenizer: tokenizers.Tokenizer
) -> Callable[[int], str]:
    if request.return_tokens_as_token_ids:
        return "token_id:{}".format
    return lambda id_: tokenizer.decode([id_], skip_special_tokens=False)
