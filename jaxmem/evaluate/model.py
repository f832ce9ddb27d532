"""A saved model behind the model interface of lm-evaluation-harness."""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from lm_eval import utils
from lm_eval.api.model import LM

from jaxmem.base import messages
from jaxmem.data.chat_messages import talk_of
from jaxmem.data.documents import NO_LABEL
from jaxmem.data.rendering import Conversation
from jaxmem.evaluate.recorded_answers import RecordedAnswers
from jaxmem.generate.completions import EncodedPrompt, Generator
from jaxmem.generate.config import GenerateConfig
from jaxmem.generate.model import Model
from jaxmem.models.own_model import LanguageModel
from jaxmem.score.document_windows import by_micro_batch

_WINDOWS_AT_ONCE = 1024  # packed together
_NEW_TOKENS = 256  # of a completion for which the task names no limit


class HarnessWindow(NamedTuple):
    """Ids of which the last `scored` are labels."""

    ids: list[int]
    scored: int
    is_joint: bool = True  # context and continuation were encoded as one text


class HarnessModel(LM):
    """Log-likelihoods and completions of a model, for `lm_eval.simple_evaluate`.

    Texts get the start of sequence that the tokenizer's own template gives them. A
    context that is too long loses its beginning, as in the harness's other models.

    Args:
        model: from `jaxmem.generate.load`.
        name: identifies the model where the harness caches requests.
        max_tokens: slots of a micro-batch of texts to be scored.
        batch_size: completions that are sampled together.
        answers: records them; None: they are not recorded.

    Raises:
        ValueError: the vocabulary has neither a start nor an end of sequence, one of
            which the first token of a text follows.
    """

    def __init__(
        self,
        model: Model,
        name: str,
        max_tokens: int = 4096,
        batch_size: int = 8,
        answers: RecordedAnswers | None = None,
    ):
        super().__init__()
        self._model, self._name, self._batch_size = model, name, batch_size
        self._answers = answers
        self._max_tokens = max_tokens
        self._length = min(max_tokens, model.max_positions)
        vocabulary = model.vocabulary
        before = [*vocabulary.start, vocabulary.eos][0]
        if before is None:
            raise ValueError(
                f"{name}: the tokenizer has neither a start-of-sequence nor an "
                "end-of-sequence token; the first token of a text must follow one of "
                "them"
            )
        self._prefix = before

    # ------------------------------------------------------- of the harness

    @property
    def tokenizer_name(self) -> str:
        """See `lm_eval.api.model.LM`."""
        return self._name

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """See `lm_eval.api.model.LM`; a name selects among templates, of which one is.

        Raises:
            ValueError: a template is named.
        """
        if isinstance(chat_template, str):
            raise ValueError(
                f"chat template {chat_template!r}: a checkpoint has one template, "
                "without a name; leave the name out"
            )
        return self._name if chat_template else ""

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """See `lm_eval.api.model.LM`."""
        where = "the conversation"
        conversation = Conversation(talk_of(where, "messages", chat_history).turns)
        renderer = self._model.reader.renderer
        if add_generation_prompt:
            return renderer.prompt(conversation, where)
        return renderer.counted(conversation, where).text

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        """Score continuations: ln p, and True if greedy decoding would write them.

        Warns:
            UserWarning: of some pairs a token would be of both texts.

        Raises:
            ValueError: a continuation has no token, none of its own in any encoding, or
                more than what the model reads at once.
        """
        windows = [self._encode_pair(*request.args) for request in requests]
        if apart := sum(not window.is_joint for window in windows):
            warnings.warn(
                f"{self._name}: {apart:,} of {len(windows):,} continuations were "
                "encoded separately from their contexts, because a token of the joint "
                "text would contain parts of both",
                stacklevel=2,
            )
        return self._score_sorted(windows)

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
        """Score whole texts: ln p(text), in windows that score each token once."""
        windows: list[HarnessWindow] = []
        owners: list[int] = []
        for owner, request in enumerate(requests):
            ids = self._encode_text(request.args[0])
            pairs = utils.get_rolling_token_windows(ids, self._prefix, self._length, 1)
            for before, after in map(utils.make_disjoint_window, pairs):
                windows.append(HarnessWindow([*before, *after], len(after)))
                owners.append(owner)
        sums = np.zeros(len(requests))
        np.add.at(sums, owners, [logprob for logprob, _ in self._score_sorted(windows)])
        return sums.tolist()

    def generate_until(self, requests: list[Any]) -> list[str]:
        """Completions up to a stop string, the end of sequence or the limit."""
        texts = [""] * len(requests)
        by_options: dict[GenerateConfig, list[int]] = {}
        for index, request in enumerate(requests):
            by_options.setdefault(self._generate_config(request.args[1]), []).append(
                index
            )
        for options, indices in by_options.items():
            generator = Generator(self._model, options)
            prompts = [
                self._encode_prompt(requests[i].args[0], i, options) for i in indices
            ]
            for start in range(0, len(prompts), self._batch_size):
                batch = prompts[start : start + self._batch_size]
                done = self._answer(
                    [dataclasses.asdict(options), batch],
                    functools.partial(_complete, generator, batch),
                )
                for index, text in zip(indices[start:], done, strict=False):
                    texts[index] = text
        return texts

    def _answer(self, inputs: Any, compute: Callable[[], list[Any]]) -> list[Any]:
        """The answers to a group of requests, as `RecordedAnswers.of_group`."""
        if self._answers is None:
            return compute()
        return self._answers.of_group(inputs, compute)

    # ----------------------------------------------------------------- ids

    def _encode_pair(self, context: str, continuation: str) -> HarnessWindow:
        """Encode both texts as one, cut between them.

        If a token were of both texts, they are encoded apart: all continuations of a
        context then follow the same ids.
        """
        texts = context, continuation
        spaces = len(context) - len(context.rstrip())
        if spaces and continuation:  # a tokenizer joins a space with what follows it
            context, continuation = context[:-spaces], context[-spaces:] + continuation
        after = self._encode_text(continuation)
        if not after:
            raise ValueError(f"{_describe_pair(*texts)}: the continuation has no token")
        if not context:
            return self._cut_to_length(
                HarnessWindow([self._prefix, *after], len(after))
            )
        before, whole = (
            self._encode_with_start(context),
            self._encode_with_start(context + continuation),
        )
        scored = len(whole) - len(before)
        if scored < 1 or whole[: len(before)] != before:
            scored = self._count_scored(context, continuation)
        if scored:
            return self._cut_to_length(HarnessWindow(whole, scored))
        ids, tokenizer = [*before, *after], self._model.vocabulary.tokenizer
        apart, joint = (tokenizer.decode(x, skip_special_tokens=False)
                        for x in (ids, whole))  # fmt: skip
        if apart != joint:
            raise ValueError(
                f"{_describe_pair(*texts)}: a token of the joint text contains parts "
                "of both, and encoded separately they give another text, which ends in "
                f"{messages.short(apart[-40:])}; let the continuation begin with a "
                "space, or leave the task out"
            )
        return self._cut_to_length(HarnessWindow(ids, len(after), is_joint=False))

    def _count_scored(self, context: str, continuation: str) -> int:
        """The number of tokens of the continuation; 0 if one token is of both texts.

        A context may be split into other tokens where a text follows it.
        """
        tokenizer, border = self._model.vocabulary.tokenizer, len(context)
        encoded = tokenizer.encode(context + continuation, add_special_tokens=False)
        if any(start < border < stop for start, stop in encoded.offsets):
            return 0
        return sum(start >= border for start, _ in encoded.offsets)

    def _cut_to_length(self, window: HarnessWindow) -> HarnessWindow:
        """The window's last tokens, as many as the model reads at once."""
        if window.scored > self._length:
            raise ValueError(
                f"a continuation of {window.scored:,} tokens is longer than the "
                f"{self._length:,} that the model reads at once; raise --max-tokens, "
                "or leave the task out"
            )
        return window._replace(ids=window.ids[-(self._length + 1) :])

    def _encode_text(self, text: str) -> list[int]:
        return self._model.vocabulary.encode([text])[0]

    def _encode_with_start(self, text: str) -> list[int]:
        """Ids with the start of sequence, once where a template has written it."""
        start, ids = list(self._model.vocabulary.start), self._encode_text(text)
        return ids if ids[: len(start)] == start else [*start, *ids]

    def _generate_config(self, keywords: dict[str, Any]) -> GenerateConfig:
        keywords = dict(keywords)
        until = keywords.pop("until", None) or []
        limit = keywords.pop("max_gen_toks", None) or _NEW_TOKENS
        sampled = keywords.pop("do_sample", False)
        temperature = float(keywords.pop("temperature", 1.0)) if sampled else 0.0
        kept = {name: keywords.pop(name, None) for name in ("top_k", "top_p", "min_p")}
        keywords.pop("temperature", None)  # of greedy decoding
        if keywords:
            name, value = next(iter(keywords.items()))
            raise ValueError(
                f"the task asks for generation with {name}={value!r}, which jaxmem "
                "does not support; leave it out of generation_kwargs"
            )
        return GenerateConfig(
            max_new_tokens=min(int(limit), self._model.max_positions - 1),
            temperature=temperature,
            stop=(until,) if isinstance(until, str) else tuple(until),
            batch_size=self._batch_size,
            **(kept if sampled else {}),
        )

    def _encode_prompt(
        self, text: str, number: int, options: GenerateConfig
    ) -> EncodedPrompt:
        assert options.max_new_tokens is not None
        ids = self._encode_with_start(text) or [self._prefix]
        room = self._model.max_positions - options.max_new_tokens
        return EncodedPrompt(
            f"request {number}", ids[-room:], number, options.max_new_tokens
        )

    # -------------------------------------------------------------- scores

    def _score_sorted(
        self, windows: Sequence[HarnessWindow]
    ) -> list[tuple[float, bool]]:
        """Sum of each window's log-probabilities; True if greedy decoding writes it."""
        order = sorted(range(len(windows)), key=lambda i: len(windows[i].ids))
        results: list[tuple[float, bool]] = [(0.0, True)] * len(windows)
        for start in range(0, len(order), _WINDOWS_AT_ONCE):
            some = order[start : start + _WINDOWS_AT_ONCE]
            group = [windows[i] for i in some]
            scores = self._answer(group, functools.partial(self._score_group, group))
            for i, (logprob, is_greedy) in zip(some, scores, strict=True):
                results[i] = logprob, is_greedy
        return results

    def _score_group(self, windows: Sequence[HarnessWindow]) -> list[Any]:
        """The sum of log-probabilities of each window, and if it is greedy."""
        return [
            (
                float(score["logprobs"].sum(dtype=np.float64)),
                bool(score["greedy"][-window.scored :].all()),
            )
            for window, score in zip(windows, self._score_windows(windows), strict=True)
        ]

    def _score_windows(
        self, windows: Sequence[HarnessWindow]
    ) -> list[dict[str, np.ndarray]]:
        inputs = [np.array(window.ids[:-1], np.int32) for window in windows]
        labels = [np.array(window.ids[1:], np.int32) for window in windows]
        for window, row in zip(windows, labels, strict=True):
            row[: len(row) - window.scored] = NO_LABEL

        def run(_number: int, *arrays: Any) -> dict[str, jax.Array]:
            return _token_scores(self._model.decoder, *arrays)

        return by_micro_batch(run, inputs, labels, self._max_tokens, self._length)


def _complete(generator: Generator, prompts: Sequence[EncodedPrompt]) -> list[str]:
    return [completion.text for completion in generator.complete(prompts)]


def _describe_pair(context: str, continuation: str) -> str:
    """Both texts, for an error."""
    end = context if len(context) <= 60 else f"...{context[-60:]}"
    return f"context {messages.short(end)}, continuation {messages.short(continuation)}"


@jax.jit
def _token_scores(
    decoder: LanguageModel,
    tokens: jax.Array,
    labels: jax.Array,
    segment_ids: jax.Array,
    positions: jax.Array,
) -> dict[str, jax.Array]:
    """Log-probabilities of labels, and True where a label is the likeliest; [B, T]."""
    hidden = decoder(tokens, segment_ids, positions)
    stats = decoder.head.token_stats(hidden, labels)
    return {"logprobs": stats.logprob, "greedy": stats.is_argmax}
