"""Samples from a decoder: prompts in, tokens and their log-probabilities out.

    logits / temperature -> top k -> top p -> min p -> one token -> append it, until eos

A token's log-probability is that under the sampling distribution, after temperature and
truncation, and the support of that distribution is returned too. A trainer can
therefore compare its policy with the sampler: by
`jaxmem.logprobs(..., temperature=...)` without truncation, and by
`jaxmem.support_logprobs` over `support_ids` with it.

>>> import jax, jax.numpy as jnp
>>> from flax import nnx
>>> from jaxmem.models import decoder, sampling
>>> sizes = decoder.ModelConfig(layers=1, hidden=16, ff=16, vocab_size=10)
>>> model = decoder.Decoder(sizes, rngs=nnx.Rngs(0))
>>> config = sampling.SamplingConfig(max_new_tokens=4, temperature=0.8, top_k=5)
>>> prompts, lengths = jnp.array([[1, 2, 3], [4, 0, 0]]), jnp.array([3, 1])
>>> draw = jax.jit(lambda model, key: sampling.sample(
...     model, prompts, lengths, key, config, eos_id=9, pad_id=0))
>>> samples = draw(model, jax.random.key(0))
>>> samples.tokens.shape, samples.logprobs.shape, samples.support_ids.shape
((2, 4), (2, 4), (2, 4, 5))
"""

import dataclasses
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.core import Tracer

from jaxmem import devices
from jaxmem.base.fields import check_field
from jaxmem.head.maths import column_sampling, recorded
from jaxmem.head.maths.random_streams import Stream
from jaxmem.head.maths.recorded import RecordedEntries
from jaxmem.models import kv_cache, largest, partitioning, refill
from jaxmem.models.decoder import Decoder
from jaxmem.models.decoding import with_decoded_blocks
from jaxmem.models.layers import Ids
from jaxmem.models.own_model import LanguageModel
from jaxmem.models.truncation import (
    SamplingConfig as SamplingConfig,
    among_all,
    truncate as truncate,
)

# For `jax.jit` around `sample`. With Triton's GEMMs, XLA for GPUs would copy each
# layer's weights out of their stack in every step, where cuBLAS reads them in place.
# The dot merger would concatenate the weights of products that share an operand.
COMPILER_OPTIONS = {
    "xla_gpu_enable_triton_gemm": False,
    "xla_gpu_dot_merger_threshold_mb": 0,
}


class Samples(NamedTuple):
    """Completions of B prompts, R = max_new_tokens slots each.

    Attributes:
        tokens: [B, R] int32 ids, end of sequence included; pad_id after.
        mask: [B, R] bool, true for tokens of the completion.
        logprobs: [B, R] f32 log-probability of each token within its support; 0 after
            the end.
        support_ids: [B, R, K] int32 ids of each token's support by falling probability,
            padded by -1; -1 after the end. None without truncation.
        lengths: [B] int32 tokens of each completion.
        starts: [B] int32 steps before each completion's first token, with
            `SamplingConfig.slots`; None: all start together.
        routes: [B, S, ...] experts that the tokens of each row went to, as in
            `models.route_records`, prompt first; of all but a completion's last token,
            which is not read. None: they are not recorded.
        entries: `jaxmem.RecordedEntries` of each token's softmax, with leading axes
            [B, R]; arbitrary where mask is False. None: they are not recorded.
    """

    tokens: jax.Array
    mask: jax.Array
    logprobs: jax.Array
    support_ids: jax.Array | None
    lengths: jax.Array
    starts: jax.Array | None = None
    routes: jax.Array | None = None
    entries: RecordedEntries | None = None

    @property
    def steps(self) -> int:
        """Tokens that were decoded one after the other, after those of prompts."""
        starts = 0 if self.starts is None else np.asarray(self.starts)
        return int((starts + np.asarray(self.lengths)).max()) - 1


class SampledTokens(NamedTuple):
    """One token per row, arrays [B, ...]; or those of all steps, [R, B, ...]."""

    tokens: jax.Array
    mask: jax.Array
    logprobs: jax.Array
    support_ids: jax.Array | None
    entries: RecordedEntries | None = None  # arbitrary where mask is False


class SamplerState(NamedTuple):
    """Completions so far, and what the next token depends on."""

    step: jax.Array  # tokens sampled so far
    token: jax.Array  # [B] the last of them
    ended: jax.Array  # [B] bool
    keys: jax.Array  # [B] of the rows' random numbers
    drawn: SampledTokens  # [R, B, ...]
    cache: kv_cache.Cache


