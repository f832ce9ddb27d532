"""Completions as packed micro-batches, with inputs and labels, and values back.

A sequence is a prompt and its completion without the last token, which predicts
nothing. Values of sampled tokens are [N, R], as samplers return them; in a sequence
they are at the index where the token is predicted.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxmem import packing
from jaxmem.data.documents import NO_LABEL, Batch
from jaxmem.models.positions import Branches, Ids
from jaxmem.models.sampling import Samples
from jaxmem.packing import Packing
from jaxmem.packing.shared_prefixes import PrefixGroups, pack_branches


class Completions(NamedTuple):
    """N sequences: prompts and the tokens that were sampled after them."""

    tokens: list[np.ndarray]  # ids of each sequence that the model reads
    first: np.ndarray  # [N] index at which the first sampled token is predicted
    sampled: np.ndarray  # [N, R] ids
    lengths: np.ndarray  # [N] tokens sampled
    # [N, R] True where the model sampled the token, not an environment; None: all
    own: np.ndarray | None = None
    # routes of each sequence's tokens, [T, ...], that are replayed, as in
    # `models.route_records`; None: routers choose
    routes: list[np.ndarray] | None = None

    @classmethod
    def of(
        cls,
        prompts: np.ndarray,
        prompt_lengths: np.ndarray,
        sampled: np.ndarray,
        lengths: np.ndarray,
        own: np.ndarray | None = None,
        routes: Ids | None = None,
    ) -> "Completions":
        """Join prompts [N, P] and completions [N, R], both right-padded.

        Routes are [N, S, ...], those of each row first.
        """
        rows = zip(prompts, prompt_lengths, sampled, lengths, strict=True)
        tokens = [np.concatenate([p[:n], s[: m - 1]]) for p, n, s, m in rows]
        replayed = None
        if routes is not None:
            pairs = zip(np.asarray(routes), tokens, strict=True)
            replayed = [row[: len(ids)] for row, ids in pairs]
        return cls(tokens, prompt_lengths - 1, sampled, lengths, own, replayed)

    @classmethod
    def of_samples(
        cls, prompts: Any, samples: Samples, own: np.ndarray | None = None
    ) -> "Completions":
        """The completions of prompts, as `PromptIds` has them, by a sampler."""
        tokens, lengths = np.asarray(samples.tokens), np.asarray(samples.lengths)
        return cls.of(
            prompts.ids, prompts.lengths, tokens, lengths, own, samples.routes
        )

    @property
    def counts(self) -> np.ndarray:
        """Tokens [N] that the model sampled."""
        if self.own is None:
            return self.lengths
        within = np.arange(self.own.shape[1]) < self.lengths[:, None]
        return (self.own & within).sum(axis=1)

    @property
    def labels(self) -> np.ndarray:
        """Ids [N, R] to be predicted; NO_LABEL for tokens of an environment."""
        if self.own is None:
            return self.sampled
        return np.where(self.own, self.sampled, NO_LABEL)

    def spread(self, values: np.ndarray, fill: float = 0) -> list[np.ndarray]:
        """Put values of sampled tokens [N, R, ...] into their sequences."""
        out = []
        rows = zip(self.tokens, values, self.first, self.lengths, strict=True)
        for tokens, value, first, length in rows:
            row = np.full((len(tokens), *values.shape[2:]), fill, values.dtype)
            row[first : first + length] = value[:length]
            out.append(row)
        return out

    def collect(self, values: Sequence[np.ndarray]) -> np.ndarray:
        """Take values of sampled tokens [N, R] out of their sequences; 0 elsewhere."""
        out = np.zeros(self.sampled.shape, np.float32)
        rows = zip(out, values, self.first, self.lengths, strict=True)
        for row, value, first, length in rows:
            row[:length] = value[first : first + length]
        return out

    def measured(self, packed: Packing, outputs: Sequence[Any]) -> "Logprobs":
        """The `Logprobs` that programs returned, a pair of arrays a micro-batch."""
        drawn_from, whole = zip(*outputs, strict=True)
        over_vocabulary = None
        if whole[0] is not None:
            over_vocabulary = self.collect(packed.unpack(whole))
        within = np.arange(self.sampled.shape[1]) < self.lengths[:, None]
        known = within & (self.labels != NO_LABEL)
        in_supports = self.collect(packed.unpack(drawn_from))
        return Logprobs(in_supports, over_vocabulary, known)

    def keeping(self, kept: np.ndarray | None) -> "Completions":
        """These completions, with labels of the tokens `kept` only; None: of all."""
        if kept is None:
            return self
        labels = np.where(kept, self.sampled, NO_LABEL)
        return self._replace(sampled=labels)

    def cut(self, lengths: np.ndarray) -> "Completions":
        """These completions cut to their first `lengths` [N] sampled tokens."""
        ends = self.first + lengths

        def cut(rows: list[np.ndarray]) -> list[np.ndarray]:
            return [row[:end] for row, end in zip(rows, ends, strict=True)]

        routes = None if self.routes is None else cut(self.routes)
        return self._replace(tokens=cut(self.tokens), lengths=lengths, routes=routes)

    def pack(
        self, max_tokens: int, row_lengths: Sequence[int], quadratic: float
    ) -> Packing:
        """Lay the sequences out; see `jaxmem.packing.pack`."""
        lengths = tuple(len(tokens) for tokens in self.tokens)
        return _pack(lengths, max_tokens, tuple(row_lengths), quadratic)

    def pack_shared(
        self, max_tokens: int, row_lengths: Sequence[int], layout: Branches
    ) -> Packing:
        """Lay the sequences out with each prompt once a row; see `pack_branches`.

        A prompt's last token is not shared, because it predicts a sampled token.
        """
        known: dict[bytes, int] = {}
        starts = zip(self.tokens, self.first, strict=True)
        prompts = [tokens[: first + 1].tobytes() for tokens, first in starts]
        groups = [known.setdefault(prompt, len(known)) for prompt in prompts]
        lengths = np.array([len(tokens) for tokens in self.tokens])
        parts = PrefixGroups(lengths, np.asarray(self.first), np.array(groups))
        return pack_branches(parts, max_tokens, layout, row_lengths)

    def batches(self, packed: Packing) -> Iterator[Batch]:
        """The micro-batches of a packing."""
        tokens = packed.place(self.tokens)
        labels = packed.place(self.spread(self.labels, NO_LABEL), NO_LABEL)
        for i, packed_rows in enumerate(packed.micro_batches):
            yield Batch(
                tokens[i], labels[i], packed_rows.segment_ids, packed_rows.positions
            )

    def routed(self, packed: Packing) -> Iterator[np.ndarray | None]:
        """The routes of each micro-batch of a packing; None without routes."""
        if self.routes is None:
            return itertools.repeat(None)
        return iter(packed.place(self.routes))


# A mark in the place of a log-probability of the trainer: the weights are still those
# of the rollout, so that it equals the policy's own and the ratio is 1.
SAME_WEIGHTS = np.float32(np.inf)


class Logprobs(NamedTuple):
    """The trainer's log-probabilities [N, R] of sampled tokens."""

    drawn_from: np.ndarray  # under the distributions that the tokens were drawn from
    whole: np.ndarray | None  # over the vocabulary; None where that is the same
    known: np.ndarray  # True where the token has been measured

    @classmethod
    def unknown(cls, shape: tuple[int, ...], truncates: bool) -> "Logprobs":
        """Log-probabilities of no token yet."""
        whole = np.zeros(shape, np.float32) if truncates else None
        drawn_from = np.full(shape, SAME_WEIGHTS, np.float32)
        return cls(drawn_from, whole, np.zeros(shape, bool))

    def put(self, rows: np.ndarray, other: "Logprobs") -> None:
        """Write the measured tokens of `other` into the rows `rows`."""
        for ours, theirs in zip(self, other, strict=True):
            if ours is not None:
                ours[rows] = np.where(other.known, theirs, ours[rows])


