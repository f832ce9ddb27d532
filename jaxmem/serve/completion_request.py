"""Requests for completions: the fields of vLLM's two routes, checked.

A field that would change the completions, and that is not implemented, is an error
unless it has the value that changes nothing.
"""

import dataclasses
import math
import secrets
from collections.abc import Collection, Mapping, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple

from jaxmem.base import messages
from jaxmem.data.records import DataError, RawRecord
from jaxmem.generate.model import Model
from jaxmem.serve.request_error import RequestError

_MAX_TOKENS = 16  # vLLM's default of max_tokens
_LEAST_TEMPERATURE = 1e-6  # logits divided by less could be infinite
_SEEDS = 2**63  # seeds are below it, and not below its negative
_READ = frozenset(
    "model prompt n max_tokens temperature top_p top_k min_p seed stop_token_ids "
    "ignore_eos logprobs return_token_ids return_tokens_as_token_ids".split()
)
_NOTES = frozenset(("user", "request_id"))  # change nothing
# Fields of `/inference/v1/generate`, besides those inside its sampling_params.
_OF_TOKENS = frozenset(("model", "token_ids", "sampling_params", "return_token_ids"))
_OUTSIDE = frozenset(("prompt", *_OF_TOKENS))  # not inside them
# Fields that are not implemented, with the values, besides null, that change nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "add_special_tokens": (True,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "best_of": (1,),
    "cache_salt": (),
    "echo": (False,),
    "frequency_penalty": (0,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "priority": (0,),
    "prompt_logprobs": (),
    "repetition_penalty": (1,),
    "response_format": (),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop": ([], ""),
    "stream": (False,),
    "stream_options": (),
    "structured_outputs": (),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}


class DrawOptions(NamedTuple):
    """Options that all rows of a batch share, since programs are compiled for them."""

    is_greedy: bool
    top_k: int | None
    top_p: float | None
    min_p: float | None
    end_ids: tuple[int, ...]  # each ends a completion, sorted
    top: int  # most probable tokens that are kept


@dataclasses.dataclass(frozen=True, eq=False)
class CompletionRequest:
    """A checked request: each of its prompts gets `n` completions."""

    model: str
    prompts: Sequence[Sequence[int]]
    n: int
    max_tokens: int  # of a completion
    seed: int
    temperature: float
    options: DrawOptions
    stop_ids: frozenset[int]  # of the ends, those that only the request names
    logprobs: int | None  # most probable tokens that the answer names; None: none
    return_token_ids: bool
    return_tokens_as_token_ids: bool


@dataclasses.dataclass(frozen=True)
class RequestReader:
    """Reads requests for one model."""

    model: Model
    max_len: int  # tokens of a prompt and its completion
    max_waiting: int  # completions of all requests
    max_logprobs: int  # most probable tokens that are kept beside each token

    def of_tokens(
        self, fields: Mapping[str, Any], names: Sequence[str]
    ) -> CompletionRequest:
        """Check the fields of a request that has ids and sampling_params.

        Raises:
            RequestError: as in `__call__`.
        """
        unknown = sorted(fields.keys() - _OF_TOKENS - _NOTES)
        if unknown:
            raise _unknown(unknown, _OF_TOKENS)
        params = fields.get("sampling_params")
        if not isinstance(params, dict):
            raise RequestError(
                messages.must_be("sampling_params", "a JSON object", params),
                param="sampling_params",
            )
        misplaced = sorted(params.keys() & _OUTSIDE)
        if misplaced:
            raise _unknown(misplaced, _READ - _OUTSIDE)
        ids = self._ids(fields.get("token_ids"), "token_ids")
        outer = {k: fields.get(k) for k in ("model", "return_token_ids")}
        return self({**params, **outer, "prompt": ids}, names)

    def __call__(
        self, fields: Mapping[str, Any], names: Sequence[str]
    ) -> CompletionRequest:
        """Check the fields of a request.

        Args:
            fields: of the request's object.
            names: of models that it may name; the first is the default.

        Raises:
            RequestError: a field is unknown or has an impossible value.
        """
        _refuse_others(fields)
        take = _Fields(fields)
        name = take.text("model", names[0])
        check_model(name, names)
        prompts = self._prompts(fields.get("prompt"))
        n = take.integer("n", 1, 1, 2**31 - 1)
        if len(prompts) * n > self.max_waiting:
            raise RequestError(
                f"n={n} for {len(prompts)} prompts asks for {len(prompts) * n} "
                f"completions, and {self.max_waiting} may wait (--max-waiting)",
                param="n",
            )
        max_tokens = take.integer("max_tokens", _MAX_TOKENS, 1, 2**31 - 1)
        longest = max(map(len, prompts))
        if longest + max_tokens > self.max_len:
            raise RequestError(
                f"This model's maximum context length is {self.max_len} tokens "
                f"(--max-len), but max_tokens={max_tokens} and a prompt of {longest} "
                f"tokens need {longest + max_tokens}",
                param="max_tokens",
            )
        temperature = take.number("temperature", 1.0, 0.0, math.inf)
        if 0 < temperature < _LEAST_TEMPERATURE:
            expected = f"0 or at least {_LEAST_TEMPERATURE}"
            raise RequestError(
                messages.must_be("temperature", expected, temperature),
                param="temperature",
            )
        options, stop_ids = self._options(take, temperature == 0)
        if n > 1 and temperature == 0:
            raise RequestError(f"n must be 1 at temperature 0, got {n}", param="n")
        seed = take.integer("seed", -1, -_SEEDS, _SEEDS - 1)
        return CompletionRequest(
            name, prompts, n, max_tokens,
            secrets.randbits(62) if seed == -1 else seed,  # as in vLLM
            temperature, options, stop_ids,
            None if fields.get("logprobs") is None else options.top,
            take.truth("return_token_ids"),
            take.truth("return_tokens_as_token_ids"),
        )  # fmt: skip

    def _options(
        self, take: "_Fields", is_greedy: bool
    ) -> tuple[DrawOptions, frozenset[int]]:
        size = self._vocab_size
        top_k = take.integer("top_k", 0, -1, 2**31 - 1)
        top_p = take.number("top_p", 1.0, 0.0, 1.0)
        if top_p == 0:
            raise RequestError(
                messages.must_be("top_p", "in (0, 1]", top_p), param="top_p"
            )
        min_p = take.number("min_p", 0.0, 0.0, 1.0)
        own = () if take.truth("ignore_eos") else self.model.eos_ids
        stops = self._ids(take.fields.get("stop_token_ids") or [], "stop_token_ids")
        top = take.integer("logprobs", 0, -1, 2**31 - 1)
        top = size if top == -1 else min(top, size)
        if top > self.max_logprobs:
            raise RequestError(  # clients know vLLM's first words
                f"Requested sample logprobs of {top}, which is greater than max "
                f"allowed: {self.max_logprobs} (--max-logprobs)",
                param="logprobs",
            )
        options = DrawOptions(
            is_greedy,
            top_k if 0 < top_k < size else None,
            None if top_p == 1 else top_p,
            min_p or None,
            tuple(sorted({*own, *stops})),
            top,
        )
        return options, frozenset(stops) - {*own}

    @property
    def _vocab_size(self) -> int:
        size = self.model.decoder.config.vocab_size
        assert size is not None
        return size

    def _prompts(self, prompt: Any) -> list[list[int]]:
        """Ids of each prompt: a text, a list of ids, or a list of either."""
        if isinstance(prompt, str):
            return [self._encode(prompt, "prompt")]
        if not isinstance(prompt, list) or not prompt:
            expected = "a text, a list of ids, or a list of these"
            raise RequestError(
                messages.must_be("prompt", expected, prompt), param="prompt"
            )
        if not isinstance(prompt[0], list | str):
            return [self._ids(prompt, "prompt")]
        named = ((own, f"prompt[{i}]") for i, own in enumerate(prompt))
        return [
            self._encode(own, name) if isinstance(own, str) else self._ids(own, name)
            for own, name in named
        ]

    def _encode(self, text: str, name: str) -> list[int]:
        try:
            return self.model.encode(RawRecord(name, {"prompt": text}))
        except DataError as error:
            raise RequestError(str(error), param="prompt") from error

    def _ids(self, ids: Any, name: str) -> list[int]:
        param = name.partition("[")[0]
        if not isinstance(ids, list):
            raise RequestError(
                messages.must_be(name, "a list of ids", ids), param=param
            )
        if not ids and param != "stop_token_ids":
            raise RequestError(f"{name} has no token", param=param)
        size = self._vocab_size
        for i, id_ in enumerate(ids):
            if type(id_) is not int or not 0 <= id_ < size:
                expected = f"an id of the vocabulary, in [0, {size})"
                raise RequestError(
                    messages.must_be(f"{name}[{i}]", expected, id_), param=param
                )
        return ids