def sample(
    decoder: LanguageModel,
    prompts: Ids,
    prompt_lengths: Ids,
    key: jax.Array,
    config: SamplingConfig,
    *,
    eos_id: int | tuple[int, ...],
    pad_id: int,
) -> Samples:
    """Complete every prompt, one token per row and step, until all rows have ended.

        token_t ~ softmax over S_t of (logits_t / temperature),   `truncate` defines S_t

    Call it inside `jax.jit`, with `COMPILER_OPTIONS`. Row i samples with
    `fold_in(key, i)`, so its completion does not depend on the other rows' prompts, nor
    on when they end. With `SamplingConfig.slots`, so many rows are decoded at a time,
    and `refill` says which.

    Args:
        decoder: the policy.
        prompts: [B, P] ids, each row's prompt first; the rest of a row is ignored.
        prompt_lengths: [B] tokens of each prompt, from 1 to P; 0: the row gets no token
            and nothing waits for it.
        key: of the random numbers; the same key gives the same samples.
        config: lengths, temperature and truncation.
        eos_id: the token that ends a completion, as its last token; or several.
        pad_id: the token that fills slots after the end.

    Returns:
        `Samples`; log-probabilities are NaN where a traced length is out of range.

    Raises:
        ValueError: shapes disagree, there are fewer rows than slots, or a length or an
            id is out of range; the message names it.
    """
    ends = eos_id if isinstance(eos_id, tuple) else (eos_id,)
    size = decoder.config.vocab_size or 0
    for name, token in (*(("eos_id", end) for end in ends), ("pad_id", pad_id)):
        if not 0 <= token < size:
            raise ValueError(
                f"{name} must be a token of the vocabulary, in [0, {size}), got {token}"
            )
    sampler = Sampler(config, ends, pad_id)
    return sampler.complete(decoder, prompts, prompt_lengths, key)


def samples_of(state: SamplerState) -> Samples:
    """The completions of a state whose rows have ended."""
    drawn = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), state.drawn)
    lengths = jnp.sum(drawn.mask, axis=1, dtype=jnp.int32)
    routes = kv_cache.routes_by_position(state.cache)
    return Samples(**drawn._asdict(), lengths=lengths, routes=routes)


def prepared(decoder: LanguageModel, decode_base: bool = False) -> LanguageModel:
    """The decoder with its weights in the compute dtype, so that no call casts them.

    `decode_base` is that of a `SamplingConfig`. On one GPU, the decoder's projections
    are joined as well, by `layers.Attention.join`.
    """
    if decode_base:
        decoder = with_decoded_blocks(cast(Decoder, decoder))
    model = nnx.merge(*decoder.in_compute_type())
    if devices.backend() == "gpu" and partitioning.current() is None:
        model.join()
    return model


