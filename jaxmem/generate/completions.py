"""Completes batches of prompts: tokens from the sampler, texts and ends on the host."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from jaxmem.data.records import DataError, RawRecord
from jaxmem.generate.completion_text import CompletionText
from jaxmem.generate.config import GenerateConfig
from jaxmem.generate.model import Model
from jaxmem.head.maths.random_streams import Stream
from jaxmem.models import sampling
from jaxmem.models.own_model import recomputation

_TOKENS_AT_ONCE = 16  # between two looks for stop strings
_MOST_BY_DEFAULT = 256  # tokens of a completion
_NARROWEST = 16  # tokens of a row of prompts; the others are powers of two


class Completion(NamedTuple):
    """The text and the tokens that a model wrote after a prompt."""

    text: str  # without special tokens and the stop string
    ids: list[int]  # its tokens, the end of sequence included
    finish: Literal["eos", "stop", "length"]  # why it ends
    stop: str | None = None  # the stop string that it reached


class EncodedPrompt(NamedTuple):
    """A prompt as ids."""

    where: str  # its name in errors
    ids: list[int]
    number: int  # identifies its random numbers, whatever batch it is in
    room: int  # maximum tokens of its completion


class Generator:
    r"""Completes prompts with one model.

    Args:
        model: from `load`.
        config: how to sample, and where to end.

    Raises:
        ValueError: an option is impossible for the model.

    >>> from jaxmem import generate
    >>> model = generate.load("runs/sft/model")  # doctest: +SKIP
    >>> settings = generate.GenerateConfig(temperature=0, stop=("\n",))
    >>> generate.Generator(model, settings)(["Once"])[0].text  # doctest: +SKIP
    """

    def __init__(self, model: Model, config: GenerateConfig):
        self.model, self.config = model, config
        tokenizer = model.vocabulary.tokenizer
        # A stop string that is one special token ends a completion on the device.
        added = tokenizer.get_added_tokens_decoder()
        special = {token.content: id_ for id_, token in added.items() if token.special}
        self._stop_ids = {special[s]: s for s in config.stop if s in special}
        self._stops = [s for s in config.stop if s not in special]
        ends = dict.fromkeys((*model.eos_ids, *self._stop_ids))
        vocab_size = model.decoder.config.vocab_size
        assert vocab_size is not None
        default = min(_MOST_BY_DEFAULT, model.max_positions)
        self._limit = config.max_new_tokens or default
        options = config.sampling(self._limit, vocab_size)
        sampler = sampling.Sampler(options, tuple(ends), 0, keep_support=False)
        self._decoder = sampling.prepared(model.decoder)
        self._start, self._advance = _programs(sampler)

    @property
    def cost(self) -> str | None:
        """A line on the cost of decoding without a cache; None for a cached model."""
        is_cached = not self.model.decoder.recomputes
        return None if is_cached else recomputation(self._limit)

    def __call__(
        self, prompts: Sequence[str | list[dict[str, Any]]]
    ) -> list[Completion]:
        """Complete texts or conversations.

        Args:
            prompts: texts, or lists of messages for the chat template.

        Raises:
            DataError: a prompt has no token, or no room for a completion.
        """
        encoded = [self.prompt(p, f"prompt {i}", i) for i, p in enumerate(prompts)]
        size = self.config.batch_size
        return [
            completion
            for start in range(0, len(encoded), size)
            for completion in self.complete(encoded[start : start + size])
        ]

    def prompt(
        self, prompt: str | list[dict[str, Any]], where: str, number: int = 0
    ) -> EncodedPrompt:
        """Encode a prompt.

        Raises:
            DataError: it has no token, or no room for a completion.
        """
        return self.prompt_of(RawRecord(where, {"prompt": prompt}), number)

    def prompt_of(self, record: RawRecord, number: int = 0) -> EncodedPrompt:
        """Encode the prompt of a record.

        Raises:
            DataError: as in `prompt`, or the record has no prompt.
        """
        where, ids = record.where, self.model.encode(record)
        room = self.model.max_positions - len(ids)
        limit = self.config.max_new_tokens
        if room < (limit or 1):
            more = f"--max-new-tokens={limit}" if limit else "one token of a completion"
            raise DataError(
                f"{where}: the prompt's {len(ids):,} tokens and {more} exceed the "
                f"{self.model.max_positions:,} positions of the model; shorten the "
                "prompt"
            )
        return EncodedPrompt(where, ids, number, min(room, self._limit))

    def complete(
        self,
        prompts: Sequence[EncodedPrompt],
        show: Callable[[str], None] | None = None,
    ) -> list[Completion]:
        """Complete at most `batch_size` prompts.

        Args:
            prompts: from `prompt`.
            show: called with each piece of the first completion's text as it arrives.
        """
        tokenizer = self.model.vocabulary.tokenizer
        texts = [
            CompletionText(tokenizer, prompt.ids, self._stops) for prompt in prompts
        ]
        # The last batch of many is filled up, to be of the shape that is compiled.
        rows = 1 if len(prompts) == 1 else self.config.batch_size
        state = self._read(prompts, rows)
        step = _TOKENS_AT_ONCE if show is None else 1
        done, shown = 0, 0
        while True:
            on_device = state.step, state.ended, state.drawn[:2]
            sampled, ended, drawn = jax.device_get(on_device)
            new = [x[done : int(sampled)] for x in drawn]
            done, ended = int(sampled), np.array(ended)  # a writable copy
            ended[len(texts) :] = True
            for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
                ended[row] |= _add(text, prompt.room, *(x[:, row] for x in new))
            if show is not None and len(text := texts[0].settled) > shown:
                show(text[shown:])
                shown = len(text)
            if ended.all():
                break
            state, until = state._replace(ended=ended), np.int32(done + step)
            state = self._advance(self._decoder, state, until)
        if show is not None:
            show(texts[0].whole[shown:])
        return [self._completion(text) for text in texts]

    def _read(
        self, prompts: Sequence[EncodedPrompt], rows: int
    ) -> sampling.SamplerState:
        longest = max(len(prompt.ids) for prompt in prompts)
        width = max(_NARROWEST, 1 << (longest - 1).bit_length())
        ids = np.zeros((rows, width), np.int32)
        filled = [prompts[i % len(prompts)] for i in range(rows)]
        for row, prompt in zip(ids, filled, strict=True):
            row[: len(prompt.ids)] = prompt.ids
        lengths = np.array([len(prompt.ids) for prompt in filled], np.int32)
        numbers = np.array([prompt.number for prompt in filled], np.int32)
        key = Stream.COMPLETIONS.key(self.config.seed)
        keys = sampling.row_keys(key, numbers)
        return self._start(self._decoder, ids, lengths, keys)

    def _completion(self, text: CompletionText) -> Completion:
        last = text.ids[-1] if text.ids else None
        if text.stop is not None:
            return Completion(text.whole, text.ids, "stop", text.stop)
        if last in self._stop_ids:
            return Completion(text.whole, text.ids, "stop", self._stop_ids[last])
        finish = "eos" if last in self.model.eos_ids else "length"
        return Completion(text.whole, text.ids, finish)


@functools.cache
def _programs(sampler: sampling.Sampler) -> tuple[Callable, Callable]:
    """The jitted `start` and `advance`, shared by the generators of a process."""
    options = sampling.COMPILER_OPTIONS if jax.default_backend() == "gpu" else None
    advance = jax.jit(sampler.advance, donate_argnums=1, compiler_options=options)
    return jax.jit(sampler.start, compiler_options=options), advance


def _add(text: CompletionText, room: int, tokens: np.ndarray, mask: np.ndarray) -> bool:
    """Add a row's new tokens to its text; return True if it takes no more."""
    text.add(tokens[mask].tolist()[: room - len(text.ids)])
    return text.stop is not None or len(text.ids) == room


def unreached(stops: Sequence[str], ends: Sequence[str]) -> str | None:
    """A line on the completions that reached no stop string; None if all did.

    Args:
        stops: the stop strings.
        ends: `Completion.finish` of each completion.
    """
    count = ends.count("length")
    if not stops or not count:
        return None
    named = ", ".join(map(repr, stops))
    return (
        f"{count} of {len(ends)} completions reached the maximum length without a stop "
        f"string ({named})"
    )