class _Fields(NamedTuple):
    """Values of a request by name; null stands for the default."""

    fields: Mapping[str, Any]

    def integer(self, name: str, default: int, least: int, most: int) -> int:
        value = self.fields.get(name)
        if value is None:
            return default
        if type(value) is not int or not least <= value <= most:
            expected = f"an integer from {least} to {most}"
            raise RequestError(messages.must_be(name, expected, value), param=name)
        return value

    def number(self, name: str, default: float, least: float, most: float) -> float:
        value = self.fields.get(name)
        if value is None:
            return default
        is_number = type(value) in (int, float) and math.isfinite(value)
        if not is_number or not least <= value <= most:
            expected = f"a number from {least:g}"
            expected += f" to {most:g}" if math.isfinite(most) else " on"
            raise RequestError(messages.must_be(name, expected, value), param=name)
        return float(value)

    def truth(self, name: str) -> bool:
        value = self.fields.get(name)
        if not isinstance(value, bool | None):
            expected = "true or false"
            raise RequestError(messages.must_be(name, expected, value), param=name)
        return bool(value)

    def text(self, name: str, default: str) -> str:
        value = self.fields.get(name)
        if not isinstance(value, str | None):
            raise RequestError(messages.must_be(name, "a text", value), param=name)
        return default if value is None else value


def check_model(name: str, names: Collection[str]) -> None:
    """Raise a RequestError unless one of the served models has a name."""
    if name not in names:
        raise RequestError(
            f"The model `{name}` does not exist; this server has "
            f"{messages.listing(names)}",
            HTTPStatus.NOT_FOUND,
            "model",
        )


def _refuse_others(fields: Mapping[str, Any]) -> None:
    """Raise a RequestError for unknown fields, and for what is not implemented."""
    unknown = sorted(fields.keys() - _READ - _NOTES - _NEUTRAL.keys())
    if unknown:
        raise _unknown(unknown, _READ)
    for name, neutral in _NEUTRAL.items():
        value = fields.get(name)
        if value is not None and value not in neutral:
            allowed = " or ".join(map(repr, neutral)) or "null"
            raise RequestError(
                f"{name}={messages.short(value)} is not implemented by jaxmem serve; "
                f"leave it out, or send {allowed}",
                param=name,
            )


def _unknown(names: Sequence[str], known: Collection[str]) -> RequestError:
    return RequestError(
        f"unknown fields {messages.listing(names)}; leave them out, jaxmem serve reads "
        f"{', '.join(sorted(known))}",
        param=messages.name(names[0]),
    )