def row_keys(key: jax.Array, numbers: Ids) -> jax.Array:
    """The key of each row, which depends only on the row's number."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, numbers)


@dataclasses.dataclass(frozen=True)
class Sampler:
    """Sampling in parts: `start` reads prompts, each `advance` adds some tokens.

    The tokens do not depend on where the parts end. `resume` reads what was said after
    completions, which stay in the cache, and begins further completions. Call all of
    them inside `jax.jit`, with `COMPILER_OPTIONS`, and donate the state.
    """

    config: SamplingConfig
    eos_ids: tuple[int, ...]  # each ends a completion; may be empty
    pad_id: int  # fills slots after the end
    keep_support: bool = True  # False: `SampledTokens.support_ids` is not stored
    room: int | None = None  # tokens of a row of the cache; None: for one completion
    unroll: bool | None = None  # as in `Decoder.decode`; None: if compiled for a GPU
    records: bool = False  # as in `Decoder.prefill`
    # K, entries of each token's softmax that are recorded, drawn by the law of
    # `jaxmem.Sample(K)`, where nothing is truncated; None: none are
    entries: int | None = None

    def complete(
        self, decoder: LanguageModel, prompts: Ids, prompt_lengths: Ids, key: jax.Array
    ) -> Samples:
        """Complete every prompt; arguments are as in `sample`."""
        # once, for both parts
        model = prepared(decoder, self.config.decode_base)
        keys = row_keys(key, jnp.arange(len(prompts)))
        if self.config.slots is not None:
            return self._complete_by_refill(model, prompts, prompt_lengths, keys)
        state = self.start(model, prompts, prompt_lengths, keys)
        return samples_of(self.advance(model, state, self.config.max_new_tokens))

    def _complete_by_refill(
        self, model: LanguageModel, prompts: Ids, lengths: Ids, keys: jax.Array
    ) -> Samples:
        config, rows = self.config, len(lengths)
        _check_prompts(prompts, lengths)
        row_prompts = refill.RefillPrompts(
            jnp.asarray(prompts), jnp.asarray(lengths), keys
        )
        assert config.slots is not None
        check_field(config, "slots", config.slots <= rows, f"at most the {rows} rows")
        decoding = refill.Refill(
            model.in_compute_type(), row_prompts, config.slots, config.max_new_tokens,
            self.draw_tokens, self.is_unrolled, self.records,
        )  # fmt: skip
        logits = jax.ShapeDtypeStruct((rows, model.config.vocab_size), jnp.float32)
        drawn, _ = jax.eval_shape(self.draw_tokens, keys, lengths, logits, lengths == 0)
        like = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), drawn)
        nothing = _nothing_drawn(like, config.max_new_tokens, self.pad_id)
        ended = decoding.run(jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), nothing))
        after = {name: getattr(ended, name) for name in ("lengths", "starts", "routes")}
        return Samples(**ended.drawn._asdict(), **after)

    def start(
        self, decoder: LanguageModel, prompts: Ids, prompt_lengths: Ids, keys: jax.Array
    ) -> SamplerState:
        """Read prompts, as in `sample`, and draw the first token of each row.

        Steps are fastest if the decoder is `prepared`; keys [B] are from `row_keys`.
        """
        _check_prompts(prompts, prompt_lengths)
        width, slots = prompts.shape[1], self.config.max_new_tokens
        model = nnx.merge(*decoder.in_compute_type())
        # The last token of a row is not read again, and needs no slot. GPU products
        # would pad keys and values whose size is not a multiple of 16 bytes, in every
        # step.
        room = width + slots - 1 if self.room is None else self.room
        max_length = -(-room // 8) * 8
        lengths = jnp.asarray(prompt_lengths)
        hidden, cache = model.prefill(
            prompts,
            jnp.where(lengths == 0, 1, lengths),
            max_length,
            records=self.records,
        )
        return self._first_tokens(model, hidden, lengths == 0, keys, cache)

    def resume(
        self,
        decoder: LanguageModel,
        cache: kv_cache.Cache,
        tokens: Ids,
        lengths: Ids,
        keys: jax.Array,
    ) -> SamplerState:
        """Read what follows on completions, and draw a token after it.

        Args:
            decoder: as in `start`.
            cache: of a state whose rows have ended, from `advance`; it has read all but
                the last token of each completion.
            tokens: [B, M] ids: that last token, then what follows on it.
            lengths: [B] tokens of each row, from 0 to M; 0: the row gets no token.
            keys: [B] of the rows' further random numbers.
        """
        model = nnx.merge(*decoder.in_compute_type())
        lengths = jnp.asarray(lengths)
        hidden, cache = model.extend(tokens, lengths, cache)
        return self._first_tokens(model, hidden, lengths == 0, keys, cache)

    def _first_tokens(
        self, model: LanguageModel, hidden, ended, keys, cache
    ) -> SamplerState:
        """The state after a first token, drawn from hidden states of the one before."""
        step, slots = jnp.asarray(0), self.config.max_new_tokens
        first, ended = self.draw_tokens(keys, step, model.logits(hidden), ended)
        drawn = _write_step(_nothing_drawn(first, slots, self.pad_id), step, first)
        return SamplerState(step + 1, first.tokens, ended, keys, drawn, cache)

    def advance(
        self, decoder: LanguageModel, state: SamplerState, until: Ids | int
    ) -> SamplerState:
        """Draw tokens until there are so many, or all rows have ended.

        The state is from `start` or `advance`, and its rows may be ended from outside.
        """
        definition, weights = decoder.in_compute_type()
        until = jnp.minimum(until, self.config.max_new_tokens)

        def goes_on(state: SamplerState) -> jax.Array:
            return (state.step < until) & ~jnp.all(state.ended)

        def one_more(state: SamplerState) -> SamplerState:
            model = nnx.merge(definition, weights)  # modules must not enter the loop
            hidden, cache = model.decode(
                state.token, state.cache, ~state.ended, unroll=self.is_unrolled
            )
            logits = model.logits(hidden)
            new, ended = self.draw_tokens(state.keys, state.step, logits, state.ended)
            return state._replace(
                drawn=_write_step(state.drawn, state.step, new),
                step=state.step + 1,
                token=new.tokens,
                ended=ended,
                cache=cache,
            )

        return lax.while_loop(goes_on, one_more, state)

    @property
    def is_unrolled(self) -> bool:
        """True if `Decoder.decode` traces the blocks one after the other."""
        return devices.backend() == "gpu" if self.unroll is None else self.unroll

    def draw_tokens(
        self, keys: jax.Array, steps: jax.Array, logits: jax.Array, ended: jax.Array
    ) -> tuple[SampledTokens, jax.Array]:
        """One more token per row, and a mask of the rows that have ended with it.

        Args:
            keys: [B] of the rows' random numbers.
            steps: tokens of each row so far, [B], or of all.
            logits: [B, V] f32.
            ended: [B] mask of rows that get no token.
        """
        steps = jnp.broadcast_to(steps, keys.shape)
        keys = jax.vmap(jax.random.fold_in)(keys, steps)
        new = _draw_categorical(keys, *self._truncate(logits))
        if not self.keep_support:
            new = new._replace(support_ids=None)
        new = _mask_ended(new, ended, self.pad_id)
        if self.entries is not None:
            labels = jnp.where(ended, -1, new.tokens)
            new = new._replace(entries=self._record(keys, logits, labels))
        ends = jnp.isin(new.tokens, jnp.asarray(self.eos_ids, jnp.int32))
        return new, ended | ends

    def _record(
        self, keys: jax.Array, logits: jax.Array, labels: jax.Array
    ) -> RecordedEntries:
        """Entries of rows' softmax; tokens do not depend on whether they are recorded.

        `keys` [B] are those of the tokens' own draws.
        """
        keys = jax.vmap(lambda key: jax.random.fold_in(key, Stream.ENTRIES))(keys)
        assert self.entries is not None and not self.config.truncates
        scaled, draws = logits / self.config.temperature, column_sampling.draws(keys)
        made = recorded.record(scaled, labels, self.entries, draws)
        return recorded.compact(made)

    def most_probable(
        self, logits: jax.Array, count: int
    ) -> tuple[jax.Array, jax.Array]:
        """Ids [B, count] that `draw_tokens` draws most often, and log-probabilities.

        Ids are -1, and log-probabilities -inf, beyond the support.
        """
        logprobs, ids = self._truncate(logits)
        missing = max(0, count - logprobs.shape[-1])
        best, places = largest.top(logprobs, count - missing)
        ids = places if ids is None else jnp.take_along_axis(ids, places, axis=-1)
        ids = jnp.where(best > -jnp.inf, ids, -1)
        unused = (0, 0), (0, missing)
        best = jnp.pad(best, unused, constant_values=-jnp.inf)
        return jnp.pad(ids, unused, constant_values=-1), best

    def _truncate(self, logits: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """The result of `truncate`; ids are None where all ids are in the support."""
        is_whole = self.config.support_size == logits.shape[-1]
        if is_whole and self.config.top_k is None and not self.keep_support:
            return among_all(logits, self.config), None
        return truncate(logits, self.config)


def _draw_categorical(
    keys: jax.Array, logprobs: jax.Array, ids: jax.Array | None
) -> SampledTokens:
    choice = jax.vmap(jax.random.categorical)(keys, logprobs)[:, None]

    def chosen(x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, choice, axis=1)[:, 0]

    tokens = choice[:, 0] if ids is None else chosen(ids)
    mask = jnp.ones(tokens.shape, bool)
    return SampledTokens(tokens.astype(jnp.int32), mask, chosen(logprobs), ids)


def _mask_ended(drawn: SampledTokens, ended: jax.Array, pad_id: int) -> SampledTokens:
    """The drawn tokens, with padding in rows that have ended."""
    ids = drawn.support_ids
    return drawn._replace(
        tokens=jnp.where(ended, pad_id, drawn.tokens),
        mask=drawn.mask & ~ended,
        logprobs=jnp.where(ended, 0.0, drawn.logprobs),
        support_ids=None if ids is None else jnp.where(ended[:, None], -1, ids),
    )


def _nothing_drawn(like: SampledTokens, slots: int, pad_id: int) -> SampledTokens:
    nothing = _mask_ended(like, jnp.ones(like.mask.shape, bool), pad_id)
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (slots, *x.shape)), nothing)


def _write_step(
    drawn: SampledTokens, step: jax.typing.ArrayLike, token: SampledTokens
) -> SampledTokens:
    return jax.tree.map(lambda all_, x: all_.at[step].set(x), drawn, token)


def _check_prompts(prompts: Ids, lengths: Ids) -> None:
    if prompts.ndim != 2 or not jnp.issubdtype(prompts.dtype, jnp.integer):
        raise ValueError(
            f"prompts must be integers [B, P], got {prompts.dtype}{prompts.shape}"
        )
    if lengths.shape != prompts.shape[:1]:
        raise ValueError(
            f"prompt_lengths must have one entry a prompt, shape {prompts.shape[:1]}, "
            f"got {lengths.shape}"
        )
    if isinstance(lengths, Tracer):
        return
    lengths = np.asarray(lengths)
    bad = lengths[(lengths < 0) | (lengths > prompts.shape[1])]
    if len(bad):
        raise ValueError(
            f"prompt_lengths must be from 0 to the {prompts.shape[1]} tokens that "
            f"prompts has room for, got {bad[0]}"
        )