@dataclasses.dataclass(frozen=True, eq=False)
class RolloutSupports:
    """The ids that each sampled token was drawn from, as compressed sparse rows."""

    csr: packing.Supports  # of all tokens of a rollout
    numbers: np.ndarray  # [N, R] row of `csr` of each sampled token
    limit: int  # maximum ids of a token

    @classmethod
    def of(cls, padded: np.ndarray) -> "RolloutSupports":
        """The supports of an array of ids [N, R, K], padded by negative ones."""
        *shape, limit = padded.shape
        numbers = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
        return cls(packing.support_to_csr(padded), numbers, limit)

    @property
    def sizes(self) -> np.ndarray:
        """Number of ids [N, R] of each sampled token; 0 after the end."""
        return np.diff(self.csr.offsets)[self.numbers]

    def __getitem__(self, rows: np.ndarray) -> "RolloutSupports":
        """The supports of the sequences `rows`."""
        return dataclasses.replace(self, numbers=self.numbers[rows])

    def micro_batches(
        self, completions: Completions, packed: Packing, kept: np.ndarray | None = None
    ) -> Iterator[packing.Supports]:
        """Yield the supports of each micro-batch, with room for `limit` ids a token.

        They are those of the tokens `kept` [N, R], in row-major order; None: of all.
        """
        numbers = self.numbers
        if kept is not None:
            numbers = np.where(kept, numbers, -1)
        for csr_rows in packed.place(completions.spread(numbers, -1), -1):
            yield packing.take_supports(*self.csr, csr_rows, csr_rows.size * self.limit)


# With completions of equal length, every step packs the same lengths.
_pack = functools.lru_cache(maxsize=8)(
    lambda lengths, max_tokens, row_lengths, quadratic: packing.pack(
        lengths, max_tokens, row_lengths=row_lengths, quadratic=quadratic
    )
)
